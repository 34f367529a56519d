"""Attention of libraries on NVIDIA GPUs as backends: cuDNN, and FlashAttention 3 and 4 where they are installed.

torch calls all of them. Each returns lse, and its backward takes the *global* lse and an `out` with the global delta.
cuDNN takes fully visible blocks and causal squares, so aten's loops over blocks serve it; FlashAttention takes windows
and packed documents (varlen.py), and decodes (decoders.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.attention
from torch import Tensor

from ..spec import AttnSpec
from . import aten, varlen
from .blocks import DIAGONAL
from .decoders import Decoder, flash_decoder
from .decoders import installed as _installed
from .kv_cache import KVCache
from .varlen import Band


class Library(NamedTuple):
    """A backend (`backends.Backend`) that computes forward and backward, and decodes if it has a decoder."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    """(q, k, v, causal, scale) -> out, lse [b, h, s]; tensors [b, s, h, d] with one head_dim. With packs also (...,
    window, packing), see `aten.flash_forward`."""
    backward: Callable[..., tuple[Tensor, ...]]
    """(dout, out, q, k, v, lse, causal, scale) -> dq, dk, dv."""
    missing: Callable[[Tensor, int], str | None]
    """(q, head_dim) -> what this machine or the library can't do, or None."""
    active: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    """In which its functions are called."""
    packs: bool = False
    """Whether it takes windows and packed documents."""
    decoder: Decoder | None = None

    def unsupported(
        self, q, k, v, spec: AttnSpec, *, flowing_lse: bool, masked: bool, decodes: bool, cache: KVCache | None = None
    ) -> str | None:
        """Why this backend can't take the call, or None if it can; see `kernels.choose`."""
        if decodes and self.decoder is None:
            return "decoding"
        if decodes:
            needs = dict(flowing_lse=flowing_lse, masked=masked, decodes=decodes, cache=cache)
            return self.decoder.unsupported(q, k, v, spec, **needs)
        if q.device.type not in aten.GPUS or torch.version.hip:
            return f"device type {q.device.type} (it needs an NVIDIA GPU)"
        if q.dtype not in (torch.bfloat16, torch.float16):
            return f"dtype {q.dtype}"
        if spec.deterministic:
            return "deterministic=True (its backward adds up in any order)"
        if self.packs:
            spec = dataclasses.replace(spec, window_size=(-1, -1))  # which aten's refuse
        options = dict(flowing_lse=flowing_lse, masked=masked, decodes=False)
        return aten.unsupported(q, k, v, spec, **options) or self.missing(q, aten.width(q, v))

    def attn_fwd(self, q, k, v, *, q_segments, k_segments, spec: AttnSpec, out_dtype=None) -> tuple[Tensor, Tensor]:
        """See `Backend.attn_fwd`; out_dtype changes nothing."""
        call = dict(q_segments=q_segments, k_segments=k_segments, spec=spec)
        with self.active():
            if self.packs:
                return varlen.attn_fwd(functools.partial(self._packed_fwd, spec.softmax_scale), q, k, v, **call)
            return aten.attn_fwd(q, k, v, **call, block_fwd=self._block_fwd)

    def attn_bwd(self, dout, q, k, v, lse, delta, *, q_segments, k_segments, spec: AttnSpec):
        """See `Backend.attn_bwd`."""
        call = dict(q_segments=q_segments, k_segments=k_segments, spec=spec)
        with self.active():
            if self.packs:
                derive = functools.partial(self._packed_bwd, spec.softmax_scale)
                return varlen.attn_bwd(derive, dout, q, k, v, lse, delta, **call)
            return aten.attn_bwd(dout, q, k, v, lse, delta, **call, block_bwd=self._block_bwd)

    def attn_decode(self, q: Tensor, cache: KVCache, spec: AttnSpec) -> Tensor:
        """See `Backend.attn_decode`."""
        with self.active():
            return self.decoder.attn_decode(q, cache, spec)

    def _block_fwd(self, q, k, v, block, mask, spec: AttnSpec) -> tuple[Tensor, Tensor]:
        assert mask is None
        return self._narrow_fwd(q, k, v, block.kind == DIAGONAL, spec.softmax_scale)

    def _block_bwd(self, dout, out, q, k, v, lse, block, mask, spec: AttnSpec) -> tuple[Tensor, Tensor, Tensor]:
        return self._narrow_bwd(dout, out, q, k, v, lse.contiguous(), block.kind == DIAGONAL, spec.softmax_scale)

    def _packed_fwd(self, scale: float, q, k, v, band: Band, packing) -> tuple[Tensor, Tensor]:
        return self._narrow_fwd(q, k, v, band.causal, scale, *_masked(band, packing))

    def _packed_bwd(self, scale: float, dout, out, q, k, v, lse, band: Band, packing):
        return self._narrow_bwd(dout, out, q, k, v, lse, band.causal, scale, *_masked(band, packing))

    def _narrow_fwd(self, q, k, v, *how) -> tuple[Tensor, Tensor]:
        """`forward` of any two head_dims."""
        q, k, wide_v = aten.widen(aten.width(q, v), q, k, v)
        out, lse = self.forward(q, k, wide_v, *how)
        return out[..., : v.shape[-1]], lse

    def _narrow_bwd(self, dout, out, q, k, v, lse, *how) -> tuple[Tensor, Tensor, Tensor]:
        d, d_v = q.shape[-1], v.shape[-1]
        dq, dk, dv = self.backward(*aten.widen(aten.width(q, v), dout, out, q, k, v), lse, *how)
        return dq[..., :d], dk[..., :d], dv[..., :d_v]


