"""bf16 and fp16 in the compiled Triton kernels: on a GPU, or without one under --ptx (tests/ptx).

The error against float64 is at most twice, of gradients three times, that of the same mathematics done densely in that
dtype. Every case runs through several tiles with and without a mask.
"""

import pytest
import torch

from megatron_tree import energy, kernels
from megatron_tree.cache import quantize
from megatron_tree.config import AttnSpec, Dropout
from megatron_tree.dropout import keep_weights
from megatron_tree.kernels import PagedKV, Visible
from megatron_tree.kernels.triton import attn_delta, decode, host
from megatron_tree.layout import Segment, positions_of, sequences_of
from support.triton_inputs import DEVICE, NEG_INF, inputs, paged

pytestmark = pytest.mark.skipif(host.interpreting(), reason="the interpreter computes bf16 wrongly: use --ptx or a GPU")
RULE = (2.0, 3.0, 3.0, 3.0)  # out, dq, dk, dv
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
ONE, CUT, PACKED = "one", "cut", "packed"
SEGMENTS = {  # query segments, KV segments, rows of each
    ONE: (((0, 0, 200),), ((0, 0, 200),), 200, 200),
    CUT: (((3, 100, 140),), ((0, 0, 90), (95, 120, 130)), 150, 230),
    PACKED: (((0, 0, 70, 0), (75, 0, 130, 1)), ((0, 0, 130, 1), (140, 0, 75, 0)), 210, 220),
}
TRAINING = {  # segments, heads, head dims, options
    "64": (ONE, (2, 1), (64, 64), {}),
    "128": (ONE, (2, 1), (128, 128), {}),
    "mla": (ONE, (2, 2), (192, 128), {}),
    "256": (ONE, (2, 1), (256, 256), {}),
    "full": (CUT, (2, 1), (64, 64), dict(causal=False)),
    "window": (CUT, (2, 1), (64, 64), dict(window_size=(50, 0))),
    "two-sided": (ONE, (2, 1), (64, 64), dict(causal=False, window_size=(70, 9))),
    "softcap": (ONE, (2, 1), (64, 64), dict(softcap=3.0)),
    "packed": (PACKED, (2, 1), (64, 64), {}),
    "dropout": (ONE, (2, 1), (64, 64), dict(dropout=Dropout(0.2, 1 << 40 | 3, 1))),
    "dropout 128": (CUT, (2, 1), (128, 128), dict(dropout=Dropout(0.5, 7))),
    "odd": (CUT, (3, 1), (40, 24), {}),
}


