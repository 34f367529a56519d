"""DeepSeek V4, whose queries see keys of compressed blocks beside a window: as the plain model, on any ranks."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import megatron_tree.integrations.transformers as tree_hf
from megatron_tree.integrations.transformers.families import compressed
from megatron_tree.integrations.transformers.infer.engine import share_model
from megatron_tree.integrations.transformers.infer.weight_layout import plan_layout
from support.hf_architectures import deepseek_v4
from support.hf_models import hf_generate, left_padded, plain, prompt
from support.hf_served import begin_rows, check_no_cache, check_prompts, check_saved_rows, check_served, check_sharded
from support.hf_training import check_trained_batches
from support.ranks import on_ranks


def _served(sparse=2, heavy=4, **changes):
    """With blocks of so many tokens."""
    rates = {"compressed_sparse_attention": sparse, "heavily_compressed_attention": heavy}
    return deepseek_v4(compress_rates=rates, **changes)


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.supports("`deepseek_v4`", with_="generate and model.generate; 1, 2 and 4 ranks")
@on_ranks()
def test_generation(world):
    """Steps of one token and of several, and chunks of prompts, that end within blocks."""
    check_served(_served(), pads=False, page_size=4)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.supports("`deepseek_v4`", with_="weights over all ranks; 2 and 4 ranks")
@on_ranks()
def test_weights_over_all_ranks(world, tmp_path):
    """Of a model in memory, whose ranks run all tokens of a prompt or their own; and of one in files, whose row goes on
    in another cache."""
    check_sharded(_served(o_groups=4), page_size=4)
    ids, folder = prompt(1, 45), tmp_path / "model"
    whole = _served(o_groups=4)
    want = plain(whole, ids, 3)
    whole.save_pretrained(folder)  # on the first rank
    if dist.get_rank() == 0:  # with DeepSeek's names: Transformers does not find model.norm under its own
        weights = load_file(folder / "model.safetensors")
        weights = {name.removeprefix("model."): x for name, x in weights.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    dist.barrier()
    engine = share_model(folder, weights="sharded", page_size=4)
    check_saved_rows(engine, ids, want, tmp_path / "rows")


def test_groups_of_heads_that_ranks_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"o_a_proj: it has 2 groups of heads: start one of \[1, 2\] ranks"):
        plan_layout(deepseek_v4(), 4, 0)


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.supports("`deepseek_v4`", with_="training on shards; 2 and 4 ranks")
@on_ranks()
def test_training(world):
    """Blocks that shards cut: zigzag, padded, packed, recomputed; and documents without any."""
    check_trained_batches(deepseek_v4)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks()
def test_prompts(world, tmp_path):
    check_prompts(_served(), tmp_path / "saved", page_size=4)


@on_ranks(2)
def test_rows(world):
    """Rows of a runner, whose blocks end at different steps: a copy, a failure; and who has which blocks."""
    model = _served(3, 6)

    def new_cache():
        return tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD, page_size=6)

    runner, rows, copy, texts, check = begin_rows(model, (3, 29, 12), new_cache, 12)
    hook = model.model.layers[-1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.step(rows, torch.stack([text[2:3] for text in texts]))
    hook.remove()
    for i, logits in enumerate(runner.step(rows, torch.stack([text[2:3] for text in texts]))):
        check(logits[0], i, len(texts[i]) + 2, "after a failure")
    check(runner.step([copy], texts[1][2:3, None])[0, 0], 1, 31, "a copy")
    with pytest.raises(ValueError, match="have the state of 32 tokens, which can't go back"):
        runner.crop(copy, 31)
    store, lengths = runner.store, [6, 32, 15, 32]
    held = torch.tensor([store.num_local(kind) for kind in (1, 2)])
    assert store.block_sizes == [1, 3, 6]
    dist.all_reduce(held)
    assert held.tolist() == [sum(n // size for n in lengths) for size in (3, 6)]
    d, state = model.config.head_dim, store.book.rows[copy].state
    assert store.layers[-1].bytes_of_a_token == 4 * d, "a key is its value, too"
    # of the last tokens before a block's last one: keys and gates, and of sparse layers those of two parts and an index
    assert state.nbytes == 4 * (5 * (4 * d + 4 * model.config.index_head_dim) + 5 * 2 * d)


@pytest.mark.supports("`deepseek_v4`", with_="evaluation without a cache")
def test_evaluation_without_a_cache():
    check_no_cache(deepseek_v4(), "attention_mask with padding: DeepseekV4Attention counts blocks")


@pytest.mark.parametrize("way", ["a cache", "dropout", "another version"])
def test_refusals(way, monkeypatch):
    model, ids = deepseek_v4(), prompt(1, 9)
    if way == "a cache":
        with pytest.raises(ValueError, match="page_size=16: .* each block of 3 tokens, .* choose 24, or a multiple"):
            tree_hf.TreeCache(model.config)
        model.set_attn_implementation("tree")
        with pytest.raises(ValueError, match="past_key_values: DeepseekV4Attention counts blocks .* use_cache=False"):
            model(ids)
        ids, mask = left_padded(2, 9)
        with pytest.raises(ValueError, match="attention_mask with padding: DeepseekV4Attention counts blocks"):
            hf_generate(model, ids, 2, mask, past_key_values=tree_hf.TreeCache(model.config, page_size=24))
    elif way == "another version":
        monkeypatch.setitem(compressed.READ, "DeepseekV4Indexer", "0")
        with pytest.raises(ValueError, match=r"DeepseekV4Indexer of this version of Transformers .* knows \(0\)"):
            tree_hf.train_on_shards(model)
    else:
        tree_hf.train_on_shards(model)
        model.train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        with pytest.raises(ValueError, match="attention_dropout=0.1: DeepseekV4Attention attends to tokens and to"):
            model(**tree_hf.shard_batch({"input_ids": ids, "labels": ids}, cp_group=None))
