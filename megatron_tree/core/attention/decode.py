"""Decoding over a KV cache that is sharded across ranks: attention of a few replicated queries. No gradients.

Ranks send queries and partial results, not the cache. `tree_decode` is one call; the layers of a model's step share a
`DecodeStep`, which checks and plans what they have in common once. Bad input raises errors as in functional.py.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import comm, kernels
from ..config import TRUSTING, TreeConfig
from ..duals import check_tangents, only_backward
from ..kernels import KVCache, SharedPages
from ..log import say_once, warn_once
from ..merge import merge_sinks, state_dtype
from ..plan import DecodePlan, Topology, plan_decode
from ..plan.cost import placed_topology
from ..plan.decode import exchanges_queries, projects_first
from ..spec import AttnSpec
from .autograd import in_torch
from .call import LIKENESS
from .shares import all_heads_of, check_head_shares, gather_heads, has_all_heads, slice_of
from .tuning import Stopwatch, tuned_plan
from .validate import (
    autocast,
    check_cache,
    check_decode_schedule,
    check_finite_cache,
    check_seen_slots,
    check_selected_slots,
    check_shared,
    check_sinks,
    make_spec,
)


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
    given = (q, k_cache) if v_cache is None else (q, k_cache, v_cache)
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        warn_once(
            "tree_decode gives no gradients, but its inputs require them: decode under torch.no_grad(), or train with "
            "tree_attn_func"
        )
    outside, q, k_cache, v_cache = autocast(q, k_cache, v_cache)
    cache = KVCache(
        k_cache, v_cache, k_scale, v_scale, head_dim_v, cache_seqlens, q_positions, cache_positions, block_table,
        shared, selected,
    )  # fmt: skip
    ranks = comm.Ranks.of(cp_group, q.device, config)
    options = DecodeOptions(ranks, softmax_scale, window_size, softcap, alibi_slopes, head_shares, schedule)
    with ranks.call("tree_decode") as call, outside, torch.no_grad():
        # what tensors say of slots may be written to between calls; without them calls that are alike stay alike
        alike = cache_seqlens is q_positions is cache_positions is block_table is selected is alibi_slopes is None
        step = DecodeStep(ranks.state.planned if alike and not shared and only_backward() else None)
        out, lse = step.run(call, q, cache, options, sinks)
    return (out, lse) if return_lse else out


class DecodeStep:
    """The decode calls of a step's layers. No table, length, position or slope is written to between them.

    A call is checked, compared among the ranks and planned unless an earlier one had everything on which this depends:
    shapes, dtypes and devices, options, and the very tensors that say which slots the queries see.
    """

    def __init__(self, known: dict | None = None):
        """known: calls that are planned, for longer than a step."""
        self._known: dict[tuple, tuple[PlannedDecode, tuple]] = {} if known is None else known
        self._lasts = known is not None

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
        if options.ranks.size == 1:
            planned, _ = self._known.get(_key(q, cache, options, sinks, projection)[0], (None, None))
            if planned is not None:
                return planned.run(q, cache, sinks, projection)
        with options.ranks.call("tree_decode") as call:
            return self.run(call, q, cache, options, sinks, projection)

    def run(
        self, call: comm.CollectiveCall, q, cache: KVCache, options: DecodeOptions, sinks=None, projection=None
    ) -> tuple[Tensor, Tensor]:
        """`decode` in a call that has begun, without gradients."""
        key, tensors = _key(q, cache, options, sinks, projection)
        planned, _ = self._known.get(key, (None, None))
        if planned is not None:
            call.repeat(planned.agreement)
        else:
            planned = PlannedDecode.of(call, q, cache, options, sinks, projection)
            if options.ranks.config.check in TRUSTING and (planned.is_final or not self._lasts):
                self._known[key] = planned, tensors
        return planned.run(q, cache, sinks, projection)


def _key(q: Tensor, cache: KVCache, options: DecodeOptions, sinks, projection) -> tuple[tuple, tuple]:
    """What a call's checks and plan depend on, and the tensors that it names by identity, to be kept with it."""
    ranks, scale, window_size, softcap, slopes, head_shares, schedule = options
    k, v, k_scale, v_scale, head_dim_v, *seen, selected = cache  # seen: which slots queries see
    tensors = (*seen, ranks, slopes)
    key = (
        LIKENESS(q),
        LIKENESS(k),
        None if v is None else LIKENESS(v),
        None if k_scale is None else LIKENESS(k_scale),
        None if v_scale is None else LIKENESS(v_scale),
        None if sinks is None else LIKENESS(sinks),
        None if projection is None else LIKENESS(projection),
        # each layer has its own, which may be of another length
        None if selected is None else (selected.shape[:2], selected.dtype, selected.device),
        *(head_dim_v, scale, tuple(window_size), softcap, schedule),
        None if head_shares is None else tuple(head_shares),
        *map(id, tensors),
    )
    return key, tensors


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


