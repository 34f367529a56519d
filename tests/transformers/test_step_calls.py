"""How many Python functions of this package a decode step calls, for each layer and for the rest of the step.

The limits are a tenth above what Python 3.11 counts; later versions call fewer."""

import os
import sys

import pytest
import torch
import torch.distributed as dist

import megatron_tree
from megatron_tree.core.comm import Ranks
from megatron_tree.integrations.transformers.attention import TreeCache
from megatron_tree.integrations.transformers.infer.runner import Runner
from megatron_tree.integrations.transformers.infer.split_model import split_model
from megatron_tree.integrations.transformers.infer.weight_layout import plan_layout
from support.hf_models import SHAPE
from support.ranks import on_ranks
from transformers import AutoModelForCausalLM, LlamaConfig

PACKAGE = os.path.dirname(megatron_tree.__file__)
LAYERS = 2, 5
TOKEN = torch.zeros(1, 1, dtype=torch.int64)
# two ranks share all KV heads, and split the query heads
HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}


def _calls(step):
    """Calls of one step, the least of four: a rank that waits for others looks what keeps them."""
    found = []
    for _ in range(4):
        calls = [0]

        def count(frame, event, arg, calls=calls):
            calls[0] += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

        sys.setprofile(count)
        try:
            step()
        finally:
            sys.setprofile(None)
        found.append(calls[0])
    return min(found)


@torch.no_grad()
def _of_layer_and_step(make_step):
    """(calls of a layer, of the rest of a step)."""
    few, many = (_calls(make_step(layers)) for layers in LAYERS)
    of_layer = (many - few) / (LAYERS[1] - LAYERS[0])
    return of_layer, few - LAYERS[0] * of_layer


def _model(layers):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE | HEADS | {"num_hidden_layers": layers})).eval()
    model.set_attn_implementation("tree")
    return model


def _runner(layers, group=None, weights="replicated", **options):
    model, shares = _model(layers), None
    if weights == "sharded":
        layout = plan_layout(model, dist.get_world_size(), dist.get_rank())
        split_model(model, layout, Ranks.of(group))
        shares = layout.heads.shares
    runner = Runner(model, TreeCache(model.config, cp_group=group, head_shares=shares), **options)
    row = runner.add()
    runner.prefill(row, torch.arange(2, 9))
    runner.step([row], TOKEN)
    return lambda: runner.step([row], TOKEN)


def _model_alone(layers):
    model = _model(layers)
    cache = TreeCache(model.config)
    model(input_ids=torch.arange(2, 9)[None], past_key_values=cache)
    return lambda: model(input_ids=TOKEN, past_key_values=cache)


@pytest.mark.parametrize(("make_step", "of_layer", "of_step"), [(_runner, 26, 173), (_model_alone, 30, 172)])
def test_one_rank(make_step, of_layer, of_step):
    found = _of_layer_and_step(make_step)
    assert found[0] <= of_layer and found[1] <= of_step, found


@pytest.mark.parametrize(("weights", "of_layer", "of_step"), [("replicated", 46, 165), ("sharded", 68, 212)])
@on_ranks(2)
def test_two_ranks(weights, of_layer, of_step):
    found = _of_layer_and_step(lambda layers: _runner(layers, dist.group.WORLD, weights))
    assert found[0] <= of_layer and found[1] <= of_step, found


@pytest.mark.parametrize(("weights", "of_layer", "of_step"), [("replicated", 5, 84), ("sharded", 8, 86)])
@on_ranks(2)
def test_two_ranks_that_replay(weights, of_layer, of_step):
    """Of a layer are left its launches: attention in C, and collectives."""
    found = _of_layer_and_step(lambda layers: _runner(layers, dist.group.WORLD, weights, record_steps=True))
    assert found[0] <= of_layer and found[1] <= of_step, found
