"""The public functions: check the input, plan, run. Start reading here.

`tree_attn_func` is attention over a sequence sharded across cp_group, for training and prefill; `tree_decode` is
attention of a few replicated queries over a sharded KV cache. Tensors are [batch, sequence, heads, head_dim] as in
flash-attn. Bad input raises ``ValueError`` before anything is sent, and ranks whose arguments differ all get one.
"""

from __future__ import annotations

import dataclasses
import weakref
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from . import autograd, comm, decode
from .agree import agree, tell_failure
from .config import DECODE_SCHEDULES, TreeConfig, check_choice
from .job import Job
from .log import say_once
from .plan import Placement, Shape, Topology, default_topology, load_topology, place, plan_decode, plan_training
from .shard import Layout, check_layout, shard_lengths, shard_positions
from .validate import check_cache, check_qkv, check_sinks, check_visible, make_spec

_DEFAULT = TreeConfig()


def tree_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cp_group,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    layout: Layout = "zigzag",
    config: TreeConfig | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence sharded across ranks; differentiable. Collective over cp_group.

    Args:
        q: [b, s/p, h, d], this rank's share of the queries; any strides, fp32, bf16, fp16 or fp64.
        k, v: [b, s/p, h_kv, d] and [b, s/p, h_kv, d_v]; h_kv divides h (GQA, MQA).
        cp_group: the process group the sequence is sharded over; None for one rank.
        causal: a query sees keys at its own and earlier positions.
        softmax_scale: default 1 / sqrt(d).
        window_size: (left, right) keys seen to either side of the query's own position; -1 is unbounded.
        softcap: logits become softcap * tanh(logits / softcap); 0 turns it off.
        sinks: [h] logits with value 0 that join every query's softmax. Their gradient is this rank's share: sum it over
            cp_group as for any replicated parameter.
        layout: "zigzag" (Megatron's), "contiguous" (equal shares), or a tuple of every rank's length (contiguous).
        config: `TreeConfig`; the default lets the planner choose.
        return_lse: also return lse [b, h, s/p], fp32, natural log, differentiable; -inf for a query that sees nothing.

    Returns: out [b, s/p, h, d_v] in q's dtype (and lse).
    Raises: ValueError for bad input or ranks that disagree; CommError for a rank that failed or is stuck.
    Source: Tree Attention (arXiv 2408.04093), spread over a grid of ranks as docs/design.md derives.
    """
    config = config or _DEFAULT
    world, rank = comm.group_size(cp_group), comm.group_rank(cp_group)
    try:
        check_qkv(q, k, v)
        spec = make_spec(q, causal, softmax_scale, window_size, softcap)
        check_sinks(sinks, q)
        seq_len = _sequence_length(q, world, rank, layout)
        shape = Shape(q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        network = _Network.of(cp_group, q.device, config)
    except ValueError as error:
        tell_failure(cp_group, error)
        raise
    signature = (
        f"tree_attn_func; batch={q.shape[0]}; seq_len={seq_len}; heads and head_dim={tuple(shape)}; dtype={q.dtype}; "
        f"{spec}; sinks={sinks is not None}; layout={layout!r}; {config}; topology={network.digest}"
    )
    agree(cp_group, signature, check=config.check, timeout_s=config.timeout_s)
    topology, _, placement = network.placed(cp_group, q.device, config)
    plan = plan_training(
        world,
        shape,
        batch=q.shape[0],
        seq_len=seq_len,
        bytes_per_word=q.element_size(),
        causal=causal,
        topology=topology,
        placement=placement,
        schedule=config.schedule,
        grid=config.grid,
        grid_backward=config.grid_backward,
        head_groups=config.head_groups,
        memory_budget=config.memory_budget,
    )
    if world > 1 and rank == 0:
        h, h_kv, d, _ = shape
        say_once(f"attention over {world} ranks ({h} heads, {h_kv} KV heads, head_dim {d}): {plan.reason}")
    wire = torch.promote_types(q.dtype, torch.float32) if config.comm_dtype == "fp32" else q.dtype
    layout = tuple(layout) if isinstance(layout, list) else layout
    job = Job(
        spec=spec,
        group=cp_group,
        seq_len=seq_len,
        layout=layout,
        plan=plan,
        placement=placement,
        config=config,
        transport=topology.transport,
        wire=wire,
    )
    out, lse = autograd.tree_attention(q, k, v, sinks, job)
    return (out, lse) if return_lse else out


_networks: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # group -> {(topology, transport, device): Network}


class _Network(NamedTuple):
    """What the planner reckons with, and in `topology.transport` how messages will really travel."""

    topology: Topology
    digest: str
    """Name and checksum of the topology: files of one name may differ between hosts."""
    placement: Placement | None

    @classmethod
    def of(cls, group, device: torch.device, config: TreeConfig) -> _Network:
        """The network of a group; its placement is not known before `placed`. Raises ``ValueError``."""
        made, key = _networks.get(group, {}) if group is not None else {}, cls._key(device, config)
        if key in made:
            return made[key]
        backend = comm.backend(group)
        topology = default_topology(backend) if config.topology is None else load_topology(config.topology)
        wanted = config.transport
        if wanted == "auto" and config.topology is not None and topology.transport == "builtin":
            wanted = "builtin"  # measured, or meant for another backend
        topology = dataclasses.replace(topology, transport=comm.resolve_transport(group, device, wanted))
        return cls(topology, f"{topology.name} ({zlib.crc32(repr(topology).encode()):08x})", None)

    def placed(self, group, device: torch.device, config: TreeConfig) -> _Network:
        """The same with its ranks on their hosts; collective at the group's first call."""
        if self.placement is not None:
            return self
        network = self._replace(placement=place(self.topology, comm.hosts(group, timeout_s=config.timeout_s)))
        if group is not None:
            _networks.setdefault(group, {})[self._key(device, config)] = network
        return network

    @staticmethod
    def _key(device: torch.device, config: TreeConfig) -> tuple:
        return config.topology, config.transport, device.type


def _sequence_length(q: Tensor, world: int, rank: int, layout: Layout) -> int:
    check_layout(layout, world)
    if isinstance(layout, (tuple, list)):
        if q.shape[1] != layout[rank]:
            raise ValueError(
                f"q holds {q.shape[1]} tokens on rank {rank} but layout={tuple(layout)} says {layout[rank]}"
            )
        return sum(layout)
    shard_lengths(q.shape[1] * world, world, layout)  # zigzag wants an even share
    return q.shape[1] * world


def tree_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cp_group,
    cache_seqlens: Tensor | None = None,
    q_positions: Tensor | None = None,
    cache_positions: Tensor | None = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    schedule: str = "auto",
    config: TreeConfig | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of a few queries over a KV cache sharded across ranks. Collective over cp_group; no gradients.

    Args:
        q: [b, s_q, h, d], the same on every rank.
        k_cache, v_cache: [b, s_local, h_kv, d] and [b, s_local, h_kv, d_v]: this rank's slots, in any order; s_local
            may differ between ranks and may be 0. The new tokens' own keys are already in the cache of one rank.
        cp_group: the process group the cache is sharded over; None for one rank.
        cache_seqlens: int [b], how many leading slots of this rank's shard are valid; default all.
        q_positions, cache_positions: int64 [b, s_q] or [s_q], and [b, s_local] or [s_local]. A slot is seen when
            0 <= its position <= the query's, within the window; -1 hides it (padding). Needed for s_q > 1 and for
            windows; without them every query sees every valid slot.
        softmax_scale, window_size, softcap, sinks: as in `tree_attn_func`.
        schedule: "auto", "allreduce" (the paper's Algorithm 3), "allgather", "butterfly", "scatter", "two_level"
            (inside nodes first), "ring" (baseline).
        config: `TreeConfig`; backend, topology, transport, memory_budget, timeout_s and check are used.
        return_lse: also return lse [b, h, s_q], fp32, natural log.

    Returns: out [b, s_q, h, d_v] in q's dtype (and lse), bit-identical on all ranks.
    Raises: ValueError for bad input or ranks that disagree; CommError for a rank that failed or is stuck.
    """
    config = config or _DEFAULT
    world, _ = comm.group_size(cp_group), comm.group_rank(cp_group)
    try:
        check_choice("schedule", schedule, DECODE_SCHEDULES)
        check_cache(q, k_cache, v_cache)
        spec = make_spec(q, True, softmax_scale, window_size, softcap)
        check_sinks(sinks, q)
        visible = check_visible(q, k_cache, q_positions, cache_positions, cache_seqlens, spec)
        network = _Network.of(cp_group, q.device, config)
    except ValueError as error:
        tell_failure(cp_group, error)
        raise
    b, s_q, h, _ = q.shape
    h_kv, d_v = v_cache.shape[2:]
    signature = (
        f"tree_decode; q={tuple(q.shape)}; num_heads_kv={h_kv}; head_dim_v={d_v}; dtype={q.dtype}; {spec}; "
        f"sinks={sinks is not None}; schedule={schedule!r}; positions={q_positions is not None}; "
        f"memory_budget={config.memory_budget}; transport={network.topology.transport}; topology={network.digest}"
    )
    agree(cp_group, signature, check=config.check, timeout_s=config.timeout_s)
    topology, _, placement = network.placed(cp_group, q.device, config)
    plan = plan_decode(
        world,
        rows=b * s_q * h,
        head_dim_v=d_v,
        kv_bytes=None,  # shards differ between ranks, and every rank must come to the same plan
        topology=topology,
        placement=placement,
        schedule=schedule,
        memory_budget=config.memory_budget,
    )
    if schedule == "auto" and world > 1 and s_q == 1:
        say_once(f"decode schedule: {plan.reason}")
    with torch.no_grad():
        out, lse = decode.decode(
            q,
            k_cache,
            v_cache,
            sinks,
            visible=visible,
            spec=spec,
            group=cp_group,
            schedule=plan.schedule,
            across=plan.across,
            transport=topology.transport,
            placement=placement,
            backend=config.backend,
            timeout_s=config.timeout_s,
        )
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)


def shard_sequence(x: Tensor, cp_group, dim: int, layout: Layout = "zigzag") -> Tensor:
    """This rank's share of x, which holds the whole sequence along `dim`. Differentiable; nothing is sent.

    Raises ``ValueError`` when the length can't be sharded in this layout (zigzag: a multiple of twice the ranks).
    """
    world, rank = comm.group_size(cp_group), comm.group_rank(cp_group)
    return x.index_select(dim, shard_positions(x.shape[dim], rank, world, layout, device=x.device))


def unshard_sequence(x: Tensor, cp_group, dim: int, layout: Layout = "zigzag", seq_len: int | None = None) -> Tensor:
    """The whole sequence, on every rank, from the shares that `shard_sequence` made. One all-gather; no gradients.

    seq_len: the whole length; needed for an uneven "contiguous" layout, default p times this rank's share.
    """
    world, rank = comm.group_size(cp_group), comm.group_rank(cp_group)
    try:
        check_layout(layout, world)
        if seq_len is None:
            seq_len = sum(layout) if isinstance(layout, (tuple, list)) else x.shape[dim] * world
        lengths = shard_lengths(seq_len, world, layout)
        if x.shape[dim] != lengths[rank]:
            raise ValueError(
                f"x holds {x.shape[dim]} tokens along dim {dim} on rank {rank}; layout={layout!r}, seq_len={seq_len} "
                f"has {lengths[rank]} there: pass the seq_len of the whole sequence"
            )
    except ValueError as error:
        tell_failure(cp_group, error)
        raise
    shape = [n for i, n in enumerate(x.shape) if i != dim % x.dim()]
    signature = f"unshard_sequence; shape without dim={shape}; dtype={x.dtype}; seq_len={seq_len}; layout={layout!r}"
    agree(cp_group, signature, check="first", timeout_s=_DEFAULT.timeout_s)
    rows = x.detach().movedim(dim, 0)
    rows = torch.cat((rows, rows.new_zeros(max(lengths) - rows.shape[0], *rows.shape[1:])))
    whole = comm.gather_sequence(rows, cp_group).unflatten(0, (world, -1))
    out = rows.new_zeros(seq_len, *rows.shape[1:])
    for r in range(world):
        out[shard_positions(seq_len, r, world, layout, device=x.device)] = whole[r, : lengths[r]]
    return out.movedim(0, dim)
