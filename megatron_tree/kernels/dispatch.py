"""Which backend computes a block, and why. Every backend has the same functions with the same meaning."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import AttnSpec
from ..energy import visible as visible_positions
from ..log import say_once
from ..merge import pack_state, state_dtype
from . import aten, reference

ACCELERATORS = ("cuda",)  # torch's name for CUDA and ROCm devices: Triton's kernels are the default there


class Choice(NamedTuple):
    """A backend's name and the reason why it was chosen."""

    name: str
    reason: str


class Visible(NamedTuple):
    """Which slots of a KV shard a query sees, for decoding. Nothing given: all of them.

    lengths: int [b], valid leading slots. q_positions int64 [b, s_q] and k_positions int64 [b, s], both or neither:
    a slot is seen when 0 <= its position <= the query's, within the window.
    """

    lengths: Tensor | None = None
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None

    def row(self, some: slice) -> Visible:
        """The same of some rows of the batch."""
        return Visible(*(None if x is None else x[some] for x in self))

    def mask(self, num_slots: int, spec: AttnSpec) -> Tensor | None:
        """bool [b, 1 or s_q, num_slots], or None where every slot is seen."""
        keep = None
        if self.k_positions is not None:
            keep = visible_positions(self.q_positions, self.k_positions, spec) & (self.k_positions >= 0)[:, None]
        if self.lengths is not None:
            valid = (torch.arange(num_slots, device=self.lengths.device) < self.lengths[:, None])[:, None]
            keep = valid if keep is None else keep & valid
        return keep


class PagedKV(NamedTuple):
    """Where the rows of a paged cache are: k [pages, page_size, h_kv, d] and v [pages, page_size, h_kv, d_v].

    block_table: int32 [b, n], the pages of each row, in order. k_scale, v_scale: fp32 [pages, page_size, h_kv] where k
    and v hold 8 bits (int8, fp8): each vector is its scale times what is stored.
    """

    block_table: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@functools.lru_cache
def _triton():
    """The module of our Triton kernels; None where triton is not installed."""
    return importlib.import_module(".triton", __package__) if importlib.util.find_spec("triton") else None


def _why_not_triton(q, k, v, spec) -> str | None:
    if _triton() is None:
        return "anything: triton is not installed (pip install triton)"
    return _triton().unsupported(q, k, v, spec)


def choose(q, k, v, spec: AttnSpec, backend: str = "auto", *, flowing_lse: bool = False) -> Choice:
    """The backend for this call. Raises ``ValueError`` when a named one can't take it; "auto" says why it chose.

    flowing_lse: the backward of a loss that uses lse itself; aten's backward has no place for that gradient.
    """
    if backend == "reference":
        return Choice(backend, "asked for")
    not_triton = None
    if backend == "triton" or (backend == "auto" and q.device.type in ACCELERATORS):
        not_triton = _why_not_triton(q, k, v, spec)
        if not not_triton:
            return Choice("triton", "asked for" if backend == "triton" else f"our kernels take {q.dtype} on {q.device}")
        if backend == "triton":
            raise _refusal(backend, not_triton)
    not_aten = "a gradient that flows through lse" if flowing_lse else aten.unsupported(q, k, v, spec)
    if backend == "aten":
        if not_aten:
            raise _refusal(backend, not_aten)
        return Choice(backend, "asked for")
    before = f"triton can't take {not_triton}; " if not_triton else ""
    if not_aten:
        return Choice("reference", f"{before}aten can't take {not_aten}")
    return Choice("aten", f"{before}torch's flash kernel takes {q.dtype} on {q.device.type}")


def _refusal(backend: str, what: str) -> ValueError:
    return ValueError(f"backend={backend!r} can't take {what}: use backend='auto' or 'reference'")


def _pick(q, k, v, spec, backend, **kwargs):
    choice = choose(q, k, v, spec, backend, **kwargs)
    say_once(f"attention backend {choice.name}: {choice.reason}")
    return _triton() if choice.name == "triton" else {"aten": aten, "reference": reference}[choice.name]


