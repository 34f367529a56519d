"""Beyond 2^31 elements, at millions of positions, with hundreds of ranks: exact, without the machine for it."""

import mmap

import pytest
import torch

from megatron_tree.core import kernels
from megatron_tree.core.kernels import KVCache
from megatron_tree.core.kernels.triton import decode as triton_decode
from megatron_tree.core.kernels.triton import host
from megatron_tree.core.kernels.triton import merge as triton_merge
from megatron_tree.core.layout import Segment
from megatron_tree.core.spec import AttnSpec, Dropout
from support.rounding import assert_near

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU `bench kernels` has the memory for the real thing"
)
FAR = 1 << 30  # elements: a stride that fits 32 bits, twice of which does not
NEG_INF = float("-inf")


def sparse(shape, stride, dtype=torch.float32):
    """Zeros of any strides over memory that is reserved, not used: what is never written takes none.

    2^31 elements before the first one are zeros, too: there offsets lead that wrap in 32 bits.
    """
    before = 1 << 31
    count = 1 + before + sum((n - 1) * m for n, m in zip(shape, stride))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)  # as on Linux
    try:
        room = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    except OSError as error:
        pytest.skip(f"no address space for {count} elements: {error}")
    return torch.frombuffer(room, dtype=dtype).as_strided(shape, stride, before)


def spread(x, dim, stride=FAR):
    """A copy of x whose neighbours along `dim` are `stride` elements apart."""
    rest, strides, step = [d for d in range(x.dim()) if d != dim], [0] * x.dim(), 1
    for d in reversed(rest):
        strides[d], step = step, step * x.shape[d]
    strides[dim] = stride
    return sparse(x.shape, strides, x.dtype).copy_(x)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WHOLE = dict(q_segments=(Segment(0, 0, 4),), k_segments=(Segment(0, 0, 4),), spec=AttnSpec(softmax_scale=0.5))


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "row", "head"])
def test_strides_beyond_32_bits_in_training_kernels(dim):
    """Every tensor of forward, dq, dkdv and delta is spread over 8 to 12 GB of address space: equal to the compact."""
    q, k, v, dout = (randn(4, 4, 4, 16, seed=i) for i in range(4))
    out, lse = host.attn_fwd(q, k, v, **WHOLE)
    delta = host.attn_delta(dout, out)
    grads = host.attn_bwd(dout, q, k, v, lse, delta, **WHOLE)
    far = [spread(x, dim) for x in (q, k, v)]
    o, l = spread(torch.zeros_like(out), dim), torch.zeros_like(lse)
    host.write_state(o, l, *far, **WHOLE)
    assert_near(o, out, 16)
    assert_near(l, lse, 16)
    far_dout = spread(dout, dim)
    assert_near(host.attn_delta(far_dout, o), delta, 16)
    found = [spread(torch.zeros_like(x), dim) for x in grads]
    host.accumulate_bwd(far_dout, *far, lse, delta, found, **WHOLE)
    for x, y in zip(found, grads):
        assert_near(x, y, 16)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "row", "head"])
def test_strides_beyond_32_bits_in_the_decode_kernel(dim):
    q, k, v = randn(4, 1, 4, 16), randn(4, 4, 4, 16, seed=1), randn(4, 4, 4, 16, seed=2)
    cache = KVCache(k, v, lengths=torch.tensor([4, 3, 2, 4]))
    near = triton_decode.attn_decode(q, cache, WHOLE["spec"])
    far = triton_decode.attn_decode(q, cache._replace(k=spread(k, dim), v=spread(v, dim)), WHOLE["spec"])
    assert torch.equal(near, far)


@pytest.mark.parametrize("dim", [0, 2], ids=["page", "head"])
@pytest.mark.parametrize("stored", [torch.float32, torch.int8])
def test_pages_beyond_32_bits(dim, stored):
    """Pages, and their scales, each 2^30 elements after the last one; the block table's rows are far apart, too."""
    q, k, v = randn(2, 1, 4, 16), randn(4, 16, 4, 16, seed=1), randn(4, 16, 4, 16, seed=2)
    k, v = ((40 * x).round().clamp(-127, 127).to(stored) if stored == torch.int8 else x for x in (k, v))
    scales = [randn(4, 16, 4, seed=3 + i).abs() / 40 for i in range(2)] if stored == torch.int8 else [None, None]
    table = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32)
    positions = torch.arange(64).reshape(2, 32)
    seen = dict(lengths=torch.tensor([30, 18]), q_positions=torch.tensor([[29], [60]]))
    spec = AttnSpec(softmax_scale=0.5, window_size=(9, -1))
    near = triton_decode.attn_decode(q, KVCache(k, v, *scales, **seen, k_positions=positions, block_table=table), spec)
    seen |= dict(k_positions=spread(positions, 0, 3 * FAR), block_table=spread(table, 0, 3 * FAR))
    far_scales = [x if x is None or dim else spread(x, 0) for x in scales]
    far = KVCache(*(spread(x, dim) for x in (k, v)), *far_scales, **seen)
    assert torch.equal(near, triton_decode.attn_decode(q, far, spec))


