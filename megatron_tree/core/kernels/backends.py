"""The backends and the choice between them, made once for an attention call.

`triton` (ours), `aten` (torch's flash kernels) and `reference` (the formulas in plain torch) have the same functions
with the same meaning: `Backend`'s, and `unsupported`. `native` (ours in C, for CPUs), `flashinfer` and `flashmla`
(decoders.py) only decode; `cudnn` (libraries.py, as fa3 and fa4) does all but that.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from .. import merge
from ..layout import Sharding
from ..log import say_once
from ..spec import AttnSpec
from . import fastest, leaves, ranges
from .decoders import DECODERS, Decoder
from .kv_cache import KVCache, decode_shared
from .libraries import LIBRARIES, Library, preferred
from .maxima import LargestLogits
from .states import ACCELERATORS, triton_for

NAMED = "asked for"  # the reason for a backend that the user has named
ANY_RANKS = "deterministic='ranks'"  # the beginning of the reason for one whose bits depend on no number of ranks


@dataclass(frozen=True)
class Backend:
    """A chosen backend: its name, the reason why it was chosen, and its functions."""

    name: str
    reason: str
    module: ModuleType | Library | Decoder
    dual: bool = False
    """Whether it takes dual tensors: see `for_duals`."""
    flowing_lse: bool = False
    """As of `choose`."""

    def attn_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, *, q_segments, k_segments, spec: AttnSpec, out_dtype=None, **selected
    ):
        """Partial attention of q's segments against k's: equations (2) and (3) of docs/design.md.

        Args: q [b, s_q, h, d], k [b, s_k, h_kv, d], v [b, s_k, h_kv, d_v], any strides; segments give the positions of
        rows, and rows of no segment are padding. Returns the state (out [b, s_q, h, d_v] in the inputs' dtype or fp32,
        lse [b, h, s_q] fp32, natural log); a row that sees nothing has out 0 and lse -inf. out_dtype: what the caller
        rounds out to; a kernel whose out would be fp32 then writes it so. selected: int32 [b, s_q, m], the positions of
        the keys that a query sees, -1 for none, in a backend that was chosen for it (`choose(selects=True)`).
        """
        attend = self.module.attn_jvp if self.dual else self.module.attn_fwd
        call = dict(q_segments=q_segments, k_segments=k_segments, spec=spec, **selected)
        if spec.ranges is None:
            return attend(q, k, v, **call, out_dtype=out_dtype)
        return ranges.attn_fwd(attend, q, k, v, **call, out_dim=self.out_dim(v))

    def attn_bwd(self, dout, q, k, v, lse, delta, *, q_segments, k_segments, spec: AttnSpec, **others):
        """This block's share of the gradients, equations (5) to (7), from the *global* statistics: sums over blocks are
        exact.

        Args: dout [b, s_q, h, d_v]; lse and delta [b, h, s_q] fp32, delta = rowsum(dout * out) - dlse; selected as of
        `attn_fwd`; own and steps of leaves.py.
        Returns: dq [b, s_q, h, d], dk [b, s_k, h_kv, d], dv [b, s_k, h_kv, d_v] in fp32 (float64 for float64).
        """
        if self.dual:
            derive = self.module.attn_bwd_jvp
        elif self.flowing_lse and self.name == "aten":
            derive = self.module.attn_bwd_through_lse
        else:
            derive = self.module.attn_bwd
        if spec.ranges is not None:
            derive = functools.partial(ranges.attn_bwd, derive)
        call = dict(q_segments=q_segments, k_segments=k_segments, spec=spec, **others)
        return derive(dout, q, k, v, lse, delta, **call)

    def for_duals(self, dtype: torch.dtype, width: int) -> Backend:
        """The same for dual tensors (duals.py) q, k, v and dout: values and tangents, [..., 2 d] or [..., 2 d_v].

        width: the wider of d and d_v. A module whose `takes_duals` says no gives way to torch's operations.

        attn_fwd is the module's `attn_jvp`, equations (9) and (10): out [b, s_q, h, 2 d_v + 1] has the columns out, r
        and mu, all of them averages over the keys with the same weights, so that states merge as without tangents.
        attn_bwd is `attn_bwd_jvp`, equations (5) to (7) and (12) to (14), from the *global* statistics (lse, mu) and
        (delta, kappa), [b, h, s_q, 2] each: dq, dk and dv are dual tensors, and still sums over blocks.

        A library has no such kernels: ours take the place of one that "auto" has chosen.
        Raises: ``ValueError`` for one that was named.
        """
        if isinstance(self.module, LargestLogits):
            inner = replace(self, module=self.module.module).for_duals(dtype, width)
            return replace(inner, module=LargestLogits(inner.module, self.module.largest))
        if self.reason.startswith(ANY_RANKS):
            raise ValueError(
                "deterministic='ranks' has first derivatives only: use deterministic=True where tangents or second "
                "derivatives are asked for"
            )
        if isinstance(self.module, Library) and self.reason != NAMED:
            name = "reference" if _module("triton") is None else "triton"
            return replace(self, name=name, module=_module(name)).for_duals(dtype, width)
        if isinstance(self.module, Library):
            raise ValueError(
                f"backend={self.name!r} has first derivatives only: use backend='reference' where tangents or second "
                "derivatives are asked for"
            )
        takes_duals = getattr(self.module, "takes_duals", None)
        if takes_duals and takes_duals(dtype, width):
            return replace(self, dual=True)
        say_once(f"attention backend {self.name}: tangents and second derivatives are computed by torch's operations")
        return replace(self, module=_module("reference"), dual=True)

    def out_dim(self, v: Tensor) -> int:
        """Columns of `attn_fwd`'s out."""
        return v.shape[-1] + self.dual

    def statistics(self, out: Tensor, lse: Tensor) -> Tensor:
        """What a backward needs of the state (out, lse): lse [b, h, s]; of dual tensors (lse, mu), [b, h, s, 2]."""
        return torch.stack((lse, out[..., -1].transpose(1, 2).to(lse.dtype)), -1) if self.dual else lse

    def attn_decode(self, q: Tensor, cache: KVCache, spec: AttnSpec) -> Tensor:
        """Partial attention of few queries over a shard of the KV cache: the packed state, ready to be sent.

        Args: q [b, s_q, h, d] and the cache's tensors, any strides. spec's causality and window
        apply to positions only.
        Returns: fp32 (float64 for float64) [b, s_q, h, d_v + 1]: out, then lse.
        """
        assert spec.dropout is None, "dropout is for training"
        decode = self.module.attn_decode
        state = decode(q, cache, spec)
        return decode_shared(decode, q, cache, spec, state) if cache.shared else state

    def adds_integers(self, queries: Sharding, spec: AttnSpec, dtype: torch.dtype) -> bool:
        """Whether ranks may add up what `attn_bwd` gives them for keys, from steps that all know (steps.py)."""
        return self.module is leaves and spec.ranges is None and dtype != torch.float64 and leaves.are_whole(queries)

    def check_pages(self, k: Tensor) -> None:
        """Raise ``ValueError`` for pages k [pages, page_size, h_kv, d] that this backend can't read."""
        if self.name == "triton":  # the others read pages of any size, or gather rows
            self.module.check_pages(k)

    def with_largest_logits(self, q: Tensor) -> tuple[Backend, Tensor]:
        """The same, and the largest logit [h] of the calls of its `attn_fwd`, for a call whose queries are q."""
        module = LargestLogits.for_queries(self.module, q)
        return replace(self, module=module), module.largest


