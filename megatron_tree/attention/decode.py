"""Decoding over a KV cache that is sharded across ranks: attention of a few replicated queries. No gradients.

Ranks send queries and partial results, not the cache. `tree_decode` is one call; the layers of a model's step share a
`DecodeStep`, which checks and plans what they have in common once. Bad input raises errors as in functional.py.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import comm, kernels
from ..config import AttnSpec, TreeConfig
from ..kernels import KVCache, SharedPages
from ..log import say_once
from ..merge import merge_sinks, state_dtype
from ..plan import DecodePlan, plan_decode
from ..plan.cost import placed_topology
from ..plan.decode import exchanges_queries, projects_first
from .derivatives import check_tangents, in_torch
from .head_shares import all_heads_of, check_head_shares, gather_heads, has_all_heads, slice_of
from .precision import autocast
from .spec import make_spec
from .tuning import Stopwatch, tuned_plan
from .validate import (
    check_cache,
    check_decode_schedule,
    check_finite_cache,
    check_seen_slots,
    check_selected_slots,
    check_shared,
    check_sinks,
)

TRUSTING = ("first", "never")  # values of `TreeConfig.check` with which calls that are alike are checked once


@comm.public_call
def tree_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    cp_group,
    head_dim_v: int | None = None,
    cache_seqlens: Tensor | None = None,
    q_positions: Tensor | None = None,
    cache_positions: Tensor | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    shared: Sequence[SharedPages] = (),
    selected: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    head_shares: Sequence[int] | None = None,
    schedule: str = "auto",
    config: TreeConfig | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of a few queries over a KV cache sharded across ranks. Collective over cp_group; no gradients.

    Args:
        q: [b, s_q, h, d], the same on every rank.
        k_cache, v_cache: [b, s_local, h_kv, d] and [b, s_local, h_kv, d_v]: this rank's slots, in any order; s_local
            may differ between ranks and may be 0. The keys of the new tokens must already be in one rank's cache.
        cp_group: the process group over which the cache is sharded, or a 1-D DeviceMesh; None for one rank.
        head_dim_v: with v_cache=None: the first head_dim_v numbers of a key are its value (latent attention).
        cache_seqlens: int [b], how many leading slots of this rank's shard are valid; default: all.
        q_positions, cache_positions: int64 [b, s_q] or [s_q], and [b, s_local] or [s_local]. A query sees a slot if
            0 <= the slot's position <= the query's, within the window; -1 hides a slot (padding). Needed for s_q > 1
            and for windows; without them every query sees every valid slot.
        block_table: int32 [b, n]: k_cache and v_cache are then pages [pages, page_size, h_kv, d] and [.., d_v], and row
            i's slots are those of the pages block_table[i], in order: s_local = n * page_size. Needs cache_seqlens.
        k_scale, v_scale: fp32 [pages, page_size, h_kv], for pages in int8 or fp8 (`cache.quantize`).
        shared: `kernels.SharedPages` that rows begin with, on this rank, before those of block_table: all queries see
            them, and they are read once for all their rows. cache_seqlens and positions are of block_table's slots.
        selected: int32 [b, s_q, m], slots of this rank that each query attends to, each once, as `tree_select` returns
            them: no others are read. -1 is none; m may differ between ranks. Then without positions, window, ALiBi,
            shared pages and the ring.
        softmax_scale, window_size, softcap, sinks: as in `tree_attn_func`.
        alibi_slopes: as in `tree_attn_func`, of all heads; with positions.
        head_shares: query heads of every rank of cp_group, in rank order, for weights that are split over these ranks.
            q, sinks and the results are then those of this rank's heads (possibly none), and q is gathered. If every
            rank computes the queries of all heads, q may have them all; sinks and results stay local.
        schedule: "auto", "allreduce" (the paper's Algorithm 3), "allgather", "butterfly", "scatter", "two_level"
            (inside nodes first), "ring" (baseline).
        config: `TreeConfig`; backend, topology, transport, memory_budget, timeout_s, check and deterministic are used.
        return_lse: also return lse [b, h, s_q], fp32, natural log.

    Under torch.autocast q and the caches are cast as for torch's scaled_dot_product_attention, but for pages in 8 bits.
    A cache in another dtype is copied in every call.

    Returns: out [b, s_q, h, d_v] in q's dtype (and lse), bit-identical on all ranks that return a head.
    Raises: ValueError for bad input or arguments that differ between ranks; CommError if a rank failed or does not
        respond.
    """
    outside, q, k_cache, v_cache = autocast(q, k_cache, v_cache)
    cache = KVCache(
        k_cache, v_cache, k_scale, v_scale, head_dim_v, cache_seqlens, q_positions, cache_positions, block_table,
        shared, selected,
    )  # fmt: skip
    ranks = comm.Ranks.of(cp_group, q.device, config)
    options = DecodeOptions(ranks, softmax_scale, window_size, softcap, alibi_slopes, head_shares, schedule)
    with ranks.call("tree_decode") as call, outside, torch.no_grad():
        out, lse = DecodeCall.planned(call, q, cache, options, sinks).run(q, cache, sinks)
    return (out, lse) if return_lse else out


