"""Libraries that decode on NVIDIA GPUs: FlashAttention 3 and 4 through torch's operators, FlashInfer and FlashMLA.

Written by their documentation; none has run. They read a dense cache or pages whose rows are seen up to their lengths.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..merge import NEG_INF, State, empty_state, pack_state
from ..spec import AttnSpec
from . import aten
from .kv_cache import KVCache

FLASH_MLA_PAGE = 64  # tokens
WORKSPACE = 128 << 20  # bytes, what FlashInfer's documentation recommends


class Decoder(NamedTuple):
    """A backend (`backends.Backend`) that decodes."""

    decode: Callable[[Tensor, KVCache, AttnSpec], State]
    """Of at least one slot: (out, lse [b, h, s_q] to the base e); anything where a row has length 0."""
    missing: Callable[[Tensor, KVCache, AttnSpec], str | None]
    """What this machine or the library can't do of a call whose mask is lengths, or None."""

    def unsupported(
        self, q, k, v, spec: AttnSpec, *, flowing_lse: bool, masked: bool, decodes: bool, cache: KVCache | None = None
    ) -> str | None:
        """Why this backend can't take the call, or None if it can; see `kernels.choose`."""
        if not decodes:
            return "anything but decoding"
        if q.device.type not in aten.GPUS or torch.version.hip:
            return f"device type {q.device.type} (it needs an NVIDIA GPU)"
        if cache is None:
            return "decoding but of a cache that stays on its rank (not schedule='ring')"
        if cache.selected is not None:
            return "selected slots"
        if cache.k_positions is not None:
            return "positions of a cache's slots (a window, ALiBi, or a cache that is not in order)"
        if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype not in (q.dtype, torch.int8, torch.float8_e4m3fn):
            return f"q in {q.dtype} with k in {k.dtype}"
        if k.dtype != q.dtype:
            return f"pages in {k.dtype}: it knows no scale of each slot and head"
        if spec.softmax_scale <= 0:
            return f"softmax_scale={spec.softmax_scale} (it hides keys by -inf before it scales)"
        return self.missing(q, cache, spec)

    def attn_decode(self, q: Tensor, cache: KVCache, spec: AttnSpec) -> Tensor:
        """See `Backend.attn_decode`."""
        if 0 in (len(q), cache.num_slots):
            return pack_state(*empty_state((*q.shape[:3], cache.values.shape[-1]), device=q.device), torch.float32)
        if cache.lengths is None and cache.block_table is not None:
            cache = cache._replace(lengths=torch.full((len(q),), cache.num_slots, device=q.device))
        out, lse = self.decode(q, cache, spec)
        if cache.lengths is not None:  # libraries differ in the lse of such rows
            empty = cache.lengths == 0
            out = out.masked_fill(empty[:, None, None, None], 0)
            lse = lse.masked_fill(empty[:, None, None], NEG_INF)
        return pack_state(out, lse, torch.float32)


def flash_decoder(flash) -> Decoder:
    """FlashAttention 3 or 4, a `libraries._Flash`, through torch's operators: it has to be active in a call."""
    return Decoder(functools.partial(_flash, flash), functools.partial(_flash_missing, flash))


def _flash_missing(flash, q: Tensor, cache: KVCache, spec: AttnSpec) -> str | None:
    d, d_v = q.shape[-1], cache.values.shape[-1]
    if spec.softcap:
        return "softcap"
    if spec.deterministic and flash.name != "FA3":
        return "deterministic=True (its decode is split by the batch)"
    if d != d_v or d % 8:
        return f"head_dim {d} of q and k with {d_v} of v (one multiple of 8)"
    if what := flash.missing(q, d):
        return what
    major, _ = torch.cuda.get_device_capability(q.device)
    return "a cache in pages on sm_90" if flash.name == "FA4" and major == 9 and cache.block_table is not None else None


def _flash(flash, q: Tensor, cache: KVCache, spec: AttnSpec) -> State:
    """FA3 splits the keys by itself, with deterministic=True not at all: then bits don't depend on the batch. FA4 does
    so as often as it is told, on sm_100."""
    splits = 1 if spec.deterministic else None
    if flash.name == "FA4" and torch.cuda.get_device_capability(q.device)[0] == 10:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        programs = len(q) * cache.k.shape[2]
        splits = max(1, min(processors // programs, cache.num_slots // 512))
    q, k, v = aten.widen(q.shape[-1], q, cache.k, cache.values)
    table, lengths = (None if x is None else x.to(torch.int32).contiguous() for x in (cache.block_table, cache.lengths))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], cache.num_slots, 0.0, False, False,
        scale=spec.softmax_scale, seqused_k=lengths, block_table=table, num_splits=splits,
    )  # fmt: skip
    return out, lse


