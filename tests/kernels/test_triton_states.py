"""Merges of states, and tokens into pages in 8 bits: single Triton kernels against torch's operations and float64."""

from unittest import mock

import pytest
import torch

from megatron_tree.core import energy, kernels, merge
from megatron_tree.core.cache import quantize
from megatron_tree.core.cache.pages import LayerPages
from megatron_tree.core.kernels import states
from megatron_tree.core.kernels.triton import merge_packed
from support.rounding import assert_near, rounding
from support.triton_inputs import DEVICE, skip_without

NEG_INF = float("-inf")
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # the interpreter computes bf16 wrongly


@pytest.fixture(autouse=True)
def on_an_accelerator():
    with mock.patch.object(states, "ACCELERATORS", (DEVICE,)):
        yield


def some_states(n, b=1, s=9, h=3, d=24):
    """Of float64 on the CPU: outs [n, b, s, h, d], lses [n, b, h, s], some without keys; one row has none in all."""
    outs, lses = torch.randn(n, b, s, h, d, dtype=torch.float64), 30 * torch.randn(n, b, h, s, dtype=torch.float64)
    empty = torch.rand(n, b, h, s) < 0.2
    empty[..., 5] = True
    lses[empty] = NEG_INF
    outs[empty.transpose(-1, -2)] = 0
    return outs, lses.float().double()


@pytest.mark.parametrize("wire", [torch.float32, HALF])
@pytest.mark.parametrize("n", [2, 8, 40])
def test_received_states(wire, n):
    """From the wire, lse bit for bit in two words of half precision, in one launch."""
    outs, lses = some_states(n)
    outs = outs.to(wire)
    packed = torch.stack([merge.pack_state(o, l.float(), wire) for o, l in zip(outs, lses)]).to(DEVICE)
    with mock.patch.object(states.merge.StateReducer, "merge", side_effect=AssertionError("torch's operations")):
        merged = kernels.StateReducer(wire, torch.float32).merge(packed)
    out, lse = merge.unpack_state(merged.cpu(), torch.float32)
    want, want_lse = energy.merge_by_energy(outs.double(), lses)
    assert_near(out, want, n)
    assert_near(lse, want_lse, n)
    assert torch.equal(merged, merge_packed(packed.transpose(0, 1).contiguous(), 1))


@pytest.mark.parametrize("d", [1, 5, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_state_into_another(dtype, d):
    """Into some rows of some heads, from views of a wider tensor; other rows stay as they were."""
    outs, lses = some_states(2, d=d)
    outs[1] = outs[1].to(dtype)
    acc = outs[0].float().to(DEVICE), lses[0].float().to(DEVICE)
    before = [x.clone() for x in acc]
    rows, heads = slice(1, 8), slice(1, 3)
    wide = torch.full((1, 9, 3, d + 3), float("nan")).to(DEVICE, dtype)
    wide[..., 3:] = outs[1].to(DEVICE, dtype)
    part = wide[:, rows, heads, 3:], lses[1, :, heads, rows].float().to(DEVICE)
    with mock.patch.object(states.merge, "merge_into", side_effect=AssertionError("torch's operations")):
        kernels.merge_into((acc[0][:, rows, heads], acc[1][:, heads, rows]), part)
    want, want_lse = energy.merge_by_energy(outs[:, :, rows, heads], lses[:, :, heads, rows])
    assert_near(acc[0][:, rows, heads].cpu(), want, 2)
    assert_near(acc[1][:, heads, rows].cpu(), want_lse, 2)
    for x, old, kept in zip(acc, before, ((slice(None), [0, 8]), (slice(None), slice(None), [0, 8]))):
        assert torch.equal(x[kept], old[kept])


def test_float64_takes_torchs_operations():
    outs, lses = some_states(2)
    acc = outs[0].clone(), lses[0].clone()
    kernels.merge_into(acc, (outs[1], lses[1]))
    want, want_lse = energy.merge_by_energy(outs, lses)
    assert_near(acc[0], want, 2, dtype=torch.float64)
    assert_near(acc[1], want_lse, 2, dtype=torch.float64)


@pytest.mark.parametrize("stored", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.without_ptx)])
@pytest.mark.parametrize(("heads", "d", "d_v"), [(3, 16, 16), (2, 24, 40), (1, 128, 16)])
def test_tokens_into_pages(stored, heads, d, d_v):
    """The bits of `quantize` where each token belongs, and nothing elsewhere; from views, of 0 and of tiny numbers."""
    skip_without(stored)
    page, slots = 16, torch.tensor([5, 40, 16, 3, 63, 15], device=DEVICE)
    wide = torch.randn(len(slots), heads, d + d_v, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    wide[1, 0], wide[2] = 0, wide[2] * 1e-35
    wide[3, :, :2] = torch.tensor([127.0, 0.5])  # a tie: to the even integer
    wide[3, :, 2:] = wide[3, :, 2:].clamp(-1, 1)
    k, v = wide.split((d, d_v), -1)
    pools = [LayerPages(page, stored) for _ in range(2)]
    for pool in pools:
        pool.reserve(4, k[None], v[None])
    with mock.patch("megatron_tree.core.cache.pages.quantize", side_effect=AssertionError("torch's operations")):
        pools[0].write(slots, k, v)
    with mock.patch.object(states, "ACCELERATORS", ()):
        pools[1].write(slots, k, v)
    for name, x in pools[0].tensors.items():
        assert torch.equal(x.float(), pools[1].tensors[name].float()), name
    found = pools[0].read("k", slots).float() * pools[0].read("k_scale", slots)[..., None]
    step = quantize(k, stored)[1][..., None] * (0.5 if stored == torch.int8 else 16.0)
    assert ((found - k).abs() <= step * (1 + rounding(1))).all()
    pools[0].write(slots[:0], k[:0], v[:0])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_number_that_is_not_finite_is_seen():
    """The token's scale is then NaN, and so is what is read; other tokens are as they were."""
    x = torch.randn(3, 1, 16).to(DEVICE)
    for bad in (float("nan"), float("inf")):
        x[1, 0, 4] = bad
        pool = LayerPages(16, torch.int8)
        pool.reserve(1, x[None], x[None])
        pool.write(torch.arange(3, device=DEVICE), x, x)
        assert pool.k_scale[0, :3, 0].isnan().tolist() == [False, True, False]


def test_old_gpus_have_no_fp8(monkeypatch):
    """What the kernel can't store torch does."""
    k = torch.zeros(1, 1, 16)
    pages = [torch.zeros(1, 16, 1, 16, dtype=torch.float8_e4m3fn)] * 2
    monkeypatch.setattr(states, "_has_fp8", lambda device: False)
    assert not states.write_eight_bits(
        torch.zeros(1, dtype=torch.int64), k, k, pages, [torch.zeros(1, 16, 1)] * 2, 448.0
    )
