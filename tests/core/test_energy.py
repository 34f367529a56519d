"""The energy's derivatives are attention: checked against torch's own, finite differences, and closed forms."""

import pytest
import torch

from megatron_tree import energy
from megatron_tree.config import AttnSpec, Dropout
from megatron_tree.dropout import keep_weights

VARIANTS = {
    "full": dict(causal=False),
    "causal": {},
    "window": dict(window_size=(3, 0)),
    "softcap": dict(softcap=1.5),
    "sinks": dict(sinks=True),
    "dropout": dict(dropout=Dropout(0.4, 7, 2), sinks=True),
}


def inputs(h=4, h_kv=2, s=6, d=5, d_v=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((h, d), (h_kv, d), (h_kv, d_v), (h, d_v))
    return [torch.randn(2, s, *n, generator=g, dtype=torch.float64) for n in shapes]


def closed_form(q, k, v, spec, keep, sinks, weights):
    """Textbook softmax attention, KV repeated, its probabilities dropped: what the derivative must equal."""
    g = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(g, 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * spec.softmax_scale
    if spec.softcap:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    s = s.masked_fill(~keep, float("-inf"))
    if sinks is not None:
        s = torch.cat((s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)), -1)
    p = torch.softmax(s, -1)[..., : k.shape[1]]
    return torch.einsum("bhqk,bkhd->bqhd", p if weights is None else p * weights, v), torch.logsumexp(s, -1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("left", [-1, 0, 3])
@pytest.mark.parametrize("right", [-1, 0, 2])
def test_what_a_query_sees(causal, left, right):
    """The rule of flash-attn's window_size, pair by pair: every other test takes `visible` for the truth."""
    spec = AttnSpec(softmax_scale=1.0, causal=causal, window_size=(left, right))
    q_positions, k_positions = torch.tensor([0, 5, 2, 9]), torch.arange(8)
    expected = [
        [(left < 0 or k >= q - left) and (right < 0 or k <= q + right) and (not causal or k <= q) for k in range(8)]
        for q in q_positions.tolist()
    ]
    assert energy.visible(q_positions, k_positions, spec).tolist() == expected


@pytest.mark.parametrize("variant", VARIANTS)
def test_first_and_second_derivative(variant):
    options = dict(VARIANTS[variant])
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64) if options.pop("sinks", False) else None
    spec = AttnSpec(softmax_scale=0.4, **options)
    q, k, v, dout = inputs()
    positions = torch.arange(q.shape[1])
    keep = energy.visible(positions, positions, spec)
    weights = spec.dropout and keep_weights(
        spec.dropout, batch=2, num_heads=4, q_positions=positions, k_positions=positions
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    out, lse = closed_form(*leaves[:3], spec, keep, leaves[3] if sinks is not None else None, weights)
    o, l = energy.attention(q, k, v, spec=spec, keep=keep, sinks=sinks, keep_weights=weights)
    torch.testing.assert_close(o, out.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(l, lse.detach(), rtol=1e-12, atol=1e-12)
    dlse = torch.randn_like(lse)
    expected = torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), leaves)
    found = energy.attention_grads(q, k, v, dout, spec=spec, keep=keep, sinks=sinks, dlse=dlse, keep_weights=weights)
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_energy_of_a_whole_is_the_logsumexp_of_its_parts():
    q, k, v, _ = inputs(s=7)
    spec = AttnSpec(softmax_scale=0.4, causal=False)
    zeta = torch.randn(2, 7, 4, 3, dtype=torch.float64)
    whole = energy.energy(q, k, v, zeta, spec)
    parts = [energy.energy(q, k[:, p], v[:, p], zeta, spec) for p in (slice(0, 2), slice(2, 3), slice(3, 7))]
    torch.testing.assert_close(energy.logsumexp(torch.stack(parts, -1)), whole, rtol=1e-13, atol=1e-13)


def test_merge_rule_from_the_energy():
    q, k, v, _ = inputs(s=7)
    spec = AttnSpec(softmax_scale=0.4, causal=False)
    parts = [energy.attention(q, k[:, p], v[:, p], spec=spec) for p in (slice(0, 2), slice(2, 2), slice(2, 7))]
    outs, lses = torch.stack([o for o, _ in parts]), torch.stack([l for _, l in parts])
    out, lse = energy.merge_by_energy(outs, lses)
    whole = energy.attention(q, k, v, spec=spec)
    torch.testing.assert_close(out, whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole[1], rtol=1e-12, atol=1e-12)


def test_rows_that_see_nothing_are_the_identity():
    q, k, v, dout = inputs()
    spec = AttnSpec(softmax_scale=0.4)
    keep = torch.ones(6, 6, dtype=torch.bool).tril()
    keep[2] = False
    out, lse = energy.attention(q, k, v, spec=spec, keep=keep)
    assert not out[:, 2].any() and (lse[..., 2] == float("-inf")).all()
    grads = energy.attention_grads(q, k, v, dout, spec=spec, keep=keep)
    assert all(g.isfinite().all() for g in grads) and not grads[0][:, 2].any()
