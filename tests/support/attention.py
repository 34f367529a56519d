"""Training attention on ranks: inputs, this rank's call, and what the float64 oracle has for the whole sequence."""

import functools
import itertools

import torch
import torch.distributed as dist

from megatron_tree import AttnSlice, TreeConfig, shard_positions, tree_attn_func
from megatron_tree.core import energy
from megatron_tree.core.dropout import keep_weights
from megatron_tree.core.layout import shard_lengths
from megatron_tree.core.plan import grids
from megatron_tree.core.spec import AttnSpec
from support.ranks import largest


def configs(world):
    yield "auto", TreeConfig()
    if world > 1:
        yield "ring", TreeConfig(schedule="ring")
        for grid in grids(world):
            yield f"grid {grid[0]}x{grid[1]}", TreeConfig(grid=grid)


def make_inputs(seq_len, heads, *, batch=2, d=8, d_v=8, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    h, h_kv = heads
    shapes = ((h, d), (h_kv, d), (h_kv, d_v), (h, d_v))  # q, k, v, dout
    return [torch.randn(batch, seq_len, n, m, generator=g, dtype=torch.float64).to(dtype) for n, m in shapes]


def oracle(q, k, v, dout, dlse=None, *, sequences=None, dropout=None, sinks=None, alibi_slopes=None, **mask):
    """(out, lse, dq, dk, dv[, dsinks]) of the whole sequence in float64; mask: causal, window_size, softcap.

    sequences: the document of every row, -1 for padding; dropout: a `Dropout`.
    """
    options = dict(dropout=dropout, alibi_slopes=slopes_of(alibi_slopes), **mask)
    spec = AttnSpec(softmax_scale=q.shape[-1] ** -0.5, **options)
    q_pos, k_pos = torch.arange(q.shape[1]), torch.arange(k.shape[1])
    keep, weights = energy.visible(q_pos, k_pos, spec), None
    if sequences is not None:
        keep &= (sequences[:, None] == sequences) & (sequences >= 0)
        starts = torch.tensor([int((sequences == s).nonzero()[0]) for s in sequences], dtype=torch.int64)
        q_pos = k_pos = q_pos - starts
    if dropout is not None:
        of_rows = dict(q_positions=q_pos, k_positions=k_pos, q_sequences=sequences)
        weights = keep_weights(dropout, batch=q.shape[0], num_heads=q.shape[2], **of_rows)
    options = dict(spec=spec, keep=keep, keep_weights=weights, distance=distances(q_pos, k_pos))
    options["sinks"] = None if sinks is None else sinks.double()
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    out, lse = energy.attention(q, k, v, **options)
    grads = energy.attention_grads(q, k, v, dout, dlse=dlse, **options)
    return out, lse, *grads


def seen_in(slices, seq_len, seq_len_kv):
    """bool [seq_len, seq_len_kv]: what a mask of slices shows, pair by pair from the definition of the kinds."""
    keep = torch.zeros(seq_len, seq_len_kv, dtype=torch.bool)
    for (q_first, q_end), (k_first, k_end), kind in (AttnSlice(*piece) for piece in slices):
        for i, j in itertools.product(range(q_first, q_end), range(k_first, k_end)):
            from_end = (q_end - i) <= (k_end - j) or kind in ("full", "inverse")
            from_start = (i - q_first) <= (j - k_first) or kind in ("full", "causal")
            keep[i, j] |= from_end and from_start
    return keep


def run_call(inputs, q_rows, k_rows, call, sinks=None, dlse=None):
    """(out, lse, dq, dk, dv[, dsinks summed over ranks]) of call(q, k, v, sinks=...) on this rank's rows."""
    q, k, v, dout = inputs
    leaves = [x[:, rows] for x, rows in ((q, q_rows), (k, k_rows), (v, k_rows))]
    # strides as Megatron's: sequence first in memory
    leaves = [x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in leaves]
    if sinks is not None:
        leaves.append(sinks.clone().requires_grad_())
    out, lse = call(*leaves[:3], sinks=None if sinks is None else leaves[3])
    loss = (out.double() * dout[:, q_rows].double()).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse.isinf(), 0.0) * dlse[..., q_rows]).sum()
    grads = list(torch.autograd.grad(loss, leaves))
    if sinks is not None:
        dist.all_reduce(grads[3])
    return [out.detach(), lse.detach(), *grads]


