"""DeepSeek V4, whose queries see keys of compressed blocks beside a window: as the plain model, on any ranks."""

import pytest
import torch

import megatron_tree.integrations.transformers as tree_hf
from megatron_tree import prefix_tree
from megatron_tree.integrations.transformers.families import compressed
from support.hf_architectures import random_model
from support.hf_models import prompt
from support.hf_served import check_no_cache
from support.hf_training import check_trained_batches
from support.ranks import on_ranks


def _model(**changes):
    """With weights that are zeros at first: of biases of gates, sinks and the experts of token ids."""
    model = random_model("deepseek_v4", **changes)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith(("position_bias", "sinks")):
                x.normal_()
        for name, x in model.named_buffers():
            if name.endswith("tid2eid"):
                x.copy_(torch.arange(x.numel()).view(x.shape) // 3 % 4)
    return model


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.supports("`deepseek_v4`", with_="training on shards; 1, 2 and 4 ranks")
@on_ranks()
def test_training(world):
    """Blocks that shards cut: zigzag, padded, packed, recomputed; and documents without any."""
    check_trained_batches(_model)


def test_evaluation_without_a_cache():
    check_no_cache(_model(), "attention_mask with padding: DeepseekV4Attention counts blocks")


@pytest.mark.parametrize("way", ["a cache", "dropout", "a tree", "another version"])
def test_refusals(way, monkeypatch):
    model, ids = _model(), prompt(1, 9)
    if way == "a cache":
        with pytest.raises(ValueError, match="has keys of compressed blocks .* only training on shards"):
            tree_hf.TreeCache(model.config)
        model.set_attn_implementation("tree")
        with pytest.raises(ValueError, match="past_key_values: DeepseekV4Attention counts blocks .* use_cache=False"):
            model(ids)
    elif way == "another version":
        monkeypatch.setitem(compressed.READ, "DeepseekV4Indexer", "0")
        with pytest.raises(ValueError, match=r"DeepseekV4Indexer of this version of Transformers .* knows \(0\)"):
            tree_hf.train_on_shards(model)
    else:
        tree_hf.train_on_shards(model)
        batch, said = {"input_ids": ids, "labels": ids}, "takes no prefix_tree"
        if way == "a tree":
            batch = {"prefix_tree": prefix_tree([[1, 2, 3, 4], [1, 2, 5]])}
        else:
            model.train()
            said = "attention_dropout=0.1: DeepseekV4Attention attends to tokens and to blocks"
            for layer in model.model.layers:
                layer.self_attn.attention_dropout = 0.1
        with pytest.raises(ValueError, match=said):
            model(**tree_hf.shard_batch(batch, cp_group=None))
