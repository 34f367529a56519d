"""GLM-5.3 (glm5_next), whose queries see pools of tokens that an index selects: as the plain model, on any ranks."""

import pytest
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
from megatron_tree.integrations.transformers.families import gated_pools
from support.hf_models import glm5_next, hf_generate, left_padded, prompt
from support.hf_served import (
    check_eight_bits,
    check_engine,
    check_no_cache,
    check_rows,
    check_served,
    traffic_of_a_step,
)
from support.hf_training import check_trained_batches
from support.ranks import on_ranks
from support_matrix import slow_but

SMALL = {"index_kpool": 2, "index_topk": 6}  # a page of most tests has 2 tokens
INDEXED = {"layer_types": ["indexed_attention"] * 3}  # without recurrent layers, whose states can't go back


@pytest.mark.parametrize("world", slow_but([2], [1, 2, 4]))
@pytest.mark.supports("`glm5_next`", with_="training on shards; 1, 2 and 4 ranks")
@on_ranks()
def test_training(world):
    """Pools that shards cut: zigzag, padded, packed, recomputed; and documents without any."""
    check_trained_batches(glm5_next)


@pytest.mark.parametrize("world", slow_but([1, 4], [1, 2, 4]))
@pytest.mark.supports("`glm5_next`", with_="generate and model.generate; 1, 2 and 4 ranks")
@on_ranks()
def test_generation(world):
    check_served(glm5_next(**SMALL), pads=False)


@on_ranks(2)
def test_rows(tmp_path):
    check_rows(glm5_next(**INDEXED), tmp_path / "saved", page_size=8)


@pytest.mark.parametrize("dtype", slow_but(["int8"], ["int8", "fp8"]))
@on_ranks(2)
def test_caches_in_eight_bits(dtype):
    """In the last step before a pool ends a query selects pools on one rank, and the tokens behind them on another."""
    check_eight_bits(glm5_next(**SMALL, **INDEXED), dtype, {"int8": 0.2, "fp8": 1.0}[dtype])


@on_ranks(2)
def test_what_a_step_sends_and_reads(world):
    """What a step sends, 8 bytes for each pool of a list and states of heads, and reads: selected pools, and tokens
    since the last."""
    model = glm5_next(**INDEXED)  # one of three layers shares a selection
    text = model.config.text_config
    cache = tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD, page_size=4, schedule="allgather")
    sent, read = traffic_of_a_step(model, prompt(1, 41), cache)  # the 43rd token: its pool is incomplete
    lists = 2 * 8 * text.index_topk // text.index_kpool
    states = 3 * 4 * text.num_attention_heads * (text.v_head_dim + 1)
    assert sent == (world - 1) * (lists + states)
    assert read == [text.index_topk + 43 % text.index_kpool] * 3


@pytest.mark.parametrize("world", slow_but([2], [2, 4]))
@pytest.mark.supports("`glm5_next`", with_="weights and recurrent states over all ranks; 2 and 4 ranks")
@on_ranks(timeout=200.0)
def test_weights_over_all_ranks(world, tmp_path):
    check_engine(glm5_next(**SMALL), tmp_path, world, ("visual", "f_a_proj", "g_a_proj"))


def test_evaluation_without_a_cache():
    model = glm5_next()
    tree_hf.TreeCache(model.config)
    check_no_cache(model, "attention_mask with padding: Glm5NextTextConfig has an index of pools")
    with pytest.raises(ValueError, match="layers with an index need a TreeCache, or neither"):
        model(prompt(1, 9))


@on_ranks(1, fresh=True)
def test_before_a_cache_is_made():
    """Nothing has told the model's code yet that its attention is another one."""
    model = glm5_next()
    model.set_attn_implementation("tree")
    with pytest.raises(ValueError, match="Glm5NextTextAttention makes a mask of queries by keys .* make a TreeCache"):
        model(prompt(1, 9), use_cache=False)


def test_left_padding_is_refused():
    model, (ids, mask) = glm5_next(), left_padded(2, 17)
    model.set_attn_implementation("tree")
    with pytest.raises(ValueError, match="attention_mask with padding: .* an index of pools"):
        hf_generate(model, ids, 2, mask, past_key_values=tree_hf.TreeCache(model.config))


@pytest.mark.parametrize("make", [lambda model: tree_hf.TreeCache(model.config), tree_hf.train_on_shards])
def test_models_of_another_kind_are_refused(make, monkeypatch):
    with pytest.raises(ValueError, match=r"index_kpool_always_select_tail=False: a query .* would see no key"):
        make(glm5_next(index_kpool_always_select_tail=False))
    monkeypatch.setitem(gated_pools.READ, "Glm5NextTextIndexer.get_pooled_states", "0")
    with pytest.raises(ValueError, match=r"get_pooled_states of this version of Transformers .* knows \(0\)"):
        make(glm5_next())


def test_pools_that_lie_in_two_pages_are_refused():
    with pytest.raises(ValueError, match=r"page_size=2: Glm5NextTextConfig selects blocks of 4 tokens \(index_kpool\)"):
        tree_hf.TreeCache(glm5_next().config, page_size=2)
