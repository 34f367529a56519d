"""Which keys queries see, chosen by an index: the keys of largest scores, over a sequence that is sharded.

    score of key a for a query:  I_a = sum_h w_h relu(softmax_scale * q_h . k_a)    h: index heads; a token has one key

A query sees the topk keys of largest I_a among those of its document up to itself; of equal ones, the earlier.
Source: DeepSeek V3.2's lightning indexer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import comm
from ..config import TreeConfig, check_positive, default_config
from ..layout import Layout, Segment, Sharding, check_layout, shard_lengths
from ..merge import NEG_INF
from .validate import describe

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
    segments = sharding.segments(*((r,) for r in range(world)))
    keys = _Keys(keys, segments)
    wanted = min(topk, max(getattr(sharding.layout, "lengths", (sharding.seq_len,)), default=0))
    selected = torch.full((b, index_q.shape[1], wanted), -1, dtype=torch.int32, device=index_q.device)
    q, weights = index_q.float() * softmax_scale, index_weights.float()
    for strip in _strips(sharding.segments((rank,)), b):
        at, k = slice(strip.row, strip.row + strip.length), keys.before(strip)
        scores = index_scores(q[:, at], weights[:, at], k)
        positions = torch.arange(k.shape[1], device=k.device)
        later = positions > positions[strip.pos :, None]
        chosen = largest(scores.masked_fill_(later, NEG_INF), min(wanted, k.shape[1]))
        selected[:, at, : chosen.shape[-1]] = chosen
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


def largest(scores: Tensor, count: int) -> Tensor:
    """int32 [..., count]: where the largest of scores [..., n] are, fp32, in their order; of equal ones the first; -1
    instead of -inf."""
    bits = (scores + 0.0).view(torch.int32).long()  # + 0.0: no negative zero
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32  # integers in the order of the scores
    at = (ordered - torch.arange(scores.shape[-1], device=scores.device)).topk(count, dim=-1).indices
    return torch.where(scores.gather(-1, at) == NEG_INF, -1, at).int()


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


def _strips(segments: tuple[Segment, ...], batch: int) -> Iterator[Segment]:
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


def _check(q: Tensor, weights: Tensor, k: Tensor, topk: int, softmax_scale: float) -> None:
    if not isinstance(q, Tensor) or q.dim() != 4:
        raise ValueError(f"index_q must be [batch, tokens, index heads, dim], got {describe(q)}")
    for name, x, shape in (("index_weights", weights, q.shape[:3]), ("index_k", k, (*q.shape[:2], q.shape[3]))):
        if not isinstance(x, Tensor) or tuple(x.shape) != tuple(shape) or x.device != q.device:
            raise ValueError(f"{name} must be {list(shape)} on {q.device} to match index_q, got {describe(x)}")
    if topk is None or check_positive("topk", topk) is None:
        raise ValueError("topk must be a positive integer, got None")
    if isinstance(softmax_scale, bool) or not math.isfinite(softmax_scale) or softmax_scale <= 0:
        raise ValueError(f"softmax_scale={softmax_scale!r} must be a positive number")