def _masked(band: Band, packing) -> tuple:
    """The window and the packing of `aten.flash_forward`; the causal mask is said by `causal` alone."""
    return (-1, -1) if band.causal else band.window, packing


def _cudnn_forward(q, k, v, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse.reshape(q.shape[:3])  # lse [b, h, s, 1]


def _cudnn_backward(dout, out, q, k, v, lse, causal: bool, scale: float) -> tuple[Tensor, ...]:
    dout, out, q, k, v = (x.transpose(1, 2) for x in (dout, out, q, k, v))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # no dropout: never read
    lengths = (None, None, q.shape[2], k.shape[2])  # no bias, and rows of one length
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse[..., None], seed, seed, None, *lengths, 0.0, causal, scale=scale
    )
    return tuple(x.transpose(1, 2) for x in grads)


def _cudnn_missing(q: Tensor, head_dim: int) -> str | None:
    if head_dim > 128:
        return f"head_dim {head_dim} above 128"
    if not _cudnn_takes(q.device, q.dtype, head_dim):
        return f"head_dim {head_dim} in {q.dtype} here: torch.backends.cuda.can_use_cudnn_attention refuses it"
    return None


@functools.lru_cache
def _cudnn_takes(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    sample = torch.empty(1, 2, 128, head_dim, dtype=dtype, device=device)
    params = torch.backends.cuda.SDPAParams(sample, sample, sample, None, 0.0, True, False)
    return torch.backends.cuda.can_use_cudnn_attention(params)


class _Flash(NamedTuple):
    """An implementation that torch can put in the place of its flash kernel."""

    name: str
    module: str
    """It has to be installed."""
    capabilities: tuple[int, ...]
    """Major numbers of the GPUs that it runs on."""
    head_dim: int
    """The largest."""

    def missing(self, q: Tensor, head_dim: int) -> str | None:
        known = getattr(torch.nn.attention, "list_flash_attention_impls", list)()
        if self.name not in known:
            return f"anything: torch {torch.__version__} does not know {self.name}"
        if not _installed(self.module):
            return f"anything: {self.module} is not installed"
        major, _ = torch.cuda.get_device_capability(q.device)
        if major not in self.capabilities:
            return f"a GPU of compute capability {major}.x: {self.name} is for {self.capabilities}"
        return f"head_dim {head_dim} above {self.head_dim}" if head_dim > self.head_dim else None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within, torch's flash kernel is this one; then what it was. Torch switches it for the whole process, and
        other attention of the process may have what this one refuses, as dropout."""
        before = torch.nn.attention.current_flash_attention_impl()
        if before == self.name:
            yield
            return
        torch.nn.attention.activate_flash_attention_impl(self.name)
        try:
            yield
        finally:
            if before is None:
                torch.nn.attention.restore_flash_attention_impl()
            else:
                torch.nn.attention.activate_flash_attention_impl(before)


_FA3 = _Flash("FA3", "flash_attn_interface", (9,), 256)
_FA4 = _Flash("FA4", "flash_attn.cute.interface", (9, 10), 128)
LIBRARIES = {
    "cudnn": Library(_cudnn_forward, _cudnn_backward, _cudnn_missing),
    "fa3": Library(aten.flash_forward, aten.flash_backward, _FA3.missing, _FA3.active, True, flash_decoder(_FA3)),
    "fa4": Library(aten.flash_forward, aten.flash_backward, _FA4.missing, _FA4.active, True, flash_decoder(_FA4)),
}


@functools.lru_cache
def preferred(device: torch.device) -> tuple[str, ...]:
    """The libraries that are taken before our own kernels where nothing was measured: FlashAttention 3 or 4 where it is
    installed, and cuDNN, on sm_90 and sm_100."""
    if device.type not in aten.GPUS or torch.version.hip or (device.type == "cuda" and not torch.cuda.is_available()):
        return ()
    q, major = torch.empty(0, 1, 1, 16, device=device), torch.cuda.get_device_capability(device)[0]
    if major not in (9, 10):
        return ()
    name, flash = ("fa3", _FA3) if major == 9 else ("fa4", _FA4)
    return (name, "cudnn") if flash.missing(q, 16) is None else ("cudnn",)
