"""Numbers at the edge against the float64 oracle, for every backend and schedule: huge and equal logits, outliers,
denormals, rows that see nothing, and NaN wherever there is padding."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_attn_func, tree_attn_varlen_func, tree_decode
from megatron_tree.core import energy, kernels
from megatron_tree.core.config import DECODE_SCHEDULES
from megatron_tree.core.kernels import KVCache
from megatron_tree.core.layout import Segment, shard_positions
from megatron_tree.core.spec import AttnSpec
from support import extreme_values as edge
from support.attention import configs
from support.blocks import Cell, masks_of, spoil_padding
from support.decoding import cache_of, prefill_chunk
from support.extreme_values import CASES, LSE_LIMIT, SCALE
from support.paging import paged
from support.ranks import run_distributed
from support.states import merged

NEG_INF, NAN = float("-inf"), float("nan")
DTYPES = (torch.float32, *edge.LOW)
BACKENDS = ("reference", "aten", "triton")


def skip_what_cannot_run(backend, dtype):
    if backend == "triton" and dtype == torch.bfloat16 and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter computes bf16 wrongly: test_triton_low_precision.py has it")


def device_of(backend):
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_kernels_at_the_edge(case, dtype, backend):
    """Forward, backward and decode of one block, in two parts that are merged; lse within 1e-6."""
    skip_what_cannot_run(backend, dtype)
    s, spec, device = 40, AttnSpec(softmax_scale=SCALE), device_of(backend)
    q, k, v, dout = edge.make(case, dtype, s)
    keep = energy.visible(torch.arange(s), torch.arange(s), spec)
    out, lse, *grads = edge.truth(q, k, v, dout, spec, keep)
    limit, of_out, *of_grads = edge.allowed(q, k, spec, dtype), *edge.magnitudes(q, k, v, dout, spec, keep)
    on = [x.to(device) for x in (q, k, v, dout)]
    parts, sums = [], [0.0, [], []]
    delta = (out * dout.double()).sum(-1).transpose(1, 2).float().to(device)
    for rows in (slice(0, 17), slice(17, s)):
        options = dict(q_segments=(Segment(0, 0, s),), k_segments=(Segment(0, rows.start, rows.stop - rows.start),))
        options.update(spec=spec, backend=backend)
        o, l = kernels.attn_fwd(on[0], on[1][:, rows], on[2][:, rows], **options)
        parts.append((o.float(), l))
        mine = (on[3], on[0], on[1][:, rows], on[2][:, rows])
        dq, dk, dv = kernels.attn_bwd(*mine, lse.float().to(device), delta, **options)
        sums = [sums[0] + dq, [*sums[1], dk], [*sums[2], dv]]
    o, l = merged(parts)
    assert edge.lse_error(l.cpu(), lse, backend, dtype) <= LSE_LIMIT
    assert edge.rounding(o.cpu(), out, of_out, dtype) <= limit
    for name, x, want, magnitude in zip("qkv", (sums[0], *(torch.cat(x, 1) for x in sums[1:])), grads, of_grads):
        assert edge.rounding(x.cpu(), want, magnitude, dtype) <= limit, f"d{name}"
    for decodes in (backend, *["native"] * (backend == "reference")):
        state = kernels.attn_decode(on[0][:, -1:], KVCache(*on[1:3]), spec, decodes).cpu()
        assert edge.lse_error(state[..., -1].transpose(1, 2), lse[..., -1:], decodes, dtype) <= LSE_LIMIT
        assert edge.rounding(state[..., :-1], out[:, -1:], of_out[:, -1:], dtype) <= limit


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_of_rows_that_see_nothing(dtype, backend):
    """Out 0, lse -inf, gradients exactly 0, whatever the other rows hold; padding rows are NaN, dout among them."""
    skip_what_cannot_run(backend, dtype)
    spec, device, s = AttnSpec(softmax_scale=SCALE), device_of(backend), 24
    q, k, v, dout = edge.make("6e4", dtype, s)
    cell = Cell((Segment(1, 0, 6), Segment(9, 20, 7), Segment(17, 3, 5, 1)), (Segment(2, 4, 12),), s, s)
    options = dict(q_segments=cell.q_segments, k_segments=cell.k_segments, spec=spec, backend=backend)
    keep = masks_of(cell, spec, 1, 1, "cpu")["keep"]
    spoil_padding(cell, q, k, v, dout)
    on = [x.to(device) for x in (q, k, v, dout)]
    out, lse = (x.cpu() for x in kernels.attn_fwd(*on[:3], **options))
    sees, seen = keep.any(1), keep.any(0)
    assert 0 < int(sees.sum()) < s and not out[:, ~sees].any() and out.isfinite().all()
    assert (lse[..., ~sees] == NEG_INF).all() and lse[..., sees].isfinite().all()
    delta = torch.zeros_like(lse).to(device)
    dq, dk, dv = (x.cpu() for x in kernels.attn_bwd(on[3], *on[:3], lse.to(device), delta, **options))
    assert all(x.isfinite().all() for x in (dq, dk, dv)) and dv[:, seen].any()
    assert not dq[:, ~sees].any() and not dk[:, ~seen].any() and not dv[:, ~seen].any()


@pytest.mark.parametrize("backend", [*BACKENDS, "native"])
@pytest.mark.parametrize("in_pages", [False, True])
def test_kernels_decode_over_padding(in_pages, backend):
    """NaN beyond the lengths, at position -1 and in pages of nobody; a row without keys; a query before all keys."""
    spec, device, size = AttnSpec(softmax_scale=SCALE, window_size=(30, 0)), device_of(backend), 16
    q, k, v, _ = edge.make("1e4", torch.float32, 2, 3 * size, batch=4)
    lengths = torch.tensor([3 * size, 0, 21, 5])
    slots = torch.arange(3 * size).expand(4, -1).clone()
    slots[0, [0, 1, 7, 40]] = -1
    q_positions = torch.tensor([[40, 47], [3, 4], [-1, 20], [0, 4]])
    hidden = (slots < 0) | (torch.arange(3 * size) >= lengths[:, None])
    keep = energy.visible(q_positions, slots, spec) & ~hidden[:, None]
    out, lse = energy.attention(*(x.double() for x in (q, k, v)), spec=spec, keep=keep)
    k[hidden], v[hidden] = NAN, NAN
    table = None
    if in_pages:
        (k, table), (v, _) = paged(k, size), paged(v, size)
    tensors = (k, v, None, None, None, lengths, q_positions, slots, table)
    cache = KVCache(*(None if x is None else x.to(device) for x in tensors))
    state = kernels.attn_decode(q.to(device), cache, spec, backend=backend).cpu()
    assert edge.lse_error(state[..., -1].transpose(1, 2), lse) <= LSE_LIMIT
    sees = keep.any(-1)
    assert not state[..., :-1][~sees].any() and (state[..., -1][~sees] == NEG_INF).all()
    assert edge.rounding(state[..., :-1], out, torch.ones(()), torch.float32) <= 0.02  # fp32 knows 1e4 to 1e-3


def _training(rank, world, backend):
    """Worst (lse error, rounding over what is allowed) by case and schedule, over real ranks."""
    s, spec, worst = 8 * world, AttnSpec(softmax_scale=SCALE), {}
    keep = energy.visible(torch.arange(s), torch.arange(s), spec)
    rows = shard_positions(s, rank, world)
    for dtype in DTYPES:
        for case in CASES:
            inputs = edge.make(case, dtype, s)
            out, lse, *grads = edge.truth(*inputs, spec, keep)
            sizes, limit = edge.magnitudes(*inputs, spec, keep), edge.allowed(*inputs[:2], spec, dtype)
            for label, config in configs(world):
                config = TreeConfig(**{**vars(config), "backend": backend})
                leaves = [x[:, rows].clone().requires_grad_() for x in inputs[:3]]
                call = dict(cp_group=dist.group.WORLD, softmax_scale=SCALE, config=config, return_lse=True)
                o, l = tree_attn_func(*leaves, **call)
                mine = [o.detach(), *torch.autograd.grad(o, leaves, inputs[3][:, rows])]
                wants = [x[:, rows] for x in (out, *grads)]
                found = [edge.rounding(x, y, m[:, rows], dtype) / limit for x, y, m in zip(mine, wants, sizes)]
                worst[case, label, str(dtype)] = edge.lse_error(l.detach(), lse[..., rows], backend, dtype), max(found)
    return worst


@pytest.mark.parametrize(("world", "backend"), [(3, "aten"), (2, "reference")])
def test_training_at_the_edge(world, backend):
    for worst in run_distributed(_training, world, backend, timeout=300):
        assert len(worst) == len(DTYPES) * len(CASES) * len(list(configs(world)))
        bad = {name: x for name, x in worst.items() if not (x[0] <= LSE_LIMIT and x[1] <= 1)}
        assert not bad, bad


def _packed(rank, world, backend):
    """Documents with NaN in their padding, dout included, and one whose keys are an empty document; sinks, too."""
    unit, found = 2 * world, {}
    of_queries, of_keys, padded = (2 * unit - 1, unit, unit - 1), (2 * unit - 1, 0, unit), (2 * unit, unit, unit)
    bounds, bounds_kv, bounds_padded = (torch.tensor([0, *x]).cumsum(0) for x in (of_queries, of_keys, padded))
    rows_of = lambda x: torch.cat([torch.arange(m) < n for n, m in zip(x, padded)])  # noqa: E731
    real, real_kv, s = rows_of(of_queries), rows_of(of_keys), sum(padded)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(padded))
    spec = AttnSpec(softmax_scale=SCALE, causal=False)
    keep = (documents[:, None] == documents) & real[:, None] & real_kv
    rows = torch.cat([
        sum(padded[:i]) + shard_positions(n, rank, world) for i, n in enumerate(padded)
    ])  # fmt: skip
    call = dict(cu_seqlens=bounds, cu_seqlens_kv=bounds_kv, causal=False, softmax_scale=SCALE, return_lse=True)
    call.update(cu_seqlens_padded=bounds_padded, cu_seqlens_kv_padded=bounds_padded, cp_group=dist.group.WORLD)
    for with_sinks in (False, True):
        inputs = edge.make("1e4", torch.float32, s)
        sinks = torch.tensor([NEG_INF, -2.0, 1.0, 9e3]) if with_sinks else None
        out, lse, *grads = edge.truth(*inputs, spec, keep, sinks)
        limit = edge.allowed(*inputs[:2], spec, torch.float32)
        sizes = edge.magnitudes(*inputs, spec, keep)
        for x, kept in zip(inputs, (real, real_kv, real_kv, real)):
            x[:, ~kept] = NAN
        for label, config in configs(world):
            config = TreeConfig(**{**vars(config), "backend": backend})
            leaves = [x[0, rows].clone().requires_grad_() for x in inputs[:3]]
            leaves += [] if sinks is None else [sinks.clone().requires_grad_()]
            o, l = tree_attn_varlen_func(*leaves[:3], sinks=None if sinks is None else leaves[3], config=config, **call)
            mine = torch.autograd.grad(o, leaves, inputs[3][0, rows])
            assert all(x.isfinite().all() for x in mine), (label, with_sinks)
            assert not o[~real[rows]].any() and (with_sinks or (l[:, ~real[rows]] == NEG_INF).all())
            nothing = ~keep.any(1)[rows]
            assert not o[nothing].any() and not mine[0][nothing].any()
            assert not mine[1][~keep.any(0)[rows]].any() and not mine[2][~keep.any(0)[rows]].any()
            wants = [x[0, rows] for x in (out, *grads[:3])]
            errors = [
                edge.rounding(x, y, m[0, rows] + 1e-6, torch.float32) / limit
                for x, y, m in zip((o.detach(), *mine[:3]), wants, sizes)
            ]
            at = real[rows]
            found[label, with_sinks] = edge.lse_error(l.detach()[:, at], lse[0][:, rows][:, at]), max(errors)
    return found


@pytest.mark.parametrize(("world", "backend"), [(1, "triton"), (2, "aten"), (3, "reference")])
def test_packed_documents_over_padding(world, backend):
    for found in run_distributed(_packed, world, backend, timeout=300):
        bad = {name: x for name, x in found.items() if not (x[0] <= LSE_LIMIT and x[1] <= 1)}
        assert found and not bad, bad


def _decode(rank, world, backend):
    """Every schedule, dense and paged, in all cases; slots of padding hold NaN, one row sees nothing on any rank."""
    found, group, share, size = {}, dist.group.WORLD, 10, 4
    lengths = torch.tensor([[(3 * row + 5 * r) % share if row else 0 for row in range(3)] for r in range(world)])
    valid = torch.cat([torch.arange(share) < lengths[r][:, None] for r in range(world)], 1)[:, None]
    spec, mine = AttnSpec(softmax_scale=SCALE), slice(share * rank, share * (rank + 1))
    for dtype in DTYPES:
        for case in CASES:
            q, k, v, dout = edge.make(case, dtype, 1, share * world, batch=3)
            out, lse, *_ = edge.truth(q, k, v, dout, spec, valid)
            sizes, limit = edge.magnitudes(q, k, v, dout, spec, valid), edge.allowed(q, k, spec, dtype)
            k, v = (x[:, mine].masked_fill(~valid[:, 0, mine, None, None], NAN) for x in (k, v))
            (pk, table), (pv, _) = paged(k, size), paged(v, size)
            call = dict(cp_group=group, cache_seqlens=lengths[rank], softmax_scale=SCALE, return_lse=True)
            call["config"] = TreeConfig(backend=backend)
            for schedule in DECODE_SCHEDULES:
                dense = tree_decode(q, k, v, schedule=schedule, **call)
                in_pages = tree_decode(q, pk, pv, block_table=table, schedule=schedule, **call)
                for kind, (o, l) in (("dense", dense), ("paged", in_pages)):
                    assert not o[0].any() and (l[0] == NEG_INF).all()
                    errors = edge.lse_error(l, lse, backend, dtype), edge.rounding(o, out, sizes[0], dtype) / limit
                    found[case, schedule, kind, str(dtype)] = errors
    return found


@pytest.mark.parametrize(("world", "backend"), [(2, "aten"), (3, "reference")])
def test_decode_at_the_edge(world, backend):
    for found in run_distributed(_decode, world, backend, timeout=300):
        assert len(found) == len(DTYPES) * len(CASES) * len(DECODE_SCHEDULES) * 2
        bad = {name: x for name, x in found.items() if not (x[0] <= LSE_LIMIT and x[1] <= 1)}
        assert not bad, bad


def _prefill(rank, world, backend):
    """A prompt in two chunks, queries gathered or keys; pages that are not owned hold NaN (the cache is poisoned)."""
    found, chunks = {}, (9, 14)
    for dtype in DTYPES:
        for case in CASES:
            q, k, v, dout = edge.make(case, dtype, sum(chunks))
            spec = AttnSpec(softmax_scale=SCALE)
            keep = energy.visible(torch.arange(sum(chunks)), torch.arange(sum(chunks)), spec)
            out, *_ = edge.truth(q, k, v, dout, spec, keep)
            sizes, limit = edge.magnitudes(q, k, v, dout, spec, keep), edge.allowed(q, k, spec, dtype)
            for grid in ((world, 1), (1, world)):
                (cache, row), at = cache_of(rank, world, {}, 4), 0
                for n in chunks:
                    new = slice(at, at + n)
                    options = dict(softmax_scale=SCALE, config=TreeConfig(backend=backend))
                    o, own = prefill_chunk(cache, row, q[:, new], k[:, new], v[:, new], options, grid)
                    own = torch.tensor(own, dtype=torch.int64) + at
                    error = edge.rounding(o, out[:, own], sizes[0][:, own], dtype) / limit
                    found[case, str(dtype), grid, at] = error
                    at += n
    return found


@pytest.mark.parametrize(("world", "backend"), [(2, "aten"), (3, "reference")])
def test_prefill_at_the_edge(world, backend):
    for found in run_distributed(_prefill, world, backend, timeout=300):
        assert len(found) == len(DTYPES) * len(CASES) * 4
        assert max(found.values()) <= 1, {name: x for name, x in found.items() if x > 1}
