"""DeepSpeed engines with a sharded cache: sequence ranks alone and with tensor parallelism; what they refuse."""

import os

import pytest
import torch
import torch.distributed as dist

import deepspeed
from megatron_tree.integrations import deepspeed as tree_deepspeed
from support.hf_models import hf_generate, left_padded, plain, prompt, tiny_model
from support.ranks import on_ranks, run_distributed
from support.refusals import refused_with

NEW = 8


def _engine(rank, world, tp_size, extensions):
    model = tiny_model("llama")
    ids = prompt(2, 21)
    padded, mask = left_padded(2, 15)
    want, want_padded = plain(model, ids, NEW), plain(model, padded, NEW, mask)
    engine = tree_deepspeed.init_inference(model, tp_size=tp_size, page_size=2, config={"max_out_tokens": 256})
    assert isinstance(engine, deepspeed.InferenceEngine)
    assert (engine.sp_size, engine.tp_size) == (world // tp_size, tp_size)
    assert dist.get_process_group_ranks(engine.sp_group) == list(range(rank % tp_size, world, tp_size))
    result = tree_deepspeed.generate(engine, ids, max_new_tokens=NEW, keep_logits=True)
    assert result.prefill == "sharded"
    assert torch.equal(result.tokens, want[0])
    torch.testing.assert_close(torch.stack(result.logits, 1), want[1], rtol=0, atol=5e-5 * float(want[1].abs().max()))
    again = tree_deepspeed.generate(engine, padded, max_new_tokens=NEW, attention_mask=mask)
    assert torch.equal(again.tokens, want_padded[0])
    tokens, _ = hf_generate(engine, padded, NEW, mask, past_key_values=engine.new_cache())  # DeepSpeed's own generate
    assert torch.equal(tokens, want_padded[0])
    key_heads = result.cache.store.layers[0].k.shape[2]
    return result.cache.num_local_tokens, key_heads, os.listdir(extensions)


@pytest.mark.parametrize(("world", "tp_size"), [pytest.param(2, 1, marks=pytest.mark.slow), (4, 2)])
def test_engine_equals_the_plain_model(world, tp_size, tmp_path):
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    results = run_distributed(_engine, world, tp_size, str(tmp_path), env=env, fresh=True, timeout=200)
    for rank in range(0, world, tp_size):  # the sequence ranks of tensor rank 0 hold all tokens but the last
        assert results[rank][0] == results[rank + tp_size - 1][0]
    assert sum(tokens for tokens, _, _ in results[::tp_size]) == 2 * (21 + NEW - 1)
    for _, key_heads, compiled in results:
        assert key_heads == 2 // tp_size
        assert compiled == [], "DeepSpeed compiled an op"


@on_ranks(4, fresh=True)
def test_refusals_name_option_value_and_way_out(rank, tmp_path):
    listing = tmp_path / f"{rank}.json"
    listing.write_text("[1]")
    config_graphs = "enable_cuda_graph=True can't be used here: the cache grows; pass cuda_graphs=True"
    no_graphs = "cuda_graphs=True can't be had: the model is on device type 'cpu', and only a GPU has CUDA graphs"
    for options, message in (
        ({"tp_size": 3}, "tp_size=3 must be a positive integer that divides the 4 ranks"),
        ({"sp_size": 3}, "sp_size=3 * tp_size=1 must be the number of ranks, 4"),
        ({"tp_size": 4}, "tp_size=4 must divide the model's num_key_value_heads=2"),
        ({"dtype": torch.float64}, "dtype=torch.float64"),
        ({"schedule": "tree"}, "schedule='tree' is unknown"),
        ({"page_size": 0}, "page_size=0"),
        ({"config": {"replace_with_kernel_inject": True}}, "replace_with_kernel_inject=True can't be used here"),
        ({"config": {"tensor_parallel": {"tp_size": 2}}}, "pass tp_size="),
        ({"config": "no/such/file.json"}, "config='no/such/file.json' is not a readable JSON file"),
        ({"config": str(listing)}, "in that file must be an object of DeepSpeed's options"),
        ({"enable_cuda_graph": True}, config_graphs),
        ({"cuda_graphs": True}, no_graphs),
    ):
        with refused_with(message):
            tree_deepspeed.init_inference(tiny_model("llama"), **options)
    with refused_with("model='nowhere' is no folder"):
        tree_deepspeed.init_inference("nowhere")
    with refused_with("engine is a LlamaForCausalLM: pass what init_inference returns"):
        tree_deepspeed.generate(tiny_model("llama"), torch.ones(1, 3, dtype=torch.int64), max_new_tokens=1)


def test_a_program_without_a_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ValueError, match=r"LOCAL_RANK.*MASTER_PORT not set: start this program with a launcher"):
        tree_deepspeed.init_distributed()


def _limits(rank, world):
    engine = tree_deepspeed.init_inference(tiny_model("llama"))
    parallel = tree_deepspeed.register_sequence_parallel(tiny_model("llama"))
    return engine.new_runner().config.timeout_s, parallel.tree_config.timeout_s


def test_a_file_of_options_reaches_inference_and_training(tmp_path):
    (tmp_path / "tree.yaml").write_text("timeout_s: 77")
    env = {"MEGATRON_TREE_CONFIG": str(tmp_path / "tree.yaml"), "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert run_distributed(_limits, 1, env=env, fresh=True) == [(77, 77)]
