"""Which keys queries see, chosen by an index: the keys of largest scores, over a sequence that is sharded.

    score of key a for a query:  I_a = sum_h w_h relu(softmax_scale * q_h . k_a)    h: index heads; a token has one key

A query sees the topk keys of largest I_a among those of its document up to itself; of equal ones, the earlier.
Source: DeepSeek V3.2's lightning indexer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import comm
from ..config import TreeConfig, check_positive, default_config
from ..layout import Layout, Segment, Sharding, check_layout, shard_lengths
from .prefill_cell import PromptChunk, of_runs
from .validate import check_runs, check_segments, describe

STRIP = 256  # query rows at a time, at most
SCORES, PRODUCTS = 1 << 22, 1 << 24  # numbers of a strip's scores, and of its heads' products with a block of keys


@comm.outside_graphs
@torch.no_grad()
def tree_select_func(
    index_q: Tensor,
    index_weights: Tensor,
    index_k: Tensor,
    *,
    topk: int,
    cp_group,
    softmax_scale: float = 1.0,
    layout: Layout = "zigzag",
    config: TreeConfig | None = None,
) -> Tensor:
    """The keys that an index selects for this rank's queries, without gradients. Collective over cp_group.

    All ranks' index keys are gathered, d_i numbers a token; each rank scores its own queries in blocks, in fp32.

    Args:
        index_q: [b, s/p, h_i, d_i], index_weights: [b, s/p, h_i] and index_k: [b, s/p, d_i] of this rank's shard.
        topk: keys that a query sees at most.
        cp_group: the ranks over which the sequence is sharded, a process group or 1-D DeviceMesh; None for one rank.
        softmax_scale: factor of the products of index_q and index_k.
        layout: as in `tree_attn_func`; packed documents as a layout from `dispatch_documents` or `packed_layout`.
    Returns: int32 [b, s/p, m] with m = topk, or the longest document's length if that is less: positions of keys within
        the query's document, -1 where there are fewer; for `tree_attn_func(selected=)`. Equal scores: earlier keys.
    Raises: ValueError for bad input or arguments that differ between ranks; CommError if a rank failed.
    """
    config, cp_group = config or default_config(), comm.process_group(cp_group)
    with comm.collective_call("tree_select_func", cp_group, config) as call:
        comm.check_local(index_q=index_q, index_weights=index_weights, index_k=index_k)
        _check(index_q, index_weights, index_k, topk, softmax_scale)
        world, rank = comm.group_size(cp_group), comm.group_rank(cp_group)
        sharding = _sharding(index_k, cp_group, layout)
        b, _, h, d = index_q.shape
        call.agree(
            batch=b, heads=h, dim=d, topk=topk, seq_len=sharding.seq_len, layout=str(layout), scale=softmax_scale,
            dtype=index_k.dtype, config=config,
        )  # fmt: skip
        rows = index_k.transpose(0, 1)
        padded = torch.cat((rows, rows.new_zeros(sharding.rows - rows.shape[0], b, d)))
        keys = comm.gather_sequence(padded, cp_group, transport=config.transport, timeout_s=config.timeout_s)
    keys = _Keys(keys, sharding.segments(*((r,) for r in range(world))))
    wanted = min(topk, max(getattr(sharding.layout, "lengths", (sharding.seq_len,)), default=0))
    return _select(index_q * softmax_scale, index_weights, keys, sharding.segments((rank,)), wanted)


@comm.outside_graphs
@torch.no_grad()
def tree_select_prefill(
    index_q: Tensor,
    index_weights: Tensor,
    index_k: Tensor,
    *,
    topk: int,
    cp_group,
    shares: Sequence[Sequence[tuple[int, int]]],
    key_segments: Sequence[Sequence[Segment]],
    softmax_scale: float = 1.0,
    config: TreeConfig | None = None,
) -> Tensor:
    """`tree_select_func` for a chunk of a prompt over a cache, both sharded. Collective.

    Args:
        index_q [b, n, h_i, d_i], index_weights [b, n, h_i]: of this rank's queries, or of all queries on every rank.
        index_k [b, s_local, d_i]: of all keys that this rank holds, including the chunk's.
        shares: as in `tree_prefill`; one entry if every rank has all queries. key_segments: likewise, for every rank.
        Others as in `tree_select_func`.
    Returns: int32 [b, n, m] with m = topk, or the number of all keys if that is less; for `tree_prefill(selected=)`.
    """
    config, cp_group = config or default_config(), comm.process_group(cp_group)
    with comm.collective_call("tree_select_prefill", cp_group, config) as call:
        comm.check_local(index_q=index_q, index_weights=index_weights, index_k=index_k)
        _check(index_q, index_weights, index_k, topk, softmax_scale, cached=True)
        shares, segments = check_runs(shares), check_segments(key_segments)
        chunk = PromptChunk(comm.group_rank(cp_group), shares, segments, None, None)
        b, n, h, d = index_q.shape
        runs = shares[0] if len(shares) == 1 else shares[chunk.rank]
        queries, counts = of_runs(runs), chunk.num_keys
        if sum(s.length for s in queries) != n or counts[chunk.rank] != index_k.shape[1]:
            raise ValueError(
                f"index_q has {n} queries and index_k {index_k.shape[1]} keys, but shares={shares} and key_segments "
                f"give this rank {sum(s.length for s in queries)} and {counts[chunk.rank]}"
            )
        call.agree(
            batch=b, heads=h, dim=d, topk=topk, shares=str(shares), num_keys=counts, scale=softmax_scale,
            dtype=index_k.dtype, config=config,
        )  # fmt: skip
        messages = dict(transport=config.transport, timeout_s=config.timeout_s)
        keys = comm.gather_rows(index_k.transpose(0, 1).contiguous(), counts, cp_group, **messages)
    before = itertools.accumulate(counts, initial=0)
    moved = (s._replace(row=s.row + first) for of_rank, first in zip(segments, before) for s in of_rank)
    return _select(index_q * softmax_scale, index_weights, _Keys(keys, tuple(moved)), queries, min(topk, sum(counts)))


@comm.outside_graphs
@torch.no_grad()
def tree_select(
    index_q: Tensor,
    index_weights: Tensor,
    index_k: Tensor,
    *,
    topk: int,
    cp_group,
    q_positions: Tensor,
    cache_positions: Tensor,
    num_keys: int | None = None,
    softmax_scale: float = 1.0,
    config: TreeConfig | None = None,
) -> Tensor:
    """This rank's share of the keys that an index selects for a few queries over a sharded cache. Collective.

    Every rank scores its own index keys and sends its topk best, 8 bytes each; index keys don't move.

    Args:
        index_q: [b, n, h_i, d_i] and index_weights: [b, n, h_i], the same on every rank.
        index_k: [b, s_local, d_i], of this rank's slots.
        q_positions, cache_positions: int64 [b, n] and [b, s_local], as in `tree_decode`.
        num_keys: no row has more, the same number on every rank; up to topk nothing is sent. None: not known.
        Others as in `tree_select_func`.
    Returns: int32 [b, n, m]: this rank's slots among each query's selected keys, then -1; m is that of the query that
        has most here.
    """
    config, cp_group = config or default_config(), comm.process_group(cp_group)
    with comm.collective_call("tree_select", cp_group, config) as call:
        comm.check_local(index_q=index_q, index_weights=index_weights, index_k=index_k)
        _check(index_q, index_weights, index_k, topk, softmax_scale, cached=True)
        b, n, h, d = index_q.shape
        call.agree(batch=b, queries=n, heads=h, dim=d, topk=topk, num_keys=num_keys, scale=softmax_scale, config=config)
        best, slots = _best_of_shard(
            index_q * softmax_scale, index_weights, index_k, topk, q_positions, cache_positions
        )
        least = _NOTHING + 1
        if comm.group_size(cp_group) > 1 and (num_keys is None or num_keys > topk):
            missing = best.new_full((b, n, topk - best.shape[-1]), _NOTHING)
            lists = torch.cat((best, missing), -1)[None]
            lists = comm.gather_sequence(lists, cp_group, transport=config.transport, timeout_s=config.timeout_s)
            least = lists.movedim(0, -2).flatten(-2).topk(topk, dim=-1).values[..., -1:].clamp(min=least)
    chosen = best >= least
    most = int(chosen.sum(-1).max()) if chosen.numel() else 0
    return torch.where(chosen, slots, -1)[..., :most].int()


def _best_of_shard(q, weights, k, topk: int, q_positions, k_positions) -> tuple[Tensor, Tensor]:
    """The best of a rank's keys for every query, in order: (`ranked`, slots), int64 [b, n, at most topk] each."""
    b, n, slots = *q.shape[:2], k.shape[1]
    parts, step = [], max(1, SCORES // max(1, b * slots))
    for i in range(0, n, step):
        at, positions = slice(i, i + step), k_positions[:, None]
        scores = index_scores(q[:, at].float(), weights[:, at].float(), k)
        hidden = (positions < 0) | (positions > q_positions[:, at, None])
        parts.append(ranked(scores, positions).masked_fill_(hidden, _NOTHING).topk(min(topk, slots), dim=-1))
    best, at = zip(*parts)
    return torch.cat(best, 1), torch.cat(at, 1)


def _select(q: Tensor, weights: Tensor, keys: _Keys, queries: Sequence[Segment], wanted: int) -> Tensor:
    """int32 [b, n, wanted]: positions of the keys that these queries select; q is scaled."""
    selected = torch.full((*q.shape[:2], wanted), -1, dtype=torch.int32, device=q.device)
    for strip in _strips(queries, len(q)):
        at, k = slice(strip.row, strip.row + strip.length), keys.before(strip)
        scores = index_scores(q[:, at].float(), weights[:, at].float(), k)
        positions = torch.arange(k.shape[1], device=k.device)
        later = positions > positions[strip.pos :, None]
        best = ranked(scores, positions).masked_fill_(later, _NOTHING).topk(min(wanted, k.shape[1]), dim=-1).values
        selected[:, at, : best.shape[-1]] = torch.where(best == _NOTHING, -1, -best & 0xFFFFFFFF)
    return selected


def index_scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """I [b, n, keys], fp32, of q [b, n, h, d], scaled, weights [b, n, h] and k [b, keys, d]."""
    (b, n, h, _), count = q.shape, k.shape[1]
    step = max(1, PRODUCTS // max(1, b * n * h))
    scores = q.new_empty(b, n, count)
    for i in range(0, count, step):
        of_heads = torch.einsum("bnhd,bkd->bnhk", q, k[:, i : i + step].float()).relu_()
        scores[..., i : i + step] = (weights.unsqueeze(-2) @ of_heads).squeeze(-2)
    return scores


_NOTHING = torch.iinfo(torch.int64).min


def ranked(scores: Tensor, positions: Tensor) -> Tensor:
    """int64 in the order of fp32 scores and, of equal ones, of positions, the first the largest; the lower 32 bits are
    the negative position."""
    bits = (scores + 0.0).view(torch.int32).long()  # + 0.0: no negative zero
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) - positions


class _Keys:
    """Gathered keys [rows, b, d] in the order of documents and positions."""

    def __init__(self, rows: Tensor, segments: tuple[Segment, ...]):
        order = sorted(segments, key=lambda s: (s.seq, s.pos))
        at = [torch.arange(s.row, s.row + s.length, device=rows.device) for s in order]
        self._rows = rows.transpose(0, 1)[:, torch.cat(at)] if at else rows.transpose(0, 1)
        self._starts: dict[int, int] = {}
        first = 0
        for s in order:
            self._starts.setdefault(s.seq, first)
            first += s.length

    def before(self, queries: Segment) -> Tensor:
        """[b, n, d]: the keys of these queries' document up to the last of them, from position 0."""
        start = self._starts[queries.seq]
        return self._rows[:, start : start + queries.pos + queries.length]


def _strips(segments: Sequence[Segment], batch: int) -> Iterator[Segment]:
    """Short segments, so that the scores of all their keys are few numbers."""
    for s in segments:
        first, end = s.pos, s.pos + s.length
        while first < end:
            count = max(1, min(STRIP, end - first, SCORES // max(1, batch * end)))
            yield s.part(first, first + count)
            first += count


def _sharding(x: Tensor, cp_group, layout: Layout) -> Sharding:
    world, rank = comm.group_size(cp_group), comm.group_rank(cp_group)
    layout = check_layout(layout, world)
    seq_len = sum(layout) if isinstance(layout, tuple) else x.shape[1] * world
    here = shard_lengths(seq_len, world, layout)[rank]
    if here != x.shape[1]:
        raise ValueError(f"index_k has {x.shape[1]} tokens on rank {rank}, but layout={layout!r} gives it {here}")
    return Sharding(seq_len=seq_len, world=world, layout=layout)


def _check(q: Tensor, weights: Tensor, k: Tensor, topk: int, softmax_scale: float, *, cached: bool = False) -> None:
    """cached: index_k may have any number of keys."""
    if not isinstance(q, Tensor) or q.dim() != 4:
        raise ValueError(f"index_q must be [batch, tokens, index heads, dim], got {describe(q)}")
    num_keys = k.shape[1] if cached and isinstance(k, Tensor) and k.dim() == 3 else q.shape[1]
    for name, x, shape in (("index_weights", weights, q.shape[:3]), ("index_k", k, (len(q), num_keys, q.shape[3]))):
        if not isinstance(x, Tensor) or tuple(x.shape) != tuple(shape) or x.device != q.device:
            raise ValueError(f"{name} must be {list(shape)} on {q.device} to match index_q, got {describe(x)}")
    if topk is None or check_positive("topk", topk) is None:
        raise ValueError("topk must be a positive integer, got None")
    if isinstance(softmax_scale, bool) or not math.isfinite(softmax_scale) or softmax_scale <= 0:
        raise ValueError(f"softmax_scale={softmax_scale!r} must be a positive number")
