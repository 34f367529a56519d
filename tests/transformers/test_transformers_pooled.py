"""Transformers' models whose queries see blocks of tokens that an index selects: as the plain ones, on any ranks."""

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
from support.hf_architectures import POOLED, random_model
from support.hf_models import hf_generate, left_padded, prompt
from support.hf_served import (
    check_eight_bits,
    check_engine,
    check_no_cache,
    check_rows,
    check_served,
    check_trained,
    traffic_of_a_step,
)
from support.ranks import on_ranks


@on_ranks(2)
def test_what_a_step_sends_and_reads(world):
    """What a step sends, lists of 8 bytes a block and states of heads, and reads: selected blocks and those after."""
    model = random_model("qwen4_exp_text")
    config = model.config
    cache = tree_hf.TreeCache(config, cp_group=dist.group.WORLD, page_size=2, schedule="allgather")
    sent, read = traffic_of_a_step(model, prompt(1, 41), cache)  # the 43rd token: its block is incomplete
    layers, size = config.layer_types.count("indexed_attention"), config.indexer_compress_ratio
    lists = 8 * config.indexer_budget // size
    states = 4 * config.num_attention_heads * (config.head_dim + 1)
    assert sent == (world - 1) * layers * (lists + states)
    assert read == [config.indexer_budget + 43 % size] * layers


@on_ranks(2)
def test_caches_in_eight_bits():
    check_eight_bits(random_model("qwen4_exp_text"), "int8", 0.2)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", POOLED)
@on_ranks()
def test_generation(world, name):
    check_served(random_model(name), pads=False)


@pytest.mark.parametrize("name", POOLED)
@on_ranks(2)
def test_training(name):
    """Blocks that lie on several ranks."""
    check_trained(lambda: random_model(name, indexer_compress_ratio=4, indexer_budget=8))


@on_ranks(2)
def test_rows(tmp_path):
    """Without recurrent layers, whose states can't go back."""
    layers = {
        "layer_types": ["indexed_attention"] * 3,
        "indexer_compress_ratio": 4,
        "indexer_budget": 8,
        "ple_layer_ids": [],
    }
    check_rows(random_model("qwen4_exp_text", **layers), tmp_path / "saved", page_size=8)


def test_evaluation_without_a_cache():
    check_no_cache(random_model("qwen4_exp_text"), "attention_mask with padding: .* an index of blocks")


@pytest.mark.refuses("`qwen4_exp_text`, model.generate with left padding", when="it runs: blocks of tokens")
def test_left_padding_is_refused():
    model, (ids, mask) = random_model("qwen4_exp_text"), left_padded(2, 17)
    model.set_attn_implementation("tree")
    with pytest.raises(ValueError, match="attention_mask with padding: .* an index of blocks"):
        hf_generate(model, ids, 2, mask, past_key_values=tree_hf.TreeCache(model.config, page_size=2))


def test_blocks_that_lie_in_two_pages_are_refused():
    config = random_model("qwen4_exp_text", indexer_compress_ratio=3).config
    with pytest.raises(ValueError, match=r"page_size=16: .* selects blocks of 3 tokens \(indexer_compress_ratio\)"):
        tree_hf.TreeCache(config)


@pytest.mark.refuses("`qwen4_exp_text` with rope_type='dynamic'", when="TreeCache is made: blocks of tokens")
def test_rotary_embeddings_that_change_are_refused():
    config = random_model("qwen4_exp_text").config
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match="an index of blocks of tokens keeps keys of one embedding"):
        tree_hf.TreeCache(config)


def test_positions_of_images_are_refused():
    model, ids = random_model("qwen4_exp_text"), prompt(1, 9)
    model.set_attn_implementation("tree")
    positions = torch.arange(9).repeat(4, 1, 1)
    positions[2, 0, 4:] += 1
    with pytest.raises(ValueError, match="positions of images in a model with an index of blocks"):
        model(ids, position_ids=positions, past_key_values=tree_hf.TreeCache(model.config, page_size=2))


def test_another_indexer_is_refused(monkeypatch):
    import transformers.models.qwen4_exp.modeling_qwen4_exp as modeling

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values):
        return attention_mask

    monkeypatch.setattr(modeling.Qwen4ExpTextQSAIndexer, "forward", forward)
    model = random_model("qwen4_exp_text")
    with pytest.raises(ValueError, match="Qwen4ExpTextQSAIndexer of this version of Transformers .* is not one that"):
        tree_hf.train_on_shards(model)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.supports("`qwen4_exp_text`", with_="weights and recurrent states over all ranks; 2 and 4 ranks")
@on_ranks(timeout=200.0)
def test_weights_over_all_ranks(world, tmp_path):
    check_engine(random_model("qwen4_exp_text"), tmp_path, min(world, 2))  # two KV heads


def test_rows_that_begin_beside_others_are_refused():
    model, ids = random_model("qwen4_exp_text"), prompt(2, 9)
    model.set_attn_implementation("tree")
    runner = tree_hf.Runner(model, tree_hf.TreeCache(model.config, page_size=2))
    rows = [runner.add(), runner.add()]
    runner.prefill(rows[0], ids[0, :5])
    with pytest.raises(ValueError, match="1 of 2 rows begin beside rows that go on, .* keeps the last token ids"):
        runner.step(rows, ids[:, 5:6])
