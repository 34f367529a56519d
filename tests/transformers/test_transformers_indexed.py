"""Transformers' models whose queries see the keys that an index selects: as the plain ones, on any number of ranks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
from megatron_tree.inference.generation.requests import Request
from megatron_tree.inference.generation.sampling import SamplingParams
from megatron_tree.inference.generation.scheduler import Scheduler
from megatron_tree.inference.generation.speculation import Speculation
from megatron_tree.integrations.transformers.infer.weight_layout import plan_layout
from support.hf_architectures import INDEXED, random_model
from support.hf_models import glm5_next, mistral_large4, plain, prompt
from support.hf_served import (
    CountingRunner,
    check_eight_bits,
    check_no_cache,
    check_rows,
    check_served,
    check_sharded,
    check_trained,
    traffic_of_a_step,
)
from support.ranks import on_ranks
from support.scheduling import serve, tokens_of
from support_matrix import supported

NEW = 6
WHOLE = {
    "dots3_note": "layers: they have different numbers of heads",
}
FAST = ("deepseek_v32", "hy_v4")  # without and with layers that share a selection


def _model(name):
    """A random model; mistral_large4 is one of images and text, and without images here."""
    if name == "glm5_next":
        return glm5_next(layer_types=["indexed_attention"] * 3)
    if name != "mistral_large4":
        return random_model(name)
    model = mistral_large4()
    model.set_attn_implementation("eager")
    return model


def _cases(with_, without=()):
    return supported([name for name in (*INDEXED, "mistral_large4") if name not in without], with_, FAST)


def _cache(model, **options):
    return tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD, page_size=2, **options)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", _cases("generate and model.generate; 1, 2 and 4 ranks"))
@on_ranks()
def test_generation(world, name):
    check_served(_model(name))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", _cases("weights over all ranks; 2 and 4 ranks", WHOLE))
@on_ranks(timeout=200.0)
def test_weights_over_all_ranks(world, name):
    check_sharded(_model(name))


@pytest.mark.parametrize(("name", "what"), WHOLE.items())
def test_weights_that_stay_whole_are_refused_by_name(name, what):
    with pytest.raises(ValueError, match=what):
        plan_layout(_model(name), 2, 0)


@pytest.mark.refuses("`mistral_large4` with kv_source_layers", when="TreeCache is made: layers share keys and values")
def test_layers_that_share_keys_and_values_are_refused():
    config = mistral_large4().config
    config.text_config.kv_source_layers = [0, 0, 2, 3]
    with pytest.raises(ValueError, match="layers that share their keys and values"):
        tree_hf.TreeCache(config)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@on_ranks(2)
def test_caches_in_eight_bits(dtype):
    check_eight_bits(_model("deepseek_v32"), dtype, {"int8": 0.2, "fp8": 1.0}[dtype])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", FAST)
@on_ranks()
def test_rows(world, name, tmp_path):
    check_rows(_model(name), tmp_path / "saved")


@pytest.mark.parametrize("name", [*FAST, "glm5_next"])
@pytest.mark.parametrize("speculation", [None, Speculation(2)], ids=["plain", "speculation"])
def test_scheduler_and_prefixes(name, speculation):
    """Questions about one text, which runs once; tokens proposed from the text and taken back."""
    model, text = _model(name), prompt(1, 60)[0].tolist()
    requests = [Request(prompt=[*text, 7 + i, 3], sampling=SamplingParams(max_tokens=NEW), n=1 + i) for i in range(3)]
    want = [plain(model, torch.tensor([r.prompt]), NEW)[0][0].tolist() for r in requests]
    model.set_attn_implementation("tree")
    runner = CountingRunner(model, tree_hf.TreeCache(model.config, page_size=4), chunk_size=32)
    limits = dict(max_rows=8, max_waiting=8, keep_bytes=1 << 30)
    scheduler = Scheduler(runner, **limits, speculation=speculation)
    for i, (asked, own) in enumerate(zip(requests, want)):
        events = serve(scheduler, [asked]) if i == 2 else _ask(scheduler, asked)
        for answer in range(asked.n):
            assert tokens_of(events[0], answer) == own
    assert runner.num_run <= 62 + 2 * 6


def _ask(scheduler, asked):
    events = []
    scheduler.submit(asked, events.append)
    scheduler.run_until_idle()
    return [events]


@pytest.mark.parametrize("name", FAST)
@on_ranks(2)
def test_what_a_step_sends_and_reads(world, name):
    """What a step sends, lists of 8 bytes a key and states of heads, and reads: rows of selected keys, not all."""
    model = _model(name)
    config, cache = model.config, _cache(model, schedule="allgather")
    sent, read = traffic_of_a_step(model, prompt(1, 61), cache)
    indexed = getattr(config, "indexer_types", ["full"] * config.num_hidden_layers).count("full")
    lists = indexed * 8 * config.index_topk
    width = min(config.kv_lora_rank, config.v_head_dim) + 1
    states = config.num_hidden_layers * 4 * config.num_attention_heads * width
    assert sent == (world - 1) * (lists + states)
    assert read == [config.index_topk] * config.num_hidden_layers


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", _cases("training on shards; 2 and 4 ranks"))
@on_ranks()
def test_training(world, name):
    check_trained(lambda: _model(name))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", FAST)
@on_ranks()
def test_packed_documents(world, name):
    """Documents shorter and longer than what an index selects."""
    lengths = (4, 21, 1, 16)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    more = {"input_ids": prompt(1, 42), "labels": prompt(1, 42), "position_ids": positions}
    check_trained(lambda: _model(name), **more)


@pytest.mark.parametrize("name", FAST)
@on_ranks(2)
def test_recomputed_layers(name):
    def make():
        model = _model(name).train()
        model.gradient_checkpointing_enable()
        return model

    check_trained(make)


@pytest.mark.parametrize("name", _cases("evaluation without a cache"))
def test_no_cache(name):
    check_no_cache(_model(name), "padding in layers with an index needs a TreeCache")


def test_another_formula_is_refused(monkeypatch):
    model, ids = random_model("deepseek_v32"), prompt(1, 9)
    tree_hf.train_on_shards(model)
    import transformers.models.deepseek_v32.modeling_deepseek_v32 as modeling

    monkeypatch.setattr(modeling, "F", SimpleNamespace(**vars(modeling.F) | {"relu": torch.abs}))
    with pytest.raises(ValueError, match=r"DeepseekV32Indexer \(layer_idx=0\) scores keys in another way .*abs after"):
        model(**tree_hf.shard_batch({"input_ids": ids, "labels": ids}, cp_group=None))


def test_a_model_without_what_its_family_replaces_is_refused(monkeypatch):
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

    monkeypatch.delattr(modeling.DeepseekV32Indexer, "forward")
    with pytest.raises(ValueError, match=r"its model has no \*Indexer\.forward, which all .* \(indexed\) have"):
        tree_hf.train_on_shards(random_model("deepseek_v32"))
