"""Index-selected attention (DeepSeek-V3.2): which keys of a sharded cache a query attends to. No gradients.

The index keys are sharded as the cache is. Every rank scores its own; the ranks merge lists of their best, or count
scores, and each gets the slots of the selected keys that it holds. Keys stay where they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import comm, kernels
from ..config import SELECT_SCHEDULES, TreeConfig, check_choice, integer
from ..kernels import KVCache
from ..log import say_once
from ..merge import NO_ENTRY, ListReducer
from ..plan import plan_select
from ..spec import AttnSpec
from .derivatives import check_tangents
from .validate import DTYPES, check_cache, check_device, check_finite_index, check_seen_slots, describe


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
            say_once(f"selection of keys: {reason}", about=f"selection of keys {self.plan}")

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
