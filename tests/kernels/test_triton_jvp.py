"""The Triton kernels of dual tensors against reference in float64: on a GPU, or in the interpreter."""

import functools

import pytest
import torch

from megatron_tree import TreeConfig, tree_attn_func
from megatron_tree.core import kernels
from megatron_tree.core.kernels import reference, triton
from megatron_tree.core.kernels.triton import host
from megatron_tree.core.layout import Segment
from megatron_tree.core.spec import AttnSpec, Dropout
from support.blocks import CELLS, spoil_padding
from support.rounding import assert_near
from support.triton_inputs import DEVICE, inputs

NEG_INF = float("-inf")
CASES = {
    "causal": ("cell of a grid", {}, (4, 2), 16, 16),
    "full": ("packed", dict(causal=False), (2, 2), 16, 32),
    "window": ("packed", dict(window_size=(9, 0)), (4, 2), 16, 16),
    "two-sided, softcap, alibi": (
        "offsets",
        dict(causal=False, window_size=(20, 3), softcap=3.0, alibi_slopes=((0.5, 0.2, 0.1, -0.02),)),
        *((4, 1), 24, 40),
    ),
    "softcap": ("cell of a grid", dict(softcap=1.0, softmax_scale=-1.0), (6, 2), 48, 8),
    "dropout": ("packed", dict(dropout=Dropout(0.3, 1 << 40 | 5, 1)), (3, 1), 8, 5),
}


@pytest.mark.parametrize("case", CASES)
def test_any_block(case, monkeypatch):
    """With NaN in its padding, and queries that see nothing; a program for all heads of a KV head, or for each."""
    monkeypatch.setattr(host, "multiprocessors", lambda device: 1000 if case in ("softcap", "dropout") else 1)
    name, options, heads, d, d_v = CASES[case]
    cell, spec = CELLS[name], AttnSpec(**{"softmax_scale": d**-0.5} | options)
    q, k, v, dout = given = inputs(cell.s_q, cell.s_k, heads, 2 * d, 2 * d_v)
    delta = torch.randn(2, heads[0], cell.s_q, 2, device=DEVICE)
    spoil_padding(cell, *given)
    call = dict(q_segments=cell.q_segments, k_segments=cell.k_segments, spec=spec)
    exact = [x.double() for x in given]
    state, lse = reference.attn_jvp(*exact[:3], **call)
    found, found_lse = triton.attn_jvp(q, k, v, **call)
    assert torch.equal(lse == NEG_INF, found_lse == NEG_INF) and (case == "softcap" or (lse == NEG_INF).any())
    length = 4 * cell.s_k  # sums of twice as many terms as without tangents, from logits that are such sums
    for columns in (slice(0, d_v), slice(d_v, 2 * d_v), slice(2 * d_v, None)):
        assert_near(found[..., columns], state[..., columns], length, f"{case}, {columns}")
    assert_near(found_lse, lse, length, "lse")
    statistics = torch.stack((lse, state[..., -1].transpose(1, 2)), -1)
    truth = reference.attn_bwd_jvp(exact[3], *exact[:3], statistics, delta.double(), **call)
    grads = triton.attn_bwd_jvp(dout, q, k, v, statistics.float(), delta, **call)
    for what, x, want in zip(("dq", "dk", "dv"), grads, truth):
        for half, half_truth in zip(x.chunk(2, -1), want.chunk(2, -1)):
            assert_near(half, half_truth, 4 * length, what)


def test_without_keys_or_batch():
    whole = dict(q_segments=(Segment(0, 0, 8),), spec=AttnSpec(softmax_scale=0.25))
    for batch, keys in ((1, ()), (0, (Segment(0, 0, 8),))):
        q, k, v, dout = inputs(8, 8, batch=batch)
        state, lse = triton.attn_jvp(q, k, v, k_segments=keys, **whole)
        assert state.shape == (batch, 8, 4, 17) and not state.any() and (lse == NEG_INF).all()
        statistics = torch.zeros(batch, 4, 8, 2, device=DEVICE)
        grads = triton.attn_bwd_jvp(dout, q, k, v, statistics, statistics, k_segments=keys, **whole)
        assert [x.shape for x in grads] == [x.shape for x in (q, k, v)] and not any(x.any() for x in grads)


def test_derivatives_of_the_public_function():
    """The tangents, the gradient, and the gradient's tangents."""
    tensors = [x[:1] for x in inputs(24, 24, d=16, d_v=24)]
    tangents = tuple(torch.randn_like(x) for x in tensors)

    def with_grads(backend, q, k, v, dout):
        options = dict(cp_group=None, softcap=2.0, window_size=(9, 0), config=TreeConfig(backend=backend))
        out, gradient = torch.func.vjp(functools.partial(tree_attn_func, **options), q, k, v)
        return out, *gradient(dout)

    found, truth = (
        torch.func.jvp(
            functools.partial(with_grads, backend),
            tuple(x.to(dtype) for x in tensors),
            tuple(x.to(dtype) for x in tangents),
        )
        for backend, dtype in (("triton", torch.float32), ("reference", torch.float64))
    )
    for xs, wants in zip(found, truth):
        for x, want in zip(xs, wants, strict=True):
            assert_near(x, want, 16 * 24)


@pytest.mark.parametrize(
    ("dtype", "d", "taken"), [(torch.float16, 256, True), (torch.float32, 128, True), (torch.float32, 129, False)]
)
def test_wide_heads_in_fp32_take_torchs_operations(dtype, d, taken):
    x = torch.zeros(1, 4, 2, d, dtype=dtype, device=DEVICE)
    duals = kernels.choose(x, x, x, AttnSpec(softmax_scale=1.0), "triton").for_duals(dtype, d)
    assert duals.dual and duals.module is (triton if taken else reference)