def test_merging_states_beyond_32_bits():
    """The kernel alone, since its launcher takes contiguous states: 4 of them, each 2^30 elements after the last."""
    rows, e = 3, 5
    states = randn(4, rows, e + 1)
    near = triton_merge.merge_packed(states)
    far, found = spread(states, 0), torch.empty_like(near)
    strides = dict(inner=rows, outer_stride=0, state_stride=FAR)
    pointers, sizes = dict(IN=far, BITS=far, OUT=found), dict(E=e, WORDS=1, COLS=8, STATES=32)
    triton_merge.merge_states_kernel[(rows,)](**pointers, num_states=4, **strides, **sizes)
    assert torch.equal(near, found)


def test_wrapped_offsets_would_be_seen():
    """Negative control: where 32 bits lead there is nothing but zeros."""
    x = spread(randn(4, 3), 0)
    offsets = torch.arange(4, dtype=torch.int32) * FAR
    assert offsets.tolist() == [0, FAR, -2 * FAR, -FAR]
    for i, offset in enumerate(offsets.tolist()):
        found = x.as_strided((3,), (1,), x.storage_offset() + offset)
        assert torch.equal(found, x[i]) == (i < 2) and (i < 2 or not found.any())


BACKENDS = {"reference": torch.float64, "aten": torch.float64, "triton": torch.float32}
OFFSETS = (1 << 24, (1 << 24) + 1, (1 << 29) + 3)  # fp32 can't tell 2^24 from 2^24 + 1
MASKS = {
    "causal": {},
    "window": dict(window_size=(2, 0)),
    "two-sided": dict(causal=False, window_size=(1, 3)),
    "right only": dict(causal=False, window_size=(-1, 0)),
    "huge window": dict(window_size=(2**31 - 1, 2**31 - 1)),
    "larger than int64 can add": dict(causal=False, window_size=(2**63 - 1, 2**62)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_at_millions_of_positions(mask, backend):
    """Positions count by their differences alone: results from 2^24 + 1 on are those from 0 on, bit for bit."""
    spec, dtype = AttnSpec(softmax_scale=0.5, **MASKS[mask]), BACKENDS[backend]
    q, k, v, dout = (randn(1, n, 2, 16, seed=i).to(dtype) for i, n in enumerate((7, 9, 9, 7)))

    def results(offset):
        segments = dict(
            q_segments=(Segment(0, offset + 2, 5), Segment(5, offset + 40, 2)),
            k_segments=(Segment(0, offset, 5), Segment(5, offset + 37, 4)),
            spec=spec,
            backend=backend,
        )
        out, lse = kernels.attn_fwd(q, k, v, **segments)
        delta = kernels.attn_delta(dout, out)
        return out, lse, *kernels.attn_bwd(dout, q, k, v, lse, delta, **segments)

    wanted = results(0)
    assert wanted[0].isfinite().all() and wanted[0].any()
    for offset in OFFSETS:
        for x, y in zip(results(offset), wanted):
            assert torch.equal(x, y), offset


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("left", [-1, 0, 2, 2**31 - 1, 2**63 - 1])
def test_decode_at_millions_of_positions(left, backend):
    dtype = BACKENDS[backend]
    q, k, v = (randn(1, n, 2, 16, seed=i).to(dtype) for i, n in enumerate((3, 9, 9)))
    q_positions, k_positions = torch.tensor([[4, 6, 8]]), torch.tensor([[0, 2, 1, 3, 5, 4, 8, 6, 7]])
    call = dict(spec=AttnSpec(softmax_scale=0.5, window_size=(left, -1)), backend=backend)

    def state(offset):
        cache = KVCache(k, v, q_positions=q_positions + offset, k_positions=k_positions + offset)
        return kernels.attn_decode(q, cache, **call)

    for offset in (*OFFSETS, 1 << 40):
        assert torch.equal(state(offset), state(0)), offset


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_dropout_at_millions_of_positions(backend):
    """Neighbours from 2^24 on have masks of their own, and every backend has the formula's."""
    from megatron_tree.core.dropout import keep_weights

    spec = AttnSpec(softmax_scale=0.0, causal=False, dropout=Dropout(0.5, 7))
    n, dtype = 32, BACKENDS[backend]
    one_hot = torch.eye(n, dtype=dtype)[None, :, None]
    for offset in OFFSETS:
        segments = (Segment(0, offset, n),)
        out, _ = kernels.attn_fwd(
            torch.zeros_like(one_hot),
            one_hot,
            one_hot,
            q_segments=segments,
            k_segments=segments,
            spec=spec,
            backend=backend,
        )
        positions = torch.arange(offset, offset + n)
        weights = keep_weights(spec.dropout, batch=1, num_heads=1, q_positions=positions, k_positions=positions)[0, 0]
        assert torch.equal(out[0, :, 0] > 0, weights > 0)
        assert len(set(map(tuple, weights.tolist()))) == len(set(map(tuple, weights.T.tolist()))) == n
