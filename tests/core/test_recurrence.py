"""Recurrent layers over shards against the recurrence run token by token, in float64: values and all gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_tree import (
    Decay,
    dispatch_documents,
    packed_layout,
    shard_sequence,
    tree_halo,
    tree_recurrence,
    tree_scan,
    unshard_sequence,
)
from megatron_tree.comm import record
from megatron_tree.layout import shard_segments
from support.ranks import run_distributed
from support.recurrences import decaying, delta_inputs, delta_rule

B, H, D, D_V = 2, 3, 4, 5
UNEVEN = {1: (24,), 2: (24, 0), 3: (5, 0, 19), 4: (0, 7, 0, 17)}
DOCUMENTS = (3, 17, 1, 2, 25)
SCHEDULES = ("gather", "exchange", "auto")


def _documents(layout, world):
    """The lengths of the documents, and the layout of their rows."""
    if layout == "dispatched":
        return DOCUMENTS, dispatch_documents((0, *torch.tensor(DOCUMENTS).cumsum(0).tolist()), dist.group.WORLD)
    padded = [-(-n // (2 * world)) * 2 * world for n in DOCUMENTS]
    bounds = [[0, *torch.tensor(x).cumsum(0).tolist()] for x in (DOCUMENTS, padded)]
    return padded, packed_layout(*bounds)


def _relative(got, want):
    return float((got - want).abs().max() / want.abs().max()) if got.numel() else 0.0


def _run(layout, inputs, v, up, options, with_decay):
    """out, the final state, and the gradients of all leaves, of this rank's shard."""
    initial = options.get("initial_state")
    leaves = [x.detach().requires_grad_() for x in (*inputs, v)] + ([] if initial is None else [initial.requires_grad_()])
    inputs, v = leaves[: len(inputs)], leaves[len(inputs)]
    kernel = decaying if with_decay else delta_rule
    decay = Decay(inputs[2], inputs[0]) if with_decay else None
    out, final = tree_recurrence(
        kernel, inputs, v, head_dim=D, cp_group=dist.group.WORLD, layout=layout, decay=decay, **options
    )
    loss = (out * up).sum() + (0 if final is None else (final**2).sum() / dist.get_world_size())
    grads = torch.autograd.grad(loss, leaves)
    if initial is not None:
        dist.all_reduce(grads[-1])
    return out.detach(), final, grads


def _inputs(tokens, with_decay, seed=0):
    inputs, v = delta_inputs(B, tokens, H, D, D_V, seed=seed)
    if with_decay == "rows":
        inputs[2] = inputs[2][..., None] * torch.linspace(0.5, 2, D, dtype=v.dtype)
    return (inputs[:3] if with_decay else inputs), v, torch.randn(v.shape, dtype=v.dtype)


def _sequences(rank, world, with_decay):
    """The largest errors of one sequence, by layout and options."""
    kernel, errors = decaying if with_decay else delta_rule, {}
    inputs, v, up = _inputs(24, with_decay)
    for layout in ("zigzag", "contiguous", UNEVEN[world]):
        for schedule in SCHEDULES:
            for state in (None, torch.randn(B, H, D, D_V, dtype=v.dtype)):
                if state is not None:
                    dist.broadcast(state, 0)
                leaves = [x.requires_grad_() for x in (*inputs, v, *([] if state is None else [state]))]
                want, final = kernel(inputs, v, state)
                wanted = torch.autograd.grad((want * up).sum() + (0 if state is None else (final**2).sum()), leaves)
                options = dict(schedule=schedule, initial_state=None if state is None else state.detach().clone())
                shares = [shard_sequence(x.detach(), dist.group.WORLD, 1, layout) for x in (*inputs, v, up)]
                got = _run(layout, shares[:-2], *shares[-2:], options | {"return_final_state": state is not None}, with_decay)
                pairs = list(zip((got[0], *got[2]), (want, *wanted)))
                local = [(a, b if a is got[2][-1] and state is not None else shard_sequence(b, dist.group.WORLD, 1, layout)) for a, b in pairs]
                local += [] if state is None else [(got[1], final)]
                errors[f"{layout}, {schedule}, {state is not None}"] = max(_relative(a.detach(), b.detach()) for a, b in local)
    return errors
