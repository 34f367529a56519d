"""Every kernel in low precision, on small inputs, held to one rule.

The error against float64 is at most twice, of gradients three times, that of the same mathematics done densely in that
dtype. Every case runs through several tiles with and without a mask. `bench kernels` begins with these cases;
tests/kernels/test_triton_low_precision.py runs them on compiled kernels without a GPU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ...core import energy, kernels
from ...core.cache.pages import quantize
from ...core.dropout import keep_weights
from ...core.duals import dual, halves
from ...core.kernels import KVCache
from ...core.layout import Segment, positions_of, sequences_of
from ...core.spec import AttnSpec, Dropout
from ..calibrate.kernel_cases import RULE, WrongResult, in_pages

NEG_INF = float("-inf")
ONE = ((Segment(0, 0, 200),), (Segment(0, 0, 200),), 200, 200)  # segments of queries, of keys, rows of each
CUT = ((Segment(3, 100, 140),), (Segment(0, 0, 90), Segment(95, 120, 130)), 150, 230)
PACKED = (
    (Segment(0, 0, 70, 0), Segment(75, 0, 130, 1)),
    (Segment(0, 0, 130, 1), Segment(140, 0, 75, 0)),
    210,
    220,
)


class Training(NamedTuple):
    """Forward and backward."""

    segments: tuple
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    options: dict
    tangents: bool = False
    """Whether inputs are dual tensors: a forward with tangents, and second order."""

    @property
    def spec(self) -> AttnSpec:
        return AttnSpec(softmax_scale=self.head_dims[0] ** -0.5, **self.options)


class Decoding(NamedTuple):
    """A few queries over a cache of 512 tokens: rows without keys, with some, and with all of them."""

    num_queries: int
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    stored: torch.dtype | None = None
    """What the cache holds; None: the dtype of q."""
    page_size: int = 0
    options: dict = {}  # noqa: RUF012

    @property
    def spec(self) -> AttnSpec:
        return AttnSpec(softmax_scale=self.head_dims[0] ** -0.5, **self.options)

    @property
    def latent(self) -> bool:
        """Whether values begin the keys."""
        return self.head_dims[0] > 256


TRAINING = {
    "64": Training(ONE, (2, 1), (64, 64), {}),
    "128": Training(ONE, (2, 1), (128, 128), {}),
    "mla": Training(ONE, (2, 2), (192, 128), {}),
    "256": Training(ONE, (2, 1), (256, 256), {}),
    "full": Training(CUT, (2, 1), (64, 64), dict(causal=False)),
    "window": Training(CUT, (2, 1), (64, 64), dict(window_size=(50, 0))),
    "two-sided": Training(ONE, (2, 1), (64, 64), dict(causal=False, window_size=(70, 9))),
    "softcap": Training(ONE, (2, 1), (64, 64), dict(softcap=3.0)),
    "packed": Training(PACKED, (2, 1), (64, 64), {}),
    "dropout": Training(ONE, (2, 1), (64, 64), dict(dropout=Dropout(0.2, 1 << 40 | 3, 1))),
    "dropout 128": Training(CUT, (2, 1), (128, 128), dict(dropout=Dropout(0.5, 7))),
    "alibi": Training(CUT, (2, 1), (64, 64), dict(alibi_slopes=((0.3, -0.02),))),
    "odd": Training(CUT, (3, 1), (40, 24), {}),
    "tangents": Training(CUT, (2, 1), (64, 64), dict(window_size=(50, 0)), True),
    "tangents 128": Training(ONE, (2, 1), (128, 128), {}, True),
    "tangents mla": Training(ONE, (2, 2), (192, 128), {}, True),
    "tangents softcap": Training(PACKED, (2, 1), (40, 24), dict(softcap=3.0, alibi_slopes=((0.3, -0.02),)), True),
    "tangents dropout": Training(ONE, (2, 1), (64, 64), dict(dropout=Dropout(0.2, 1 << 40 | 3, 1)), True),
}
DECODING = {
    "plain": Decoding(1, (8, 2), (64, 64)),
    "128": Decoding(1, (8, 1), (128, 128)),
    "256": Decoding(1, (4, 1), (256, 256)),
    "mla": Decoding(1, (16, 1), (192, 128)),
    "latent": Decoding(1, (16, 1), (576, 512)),
    "many queries": Decoding(9, (8, 1), (64, 64)),
    "window": Decoding(2, (4, 2), (64, 64), options=dict(window_size=(30, 0))),
    "softcap": Decoding(1, (4, 2), (64, 64), options=dict(softcap=2.0)),
    "alibi": Decoding(2, (4, 2), (64, 64), options=dict(alibi_slopes=((0.3, 0.1, 0.0, -0.02),))),
    "pages": Decoding(1, (8, 2), (64, 64), None, 16),
    "int8": Decoding(1, (8, 2), (64, 64), torch.int8, 16),
    "int8 128": Decoding(2, (4, 2), (128, 128), torch.int8, 64),
    "fp8": Decoding(1, (8, 2), (64, 64), torch.float8_e4m3fn, 16),
    "fp8 128": Decoding(2, (4, 2), (128, 128), torch.float8_e4m3fn, 64),
}
CACHED = 512  # slots of a row in decoding


def training_inputs(case: Training, dtype: torch.dtype, device) -> list[Tensor]:
    """q, k, v, dout [1, s, heads, d], of dual tensors 2 d."""
    *_, s_q, s_k = case.segments
    return _random(1, s_q, s_k, case, dtype, device, halves=1 + case.tangents)


def run_training(case: Training, given: list[Tensor], backend: str) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv) of our kernels, with the delta of rows of no segment 0; of dual tensors lse alone is
    not dual."""
    q, k, v, dout = given
    q_segments, k_segments, s_q, _ = case.segments
    call = dict(q_segments=q_segments, k_segments=k_segments, spec=case.spec)
    padding = positions_of(q_segments, s_q, device=q.device) < 0
    if case.tangents:
        chosen = kernels.choose(*(halves(x)[0] for x in (q, k, v)), case.spec, backend)
        chosen = chosen.for_duals(q.dtype, max(case.head_dims))
        state, lse = chosen.attn_fwd(q, k, v, **call)
        out, r, mu = state.split((v.shape[-1] // 2, v.shape[-1] // 2, 1), -1)
        outt, (of_out, of_outt) = r - mu * out, halves(dout)
        kappa = kernels.attn_delta(of_outt, out) + kernels.attn_delta(of_out, outt)
        delta = torch.stack((kernels.attn_delta(of_out, out), kappa), -1)
        delta[:, :, padding] = 0.0
        return dual(out, outt), lse, *chosen.attn_bwd(dout, q, k, v, chosen.statistics(state, lse), delta, **call)
    out, lse = kernels.attn_fwd(q, k, v, **call, backend=backend)
    delta = kernels.attn_delta(dout, out)
    delta[..., padding] = 0.0
    return out, lse, *kernels.attn_bwd(dout, q, k, v, lse, delta, **call, backend=backend)


def check_training(case: Training, dtype: torch.dtype, device, backend: str) -> float:
    """The largest of the errors' ratios to what is allowed. Raises `WrongResult` if it is above 1."""
    q_segments, k_segments, s_q, s_k = case.segments
    q, k, v, dout = given = training_inputs(case, dtype, device)
    spec = case.spec
    q_pos, k_pos = positions_of(q_segments, s_q, device=device), positions_of(k_segments, s_k, device=device)
    q_seq, k_seq = sequences_of(q_segments, s_q, device=device), sequences_of(k_segments, s_k, device=device)
    keep = energy.visible(q_pos, k_pos, spec) & (q_seq[:, None] == k_seq) & (k_seq >= 0)
    weights = None
    if spec.dropout:
        positions = dict(q_positions=q_pos, k_positions=k_pos, q_sequences=q_seq)
        weights = keep_weights(spec.dropout, batch=1, num_heads=case.heads[0], **positions)
    distance = (q_pos[:, None] - k_pos).abs()
    oracle = dict(spec=spec, keep=keep, keep_weights=weights, distance=distance)
    dense = functools.partial(_dense, spec, keep, distance, 1.0 if weights is None else weights)
    if case.tangents:
        values, tangents = zip(*map(halves, given))
        low = torch.func.jvp(dense, values, tangents)
        exact, exact_tangents = ([x.double() for x in of] for of in (values, tangents))
        truth = _with_grads(exact, oracle), _tangents_with_grads(exact, exact_tangents, oracle)
    else:
        low = (dense(*given),)
        truth = (_with_grads([x.double() for x in given], oracle),)
    for x, pos in ((q, q_pos), (dout, q_pos), (k, k_pos), (v, k_pos)):
        x[:, pos < 0] = float("nan")  # padding between segments may hold anything
    out, lse, *grads = run_training(case, given, backend)
    _check_lse(lse, truth[0][-1], backend)
    results = zip(*map(halves, (out, *grads))) if case.tangents else ((out, *grads),)
    return max(_worst(*x, (q_pos >= 0, k_pos >= 0)) for x in zip(results, truth, low, strict=True))


def _with_grads(given: list[Tensor], oracle: dict) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv, lse) of the oracle."""
    out, lse = energy.attention(*given[:3], **oracle)
    return out, *energy.attention_grads(*given, **oracle), lse


def _tangents_with_grads(given: list[Tensor], tangents: list[Tensor], oracle: dict) -> tuple[Tensor, ...]:
    """The tangents of (out, dq, dk, dv) along those of q, k, v and dout."""
    outt, _ = energy.attention_tangents(*given[:3], tangents[:3], **oracle)
    of_inputs = energy.attention_grads_tangents(*given, tangents[:3], **oracle)
    of_dout = energy.attention_grads(*given[:3], tangents[3], **oracle)
    return outt, *(x + y for x, y in zip(of_inputs, of_dout))


def decoding_inputs(case: Decoding, dtype: torch.dtype, device) -> tuple[Tensor, ...]:
    """q [3, s_q, h, d], k and v [3, 512, h_kv, d] and d_v, and the rows' lengths."""
    q, k, v, _ = _random(3, case.num_queries, CACHED, case, dtype, device)
    lengths = torch.tensor([0, 301, CACHED], device=device)
    return q, k, k[..., : case.head_dims[1]] if case.latent else v, lengths


def run_decoding(case: Decoding, given: tuple[Tensor, ...], backend: str) -> Tensor:
    """The packed state; Triton's in three splits, which are merged."""
    q, k, v, lengths = given
    s_q = case.num_queries
    cache = in_pages(k, v, case.page_size, case.stored) if case.page_size else KVCache(k, v)
    cache = cache._replace(lengths=lengths)
    if s_q > 1:
        positions = torch.arange(CACHED, device=q.device).expand(3, -1)
        cache = cache._replace(q_positions=_last_positions(lengths, s_q), k_positions=positions)
    if backend != "triton":
        return kernels.attn_decode(q, cache, case.spec, backend=backend)
    from ...core.kernels.triton import attn_decode

    return attn_decode(q, cache, case.spec, num_splits=3)


def check_decoding(case: Decoding, dtype: torch.dtype, device, backend: str) -> float:
    """As `check_training`."""
    q, k, v, lengths = given = decoding_inputs(case, dtype, device)
    spec, slots = case.spec, torch.arange(CACHED, device=device).expand(3, -1)
    q_positions = _last_positions(lengths, case.num_queries)
    keep = energy.visible(q_positions, slots, spec) & (slots < lengths[:, None])[:, None]
    distance = (q_positions[:, :, None] - slots[:, None]).abs()
    exact = [k.double(), v.double()]
    if case.stored:
        exact = [x.double() * scale.double()[..., None] for x, scale in (quantize(x, case.stored) for x in (k, v))]
    out, lse = energy.attention(q.double(), *exact, spec=spec, keep=keep, distance=distance)
    dout = torch.zeros((*q.shape[:3], v.shape[-1]), dtype=dtype, device=device)
    low = _dense(spec, keep[:, None], distance[:, None], 1.0, q, *(x.to(dtype) for x in exact), dout)[0]
    state = run_decoding(case, given, backend)
    _check_lse(state[..., -1], lse.transpose(1, 2), backend)
    return _worst([state[..., :-1]], [out], [low])


def _random(batch: int, s_q: int, s_k: int, case, dtype, device, halves: int = 1) -> list[Tensor]:
    """q, k, v, dout [batch, s, heads, halves * d]; the same numbers on every device, and none on "meta"."""
    g, (h, h_kv), (d, d_v) = torch.Generator().manual_seed(0), case.heads, case.head_dims
    shapes = ((s_q, h, d), (s_k, h_kv, d), (s_k, h_kv, d_v), (s_q, h, d_v))
    return [torch.randn(batch, s, h, halves * d, generator=g).to(device, dtype) for s, h, d in shapes]


def _last_positions(lengths: Tensor, s_q: int) -> Tensor:
    """The positions [b, s_q] of queries that come last in rows of these lengths."""
    return (lengths - s_q).clamp(min=0)[:, None] + torch.arange(s_q, device=lengths.device)


def _dense(spec: AttnSpec, keep: Tensor, distance: Tensor, weights: Tensor | float, q, k, v, dout):
    """(out, dq, dk, dv) by torch's operations in the inputs' dtype, on the whole matrix of weights."""

    def attend(q, k, v):
        q, k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))
        s = (q @ k.mT) * spec.softmax_scale
        if spec.softcap:
            s = spec.softcap * torch.tanh(s / spec.softcap)
        if spec.alibi_slopes is not None:
            s = s - (torch.tensor(spec.alibi_slopes, device=s.device)[:, :, None, None] * distance).to(s.dtype)
        p = torch.softmax(s.masked_fill(~keep, torch.finfo(s.dtype).min), -1) * keep
        return ((p * weights).to(p.dtype) @ v).transpose(1, 2)

    out, gradient = torch.func.vjp(attend, q, k, v)
    return out, *gradient(dout)


