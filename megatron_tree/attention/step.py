"""The decode calls of one step of a model: what its layers have in common is checked and planned for the first of them.

`tree_decode` is a step of one layer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import comm, kernels
from ..config import TreeConfig, default_config
from ..log import say_once
from ..plan import plan_decode
from ..plan.cost import placed_topology
from ..plan.decode import exchanges_queries, projects_first
from .decode import DecodeCall
from .derivatives import check_tangents, in_torch
from .finite import check_finite_cache
from .head_shares import all_heads_of, check_head_shares, has_all_heads
from .spec import make_spec
from .topology import GroupTopology
from .validate import (
    check_cache,
    check_decode_schedule,
    check_paged,
    check_shared,
    check_sinks,
    check_visible,
    values_of,
)

TRUSTING = ("first", "never")  # values of `TreeConfig.check` with which calls that are alike are checked once


_NOTHING = contextlib.nullcontext()


class DecodeStep:
    """Decode calls between which no table, length, position or slope is written to.

    A call is checked, compared among the ranks and planned unless an earlier one had everything on which this depends:
    shapes, dtypes and devices, options, and the very tensors that say what is visible.
    """

    def __init__(self):
        self._known: dict[tuple, tuple[DecodeCall, comm.Agreement, tuple]] = {}

    def decode(
        self,
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
        shared: Sequence[kernels.SharedPages] = (),
        softmax_scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        projection: Tensor | None = None,
        head_shares: Sequence[int] | None = None,
        schedule: str = "auto",
        config: TreeConfig | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `tree_decode`: out [b, s_q, h, d_v] in q's dtype and lse [b, h, s_q].

        projection: [h, d_out, d_v] in q's dtype: out is [b, s_q, h, d_out], each head's result times its matrix. Of
            this rank's heads, or of all heads on every rank: then the ranks merge results that are projected, if
            the planner predicts that to be faster.
        """
        config = config or default_config()
        tensors = (q, k_cache, v_cache, k_scale, v_scale, sinks, projection)
        objects = (cache_seqlens, q_positions, cache_positions, block_table, shared, alibi_slopes, cp_group, config)
        options = (head_dim_v, softmax_scale, window_size, softcap, head_shares, schedule)
        no_grad = torch.no_grad() if torch.is_grad_enabled() else _NOTHING
        with comm.collective_call("tree_decode", cp_group, config) as call, no_grad:
            known = key = None
            if self._known:
                key = _key(tensors, objects, options)
                known = self._known.get(key)
            if known is not None:
                decode, agreed, _ = known
                call.repeat(agreed)
            else:
                decode, agreed = _checked(call, *tensors, *objects, *options)
                if config.check in TRUSTING:  # the objects are kept, so that no other one gets the id of one of them
                    self._known[key or _key(tensors, objects, options)] = decode, agreed, objects
            v_cache = values_of(k_cache, v_cache, head_dim_v)
            return decode.run(q, k_cache, v_cache, sinks, k_scale, v_scale, projection)


def _key(tensors: tuple, objects: tuple, options: tuple) -> tuple:
    """All that `_checked` depends on."""
    kinds = [x if x is None else (x.shape, x.dtype, x.device) for x in tensors]
    return *kinds, *map(id, objects), *[tuple(x) if isinstance(x, list) else x for x in options]