@dataclass(frozen=True, kw_only=True)
class DecodeCall:
    """What the ranks of a decode call agree on, and what its plan is made of."""

    q: torch.Size
    """[b, s_q, h, d], with the heads of all ranks."""
    num_heads_kv: int
    head_dim_v: int
    latent: bool
    """Whether values are the beginnings of keys."""
    dtype: torch.dtype
    spec: AttnSpec
    sinks: bool
    projection: tuple[int, bool] | None
    """Numbers of a head's projected result, and whether every rank has all heads' matrices."""
    head_shares: tuple[int, ...] | None
    gathers_heads: bool
    schedule: str
    positions: bool
    paged: bool
    selected: bool
    config: TreeConfig
    topology: str
    """`Ranks.fingerprint`."""

    @property
    def rows(self) -> int:
        """Of a partial state."""
        return self.q[:3].numel()

    def planned_on(self, network: comm.Network, width: int, **others) -> DecodePlan:
        """The plan whose partial results have `width` numbers a head. others: in place of the call's options."""
        schedule, of_integers = self.schedule, self.config.deterministic == "ranks"
        if of_integers:  # int64, and two halves of a result
            width, schedule = 4 * width + 1, "allreduce"
        options = dict(
            rows=self.rows,
            local_heads=self.head_shares is not None,
            head_dim_v=width,
            kv_bytes=None,  # shards differ between ranks, and every rank must compute the same plan
            topology=network.topology,
            placement=network.placement,
            schedule=schedule,
            memory_budget=self.config.memory_budget,
            deterministic=self.config.deterministic,
        )
        return plan_decode(len(network.placement.order), **options | others)

    def merged_dim_on(self, network: comm.Network) -> int:
        """Numbers of a result that is merged: head_dim_v, or what a projection of partial results gives, where that is
        faster."""
        width, of_all_heads = self.projection or (0, False)
        world = len(network.placement.order)
        if not of_all_heads or world == 1 or self.schedule == "ring" or self.config.deterministic:
            return self.head_dim_v
        more = 0  # bytes of matrices that a rank would not read otherwise
        if self.head_shares is not None:
            more = self.q[2] * width * self.head_dim_v * self.dtype.itemsize * (1 - 1 / world)
        plans = (self.planned_on(network, n) for n in (self.head_dim_v, width))
        return width if projects_first(placed_topology(*network), *plans, more) else self.head_dim_v


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedDecode(DecodeCall):
    """A decode call that is checked, agreed on and planned, to be run as often as it comes.

    Results may be projected, head by head. That is linear, so partial results can be, too: then the ranks merge what
    is projected, which may be narrower.
    """

    ranks: comm.Ranks
    agreement: comm.Agreement
    backend: kernels.Backend
    plan: DecodePlan
    merged_dim: int
    """Of `merged_dim_on`."""
    kernel_positions: tuple[Tensor, Tensor] | None
    """Of the queries and slots, as kernels take them."""
    is_final: bool = True
    """Whether another plan will not be chosen once calls are measured."""

    @classmethod
    def of(
        cls, collective: comm.CollectiveCall, q, cache: KVCache, options: DecodeOptions, sinks=None, projection=None
    ) -> PlannedDecode:
        """Check, compare and plan a call. Tensors as of `DecodeStep.decode`."""
        ranks, config = options.ranks, options.ranks.config
        head_shares, spec, backend, cache = _checked(q, cache, options, sinks)
        whole = all_heads_of(q, head_shares)
        call = DecodeCall(
            q=whole.shape,
            num_heads_kv=cache.k.shape[2],
            head_dim_v=cache.values.shape[3],
            latent=cache.v is None,
            dtype=q.dtype,
            spec=spec,
            sinks=sinks is not None,
            projection=None if projection is None else (projection.shape[1], len(projection) == whole.shape[2]),
            head_shares=head_shares,
            gathers_heads=not has_all_heads(q, head_shares),
            schedule=options.schedule,
            positions=cache.q_positions is not None,
            paged=cache.block_table is not None,
            selected=cache.selected is not None,
            config=config,
            topology=ranks.fingerprint,
        )
        agreement, network = collective.agree(**vars(call)), ranks.network_of_memory
        width = call.merged_dim_on(network)

        def plan_on(topology: Topology, **others) -> DecodePlan:
            return call.planned_on(network._replace(topology=topology), width, **others)

        planned = cls(
            **vars(call),
            ranks=ranks,
            agreement=agreement,
            backend=backend,
            plan=plan_on(network.topology),
            merged_dim=width,
            kernel_positions=None if cache.q_positions is None else (cache.q_positions, cache.k_positions),
        )
        if _is_tuned(options) and ranks.size > 1:

            def run(plan: DecodePlan, watch: Stopwatch) -> None:
                watch.timed(lambda: replace(planned, plan=plan).run(q, cache, sinks, projection))

            kind = ("decode", call.rows, width, head_shares is not None, config, ranks.fingerprint)
            plan, is_final = tuned_plan(ranks, kind, plan_on, network.topology, run)
            planned = replace(planned, plan=plan, is_final=is_final)
        if options.schedule == "auto" and ranks.size > 1 and q.shape[1] == 1:
            # the reason has numbers that differ between batch sizes
            say_once(f"decode schedule of a layer: {planned.plan.reason}", about=f"decoding {planned.plan.schedule}")
        return planned

    def run(self, q: Tensor, cache: KVCache, sinks=None, projection=None) -> tuple[Tensor, Tensor]:
        """out [b, s_q, h, d_v] of q's dtype and lse [b, h, s_q], fp32, the same bits on every rank that has a head."""
        shares, merged_dim = self._head_shares, self.merged_dim
        if self.kernel_positions is not None:
            cache = cache._replace(q_positions=self.kernel_positions[0], k_positions=self.kernel_positions[1])
        if self.spec.deterministic == "ranks":
            parts = kernels.FixedPoint(self._all_heads(q), cache, self.spec)
            largest = self.ranks.reduce(parts.largest, "max")
            state = parts.state(largest, self.ranks.reduce(parts.terms(largest)))
        elif self._reduction is None and self.ranks.size > 1:
            state = decode_ring(self._all_heads(q), cache, self.spec, self.backend, self.ranks)
        else:
            # receives are posted before the local attention, so that gloo announces the buffers to the senders then
            merge = None if self._reduction is None else self._reduction.start()
            state = self.backend.attn_decode(q if shares is None else self._all_heads(q), cache, self.spec)
            if state.shape[-1] != merged_dim + 1:
                partial = project(state[..., :-1].to(q.dtype), projection)
                state, projection = torch.cat((partial, state[..., -1:]), -1), None
            if merge is not None:
                state = merge((state.permute(2, 0, 1, 3) if self._merges_local_heads else state).contiguous())
        if self._merges_local_heads:
            state = state.permute(1, 2, 0, 3)
        elif shares is not None:
            state = state[:, :, slice_of(shares, self.ranks.rank)]
        out, lse = state.narrow(-1, 0, merged_dim), state.select(-1, merged_dim).transpose(1, 2)
        if sinks is not None:
            out, lse = merge_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        if projection is not None:
            if len(projection) != out.shape[2]:
                projection = projection[slice_of(shares, self.ranks.rank)]
            out = project(out, projection)
        return out, lse

    @functools.cached_property
    def _head_shares(self) -> tuple[int, ...] | None:
        """Query heads of every rank, if there are several ranks and each has some of them; so has its result."""
        return self.head_shares if self.ranks.size > 1 else None

    @functools.cached_property
    def _merges_local_heads(self) -> bool:
        """Whether each rank merges the results of its own heads only."""
        return self._head_shares is not None and self.plan.schedule == "scatter"

    @functools.cached_property
    def _reduction(self) -> comm.Reduction | None:
        """None where one rank has the whole cache, and for the ring."""
        if self.ranks.size == 1 or self.plan.schedule == "ring":
            return None
        (*rows, heads, _), width, local = self.q, self.merged_dim + 1, self._merges_local_heads
        placement = self.ranks.network.placement
        return comm.Reduction(
            ranks=self.ranks,
            schedule="local_share" if local else self.plan.schedule,
            shape=(heads, *rows, width) if local else (*rows, heads, width),
            dtype=state_dtype(self.dtype),
            in_memory=True,
            order=placement.order,
            block=placement.block,
            across=self.plan.across,
            shares=self._head_shares if local else (),
        )

    def _all_heads(self, q: Tensor) -> Tensor:
        return q if self._head_shares is None else gather_heads(q, self._head_shares, self.ranks, self._exchanges)

    @functools.cached_property
    def _exchanges(self) -> bool:
        """How heads are gathered, see `Ranks.gather_rows`."""
        share = self.q.numel() * self.dtype.itemsize / self.ranks.size
        return exchanges_queries(placed_topology(*self.ranks.network_of_memory), share)


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
    here = None if options.schedule == "ring" else cache
    choice = dict(masked=cache.needs_mask, decodes=True, cache=here)
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