def choose(
    q,
    k,
    v,
    spec: AttnSpec,
    backend: str = "auto",
    *,
    flowing_lse=False,
    masked=False,
    decodes=False,
    selects=False,
    cache: KVCache | None = None,
) -> Backend:
    """The backend for a call with tensors like these. "auto" logs what it chose and why.

    flowing_lse: it is for the backward of a loss that uses lse itself. decodes: it is for `Backend.attn_decode`;
    masked: with a mask (`KVCache.needs_mask`); cache: the cache of all calls, None where others pass by (a ring);
    selects: queries see selected keys only (`Backend.attn_fwd`). Raises ``ValueError`` when a named backend can't take
    the call.
    """
    needs = dict(flowing_lse=flowing_lse, masked=masked, decodes=decodes, selects=selects, cache=cache)
    if spec.deterministic == "ranks":
        return _of_any_ranks(q, k, v, spec, backend, needs)
    if backend != "auto":
        what = _unsupported(backend, q, k, v, spec, **needs)
        if what:
            raise ValueError(f"backend={backend!r} can't take {what}: use backend='auto' or 'reference'")
        return _chosen(backend, NAMED, flowing_lse)
    refusals, first, why_first = [], (), "the fastest that was measured on this GPU"
    if q.device.type in ACCELERATORS:
        if decodes:  # flashinfer would wait for the GPU in every step
            first = tuple(name for name in ("flashmla",) if not _unsupported(name, q, k, v, spec, **needs))
            why_first = "faster than ours for latents, by their instructions"
        else:
            first = fastest.for_device(q.device, max(q.shape[-1], v.shape[-1]))
            if not fastest.knows(q.device):
                first, why_first = preferred(q.device), "the default on such a GPU, until `make gpu` measures it"
        names = dict.fromkeys((*first, "triton", "aten"))
    else:
        names = ("native", "aten")[not decodes :]
    for name in names:
        what = _unsupported(name, q, k, v, spec, **needs)
        if not what:
            takes = {
                "triton": f"our kernels take {q.dtype} on {q.device}",
                "native": f"our kernel takes {q.dtype} on {q.device.type}",
                "aten": f"torch's flash kernel takes {q.dtype} on {q.device.type}",
            }
            why = why_first if name in first else takes[name]
            return _chosen(name, "; ".join([*refusals, why]), flowing_lse)
        refusals.append(f"{name} can't take {what}")
    return _chosen("reference", "; ".join(refusals), flowing_lse)


