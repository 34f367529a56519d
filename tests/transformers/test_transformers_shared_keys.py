"""Layers that attend to the keys and values of an earlier layer (Gemma 3n, Gemma 4): as the plain models."""

import pytest
import torch

import megatron_tree.integrations.transformers as tree_hf
from support.hf_architectures import SHARED_KEYS, assert_logits, random_model
from support.hf_models import prompt
from support.hf_served import check_rows, check_served
from support.hf_training import check_trained_batches
from support.ranks import on_ranks
from support_matrix import slow_but

MODELS = {"gemma3n_text": {}, "gemma4_text": SHARED_KEYS, "gemma4_unified_text": SHARED_KEYS}
FAST = ("gemma4_text",)


def make(name, **changes):
    model = random_model(name, **MODELS[name] | changes)
    assert sum(layer.self_attn.is_kv_shared_layer for layer in model.model.layers) == 2
    return model


@pytest.mark.parametrize("name", slow_but(FAST, MODELS))
@on_ranks(2)
def test_served(name):
    check_served(make(name))


@pytest.mark.parametrize("name", slow_but(FAST, MODELS))
@on_ranks(2)
def test_rows(tmp_path, name):
    check_rows(make(name, sliding_window=64), tmp_path / "rows")  # rows that a window has left can't be cropped


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but(FAST, MODELS))
@on_ranks()
def test_trained(world, name):
    check_trained_batches(lambda: make(name))


def test_a_layer_that_reads_other_keys():
    model, ids = make("gemma4_text"), prompt(1, 9)
    model.set_attn_implementation("tree")
    cache, attention = tree_hf.TreeCache(model.config), model.model.layers[3].self_attn
    attention.layer_type = "sliding_attention"  # it reads layer 0 then, not layer 1
    with torch.no_grad(), pytest.raises(ValueError, match=r"\(layer_idx=3\) attends"):
        model(ids, past_key_values=cache)


@torch.no_grad()
def test_the_run_ends_with_the_last_layer():
    """A run without a cache after it is no part of it."""
    model, ids = make("gemma4_text"), prompt(1, 9)
    want = model(ids, use_cache=False).logits
    model.set_attn_implementation("tree")
    model(ids, past_key_values=tree_hf.TreeCache(model.config))
    assert_logits(model(ids, use_cache=False).logits, want, "no cache")


def test_steps_are_not_captured():
    model = make("gemma4_text")
    cache = tree_hf.TreeCache(model.config)
    model.set_attn_implementation("tree")
    assert "more attention calls than are captured" in tree_hf.Runner(model, cache).depends_on_host


def test_keys_of_another_model():
    """As of assistants."""
    config = make("gemma4_text").config
    config.num_kv_shared_layers = config.num_hidden_layers
    with pytest.raises(ValueError, match="keys and values of another model; .* Use attn_impl"):
        tree_hf.TreeCache(config)
