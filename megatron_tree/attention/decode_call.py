"""One decode call: checked, compared among the ranks and planned, then run for any tensors of its shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import comm, kernels
from ..config import AttnSpec
from ..kernels import KVCache
from ..log import say_once
from ..merge import merge_sinks, state_dtype
from ..plan import DecodePlan, plan_decode
from ..plan.cost import placed_topology
from ..plan.decode import exchanges_queries, projects_first
from .decode_ring import decode_ring
from .derivatives import check_tangents, in_torch
from .finite import check_finite_cache
from .head_shares import all_heads_of, check_head_shares, gather_heads, has_all_heads, slice_of
from .spec import make_spec
from .tuning import Stopwatch, tuned_plan
from .validate import check_sinks
from .validate_cache import check_cache, check_decode_schedule, check_seen_slots, check_selected, check_shared


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
    check_selected(q, cache, spec, options.schedule)
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