def dense(q, k, v, dout, spec, keep, weights=1.0):
    """(out, dq, dk, dv) by torch's operations in the inputs' dtype, on the whole matrix of weights."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    q, k, v = (x.repeat_interleave(leaves[0].shape[2] // x.shape[2], 2).transpose(1, 2) for x in leaves)
    s = (q @ k.mT) * spec.softmax_scale
    if spec.softcap:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    p = torch.softmax(s.masked_fill(~keep, torch.finfo(s.dtype).min), -1) * keep
    out = (((p * weights).to(p.dtype)) @ v).transpose(1, 2)
    return out, *torch.autograd.grad(out, leaves, dout)


def check_rule(found, truth, low, real=(slice(None), slice(None))):
    """real: the rows of queries and of keys that belong to a segment."""
    ratios = []
    for i, (x, t, y) in enumerate(zip(found, truth, low)):
        rows = real[i > 1]
        error, dense_error = ((z.double() - t)[:, rows].abs().max().item() for z in (x, y))
        ratios.append(error / dense_error)
    assert all(ratio <= limit for ratio, limit in zip(ratios, RULE)), ratios


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("case", TRAINING)
def test_training(case, dtype):
    segments, heads, dims, options = TRAINING[case]
    *segments, s_q, s_k = SEGMENTS[segments]
    segments = [tuple(Segment(*x) for x in some) for some in segments]
    spec = AttnSpec(softmax_scale=dims[0] ** -0.5, **options)
    q, k, v, dout = inputs(s_q, s_k, heads, *dims, batch=1, dtype=LOW[dtype])
    q_pos, k_pos = (positions_of(s, n, device=DEVICE) for s, n in zip(segments, (s_q, s_k)))
    q_seq, k_seq = (sequences_of(s, n, device=DEVICE) for s, n in zip(segments, (s_q, s_k)))
    keep = energy.visible(q_pos, k_pos, spec) & (q_seq[:, None] == k_seq) & (k_seq >= 0)
    weights = None
    if spec.dropout:
        positions = dict(q_positions=q_pos, k_positions=k_pos, q_sequences=q_seq)
        weights = keep_weights(spec.dropout, batch=1, num_heads=heads[0], **positions)
    exact = [x.double() for x in (q, k, v, dout)]
    oracle = dict(spec=spec, keep=keep, keep_weights=weights)
    out, lse = energy.attention(*exact[:3], **oracle)
    low = dense(q, k, v, dout, spec, keep, 1.0 if weights is None else weights)
    for x, pos in ((q, q_pos), (dout, q_pos), (k, k_pos), (v, k_pos)):
        x[:, pos < 0] = float("nan")  # padding between segments may hold anything
    call = dict(q_segments=segments[0], k_segments=segments[1], spec=spec, backend="triton")
    o, l = kernels.attn_fwd(q, k, v, **call)
    assert torch.equal(l == NEG_INF, lse == NEG_INF)
    assert torch.where(lse == NEG_INF, 0.0, l - lse).abs().max() < 1e-5
    delta = attn_delta(dout, o)
    delta[..., q_pos < 0] = 0.0
    grads = kernels.attn_bwd(dout, q, k, v, lse.float(), delta, **call)
    truth = out, *energy.attention_grads(*exact, **oracle)
    check_rule((o, *grads), truth, low, (q_pos >= 0, k_pos >= 0))


DECODING = {  # queries, heads, head dims, what the cache holds (None: the dtype of q), pages, options
    "plain": (1, (8, 2), (64, 64), None, 0, {}),
    "128": (1, (8, 1), (128, 128), None, 0, {}),
    "256": (1, (4, 1), (256, 256), None, 0, {}),
    "mla": (1, (16, 1), (192, 128), None, 0, {}),
    "many queries": (9, (8, 1), (64, 64), None, 0, {}),
    "window": (2, (4, 2), (64, 64), None, 0, dict(window_size=(30, 0))),
    "softcap": (1, (4, 2), (64, 64), None, 0, dict(softcap=2.0)),
    "pages": (1, (8, 2), (64, 64), None, 16, {}),
    "int8": (1, (8, 2), (64, 64), torch.int8, 16, {}),
    "int8 128": (2, (4, 2), (128, 128), torch.int8, 64, {}),
    "fp8": (1, (8, 2), (64, 64), torch.float8_e4m3fn, 16, {}),
    "fp8 128": (2, (4, 2), (128, 128), torch.float8_e4m3fn, 64, {}),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("case", DECODING)
def test_decoding(case, dtype):
    """A row without keys, one of some, one of all; three splits, which are merged."""
    s_q, heads, dims, stored, page, options = DECODING[case]
    if stored == torch.float8_e4m3fn and host.arch(torch.device(DEVICE)) == "sm80":
        pytest.skip("fp8 needs sm_89 or later")
    s, lengths = 512, torch.tensor([0, 301, 512], device=DEVICE)
    spec = AttnSpec(softmax_scale=dims[0] ** -0.5, **options)
    q, k, v, _ = inputs(s_q, s, heads, *dims, batch=3, dtype=LOW[dtype])
    positions = torch.arange(s, device=DEVICE).expand(3, -1)
    q_positions = (lengths - s_q).clamp(min=0)[:, None] + torch.arange(s_q, device=DEVICE)
    keep = (energy.visible(q_positions, positions, spec) & (positions < lengths[:, None])[:, None])[:, None]
    scales = ()
    exact_k, exact_v = k.double(), v.double()
    if stored:
        (k, k_scale), (v, v_scale) = quantize(k, stored), quantize(v, stored)
        exact_k, exact_v = (x.double() * scale.double()[..., None] for x, scale in ((k, k_scale), (v, v_scale)))
        scales = k_scale, v_scale
    low_k, low_v = exact_k.to(q.dtype), exact_v.to(q.dtype)
    out, lse = energy.attention(q.double(), exact_k, exact_v, spec=spec, keep=keep[:, 0])
    low = dense(q, low_k, low_v, torch.zeros_like(q[..., :1]).expand(*q.shape[:3], dims[1]), spec, keep)[0]
    pages = None
    if page:
        bits = lambda x: x.view(torch.uint8) if stored == torch.float8_e4m3fn else x  # noqa: E731
        (k, table), (v, _) = paged(bits(k), page, 2), paged(bits(v), page, 2)
        k, v = (x.view(stored) if stored else x for x in (k, v))
        pages = PagedKV(table, *(paged(x, page, 2)[0] for x in scales))
    visible = Visible(lengths, q_positions, positions) if s_q > 1 else Visible(lengths)
    state = decode.attn_decode(q, k, v, visible=visible, spec=spec, paged=pages, num_splits=3)
    lse = lse.transpose(1, 2)
    assert torch.equal(state[..., -1] == NEG_INF, lse == NEG_INF)
    assert torch.where(lse == NEG_INF, 0.0, state[..., -1] - lse).abs().max() < 1e-5
    check_rule([state[..., :-1]], [out], [low])