def _checked(
    call: comm.CollectiveCall, q, k_cache, v_cache, k_scale, v_scale, sinks, projection, cache_seqlens, q_positions,
    cache_positions, block_table, shared, alibi_slopes, group, config: TreeConfig, head_dim_v, softmax_scale,
    window_size, softcap, head_shares, schedule,
) -> tuple[DecodeCall, comm.Agreement]:  # fmt: skip
    """The call, checked, agreed upon and planned, and what the ranks have agreed on. Arguments as of `tree_decode`."""
    given = dict(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, cache_seqlens=cache_seqlens)
    given |= dict(block_table=block_table, q_positions=q_positions, cache_positions=cache_positions)
    comm.check_local(**given, alibi_slopes=alibi_slopes)
    check_decode_schedule(schedule, config)
    latent, v_cache = v_cache is None, values_of(k_cache, v_cache, head_dim_v)
    head_shares = check_head_shares(head_shares, q, group)
    whole = all_heads_of(q, head_shares)
    paged = check_paged(whole, k_cache, v_cache, block_table, k_scale, v_scale, cache_seqlens)
    if paged is None:
        check_cache(whole, k_cache, v_cache)
    options = dict(deterministic=config.deterministic, alibi_slopes=alibi_slopes)
    spec = make_spec(whole, True, softmax_scale, window_size, softcap, **options)
    num_heads = q.shape[2] if head_shares is None else head_shares[comm.group_rank(group)]
    check_sinks(sinks, q, num_heads)
    slots = k_cache.shape[1] if paged is None else paged.block_table.shape[1] * k_cache.shape[1]
    visible = check_visible(q, slots, q_positions, cache_positions, cache_seqlens, spec)
    masked = visible.needs_mask(paged is not None)
    backend = kernels.choose(whole, k_cache, v_cache, spec, config.backend, masked=masked, decodes=True)
    if not in_torch(group, backend):
        check_tangents(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks)
    check_shared(shared, paged, whole, k_cache, spec, schedule)
    if paged is not None:
        backend.check_pages(k_cache)
    check_finite_cache(config, group, q, k_cache, v_cache, sinks, visible, paged)
    net = GroupTopology.of(group, q.device, config)
    of_all = projection is not None and len(projection) == whole.shape[2]
    agreed = call.agree(
        q=whole.shape,
        num_heads_kv=v_cache.shape[2],
        head_dim_v=v_cache.shape[3],
        latent=latent,
        dtype=q.dtype,
        spec=spec,
        sinks=sinks is not None,
        projection=None if projection is None else (projection.shape[1], of_all),
        head_shares=head_shares,
        gathers_heads=not has_all_heads(q, head_shares),
        schedule=schedule,
        positions=q_positions is not None,
        paged=paged is not None,
        config=config,
        topology=net.digest,
    )
    net, world = GroupTopology.over_cache(group, q.device, config), comm.group_size(group)
    plans = functools.partial(
        plan_decode,
        world,
        rows=whole.shape[:3].numel(),
        own_heads=head_shares is not None,
        kv_bytes=None,  # shards differ between ranks, and every rank must compute the same plan
        topology=net.topology,
        placement=net.placement,
        schedule=schedule,
        memory_budget=config.memory_budget,
        deterministic=config.deterministic,
    )
    placed, merged_dim = placed_topology(net.topology, net.placement), v_cache.shape[3]
    plan = plans(head_dim_v=merged_dim)
    if of_all and world > 1 and schedule != "ring" and not config.deterministic:
        projected = plans(head_dim_v=projection.shape[1])
        more = 0 if head_shares is None else projection.numel() * projection.element_size() * (1 - 1 / world)
        if projects_first(placed, plan, projected, more):
            plan, merged_dim = projected, projection.shape[1]
    if schedule == "auto" and world > 1 and q.shape[1] == 1:
        # the reason has numbers that differ between batch sizes
        say_once(f"decode schedule: {plan.reason}", about=f"decode schedule {plan.schedule}")
    share = whole.numel() * whole.element_size() / world
    decode = DecodeCall(
        visible=visible,
        spec=spec,
        group=group,
        plan=plan,
        transport=net.transport,
        placement=net.placement,
        backend=backend,
        timeout_s=config.timeout_s,
        rows=tuple(q.shape[:2]),
        num_heads=num_heads,
        head_shares=head_shares if world > 1 else None,
        exchanges_queries=exchanges_queries(placed, share),
        head_dim_v=v_cache.shape[3],
        merged_dim=merged_dim,
        latent=latent,
        dtype=q.dtype,
        device=q.device,
        block_table=block_table,
        shared=shared,
    )
    return decode, agreed
