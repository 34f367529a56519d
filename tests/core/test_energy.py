"""The energy's derivatives are attention: checked against closed forms; and the three readings of docs/energy.md."""

import ast
import itertools
from pathlib import Path

import pytest
import torch

import megatron_tree
from megatron_tree import tree_attn_func
from megatron_tree.core import energy
from megatron_tree.core.dropout import keep_weights
from megatron_tree.core.spec import AttnSpec, Dropout

VARIANTS = {
    "full": dict(causal=False),
    "causal": {},
    "window": dict(window_size=(3, 0)),
    "softcap": dict(softcap=1.5),
    "sinks": dict(sinks=True),
    "dropout": dict(dropout=Dropout(0.4, 7, 2), sinks=True),
    "alibi": dict(alibi_slopes=((0.5, 0.25, 0.0, -0.1),), softcap=1.5),
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
    if spec.alibi_slopes is not None:
        for (h, slope), i, j in itertools.product(enumerate(spec.alibi_slopes[0]), *map(range, keep.shape)):
            s[:, h, i, j] = s[:, h, i, j] - slope * abs(i - j)
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
    more = dict(sinks=sinks, keep_weights=weights, distance=(positions[:, None] - positions).abs())
    o, l = energy.attention(q, k, v, spec=spec, keep=keep, **more)
    torch.testing.assert_close(o, out.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(l, lse.detach(), rtol=1e-12, atol=1e-12)
    dlse = torch.randn_like(lse)
    expected = torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), leaves)
    found = energy.attention_grads(q, k, v, dout, spec=spec, keep=keep, dlse=dlse, **more)
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_a_whole_is_merged_from_its_parts():
    """The energy by log-sum-exp, its derivatives by the rule that follows; a part may be empty."""
    q, k, v, _ = inputs(s=7)
    spec, cuts = AttnSpec(softmax_scale=0.4, causal=False), (slice(0, 2), slice(2, 2), slice(2, 7))
    zeta = torch.randn(2, 7, 4, 3, dtype=torch.float64)
    parts = [energy.energy(q, k[:, p], v[:, p], zeta, spec) for p in cuts]
    whole = energy.energy(q, k, v, zeta, spec)
    torch.testing.assert_close(energy.logsumexp(torch.stack(parts, -1)), whole, rtol=1e-13, atol=1e-13)
    states = zip(*(energy.attention(q, k[:, p], v[:, p], spec=spec) for p in cuts))
    found = energy.merge_by_energy(*map(torch.stack, states))
    for x, want in zip(found, energy.attention(q, k, v, spec=spec)):
        torch.testing.assert_close(x, want, rtol=1e-12, atol=1e-12)


def test_rows_that_see_nothing_are_the_identity():
    q, k, v, dout = inputs()
    spec = AttnSpec(softmax_scale=0.4)
    keep = torch.ones(6, 6, dtype=torch.bool).tril()
    keep[2] = False
    out, lse = energy.attention(q, k, v, spec=spec, keep=keep)
    assert not out[:, 2].any() and (lse[..., 2] == float("-inf")).all()
    grads = energy.attention_grads(q, k, v, dout, spec=spec, keep=keep)
    assert all(g.isfinite().all() for g in grads) and not grads[0][:, 2].any()


def test_the_oracle_shares_no_code_with_what_it_judges():
    """energy.py imports types alone, and no module of the kernels or of the schedules imports it."""
    package = Path(megatron_tree.__file__).parent / "core"

    def imported(path):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)

    own = set(imported(package / "energy.py"))
    assert own == {"__future__.annotations", "torch", "torch.Tensor", "spec.AttnSpec"}
    judged = [package / "merge.py", *(package / "kernels").rglob("*.py"), *(package / "attention").rglob("*.py")]
    assert len(judged) > 20
    for path in judged:
        assert not [name for name in imported(path) if "energy" in name.split(".")], path


def test_the_hessian_of_the_energy_is_the_covariance_of_the_values():
    """Log-evidence: dF/dzeta is the posterior mean of v, d2F/dzeta2 its covariance."""
    q, k, v, _ = inputs(h=1, h_kv=1)
    q, k, v = q[:1, :1], k[:1], v[:1]
    spec = AttnSpec(softmax_scale=0.4, causal=False)

    def f(zeta):
        return energy.energy(q, k, v, zeta.view(1, 1, 1, 3), spec).sum()

    zero = torch.zeros(3, dtype=torch.float64)
    p = torch.softmax(0.4 * k[0, :, 0] @ q[0, 0, 0], 0)
    mean = p @ v[0, :, 0]
    centred = v[0, :, 0] - mean
    torch.testing.assert_close(torch.autograd.functional.jacobian(f, zero), mean, rtol=1e-13, atol=1e-13)
    covariance = (p[:, None] * centred).T @ centred
    torch.testing.assert_close(torch.autograd.functional.hessian(f, zero), covariance, rtol=1e-13, atol=1e-13)


BETA = 2.5


def memory(num_patterns=12, d=8, num_queries=5):
    """Random patterns x [1, n, 1, d] of length 2, and queries [1, m, 1, d] near some of them."""
    g = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(1, num_patterns, 1, d, generator=g, dtype=torch.float64), dim=-1) * 2
    noise = torch.randn(1, num_queries, 1, d, generator=g, dtype=torch.float64)
    return x, x[:, :num_queries] + 0.3 * noise


def retrieve(q, x):
    return tree_attn_func(q, x, x, cp_group=None, causal=False, softmax_scale=BETA)


def hopfield_energy(q, x):
    """E(q) = q.q / 2 - F(0) / beta of every query, with keys and values x."""
    f = energy.energy(q, x, x, torch.zeros_like(q), AttnSpec(softmax_scale=BETA, causal=False))
    return (q * q).sum(-1)[..., 0] / 2 - f[:, 0] / BETA


def test_a_retrieval_step_is_an_attention_call():
    """Associative memory: a step of size 1 down the gradient of the Hopfield energy is the output of attention."""
    x, q = memory()
    q.requires_grad_()
    (gradient,) = torch.autograd.grad(hopfield_energy(q, x).sum(), q)
    torch.testing.assert_close((q - gradient).detach(), retrieve(q.detach(), x), rtol=1e-13, atol=1e-13)
    update = torch.softmax(BETA * q[0, :, 0] @ x[0, :, 0].T, -1) @ x[0, :, 0]  # the update rule of arXiv 2008.02217
    torch.testing.assert_close(retrieve(q.detach(), x)[0, :, 0], update.detach(), rtol=1e-13, atol=1e-13)


def test_retrieval_descends_the_hopfield_energy():
    """The energy never rises, and falls strictly until a fixed point; a query near a pattern finds that one."""
    x, near = memory()
    anywhere = 3 * torch.randn(1, 40, 1, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q = torch.cat((near, anywhere), 1)
    for _ in range(30):
        following = retrieve(q, x)
        before, after = hopfield_energy(q, x), hopfield_energy(following, x)
        moved = (following - q).norm(dim=-1)[..., 0] > 1e-6
        assert (after <= before + 1e-13).all() and (after < before)[moved].all()
        q = following
    nearest = torch.cdist(q[0, : near.shape[1], 0], x[0, :, 0]).argmin(-1)
    assert nearest.tolist() == list(range(near.shape[1]))