def attn_fwd(q, k, v, *, q_segments, k_segments, spec: AttnSpec, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Partial attention of q's segments against k's.

    Args: q [b, s_q, h, d], k [b, s_k, h_kv, d], v [b, s_k, h_kv, d_v], any strides; segments give the positions of
    rows, and rows of no segment are padding. Returns the state (out [b, s_q, h, d_v] in the inputs' dtype or fp32,
    lse [b, h, s_q] fp32, natural log); a row that sees nothing has out 0 and lse -inf.
    """
    return _pick(q, k, v, spec, backend).attn_fwd(q, k, v, q_segments=q_segments, k_segments=k_segments, spec=spec)


def attn_decode(
    q, k, v, *, visible: Visible, spec: AttnSpec, paged: PagedKV | None = None, backend: str = "auto"
) -> Tensor:
    """Partial attention of few queries over a shard of the KV cache: the packed state, ready to be sent.

    Args: q [b, s_q, h, d], k [b, s, h_kv, d], v [b, s, h_kv, d_v], any strides, or pages of them with `paged`, which
    says where the rows are; `visible` says what a query sees, and spec's causality and window apply to positions only.
    Returns fp32 [b, s_q, h, d_v + 1]: out, then lse.
    """
    assert spec.dropout is None, "dropout is for training"
    if paged is not None:
        return _decode_paged(q, k, v, visible, spec, paged, backend)
    impl = _pick(q, k, v, spec, backend)
    if impl not in (aten, reference):
        return impl.attn_decode(q, k, v, visible=visible, spec=spec)
    if impl is aten and q.device.type != "cpu" and any(x is not None for x in visible):
        if backend == "aten":
            raise _refusal(
                backend, f"lengths or positions of a cache on {q.device.type}: its flash kernels take no mask"
            )
        impl = reference
        say_once("attention backend reference: aten's flash kernels for accelerators take no mask")
    if spec.deterministic and q.shape[0] > 1:  # torch's matrix products depend on the batch
        rows = (slice(i, i + 1) for i in range(q.shape[0]))
        call = dict(spec=spec, backend=backend)
        return torch.cat([attn_decode(q[i], k[i], v[i], visible=visible.row(i), **call) for i in rows])
    k, v, visible = _without_padding(k, v, visible)
    out, lse = impl.attn_fwd_masked(q, k, v, keep=visible.mask(k.shape[1], spec), spec=spec)
    return pack_state(out, lse.transpose(1, 2), state_dtype(q.dtype))


def _decode_paged(q, k, v, visible: Visible, spec: AttnSpec, paged: PagedKV, backend: str) -> Tensor:
    """Triton's kernel reads pages; for the others each row is gathered, unless its pages lie one after another."""
    impl = _pick(q, k, v, spec, backend)
    if impl not in (aten, reference):
        return impl.attn_decode(q, k, v, visible=visible, spec=spec, **paged._asdict())
    states = []
    for row in range(q.shape[0]):
        seen = visible.row(slice(row, row + 1))
        keys, values = gather_row(k, v, paged, row, None if seen.lengths is None else int(seen.lengths), q.dtype)
        if seen.k_positions is not None:
            seen = seen._replace(k_positions=seen.k_positions[:, : keys.shape[1]])
        seen = seen._replace(lengths=None)
        states.append(attn_decode(q[row : row + 1], keys, values, visible=seen, spec=spec, backend=backend))
    return torch.cat(states)


def check_pages(q, k, v, spec: AttnSpec, backend: str) -> None:
    """Raise ``ValueError`` when the backend that `attn_decode` would take can't read these pages."""
    if choose(q, k, v, spec, backend).name == "triton":
        _triton().check_pages(k)


def gather_row(k, v, paged: PagedKV, row: int, length: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first `length` tokens (None: all) of a row of a paged cache: k [1, length, h_kv, d], v [1, length, h_kv, d_v]
    in `dtype`; views where the row's pages lie one after another."""
    size = k.shape[1]
    length = paged.block_table.shape[1] * size if length is None else length
    pages = paged.block_table[row, : -(-length // size)]
    first = int(pages[0]) if len(pages) else 0
    in_order = bool((pages.diff() == 1).all())
    found = []
    for x, scale in ((k, paged.k_scale), (v, paged.v_scale)):
        rows = [x, scale] if scale is not None else [x]
        rows = [y[first : first + len(pages)] if in_order else _index(y, pages) for y in rows]
        rows = [y.flatten(0, 1)[:length] for y in rows]
        found.append((rows[0] if scale is None else (rows[0].float() * rows[1][..., None]).to(dtype))[None])
    return found[0], found[1]


def _index(x: Tensor, pages: Tensor) -> Tensor:
    """Some pages of x; torch can't index fp8 on every device, so their bytes are."""
    return x.view(torch.uint8)[pages].view(x.dtype) if x.dtype == torch.float8_e4m3fn else x[pages]


def _without_padding(k: Tensor, v: Tensor, visible: Visible) -> tuple[Tensor, Tensor, Visible]:
    """The cache up to the longest row, with zeros in slots of padding, beyond a row's length or at position -1: NaN may
    lie there. A single row loses them: then its bits don't depend on how it was padded."""
    lengths, positions = visible.lengths, visible.k_positions
    if lengths is not None:
        n = int(lengths.max()) if lengths.numel() else 0
        k, v = k[:, :n], v[:, :n]
        positions = None if positions is None else positions[:, :n]
        lengths = None if n == 0 or int(lengths.min()) == n else lengths
        visible = Visible(lengths, visible.q_positions, positions)
    padding = None if positions is None else positions < 0
    if lengths is not None:
        beyond = torch.arange(k.shape[1], device=k.device) >= lengths[:, None]
        padding = beyond if padding is None else padding | beyond
    if padding is None or not padding.any():
        return k, v, visible
    if len(k) == 1:
        kept = ~padding[0]
        return k[:, kept], v[:, kept], Visible(None, visible.q_positions, positions[:, kept])
    return *(x.masked_fill(padding[..., None, None], 0) for x in (k, v)), visible


def merge_packed(packed: Tensor) -> Tensor:
    """Merge packed states [n, ..., d_v + 1] (fp32 or fp64), in order, to one [..., d_v + 1]."""
    if packed.device.type in ACCELERATORS and packed.dtype == torch.float32 and _triton():
        return _triton().merge_packed(packed.contiguous())
    # `merge_states` in few operations: a decode step on a CPU is short
    out, lse = packed[..., :-1], packed[..., -1:]
    m = lse.amax(0).clamp_(min=torch.finfo(packed.dtype).min)  # finite where nothing was seen
    terms = torch.empty_like(packed)
    weights = torch.sub(lse, m, out=terms[..., -1:]).exp_()
    torch.mul(out, weights, out=terms[..., :-1])
    merged, *others = terms.unbind()
    for x in others:  # one by one: in torch's sum the order would depend on where a row stands
        merged.add_(x)
    num, den = merged[..., :-1], merged[..., -1:]
    num.div_(den.clamp(min=torch.finfo(packed.dtype).tiny))
    torch.add(m, den.log(), out=den)
    return merged


def attn_delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """delta [b, h, s] = rowsum(dout * out) - dlse, fp32 (float64); dout and out [b, s, h, d_v], dlse [b, h, s]."""
    if out.device.type in ACCELERATORS and out.dtype != torch.float64 and _triton():
        return _triton().attn_delta(dout, out, dlse)
    dtype = state_dtype(out.dtype)
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2)
    return (delta if dlse is None else delta - dlse).contiguous()


def attn_bwd(
    dout, q, k, v, lse, delta, *, q_segments, k_segments, spec: AttnSpec, backend: str = "auto", flowing_lse=False
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's share of the gradients, from the *global* statistics: sums over blocks are exact.

    Args: dout [b, s_q, h, d_v]; lse and delta [b, h, s_q] fp32, delta = rowsum(dout * out) - dlse.
    Returns: dq [b, s_q, h, d], dk [b, s_k, h_kv, d], dv [b, s_k, h_kv, d_v] in fp32 (float64 for float64).
    """
    impl = _pick(q, k, v, spec, backend, flowing_lse=flowing_lse)
    return impl.attn_bwd(dout, q, k, v, lse, delta, q_segments=q_segments, k_segments=k_segments, spec=spec)
