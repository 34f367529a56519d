"""One checked call of training attention: the ranks agree on it, it is planned, and it runs."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from .. import comm, kernels
from ..comm.health.agree import agree, telling
from ..config import AttnSpec, TreeConfig
from ..layout import Layout, Packed, Sharding
from ..log import say_once
from ..plan import Shape, plan_training
from .autograd import tree_attention
from .heads import heads_to_tokens, tokens_to_heads
from .job import Job
from .network import Network
from .validate import check_finite_shares, check_sinks, check_ulysses


def attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    spec: AttnSpec,
    queries: Sharding,
    keys: Sharding,
    cp_group,
    config: TreeConfig,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of checked tensors: agree, plan, and run, with Ulysses' exchanges around it if asked for."""
    world, u = comm.group_size(cp_group), config.ulysses_size
    with telling(cp_group):
        check_sinks(sinks, q)
        check_ulysses(u, world, q, k, queries)
        kernels.choose(q, k, v, spec, config.backend)  # refuses what a named backend can't take
        check_finite_shares(config, cp_group, queries, keys, q=q, k=k, v=v, sinks=sinks)
        network = Network.of(cp_group, q.device, config)
    agree(
        cp_group,
        name,
        check=config.check,
        timeout_s=config.timeout_s,
        also={f"dropout_{field}": value for field, value in spec.dropout._asdict().items()} if spec.dropout else None,
        batch=q.shape[0],
        seq_len=queries.seq_len,
        seq_len_kv=keys.seq_len,
        num_heads=q.shape[2],
        num_heads_kv=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=q.dtype,
        spec=dataclasses.replace(spec, dropout=None),
        sinks=sinks is not None,
        layout=queries.layout,
        layout_kv=keys.layout,
        return_lse=return_lse,
        config=config,
        topology=network.digest,
    )
    with comm.Task(cp_group, name):
        network = network.placed(cp_group, q.device, config)
        call = (spec, queries, keys, cp_group, config, network)
        if u == 1:
            return tree_attention(q, k, v, sinks, _job(q, k, v, *call, tuple(range(world))))
        return _attend_split(q, k, v, sinks, *call, return_lse)


def _attend_split(
    q, k, v, sinks, spec: AttnSpec, queries: Sharding, keys: Sharding, cp_group, config: TreeConfig, network: Network,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Ulysses x tree: exchange heads for tokens, attend among the ranks with the same heads, and exchange back."""
    world, rank, u = comm.group_size(cp_group), comm.group_rank(cp_group), config.ulysses_size
    place = rank % u
    team = comm.Team(
        cp_group,
        tuple((r,) for r in range(rank - place, rank - place + u)),
        network.topology.transport,
        config.timeout_s,
        ("ulysses", u),
    )
    if k.shape[2] < u:
        k, v = (x.repeat_interleave(u // x.shape[2], 2) for x in (k, v))
    first, count = place * (q.shape[2] // u), q.shape[2] // u
    q, k, v = heads_to_tokens(team, q, k, v)
    sinks = None if sinks is None else sinks[first : first + count]
    queries, keys = (dataclasses.replace(x, fused=u) for x in (queries, keys))
    job = _job(q, k, v, spec.heads_from(first), queries, keys, cp_group, config, network, tuple(range(place, world, u)))
    out, lse = tree_attention(q, k, v, sinks, job)
    if not return_lse:
        return *tokens_to_heads(team, out), None
    out, lse = tokens_to_heads(team, out, lse.transpose(1, 2)[..., None])
    return out, lse[..., 0].transpose(1, 2)


def attend_here(
    q, k, v, sinks, spec: AttnSpec, queries: Sharding, keys: Sharding, cp_group, backend: str
) -> tuple[Tensor, Tensor]:
    """(out, lse) of what this rank holds, without a message: alone on a grid of one place."""
    config = TreeConfig(backend=backend)
    network = Network.of(None, q.device, config).placed(None, q.device, config)
    job = _job(q, k, v, spec, queries, keys, None, config, network, (0,))
    return tree_attention(q, k, v, sinks, dataclasses.replace(job, group=cp_group, order=(comm.group_rank(cp_group),)))


def _job(
    q, k, v, spec: AttnSpec, queries: Sharding, keys: Sharding, cp_group, config: TreeConfig, network: Network, members
) -> Job:
    """The planned job of some ranks of the group. All teams of the group follow the first team's plan."""
    world, u = len(members), queries.fused
    shape = Shape(q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    placement = network.placement_of(members)
    plan = plan_training(
        world,
        shape,
        batch=q.shape[0],
        seq_len=queries.seq_len,
        seq_len_kv=keys.seq_len,
        bytes_per_word=q.element_size(),
        causal=spec.causal,
        visible=_visible(queries.layout),
        topology=network.topology,
        placement=placement if u == 1 else network.placement_of(tuple(range(0, u * world, u))),
        schedule=config.schedule,
        grid=config.grid,
        grid_backward=config.grid_backward,
        head_groups=config.head_groups,
        memory_budget=config.memory_budget,
    )
    if world > 1 and comm.group_rank(cp_group) == 0:
        h, h_kv, d, _ = shape
        teams = "" if u == 1 else f", in each of {u} Ulysses ranks"
        say_once(f"attention over {world} ranks ({h} heads, {h_kv} KV heads, head_dim {d}{teams}): {plan.reason}")
    return Job(
        spec=spec,
        group=cp_group,
        queries=queries,
        keys=keys,
        plan=plan,
        order=tuple(members[i] for i in placement.order),
        config=config,
        transport=network.topology.transport,
        wire=torch.promote_types(q.dtype, torch.float32) if config.comm_dtype == "fp32" else q.dtype,
    )


def _visible(layout: Layout) -> float:
    """Share of the (query, key) pairs that packed documents leave, as a power of two: plans are cached."""
    if not isinstance(layout, Packed) or not sum(layout.padded):
        return 1.0
    share = sum(n * n for n in layout.lengths) / sum(layout.padded) ** 2
    return 2.0 ** round(math.log2(share)) if share else 1.0
