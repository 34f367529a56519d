"""Which keys queries see, chosen by an index: the keys of largest scores, over a sequence or a cache that is sharded.

    score of key a for a query:  I_a = sum_h w_h relu(softmax_scale * q_h . k_a)    h: index heads; a token has one key

A query sees the topk keys of largest I_a among those of its document up to itself; of equal ones, the earlier.
Source: DeepSeek V3.2's lightning indexer.

With `Blocks` keys are those of complete blocks of neighbouring tokens, counted from a document's first. A query sees
all tokens of the topk best blocks that end at its position or before, and the tokens since the last of these ends.
Source: Qwen4-Exp's indexer.

In a decode step (`tree_select`) the index keys are sharded as the cache is, and stay where they are. Every rank scores
its own; the ranks merge lists of their best, or count scores, and each gets the slots of the selected keys that it
holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import comm, kernels
from ..config import SELECT_SCHEDULES, TreeConfig, check_choice, check_positive, integer
from ..duals import check_tangents
from ..kernels import KVCache, index_scores
from ..layout import Dispatched, Layout, Segment, Sharding, TreeRun, tree_of_blocks
from ..layout import positions_of as positions_of_rows
from ..log import say_once
from ..merge import NO_ENTRY, ListReducer, positions_of, ranked
from ..plan import plan_select
from ..spec import AttnSpec
from .prefill import PromptChunk, run_segments
from .sequences import layouts_of, sharding_of
from .validate import (
    DTYPES,
    check_cache,
    check_device,
    check_finite_index,
    check_runs,
    check_seen_slots,
    check_segments,
    describe,
)

STRIP = 256  # query rows at a time, at most
SCORES = 1 << 22  # numbers of a strip's scores


class Blocks(NamedTuple):
    """Blocks of tokens that are selected as wholes."""

    size: int
    """Tokens of a block."""
    key: Callable[[Tensor, Tensor], Tensor]
    """The keys [b, n, d_i] of blocks whose tokens have keys [b, n, size, d], and whose first positions int64 [n]."""


@comm.public_call
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
    block_size: int | None = None,
    blocks: Blocks | None = None,
    config: TreeConfig | None = None,
) -> Tensor:
    """The keys that an index selects for this rank's queries, without gradients. Collective over cp_group.

    All ranks' index keys are gathered, d_i numbers a token; each rank scores its own queries in blocks, in fp32.

    Args:
        index_q: [b, s/p, h_i, d_i], index_weights: [b, s/p, h_i] and index_k: [b, s/p, d_i] of this rank's shard.
        topk: keys, or blocks, that a query sees at most.
        cp_group: the ranks over which the sequence is sharded, a process group or 1-D DeviceMesh; None for one rank.
        softmax_scale: factor of the products of index_q and index_k.
        layout: as in `tree_attn_func`; packed documents as a layout from `dispatch_documents` or `packed_layout`; of
            `dispatch_prefix_tree`: a query sees keys among the tokens before it in its rows, and whole blocks of them.
        block_size: index_k [b, n, d_i] are keys of complete blocks of so many tokens, which lie as
            `layout.blocks(block_size)` of a `Dispatched` layout; a query sees those that end up to its position.
        blocks: select whole blocks of tokens; their keys are made of index_k on every rank.
    Returns: int32 [b, s/p, m] with m = topk, or the longest document's length if that is less: positions of keys within
        the query's document (a prefix tree's packed row is one), -1 where there are fewer; for
        `tree_attn_func(selected=)`. Equal scores: earlier keys. With block_size likewise, numbers of blocks.
        With blocks m = topk * size + size - 1, with the number of the longest document's blocks if that is less.
    Raises: ValueError for bad input or arguments that differ between ranks; CommError if a rank failed.
    """
    ranks = comm.Ranks.of(cp_group, index_q.device, config)
    (layout,) = layouts_of(layout, ranks, "tree_select_func", index_k=index_k)
    with ranks.call("tree_select_func") as call:
        of_blocks = check_positive("block_size", block_size) is not None
        check_index(index_q, index_weights, index_k, topk, softmax_scale, cached=of_blocks)
        sharding, tree = sharding_of(index_q, "index_q", ranks, layout), getattr(layout, "tree", ())
        tree_of_blocks(tree, block_size or (1 if blocks is None else blocks.size))  # raises where it parts within one
        of_keys = sharding
        if of_blocks and blocks is not None:
            raise ValueError(f"block_size={block_size} says that index_k is of blocks already: leave blocks out")
        if of_blocks:
            if not isinstance(layout, Dispatched):
                raise ValueError(f"block_size={block_size} needs a Dispatched layout, not {layout!r}")
            of_keys = sharding_of(index_k, "index_k", ranks, layout.blocks(block_size))
        b, _, h, d = index_q.shape
        call.agree(
            batch=b, heads=h, dim=d, topk=topk, seq_len=sharding.seq_len, layout=str(layout), scale=softmax_scale,
            dtype=index_k.dtype, block=block_size if blocks is None else blocks.size, config=config,
        )  # fmt: skip
        keys = KeysInOrder.gathered(index_k, of_keys, ranks, tree, block_size or 1)
    queries = sharding.in_rows(ranks.rank)
    if blocks is not None:
        keys = keys.in_blocks(blocks)
    wanted = min(topk, getattr(layout, "longest", sharding.seq_len) // keys.size)
    if of_blocks:
        return positions_of(_lists(index_q, index_weights, keys, queries, wanted, softmax_scale)).to(torch.int32)
    return _select(index_q, index_weights, keys, queries, wanted, softmax_scale)


@comm.public_call
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
    block_size: int = 1,
    config: TreeConfig | None = None,
) -> Tensor:
    """`tree_select_func` for a chunk of a prompt over a cache, both sharded. Collective.

    Ranks gather index keys or, if these are fewer bytes, queries: each lists the best of its own keys for all queries,
    and lists are merged on the queries' ranks.

    Args:
        index_q [b, n, h_i, d_i], index_weights [b, n, h_i]: of this rank's queries, or of all queries on every rank.
        index_k [b, s_local, d_i]: of all keys that this rank holds, including the chunk's; of blocks, complete ones.
        shares: as in `tree_prefill`; one entry if every rank has all queries. key_segments: likewise, for every rank.
        block_size: tokens of a block. Every rank holds all tokens of its blocks, of incomplete ones, too.
        Others as in `tree_select_func`.
    Returns: int32 [b, n, m] with m = topk, or the number of all keys if that is less; for `tree_prefill(selected=)`. Of
            blocks likewise, and m = topk * block_size + block_size - 1.
    """
    ranks = comm.Ranks.of(cp_group, index_q.device, config)
    with ranks.call("tree_select_prefill") as call:
        check_index(index_q, index_weights, index_k, topk, softmax_scale, cached=True)
        shares, segments = check_runs(shares), segments_of_blocks(check_segments(key_segments), block_size)
        chunk = PromptChunk(ranks.rank, shares, segments, None, None)
        b, n, h, d = index_q.shape
        runs = shares[0] if len(shares) == 1 else shares[chunk.rank]
        queries, counts = run_segments(runs), chunk.num_keys
        if sum(s.length for s in queries) != n or counts[chunk.rank] != index_k.shape[1]:
            raise ValueError(
                f"index_q has {n} queries and index_k {index_k.shape[1]} keys, but shares={shares} and key_segments "
                f"give this rank {sum(s.length for s in queries)} and {counts[chunk.rank]}"
            )
        call.agree(
            batch=b, heads=h, dim=d, topk=topk, shares=str(shares), num_keys=counts, scale=softmax_scale,
            dtype=index_k.dtype, block=block_size, config=config,
        )  # fmt: skip
        wanted = min(topk, sum(counts))
        lengths = tuple(sum(length for _, length in run) for run in shares)
        rows = index_k.transpose(0, 1).contiguous()
        if queries_travel(lengths, counts, h * (d + 1) * 4 + wanted * 8, d * index_k.element_size()):
            asked = torch.cat((index_q.float().flatten(2), index_weights.float()), -1).transpose(0, 1).contiguous()
            asked = ranks.gather_rows(asked, lengths).transpose(0, 1)
            asked, keys = asked.split((h * d, h), -1), KeysInOrder(rows, segments[chunk.rank], block_size)
            lists = _lists(asked[0].unflatten(-1, (h, d)), asked[1], keys, _in_order(shares), wanted, softmax_scale)
            return selected_tokens(positions_of(_merged(lists, lengths, ranks)), queries, block_size)
        keys = ranks.gather_rows(rows, counts)
    keys = KeysInOrder(keys, _one_after_another(segments, counts), block_size)
    return _select(index_q, index_weights, keys, queries, wanted, softmax_scale)


def queries_travel(queries: Sequence[int], keys: Sequence[int], query_bytes: int, key_bytes: int) -> bool:
    """Whether a prefill's index sends queries, and lists back, not keys: if these are fewer bytes.

    queries, keys: how many each rank has; one number of queries if every rank has all. Of p ranks one sends
    (p - 1) times its queries and all lists, or (p - 1) times its keys.
    """
    return len(queries) == len(keys) > 1 and max(queries) * query_bytes < max(keys) * key_bytes


def _one_after_another(segments: Sequence[Sequence[Segment]], counts: Sequence[int]) -> tuple[Segment, ...]:
    """The segments of all ranks in their rows one after another."""
    before = itertools.accumulate(counts, initial=0)
    return tuple(s._replace(row=s.row + first) for of_rank, first in zip(segments, before) for s in of_rank)


def _in_order(shares: Sequence[Sequence[tuple[int, int]]]) -> tuple[Segment, ...]:
    """The queries of all ranks, one after another."""
    return run_segments([run for runs in shares for run in runs])


def _merged(lists: Tensor, lengths: Sequence[int], ranks: comm.Ranks) -> Tensor:
    """Lists int64 [b, n, k] of all ranks' queries over this rank's keys -> lists of its own over all."""
    parts = lists.transpose(0, 1).split(tuple(lengths))
    padded = [F.pad(x, (0, 0, 0, 0, 0, max(lengths) - len(x)), value=NO_ENTRY) for x in parts]
    merged = comm.start_reduce_scatter(torch.cat(padded), ranks.everyone, ListReducer).wait()
    return merged[: lengths[ranks.rank]].transpose(0, 1)


def tokens_of_blocks(blocks: Tensor, size: int) -> Tensor:
    """int [..., m * size]: the positions, or slots, of the tokens of blocks int [..., m], -1 of the block -1."""
    tokens = blocks[..., None] * size + torch.arange(size, device=blocks.device)
    return tokens.masked_fill(blocks[..., None] < 0, -1).flatten(-2)


def tokens_after_blocks(positions: Tensor, size: int) -> Tensor:
    """int64 [..., size - 1]: for queries at these positions the tokens up to them of the block that is incomplete for
    them, then -1."""
    positions = positions[..., None]
    tokens = (positions + 1) // size * size + torch.arange(size - 1, device=positions.device)
    return tokens.masked_fill(tokens > positions, -1)


def segments_of_blocks(segments: list[list[Segment]], size: int) -> list[list[Segment]]:
    """Segments of tokens as segments of complete blocks: a rank holds whole ones, but for the sequence's last."""
    return [
        [Segment(s.row // size, s.pos // size, (s.pos + s.length) // size - s.pos // size) for s in of_rank]
        for of_rank in segments
    ]


def _select(
    q: Tensor, weights: Tensor, keys: KeysInOrder, queries: Sequence[Segment], wanted: int, scale: float
) -> Tensor:
    """int32 [b, n, m]: positions of the tokens that these queries select with `wanted` keys."""
    numbers = positions_of(_lists(q, weights, keys, queries, wanted, scale))
    return selected_tokens(numbers, queries, keys.size, keys.tree)


def _lists(
    q: Tensor, weights: Tensor, keys: KeysInOrder, queries: Sequence[Segment], wanted: int, scale: float
) -> Tensor:
    """int64 [b, n, wanted]: the best of these keys for each query, as `merge.ranked` entries, then `NO_ENTRY`."""
    lists = torch.full((*q.shape[:2], wanted), NO_ENTRY, device=q.device)
    for strip in strips(queries):
        at, (k, numbers, later) = slice(strip.row, strip.row + strip.length), keys.before(strip)
        for i in range(len(q)):
            entries = ranked(index_scores(q[i, at], weights[i, at], k[i], scale), numbers)
            best = entries.masked_fill_(later, NO_ENTRY).topk(min(wanted, k.shape[1])).values
            lists[i, at, : best.shape[-1]] = best
    return lists


def selected_tokens(blocks: Tensor, queries: Sequence[Segment], size: int, tree: Sequence[TreeRun] = ()) -> Tensor:
    """int32 [b, n, m * size + size - 1]: positions of the tokens of selected blocks int64 [b, n, m], and of those after
    the last block.

    tree: of a prefix tree, in whose packed row blocks and tokens are counted; queries are at positions in its rows.
    """
    tokens, own = tokens_of_blocks(blocks, size), positions_of_rows(queries, blocks.shape[1], device=blocks.device)
    after = tokens_after_blocks(own, size)
    if tree and size > 1:
        starts, of_blocks = (_starts(runs) for runs in (tree, tree_of_blocks(tree, size)))
        # of each block: the tokens before it in the packed row that are in no complete block
        skipped = [torch.full((run.length // size,), a - size * n) for run, a, n in zip(tree, starts, of_blocks)]
        skipped = torch.cat(skipped).to(blocks.device)[blocks].repeat_interleave(size, -1)
        tokens = torch.where(tokens < 0, -1, tokens + skipped)
        in_packed = [s._replace(pos=starts[s.seq] + s.pos - tree[s.seq].depth) for s in queries]
        shift = positions_of_rows(in_packed, len(own), device=own.device) - own
        after = torch.where(after < 0, -1, after + shift[:, None])
    return torch.cat((tokens, after.expand(len(blocks), -1, -1)), -1).to(torch.int32)


def _starts(tree: Sequence[TreeRun]) -> list[int]:
    """The first row of each run in the packed row."""
    return [*itertools.accumulate((run.length for run in tree[:-1]), initial=0)]


class KeysInOrder:
    """Keys [rows, b, d] of all ranks, or of one, in the order of documents and positions; of tokens, or of blocks of
    `size` tokens.

    segments: where they are, in keys. tree: the runs of a prefix tree, in tokens: documents, at their positions in the
    tree's rows.
    """

    def __init__(self, rows: Tensor, segments: Sequence[Segment], size: int = 1, tree: Sequence[TreeRun] = ()):
        order = sorted(segments, key=lambda s: (s.seq, s.pos))
        at = [torch.arange(s.row, s.row + s.length, device=rows.device) for s in order]
        self.source = torch.cat(at) if at else torch.arange(len(rows), device=rows.device)
        """int64: the row of each key."""
        self._rows = rows.transpose(0, 1)[:, self.source]
        parts = [torch.arange(s.pos, s.pos + s.length, device=rows.device) for s in order]
        self._numbers = torch.cat(parts) if parts else torch.arange(0, device=rows.device)
        """Of each key within its document: a token's position, or which block it is."""
        self._documents: dict[int, tuple[int, int]] = {}
        """By number of a document: its first key in this order, and how many it has."""
        self.size, self.tree, first = size, tree, 0
        of_blocks = tree_of_blocks(tree, size)
        self._shifts = [start - run.depth for start, run in zip(_starts(of_blocks), of_blocks)]
        """From numbers in a row of the tree to those in the packed row."""
        for s in order:
            start, length = self._documents.get(s.seq, (first, 0))
            self._documents[s.seq] = start, length + s.length
            first += s.length

    @classmethod
    def gathered(
        cls, x: Tensor, sharding: Sharding, ranks: comm.Ranks, tree: Sequence[TreeRun] = (), size: int = 1
    ) -> KeysInOrder:
        """Of x [b, s/p, d] of every rank; tree: the runs of a prefix tree; size: of blocks. Collective."""
        rows = x.transpose(0, 1)
        padded = torch.cat((rows, rows.new_zeros(sharding.rows - len(rows), *rows.shape[1:])))
        return cls(ranks.gather(padded), sharding.in_rows(*range(ranks.size)), size, tree)

    def in_blocks(self, blocks: Blocks) -> KeysInOrder:
        """The keys of the tokens' complete blocks."""
        parts, segments, at = [], [], 0
        for document, (start, length) in self._documents.items():
            count, first = length // blocks.size, self.tree[document].depth if self.tree else 0
            tokens = self._rows[:, start : start + count * blocks.size].unflatten(1, (count, blocks.size))
            parts.append(blocks.key(tokens, first + torch.arange(count, device=tokens.device) * blocks.size))
            segments.append(Segment(at, first // blocks.size, count, document))
            at += count
        keys = torch.cat(parts or [self._rows[:, :0]], 1).transpose(0, 1)
        return KeysInOrder(keys, segments, blocks.size, self.tree)

    def before(self, queries: Segment) -> tuple[Tensor, Tensor, Tensor]:
        """[b, n, d], int64 [n], bool [queries, n]: the keys of these queries' document up to the last of them, in a
        tree with those of the runs before; their numbers, in a tree those in the packed row; and which of them come
        after a query."""
        parts = []
        for seq, start, count in self._spans(queries):
            numbers = self._numbers[start : start + count]
            shift = self._shifts[seq] if self.tree else 0
            parts.append((self._rows[:, start : start + count], numbers, numbers + shift))
        if len(parts) > 1:
            parts = [tuple(torch.cat(x, dim) for x, dim in zip(zip(*parts), (1, 0, 0)))]
        rows, numbers, in_packed = parts[0]
        own = torch.arange(queries.pos, queries.pos + queries.length, device=rows.device)
        return rows, in_packed, (numbers + 1) * self.size > own[:, None] + 1

    def _spans(self, queries: Segment) -> list[tuple[int, int, int]]:
        """(document, first key, keys) of what these queries see, in the order of positions."""
        spans, seq, end = [], queries.seq, (queries.pos + queries.length) // self.size
        while seq >= 0:
            start, length = self._documents.get(seq, (0, 0))
            spans.append((seq, start, int((self._numbers[start : start + length] < end).sum())))
            seq = self.tree[seq].parent if self.tree else -1
        return spans[::-1]

    def place(self, queries: Segment) -> Tensor:
        """int64: where the keys of `before` are in this order."""
        spans = [torch.arange(a, a + n, device=self.source.device) for _, a, n in self._spans(queries)]
        return torch.cat(spans)


def strips(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Short segments, so that the scores of all their keys are few numbers."""
    for s in segments:
        first, end = s.pos, s.pos + s.length
        while first < end:
            count = max(1, min(STRIP, end - first, SCORES // max(1, end)))
            yield s.part(first, first + count)
            first += count


def check_index(q: Tensor, weights: Tensor, k: Tensor, topk: int, scale: float, *, cached: bool = False) -> None:
    """cached: index_k may have any number of keys."""
    if not isinstance(q, Tensor) or q.dim() != 4:
        raise ValueError(f"index_q must be [batch, tokens, index heads, dim], got {describe(q)}")
    num_keys = k.shape[1] if cached and isinstance(k, Tensor) and k.dim() == 3 else q.shape[1]
    for name, x, shape in (("index_weights", weights, q.shape[:3]), ("index_k", k, (len(q), num_keys, q.shape[3]))):
        if not isinstance(x, Tensor) or tuple(x.shape) != tuple(shape) or x.device != q.device:
            raise ValueError(f"{name} must be {list(shape)} on {q.device} to match index_q, got {describe(x)}")
    _checked_counts(topk, None)
    check_scale("softmax_scale", scale)


def check_scale(name: str, scale: float) -> None:
    if isinstance(scale, bool) or not math.isfinite(scale) or scale <= 0:
        raise ValueError(f"{name}={scale!r} must be a positive number")


# decode steps


@comm.public_call
def tree_select(
    index_q: Tensor,
    index_weights: Tensor,
    index_k: Tensor,
    *,
    topk: int,
    cp_group,
    q_positions: Tensor,
    cache_positions: Tensor,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float = 1.0,
    max_seqlen: int | None = None,
    schedule: str = "auto",
    config: TreeConfig | None = None,
) -> Tensor:
    """The slots of this rank among every query's `topk` best keys. Collective over cp_group; no gradients.

    Of the keys that a query sees, over all ranks, these are the ones of the largest index score

        I_ia = sum_h index_weights_ih relu(softmax_scale * index_q_ih . index_k_a),

    in fp32; of equal scores those at earlier positions.

    Args:
        index_q: [b, n, h_i, d_i], index_weights: [b, n, h_i]; the same on every rank.
        index_k: [b, s_local, d_i], of this rank's slots, as k_cache of `tree_decode`; or pages [pages, page_size, d_i]
            with a block_table. Any dtypes: products and sums are fp32.
        topk: keys of a query, the same on every rank.
        cp_group, cache_seqlens, block_table: as in `tree_decode`.
        q_positions, cache_positions: as in `tree_decode`, where a query sees a slot at 0 <= position <= its own. No two
            visible slots of a row have the same position, on whatever ranks.
        max_seqlen: no query sees more keys than this, over all ranks; the same on every rank. Where it is at most topk
            nothing is sent. Default: the last of q_positions + 1; on an accelerator, unknown.
        schedule: lists of the best keys are merged by "allgather", "butterfly", "scatter" or "two_level", as in
            `tree_decode`; "counts": the k-th score is searched by counting. "auto": the planner's choice.
        config: `TreeConfig`; topology, transport, memory_budget, timeout_s and check are used.

    Returns: int32 [b, n, m], slots of this rank for `tree_decode(selected=)`, the best key's first, -1 beyond the last.
        All ranks together have min(topk, keys that the query sees) for each query. m may differ between ranks.
    Raises: ValueError for bad input or arguments that differ between ranks; CommError if a rank failed or does not
        respond.
    """
    ranks = comm.Ranks.of(cp_group, index_q.device, config)
    with ranks.call("tree_select") as call, torch.no_grad():
        check_tangents(index_q=index_q, index_weights=index_weights, index_k=index_k)
        check_choice("schedule", schedule, SELECT_SCHEDULES)
        topk, max_seqlen = _checked_counts(topk, max_seqlen)
        _check_index(index_q, index_weights, index_k)
        cache = KVCache(
            index_k[:, :, None], None, head_dim_v=index_k.shape[2], lengths=cache_seqlens, q_positions=q_positions,
            k_positions=cache_positions, block_table=block_table,
        )  # fmt: skip
        check_cache(index_q.to(index_k.dtype), cache)
        if q_positions is None or cache_positions is None:
            raise ValueError("tree_select needs q_positions and cache_positions, which decide between equal scores")
        cache = check_seen_slots(index_q, cache, AttnSpec(softmax_scale=1.0))
        check_finite_index(ranks, index_q, index_weights, cache)
        sends = ranks.size > 1 and _longest(cache, max_seqlen) > topk
        call.agree(
            index_q=index_q.shape,
            topk=topk,
            softmax_scale=softmax_scale,
            sends=sends,
            schedule=schedule,
            paged=block_table is not None,
            config=config,
            topology=ranks.fingerprint,
        )
        select = _Selection(ranks, index_q.shape[:2], topk, schedule) if sends else _keep_all
        return select(lambda: kernels.best_keys(index_q, index_weights, cache, topk, softmax_scale))


def _checked_counts(topk, max_seqlen) -> tuple[int, int | None]:
    if (integer(topk) or 0) < 1:
        raise ValueError(f"topk={topk!r} must be a positive integer, the number of keys that a query attends to")
    if max_seqlen is not None and (integer(max_seqlen) is None or max_seqlen < 0):
        raise ValueError(f"max_seqlen={max_seqlen!r} must be an integer, the most keys that a query sees, or None")
    return integer(topk), max_seqlen


def _check_index(q: Tensor, weights: Tensor, k: Tensor) -> None:
    """q [b, n, h, d], weights [b, n, h], k [.., .., d], in floating point, on one device."""
    for name, x, dims in (("index_q", q, 4), ("index_weights", weights, 3), ("index_k", k, 3)):
        if not isinstance(x, Tensor) or x.dim() != dims or x.dtype not in DTYPES:
            raise ValueError(f"{name} must be a {dims}-D tensor in fp32, bf16, fp16 or fp64, got {describe(x)}")
        check_device(name, x, q)
    if weights.shape != q.shape[:3]:
        raise ValueError(f"index_weights {tuple(weights.shape)} must be index_q's first axes, {tuple(q.shape[:3])}")
    if k.shape[2] != q.shape[3]:
        raise ValueError(f"index_k {tuple(k.shape)} must have index_q's head_dim, {q.shape[3]}")


def _longest(cache: KVCache, max_seqlen: int | None) -> float:
    """The most keys that a query may see, over all ranks. The same on every rank, so the shard does not count."""
    if max_seqlen is None and cache.q_positions.device.type == "cpu":
        return int(cache.q_positions.max()) + 1 if cache.q_positions.numel() else 0
    return float("inf") if max_seqlen is None else max_seqlen


def _keep_all(best_keys) -> Tensor:
    return _slots_from(*best_keys(), NO_ENTRY + 1)


def _slots_from(lists: Tensor, slots: Tensor, threshold) -> Tensor:
    """The slots of entries from a threshold on, int32 [b, n, m], then -1."""
    kept = (lists >= threshold) & (lists != NO_ENTRY)
    if kept.device.type == "cpu":  # shorter lists are read faster; on an accelerator it would stall
        kept = kept[..., : int(kept.sum(-1).max()) if kept.numel() else 0]
    return slots[..., : kept.shape[-1]].where(kept, -1).to(torch.int32)


class _Selection:
    """The k-th best entry of every query, over all ranks."""

    def __init__(self, ranks: comm.Ranks, queries: torch.Size, topk: int, schedule: str):
        self.ranks, self.topk, self.shape = ranks, topk, (*queries, topk)
        network = ranks.network_of_memory
        self.plan, reason = plan_select(
            ranks.size,
            rows=queries.numel(),
            topk=topk,
            topology=network.topology,
            placement=network.placement,
            schedule=schedule,
            memory_budget=ranks.config.memory_budget,
        )
        if schedule == "auto":
            say_once(f"selection of keys of a layer: {reason}", about=f"selection of keys {self.plan}")

    def __call__(self, best_keys) -> Tensor:
        if self.plan.schedule == "counts":
            lists, slots = best_keys()
            rows = lists.flatten(0, 1)
            threshold = comm.kth_largest(rows, self.topk, self.plan.bits, self.ranks)
            return _slots_from(lists, slots, threshold.view(*self.shape[:2], 1))
        placement = self.ranks.network.placement
        merge = comm.Reduction(
            ranks=self.ranks,
            schedule=self.plan.schedule,
            shape=self.shape,
            dtype=torch.int64,
            in_memory=True,
            order=placement.order,
            block=placement.block,
            across=self.plan.across,
            reducer=ListReducer,
        ).start()  # receives are posted before the keys are scored
        lists, slots = best_keys()
        whole = torch.full(self.shape, NO_ENTRY, device=lists.device)
        whole[..., : lists.shape[-1]] = lists
        return _slots_from(lists, slots, merge(whole)[..., -1:])
