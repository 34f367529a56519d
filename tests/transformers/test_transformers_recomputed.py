"""Deep models on shards with gradient checkpointing and the defaults: plans are measured meanwhile."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig
from megatron_tree.core.comm.group import GroupState
from megatron_tree.integrations import transformers as tree_hf
from support.hf_models import SHAPE, VOCAB
from support.hosts import Hosts
from support.ranks import run_distributed
from support.tried_plans import taken, tried
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS, STEPS = 64, 2


def _gradients(config, recompute):
    """Of all parameters, step by step."""
    torch.manual_seed(1)
    shape = SHAPE | {"num_hidden_layers": 24, "hidden_size": 16, "intermediate_size": 16, "head_dim": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape)).train()
    if recompute:
        model.gradient_checkpointing_enable()
    tree_hf.train_on_shards(model)
    steps = []
    for step in range(STEPS):
        ids = torch.randint(1, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(step))
        batch = {"input_ids": ids, "labels": ids}
        model(**tree_hf.shard_batch(batch, cp_group=dist.group.WORLD, tree_config=config)).loss.backward()
        steps.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    return steps


def _ranks(rank, world, pick):
    want = _gradients(TreeConfig(tune=False), False)
    with Hosts(range(world)), tried({"ulysses_size": 1, "grid": (1, world)}, {"ulysses_size": 2}), taken(pick):
        got = _gradients(TreeConfig(), True)
    errors = [float((x - y).abs().max() / y.abs().max()) for x, y in zip(got, want)]
    return errors, len(GroupState.of(dist.group.WORLD).tuned)


@pytest.mark.parametrize("pick", [1, 2])
def test_a_deep_model(pick):
    for errors, measured in run_distributed(_ranks, 2, pick):
        assert max(errors) < 1e-4, errors
        assert measured == 1