def _check_lse(result: Tensor, truth: Tensor, backend: str) -> None:
    """Within 1e-5; others' kernels may take an approximate exponential, as torch's flash kernel for CPUs: 1e-4."""
    if not torch.equal(result == NEG_INF, truth == NEG_INF):
        raise WrongResult("lse is not -inf in exactly the rows that see nothing")
    error = torch.where(truth == NEG_INF, 0.0, result - truth).abs().max().item()
    if not error < (1e-5 if backend == "triton" else 1e-4):
        raise WrongResult(f"lse is off by {error:.2g}")


def _worst(results, truth, low, real=(slice(None), slice(None))) -> float:
    """The largest error over what RULE allows; `real`: the rows of queries and of keys that belong to a segment. In
    fp32 the dense error counts as a few units of the largest entry at least, which the order of sums alone makes."""
    ratios = {}
    for i, (name, x, t, y) in enumerate(zip(RULE, results, truth, low)):
        rows = real[i > 1]
        error, dense = ((z.double() - t)[:, rows].abs().max().item() for z in (x, y))
        if y.dtype == torch.float32:
            dense = max(dense, 8 * torch.finfo(y.dtype).eps * t.abs().max().item())
        ratios[name] = error / (RULE[name] * dense)
    if not all(ratio <= 1 for ratio in ratios.values()):
        said = ", ".join(f"{name} {RULE[name] * ratio:.2f} of {RULE[name]:g}" for name, ratio in ratios.items())
        raise WrongResult(f"errors as multiples of dense attention's in this dtype, and what is allowed: {said}")
    return max(ratios.values())
