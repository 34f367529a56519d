"""Core attention in a model that torch.compile compiles."""

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

pytest.importorskip("megatron.core")

from support.core_attention import core_attention, qkv
from support.ranks import run_distributed


def _compiled(rank, world):
    core = core_attention(options={"context_parallel_size": world})
    core.cp_group = dist.group.WORLD
    inputs = [x.requires_grad_() for x in qkv()]
    with torch._dynamo.config.patch(disable=False):
        got = torch.compile(core, backend="eager")(*inputs)
    expected = core(*inputs)
    grads = [torch.autograd.grad(x.square().sum(), inputs) for x in (got, expected)]
    return torch.equal(got, expected) and all(map(torch.equal, *grads))


def test_torch_compile_calls_core_attention_between_graphs():
    assert run_distributed(_compiled, 2) == [True, True]
