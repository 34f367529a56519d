"""Inputs at the edge of what a number can hold, and how far from the oracle they may lead."""

import torch

from megatron_tree.core import energy

LOW = (torch.bfloat16, torch.float16)
LSE_LIMIT = 1e-6  # relative, where |lse| > 1; absolute below
ATEN_EXP = 1e-4  # torch's flash kernel for CPUs takes a short exp in bf16 and fp16: so far off may its sums be
TINY = {torch.float32: 1e-39, torch.bfloat16: 1e-39, torch.float16: 2e-6}  # subnormal in that dtype
CASES = ("1e4", "6e4", "equal", "outlier", "denormal")
HEADS, D = (4, 2), 8
SCALE = D**-0.5


def make(case, dtype, s_q, s_k=None, batch=1, seed=0):
    """q, k, v, dout in `dtype` whose logits are those of the case; softmax_scale is SCALE.

    1e4, 6e4: logits of up to +-1e4 or +-6e4, many of them ties; before the scale they are three times as large, beyond
    fp16. outlier: one key of huge logits, a value all of 6e4, a gradient that stands out.
    """
    s_k, (h, h_kv) = s_k or s_q, HEADS
    g = torch.Generator().manual_seed(seed)
    normal = lambda s, heads: torch.randn(batch, s, heads, D, generator=g, dtype=torch.float64)  # noqa: E731
    q, k, v, dout = normal(s_q, h), normal(s_k, h_kv), normal(s_k, h_kv), normal(s_q, h)
    if case in ("1e4", "6e4"):
        size = (float(case) / (SCALE * D)) ** 0.5
        pick = lambda x: torch.randint(-2, 3, (*x.shape[:3], 1), generator=g).expand(x.shape) / 2  # noqa: E731
        q, k = pick(q) * size, pick(k) * size
    elif case == "equal":
        q, k = torch.full_like(q, 1.5), torch.full_like(k, 1.25)
    elif case == "outlier":
        k[:, s_k // 2, :, 0] *= 2e3
        v[:, s_k // 3], dout[:, s_q // 2, :, 1:3] = 6e4, 1e3
        if dtype == torch.float16:  # as gradients are scaled there: they must fit
            k[:, s_k // 2, :, 0] /= 40
            dout *= 1e-5
    elif case == "denormal":
        q, k, v, dout = (x * TINY[dtype] for x in (q, k, v, dout))
    return [x.to(dtype) for x in (q, k, v, dout)]


def truth(q, k, v, dout, spec, keep, sinks=None):
    """(out, lse, dq, dk, dv[, dsinks]) of the oracle in float64."""
    exact = [x.double() for x in (q, k, v, dout)]
    sinks = None if sinks is None else sinks.double()
    options = dict(spec=spec, keep=keep, sinks=sinks)
    return *energy.attention(*exact[:3], **options), *energy.attention_grads(*exact, **options)


def magnitudes(q, k, v, dout, spec, keep):
    """What (out, dq, dk, dv) would be if nothing cancelled: rounding is to be measured by these sums.

    A weight in fp16 has no more digits below 6e-5: there it counts as that much.
    """
    smallest = torch.finfo(q.dtype).smallest_normal
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    (h, h_kv), d = (q.shape[2], k.shape[2]), q.shape[3]
    s = energy.scores(q, k, spec, keep).unflatten(1, (h_kv, h // h_kv))  # [b, h_kv, g, q, k]
    p = torch.exp(s - energy.logsumexp(s)[..., None]).clamp(min=smallest).where(s > float("-inf"), 0.0)
    q, dout = (x.unflatten(2, (h_kv, h // h_kv)).abs() for x in (q, dout))
    k, v = k.abs(), v.abs()
    out = torch.einsum("bngqk,bknd->bqngd", p, v)
    ds = p * (torch.einsum("bqngd,bknd->bngqk", dout, v) + torch.einsum("bqngd,bqngd->bngq", dout, out)[..., None])
    ds = ds * spec.softmax_scale
    dq = torch.einsum("bngqk,bknd->bqngd", ds, k).flatten(2, 3)
    dk, dv = torch.einsum("bngqk,bqngd->bknd", ds, q), torch.einsum("bngqk,bqngd->bknd", p, dout)
    assert dq.shape[-1] == d
    return out.flatten(2, 3), dq, dk, dv


def allowed(q, k, spec, dtype):
    """Relative rounding of a weight: the dtype's own, and that of a logit or an lse kept in fp32."""
    largest = energy.scores(q.double(), k.double(), spec).abs().max().item()
    return 4 * torch.finfo(dtype).eps + 8 * torch.finfo(torch.float32).eps * max(1.0, largest)


def lse_error(lse, want, backend="", dtype=torch.float32):
    """Largest error of lse, relative where |lse| > 1; both -inf is none. `ATEN_EXP` is allowed where it applies."""
    gap = (lse.double() - want).abs()
    if dtype in LOW and backend == "aten":
        gap = (gap - ATEN_EXP).clamp(min=0.0)
    gap = gap / want.abs().clamp(min=1.0)
    return float(torch.where(lse.double() == want, 0.0, gap).max()) if lse.numel() else 0.0


def rounding(x, want, magnitude, dtype):
    """Largest error of x in units of its magnitude, besides what a number next to 0 of this dtype can't tell."""
    if not x.numel():
        return 0.0
    assert x.isfinite().all()
    gap = ((x.double() - want).abs() - 8 * torch.finfo(dtype).smallest_normal).clamp(min=0.0)
    return float(torch.where(gap == 0, 0.0, gap / magnitude.clamp(min=1e-300)).max())