def _chosen(name: str, reason: str, flowing_lse: bool) -> Backend:
    say_once(f"attention backend {name}: {reason}")
    return Backend(name, reason, _module(name), flowing_lse=flowing_lse)


def _of_any_ranks(q, k, v, spec: AttnSpec, backend: str, needs: dict[str, bool]) -> Backend:
    """The backend whose bits depend on no number of ranks. Decoding is in fixed point, in torch's operations."""
    decodes, selects, reason = needs["decodes"], needs["selects"], ANY_RANKS
    if selects or (decodes and q.dtype == torch.float64):
        what = "selected keys in training and prefill" if selects else "decoding in float64"
        raise ValueError(f"{reason} does not take {what}: use deterministic=True")
    if decodes and backend == "triton":
        raise ValueError(f"backend='triton' does not decode with {reason}: use backend='auto', which adds up integers")
    name, module = f"reference, {'in fixed point' if decodes else 'leaf by leaf'}", leaves
    if not decodes and (backend == "triton" or (backend == "auto" and q.device.type in ACCELERATORS)):
        what = _unsupported("triton", q, k, v, spec, **needs)
        if what and backend == "triton":
            raise ValueError(f"backend='triton' can't take {what}: use backend='auto' or 'reference'")
        if what:
            reason = f"{reason}; triton can't take {what}"
        else:
            name, module = "triton, leaf by leaf", importlib.import_module(".triton.aligned", __package__)
    say_once(f"attention backend {name}: {reason}")
    return Backend(name, reason, module)


def _unsupported(name: str, q, k, v, spec: AttnSpec, *, selects: bool, cache, **needs: bool) -> str | None:
    """Why a backend can't take a call, or None if it can."""
    if selects and name != "reference":
        return "selected keys"
    if _module(name) is None:
        return "anything: triton is not installed (pip install triton)"
    if isinstance(_module(name), Library | Decoder):
        needs["cache"] = cache
    asked = functools.partial(_module(name).unsupported, **needs)
    specs = [spec] if spec.ranges is None else [group.spec for group in ranges.slice_groups(spec)]
    return next(filter(None, (asked(q, k, v, spec) for spec in specs)), None)


@functools.lru_cache
def _module(name: str) -> ModuleType | Library | Decoder | None:
    """A backend's module or library; None for Triton's where Triton is not installed."""
    if name == "triton" and importlib.util.find_spec("triton") is None:
        return None
    return LIBRARIES.get(name) or DECODERS.get(name) or importlib.import_module(f".{name}", __package__)


def attn_delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """delta [b, h, s] = rowsum(dout * out) - dlse, fp32 (float64); dout and out [b, s, h, d_v], dlse [b, h, s]."""
    if triton := triton_for(out):
        return triton.attn_delta(dout, out, dlse)
    dtype = merge.state_dtype(out.dtype)
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2)
    return (delta if dlse is None else delta - dlse).contiguous()


def attn_fwd(q, k, v, *, q_segments, k_segments, spec: AttnSpec, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """`Backend.attn_fwd` of a block on its own: choose, and call."""
    return choose(q, k, v, spec, backend).attn_fwd(q, k, v, q_segments=q_segments, k_segments=k_segments, spec=spec)


def attn_bwd(
    dout, q, k, v, lse, delta, *, q_segments, k_segments, spec: AttnSpec, backend: str = "auto", flowing_lse=False
) -> tuple[Tensor, Tensor, Tensor]:
    """`Backend.attn_bwd` of a block on its own: choose, and call."""
    chosen = choose(q, k, v, spec, backend, flowing_lse=flowing_lse)
    return chosen.attn_bwd(dout, q, k, v, lse, delta, q_segments=q_segments, k_segments=k_segments, spec=spec)


def attn_decode(q: Tensor, cache: KVCache, spec: AttnSpec, backend: str = "auto") -> Tensor:
    """`Backend.attn_decode` of a shard on its own: choose, and call."""
    chosen = choose(q, cache.k, cache.values, spec, backend, masked=cache.needs_mask, decodes=True, cache=cache)
    return chosen.attn_decode(q, cache, spec)
