"""The ring for decoding, the baseline: the ranks' caches circulate while the current one is computed.

Shards differ in length, and positions travel along where only some slots are valid. So each message is preceded by a
header that says what the next one will be.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import comm, kernels
from ..config import AttnSpec
from ..kernels import KVCache


def decode_ring(q: Tensor, cache: KVCache, spec: AttnSpec, backend: kernels.Backend, ranks: comm.Ranks) -> Tensor:
    """The packed state [b, s_q, h, d_v + 1] of q [b, s_q, h, d] over every rank's cache: p - 1 shifts of the cache.

    The ranks' states are merged in rank order, so all ranks get the same bits.
    """
    order = ranks.network.placement.order
    shift = functools.partial(comm.start_shift, order=order, ranks=ranks)
    p, at = len(order), order.index(ranks.rank)
    cache = _dense(cache, q.dtype)
    q_positions = cache.q_positions
    if q_positions is None:
        q_positions = torch.zeros(q.shape[:2], dtype=torch.int64, device=q.device)
    shard = _Shard.of(cache)
    buffers = _TwoBuffers(*(x for x in (shard.k, shard.v) if x is not None))
    header = shift(shard.header, torch.empty_like(shard.header)).wait()
    states: dict[int, Tensor] = {}
    for step in range(p):
        transfers: list[comm.Transfer] = []
        if step < p - 1:
            arriving = buffers.shard(step, header)
            pairs = itertools.zip_longest(shard.tensors, arriving.tensors)
            transfers = [shift(send, receive) for send, receive in pairs]
            if step < p - 2:
                following = shift(header, torch.empty_like(header))
        held = KVCache(shard.k, shard.v, head_dim_v=cache.head_dim_v)
        if shard.positions is not None:
            held = held._replace(q_positions=q_positions, k_positions=shard.positions)
        states[order[at - step]] = backend.attn_decode(q, held, spec)
        for transfer in transfers:
            transfer.wait()
        if step < p - 1:
            shard = arriving
        if step < p - 2:
            header = following.wait()
    return kernels.merge_packed(torch.stack([states[rank] for rank in range(p)]))


def _dense(cache: KVCache, dtype: torch.dtype) -> KVCache:
    """A paged cache as one [b, longest row, ...], to be sent whole."""
    if cache.block_table is None:
        return cache
    rows = [cache.row(i, dtype) for i in range(len(cache.block_table))]
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    k = pad([row.k[0] for row in rows])
    v = None if cache.v is None else pad([row.v[0] for row in rows])
    positions = None if cache.k_positions is None else cache.k_positions[:, : k.shape[1]]
    return KVCache(k, v, None, None, cache.head_dim_v, cache.lengths, cache.q_positions, positions)


@dataclass(frozen=True)
class _Shard:
    """One rank's cache on its way: k [b, n, h_kv, d], v [b, n, h_kv, d_v] or None where it begins k, positions int64
    [b, n] or None for all."""

    k: Tensor
    v: Tensor | None
    positions: Tensor | None

    @classmethod
    def of(cls, cache: KVCache) -> _Shard:
        """This rank's: slots beyond a row's length get position -1, and zeros since NaN may lie there."""
        k, v, positions = cache.k, cache.v, cache.k_positions
        if cache.lengths is not None:
            beyond = torch.arange(k.shape[1], device=k.device) >= cache.lengths[:, None]
            if positions is None:
                positions = torch.zeros(k.shape[:2], dtype=torch.int64, device=k.device)
            positions = positions.masked_fill(beyond, -1)
            k, v = (None if x is None else x.masked_fill(beyond[..., None, None], 0) for x in (k, v))
        return cls(*(None if x is None else x.contiguous() for x in (k, v, positions)))

    @property
    def header(self) -> Tensor:
        """int64 [2]: its length, and whether positions travel with it."""
        return torch.tensor([self.k.shape[1], int(self.positions is not None)], device=self.k.device)

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.k, self.v, self.positions) if x is not None]


class _TwoBuffers:
    """Two buffers, for the current shard and the arriving one, used in turn; they grow for longer shards."""

    def __init__(self, *like: Tensor):
        self._like = like
        self._buffers = [[x.new_empty(0) for x in self._like] for _ in range(2)]

    def shard(self, step: int, header: Tensor) -> _Shard:
        """Buffers for the shard of this header, where the shard of two steps ago was."""
        length, with_positions = header.tolist()
        buffers, views = self._buffers[step % 2], []
        for i, like in enumerate(self._like):
            shape = (like.shape[0], length, *like.shape[2:])
            if buffers[i].numel() < math.prod(shape):
                buffers[i] = like.new_empty(math.prod(shape))
            views.append(buffers[i][: math.prod(shape)].view(shape))
        batch, device = self._like[0].shape[0], self._like[0].device
        positions = torch.empty(batch, length, dtype=torch.int64, device=device) if with_positions else None
        return _Shard(views[0], views[1] if len(views) > 1 else None, positions)