def run_one(inputs, layout, config, mask, dlse=None):
    """The rows of the sequence that this rank holds, and `run_call` of them."""
    seq_len, world = inputs[0].shape[1], dist.get_world_size()
    rows = shard_positions(seq_len, dist.get_rank(), world, layout)
    passed = tuple(shard_lengths(seq_len, world, layout)) if layout == "contiguous" else layout
    mask = dict(mask)
    sinks = make_sinks(inputs[0].shape[2]).to(inputs[0].dtype) if mask.pop("sinks", False) else None
    options = dict(cp_group=dist.group.WORLD, layout=passed, config=config, return_lse=True)
    return rows, run_call(inputs, rows, rows, functools.partial(tree_attn_func, **options, **mask), sinks, dlse)


def make_sinks(h):
    return torch.linspace(-1.0, 1.5, h, dtype=torch.float64)


def make_slopes(h, batch=None):
    """alibi_slopes [h], or [batch, h]; one of them raises the weight of far keys."""
    slopes = torch.linspace(0.6, -0.05, h)
    return slopes if batch is None else slopes * torch.arange(1.0, batch + 1)[:, None]


def slopes_of(alibi_slopes):
    """The same as in AttnSpec."""
    if alibi_slopes is None:
        return None
    return tuple(map(tuple, alibi_slopes.reshape(-1, alibi_slopes.shape[-1]).tolist()))


def distances(q_positions, k_positions):
    """int64 [..., s_q, s_k] of positions [..., s_q] and [..., s_k], for the oracle."""
    return (q_positions[..., :, None] - k_positions[..., None, :]).abs()


def worst_error(rows, mine, truth, k_rows=None):
    """Largest absolute error over out, lse and gradients of this rank's rows, and of other ones of the keys."""
    worst = 0.0
    for i, (x, t) in enumerate(zip(mine, truth)):
        at = rows if i < 3 or k_rows is None else k_rows
        t = t if i == 5 else t[..., at] if i == 1 else t[:, at]
        assert x.shape == t.shape, (i, x.shape, t.shape)
        same = torch.isinf(t) & (x.double() == t)
        error = torch.where(same, 0.0, x.double() - t).abs()
        assert not error.isnan().any(), f"NaN in result {i}"
        worst = largest((worst, error.max().item() if error.numel() else 0.0))
    return worst


def alibi_mask(keep, slopes, distance):
    """What torch's own attention takes for alibi_slopes [..., h]: fp32 [..., h, s_q, s_k]."""
    return torch.where(keep, -slopes[..., None, None] * distance, float("-inf"))


def dense(q, k, v, dout, *, alibi_slopes=None):
    """The same mathematics, dense and causal, done in the inputs' dtype by torch's own attention."""
    seen = dict(is_causal=True)
    if alibi_slopes is not None:
        positions = torch.arange(q.shape[1])
        apart = positions[:, None] - positions
        seen = dict(attn_mask=alibi_mask(apart >= 0, alibi_slopes, apart).to(q.dtype))
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **seen, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), dout.transpose(1, 2))
    return [x.detach().transpose(1, 2) for x in (out, *grads)]


def low_precision(world, dtype, configs, **mask):
    """By label of `configs`: errors of out, dq, dk and dv as fractions of those of dense attention in `dtype`."""
    inputs = make_inputs(64 * world, (4, 2), d=32, d_v=32, dtype=dtype, seed=3)
    out, _, *grads = oracle(*inputs, **mask)
    truth = [out, *grads]
    allowed = [(x.double() - t).abs().max() for x, t in zip(dense(*inputs, **mask), truth)]
    found = {}
    for label, config in configs:
        rows, (out, _, *grads) = run_one(inputs, "zigzag", config, mask)
        errors = [(x.double() - t[:, rows]).abs().max() for x, t in zip((out, *grads), truth)]
        found[label] = [float(e / a) for e, a in zip(errors, allowed)]
    return found