class DecodeStep:
    """The decode calls of a step's layers. No table, length, position or slope is written to between them.

    A call is checked, compared among the ranks and planned unless an earlier one had everything on which this depends:
    shapes, dtypes and devices, options, and the very tensors that say which slots the queries see.
    """

    def __init__(self):
        self._known: dict[tuple, tuple[DecodeCall, tuple]] = {}

    def decode(
        self,
        q: Tensor,
        cache: KVCache,
        options: DecodeOptions,
        *,
        sinks: Tensor | None = None,
        projection: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`tree_decode`: out [b, s_q, h, d_v] in q's dtype and lse [b, h, s_q].

        projection: [h, d_out, d_v] in q's dtype, for this rank's heads or for all heads on every rank: out is
            [b, s_q, h, d_out], each head's result times its matrix. With all heads' the ranks merge projected
            results if the planner predicts that to be faster.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.decode(q, cache, options, sinks=sinks, projection=projection)
        ranks, *numbers, slopes, head_shares, schedule = options
        tensors = (q, *cache[:4], sinks, projection)
        selected = cache.selected
        if selected is not None:  # each layer has its own, which may be of another length
            selected = selected.shape[:2], selected.dtype, selected.device
        same = (*cache[5:10], ranks, slopes)  # compared by identity, and kept with the key
        key = (
            *[x if x is None else (x.shape, x.dtype, x.device) for x in tensors],
            *(cache.head_dim_v, selected, *numbers, head_shares, schedule),
            *map(id, same),
        )
        planned, _ = self._known.get(key, (None, None))
        if planned is not None and planned.is_alone:
            return planned.run(q, cache, sinks, projection)
        with ranks.call("tree_decode") as call:
            if planned is not None:
                call.repeat(planned.agreement)
            else:
                planned = DecodeCall.planned(call, q, cache, options, sinks, projection)
                if ranks.config.check in TRUSTING:
                    self._known[key] = planned, same
            return planned.run(q, cache, sinks, projection)


class DecodeOptions(NamedTuple):
    """Options of a decode call, see `tree_decode`."""

    ranks: comm.Ranks
    softmax_scale: float | None = None
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    head_shares: Sequence[int] | None = None
    schedule: str = "auto"


def project(out: Tensor, projection: Tensor) -> Tensor:
    """out [b, s, h, d_v] with the matrix of every head, [h, d, d_v], applied: [b, s, h, d]."""
    return torch.einsum("bshv,hdv->bshd", out, projection)


@dataclass(kw_only=True)
class DecodeCall:
    """A planned decode call.

    Results may be projected, head by head. That is linear, so partial results can be, too: then the ranks merge what
    is projected, which may be narrower.
    """

    agreement: comm.Agreement
    options: DecodeOptions
    spec: AttnSpec
    backend: kernels.Backend
    plan: DecodePlan
    positions: tuple[Tensor, Tensor] | None
    """Of the queries and slots, as kernels take them."""
    q_shape: torch.Size
    """[b, s_q, h, d], with the heads of all ranks."""
    dtype: torch.dtype
    device: torch.device
    head_shares: tuple[int, ...] | None
    """Query heads of every rank, if there are several ranks and each has some of them; so has its result."""
    num_heads: int
    """Of the result."""
    exchanges_queries: bool
    """How heads are gathered, see `comm.gather_rows`."""
    merged_dim: int
    """Numbers of a result that is merged: head_dim_v, or, if partial results are projected, what that gives."""

    @classmethod
    def planned(
        cls, call: comm.CollectiveCall, q, cache: KVCache, options: DecodeOptions, sinks=None, projection=None
    ) -> DecodeCall:
        """Check and compare the call inside of `call`, and plan it. Tensors as of `DecodeStep.decode`."""
        ranks, config = options.ranks, options.ranks.config
        head_shares, spec, backend, cache = _checked(q, cache, options, sinks)
        whole, d_v, world = all_heads_of(q, head_shares), cache.values.shape[3], ranks.size
        of_all = projection is not None and len(projection) == whole.shape[2]
        agreement = call.agree(
            q=whole.shape,
            num_heads_kv=cache.k.shape[2],
            head_dim_v=d_v,
            latent=cache.v is None,
            dtype=q.dtype,
            spec=spec,
            sinks=sinks is not None,
            projection=None if projection is None else (projection.shape[1], of_all),
            head_shares=head_shares,
            gathers_heads=not has_all_heads(q, head_shares),
            schedule=options.schedule,
            positions=cache.q_positions is not None,
            paged=cache.block_table is not None,
            selected=cache.selected is not None,
            config=config,
            topology=ranks.fingerprint,
        )
        network = ranks.network_of_memory
        plan_on, merged_dim = _plan(options, whole, head_shares, d_v, projection if of_all else None)
        share = whole.numel() * whole.element_size() / world
        made = functools.partial(
            cls,
            agreement=agreement,
            options=options,
            spec=spec,
            backend=backend,
            positions=None if cache.q_positions is None else (cache.q_positions, cache.k_positions),
            q_shape=whole.shape,
            dtype=q.dtype,
            device=q.device,
            head_shares=head_shares if world > 1 else None,
            num_heads=q.shape[2] if head_shares is None else head_shares[ranks.rank],
            exchanges_queries=exchanges_queries(placed_topology(*network), share),
            merged_dim=merged_dim,
        )
        if _is_tuned(options) and world > 1:

            def run(plan: DecodePlan, watch: Stopwatch) -> None:
                watch.timed(lambda: made(plan=plan).run(q, cache, sinks, projection))

            kind = ("decode", whole.shape[:3].numel(), merged_dim, head_shares is not None, config, ranks.fingerprint)
            plan = tuned_plan(ranks, kind, plan_on, network.topology, run)
        else:
            plan = plan_on(topology=network.topology)
        if options.schedule == "auto" and world > 1 and q.shape[1] == 1:
            # the reason has numbers that differ between batch sizes
            say_once(f"decode schedule: {plan.reason}", about=f"decode schedule {plan.schedule}")
        return made(plan=plan)

    def run(self, q: Tensor, cache: KVCache, sinks=None, projection=None) -> tuple[Tensor, Tensor]:
        """out [b, s_q, h, d_v] of q's dtype and lse [b, h, s_q], fp32, the same bits on every rank that has a head."""
        shares, ranks, merged_dim = self.head_shares, self.options.ranks, self.merged_dim
        if self.positions is not None:
            cache = cache._replace(q_positions=self.positions[0], k_positions=self.positions[1])
        if self.plan.schedule == "ring" and not self.is_alone:
            state = decode_ring(q if shares is None else self._all_heads(q), cache, self.spec, self.backend, ranks)
        else:
            # receives are posted before the local attention, so that gloo announces the buffers to the senders then
            merge = None if self.is_alone else self._reduction.start()
            state = self.backend.attn_decode(q if shares is None else self._all_heads(q), cache, self.spec)
            if state.shape[-1] != merged_dim + 1:
                partial = project(state[..., :-1].to(q.dtype), projection)
                state, projection = torch.cat((partial, state[..., -1:]), -1), None
            if merge is not None:
                state = merge((state.permute(2, 0, 1, 3) if self._merges_local_heads else state).contiguous())
        if self._merges_local_heads:
            state = state.permute(1, 2, 0, 3)
        elif shares is not None:
            state = state[:, :, slice_of(shares, ranks.rank)]
        out, lse = state.narrow(-1, 0, merged_dim), state.select(-1, merged_dim).transpose(1, 2)
        if sinks is not None:
            out, lse = merge_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        if projection is not None:
            if len(projection) != self.num_heads:
                projection = projection[slice_of(shares, ranks.rank)]
            out = project(out, projection)
        return out, lse

    @functools.cached_property
    def is_alone(self) -> bool:
        """Whether one rank has the whole cache."""
        return self.options.ranks.size == 1

    @functools.cached_property
    def _merges_local_heads(self) -> bool:
        """Whether each rank merges the results of its own heads only."""
        return self.head_shares is not None and self.plan.schedule == "scatter"

    @functools.cached_property
    def _reduction(self) -> comm.Reduction:
        (*rows, heads, _), width, local = self.q_shape, self.merged_dim + 1, self._merges_local_heads
        ranks = self.options.ranks
        return comm.Reduction(
            ranks=ranks,
            schedule="local_share" if local else self.plan.schedule,
            shape=(heads, *rows, width) if local else (*rows, heads, width),
            dtype=state_dtype(self.dtype),
            in_memory=True,
            order=ranks.network.placement.order,
            block=ranks.network.placement.block,
            across=self.plan.across,
            shares=self.head_shares if local else (),
        )

    def _all_heads(self, q: Tensor) -> Tensor:
        return gather_heads(q, self.head_shares, self.options.ranks, exchanged=self.exchanges_queries)


def _checked(
    q, cache: KVCache, options: DecodeOptions, sinks
) -> tuple[tuple[int, ...] | None, AttnSpec, kernels.Backend, KVCache]:
    """(head shares, spec, backend, cache with positions as kernels take them) of a call whose tensors fit together."""
    ranks, config, slopes = options.ranks, options.ranks.config, options.alibi_slopes
    tensors = dict(q=q, k_cache=cache.k, v_cache=cache.v, sinks=sinks)
    check_decode_schedule(options.schedule, config)
    head_shares = check_head_shares(options.head_shares, q, ranks)
    whole = all_heads_of(q, head_shares)
    check_cache(whole, cache)
    mathematics = (True, options.softmax_scale, options.window_size, options.softcap)
    spec = make_spec(whole, *mathematics, deterministic=config.deterministic, alibi_slopes=slopes)
    check_sinks(sinks, q, None if head_shares is None else head_shares[ranks.rank])
    cache = check_seen_slots(q, cache, spec)
    choice = dict(masked=cache.needs_mask, decodes=True)
    backend = kernels.choose(whole, cache.k, cache.values, spec, config.backend, **choice)
    if not in_torch(ranks, backend):
        check_tangents(**tensors)
    check_shared(q, cache, spec, options.schedule)
    check_selected_slots(q, cache, spec, options.schedule)
    if cache.block_table is not None:
        backend.check_pages(cache.k)
    check_finite_cache(ranks, q, cache, sinks)
    return head_shares, spec, backend, cache


def _is_tuned(options: DecodeOptions) -> bool:
    """Whether the user leaves the schedule to measurements. Not on a GPU, whose steps may be recorded with their plan;
    through shared memory there is nothing to choose."""
    ranks, config = options.ranks, options.ranks.config
    free = options.schedule == "auto" and config.tune and not config.deterministic
    return free and ranks.device_type == "cpu" and ranks.memory is None


def _plan(
    options: DecodeOptions, q: Tensor, head_shares, head_dim_v: int, projection: Tensor | None
) -> tuple[Callable[..., DecodePlan], int]:
    """(the plan on a topology, numbers of a result that is merged) of a call with queries q of all heads, whose partial
    results may be projected."""
    world, config, network = options.ranks.size, options.ranks.config, options.ranks.network_of_memory
    plan_of = functools.partial(
        plan_decode,
        world,
        rows=q.shape[:3].numel(),
        local_heads=head_shares is not None,
        kv_bytes=None,  # shards differ between ranks, and every rank must compute the same plan
        topology=network.topology,
        placement=network.placement,
        schedule=options.schedule,
        memory_budget=config.memory_budget,
        deterministic=config.deterministic,
    )
    if projection is not None and world > 1 and options.schedule != "ring" and not config.deterministic:
        width = projection.shape[1]
        plan, projected = plan_of(head_dim_v=head_dim_v), plan_of(head_dim_v=width)
        more = 0 if head_shares is None else projection.numel() * projection.element_size() * (1 - 1 / world)
        if projects_first(placed_topology(*network), plan, projected, more):
            return functools.partial(plan_of, head_dim_v=width), width
    return functools.partial(plan_of, head_dim_v=head_dim_v), head_dim_v


def decode_ring(q: Tensor, cache: KVCache, spec: AttnSpec, backend: kernels.Backend, ranks: comm.Ranks) -> Tensor:
    """The baseline: the packed state [b, s_q, h, d_v + 1] of q [b, s_q, h, d] over every rank's cache, in p - 1 shifts
    of the cache while the current one is computed.

    Shards differ in length, and positions travel along where only some slots are valid. So each message is preceded by
    a header that says what the next one will be. The ranks' states are merged in rank order, so all ranks get the same
    bits.
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
