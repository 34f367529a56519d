"""Steps of an engine whose weights are split, captured and replayed, see cache/test_graph.py."""

import pytest
import torch

from support.ranks import largest, run_distributed

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

from megatron_tree import TreeConfig
from megatron_tree.cache.graph import GraphedSteps
from support.hf_models import prompt, tiny_model
from support.tape import Tape


def _replayed(rank, world, families):
    from megatron_tree.integrations import deepspeed as tree_deepspeed

    worst = {}
    for family in families:
        options = dict(weights="sharded", block_size=2, tree_config=TreeConfig(transport="builtin"))
        engine = tree_deepspeed.init_inference(tiny_model(family), **options)
        ordinary, replayed = engine.new_runner(), engine.new_runner()
        replayed._graphs, tokens, errors = GraphedSteps(replayed, capture=Tape), prompt(3, 12), []
        for runner in (ordinary, replayed):
            for own, n in zip(tokens, (12, 7, 3)):
                runner.prefill(runner.add(), own[:n])
        new = torch.tensor([[1], [2], [3]])
        for _ in range(8):
            want, got = (runner.step([0, 1, 2], new) for runner in (ordinary, replayed))
            errors.append((got - want).abs().max() / want.abs().max())
            new = want.argmax(-1)
        worst[family] = largest(errors)
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_replayed_steps_over_sharded_weights(world):
    """The collectives of the weights' shares are replayed as well."""
    families = ("llama", "gpt_oss", "mixtral", "deepseek_v3_experts")
    for worst in run_distributed(_replayed, world, families, fresh=True):
        assert largest(worst.values()) <= 1e-5, worst