def _flash_mla_missing(q: Tensor, cache: KVCache, spec: AttnSpec) -> str | None:
    if spec.softcap:
        return "softcap"
    if spec.deterministic:
        return "deterministic=True (its decode is split by the batch)"
    if cache.v is not None or cache.k.shape[2:] != (1, 576) or cache.head_dim_v != 512:
        return "anything but latents of 576 numbers whose first 512 are the value"
    if cache.block_table is None or cache.k.shape[1] != FLASH_MLA_PAGE:
        return f"a cache that is not in pages of {FLASH_MLA_PAGE} tokens"
    if not installed("flash_mla"):
        return "anything: flash_mla is not installed"
    major, _ = torch.cuda.get_device_capability(q.device)
    return None if major == 9 else f"a GPU of compute capability {major}.x: its dense decoding is for 9.0"


def _flash_mla(q: Tensor, cache: KVCache, spec: AttnSpec) -> State:
    """DeepSeek, flash_mla. Its plan depends on the lengths and is made on the GPU, within the first call that gets it:
    so also a CUDA graph may record it."""
    library = importlib.import_module("flash_mla")
    q, k = aten.widen(576, q, cache.k)
    table, lengths = (x.to(torch.int32).contiguous() for x in (cache.block_table, cache.lengths))
    rows = q.shape[1] * q.shape[2]
    plan, num_splits = library.get_mla_metadata(lengths, rows, 1)
    return library.flash_mla_with_kvcache(q, k, table, lengths, 512, plan, num_splits, spec.softmax_scale, causal=False)


def _flashinfer_missing(q: Tensor, cache: KVCache, spec: AttnSpec) -> str | None:
    d, d_v = q.shape[-1], cache.values.shape[-1]
    if spec.deterministic:
        return "deterministic=True (its decode is split by the batch)"
    if cache.block_table is None:
        return "a cache that is not in pages"
    if cache.v is None or d != d_v or d not in (64, 128, 256):
        return f"head_dim {d} of q and k with {d_v} of v (it takes 64, 128 and 256, the same for both)"
    return None if installed("flashinfer") else "anything: flashinfer is not installed"


def _flashinfer(q: Tensor, cache: KVCache, spec: AttnSpec) -> State:
    """Ye et al., flashinfer.decode. Each query is a request of its own: several of one request would be causal.

    Raises: ``ValueError`` while a CUDA graph is captured.
    """
    (b, s_q, h, d), (_, page, h_kv, _), pages = q.shape, cache.k.shape, cache.block_table.shape[1]
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "backend='flashinfer' plans a step on the host, which a CUDA graph can't record: use cuda_graphs=False or "
            "backend='auto'"
        )
    lengths = [min(n, pages * page) for n in cache.lengths.tolist() for _ in range(s_q)]
    counts = [-(-n // page) for n in lengths]
    begins = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    last = torch.tensor([n - max(0, count - 1) * page for n, count in zip(lengths, counts)], dtype=torch.int32)
    entries = torch.cat([torch.arange(i // s_q * pages, i // s_q * pages + n) for i, n in enumerate(counts)])
    indices = cache.block_table.to(torch.int32).flatten()[entries.to(q.device)]
    q, k, v = aten.widen(d, q, cache.k, cache.v)
    wrapper = _flashinfer_wrapper(q.device)
    wrapper.plan(
        begins, indices, last, h, h_kv, d, page, logits_soft_cap=spec.softcap or None, sm_scale=spec.softmax_scale,
        q_data_type=q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    out, log2 = wrapper.run(q.flatten(0, 1), (k, v), return_lse=True)
    lse = log2 * math.log(2)
    return out.unflatten(0, (b, s_q)), lse.unflatten(0, (b, s_q)).transpose(1, 2)


@functools.lru_cache
def _flashinfer_wrapper(device: torch.device):
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    library = importlib.import_module("flashinfer")
    return library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)


@functools.lru_cache
def installed(module: str) -> bool:
    """Whether a module can be found; its packages above are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


DECODERS = {
    "flashinfer": Decoder(_flashinfer, _flashinfer_missing),
    "flashmla": Decoder(_flash_mla, _flash_mla_missing),
}
