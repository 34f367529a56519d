"""Which backend computes a block, and why. Every backend has the same functions with the same meaning."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..config import AttnSpec
from ..log import say_once
from . import aten, reference

_BACKENDS = {"aten": aten, "reference": reference}


class Choice(NamedTuple):
    """A backend's name and the reason why it was chosen."""

    name: str
    reason: str


def choose(
    q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, backend: str = "auto", *, flowing_lse: bool = False
) -> Choice:
    """The backend for this call. Raises ``ValueError`` when a named one can't take it; "auto" says why it chose.

    flowing_lse: the backward of a loss that uses lse itself; aten's backward has no place for that gradient.
    """
    why_not = "a gradient that flows through lse" if flowing_lse else aten.unsupported(q, k, v, spec)
    if backend == "reference":
        return Choice(backend, "asked for")
    if backend == "aten":
        if why_not:
            raise ValueError(f"backend='aten' can't take {why_not}: use backend='auto' or 'reference'")
        return Choice(backend, "asked for")
    if why_not:
        return Choice("reference", f"aten can't take {why_not}")
    return Choice("aten", f"torch's flash kernel takes {q.dtype} on {q.device.type}")


def _pick(q, k, v, spec, backend, **kwargs):
    choice = choose(q, k, v, spec, backend, **kwargs)
    say_once(f"attention backend {choice.name}: {choice.reason}")
    return _BACKENDS[choice.name]


def attn_fwd(q, k, v, *, q_segments, k_segments, spec: AttnSpec, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Partial attention of q's segments against k's.

    Args: q [b, s_q, h, d], k [b, s_k, h_kv, d], v [b, s_k, h_kv, d_v], any strides; segments give the positions of
    rows, and rows of no segment are padding. Returns the state (out [b, s_q, h, d_v] in the inputs' dtype or fp32,
    lse [b, h, s_q] fp32, natural log); a row that sees nothing has out 0 and lse -inf.
    """
    return _pick(q, k, v, spec, backend).attn_fwd(q, k, v, q_segments=q_segments, k_segments=k_segments, spec=spec)


def attn_fwd_masked(q, k, v, *, keep: Tensor | None, spec: AttnSpec, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Partial attention under an explicit mask, for decoding: keep bool [s_q, s_k], [b, s_q, s_k] or None.

    Causality and window are in the mask; `spec` gives the scale and the softcap. Returns as `attn_fwd`.
    """
    if backend == "auto" and q.device.type != "cpu" and keep is not None:
        backend = "reference"  # aten's CUDA flash kernels take no mask
    return _pick(q, k, v, spec, backend).attn_fwd_masked(q, k, v, keep=keep, spec=spec)


def attn_bwd(
    dout, q, k, v, lse, delta, *, q_segments, k_segments, spec: AttnSpec, backend: str = "auto", flowing_lse=False
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's share of the gradients, from the *global* statistics: sums over blocks are exact.

    Args: dout [b, s_q, h, d_v]; lse and delta [b, h, s_q] fp32, delta = rowsum(dout * out) - dlse.
    Returns: dq [b, s_q, h, d], dk [b, s_k, h_kv, d], dv [b, s_k, h_kv, d_v] in fp32 (float64 for float64).
    """
    impl = _pick(q, k, v, spec, backend, flowing_lse=flowing_lse)
    return impl.attn_bwd(dout, q, k, v, lse, delta, q_segments=q_segments, k_segments=k_segments, spec=spec)
