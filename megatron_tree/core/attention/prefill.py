"""`tree_prefill`: attention of a chunk of a prompt over a KV cache, both sharded across ranks. No gradients.

On a grid of a x b ranks a rank gathers the queries of its column and the keys of its row, and attends; the partial
states are reduced down the column, so that every rank ends with those of its own queries. On p x 1 no key moves, so the
traffic does not grow with the cache; on 1 x p no query moves, and nothing is left to be merged. Bad input raises errors
as in functional.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import comm, kernels
from ..config import TreeConfig, check_pair, check_positive
from ..duals import check_tangents
from ..kernels import KVCache, merge_into
from ..layout import Segment, in_chunks
from ..merge import State, join_heads, merge_sinks, round_state, state_dtype
from ..plan import CallSizes, check_grid, chunk_sizes, grids, plan_prefill_grid, run_stages
from ..spec import AttnSpec
from .autograd import in_torch
from .call import neighbours
from .cell import Cell, CellForward, HeadChunk, SelectedKeys, head_chunks, wire_dtype
from .rows import HeadRows, Segments, TeamRows
from .shares import all_heads_of, check_head_shares, has_all_heads, slice_of
from .validate import (
    autocast,
    check_cache,
    check_finite_cache,
    check_latents,
    check_runs,
    check_segments,
    check_selected,
    check_sinks,
    make_spec,
)


@comm.public_call
def tree_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    cp_group,
    head_dim_v: int | None = None,
    expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    shares: Sequence[Sequence[tuple[int, int]]],
    key_segments: Sequence[Segment] | Sequence[Sequence[Segment]],
    softmax_scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    attention_chunk_size: int | None = None,
    selected: Tensor | None = None,
    head_shares: Sequence[int] | None = None,
    grid: tuple[int, int] | None = None,
    return_lse: bool = False,
    config: TreeConfig | None = None,
) -> Tensor | State:
    """Exact causal attention of a chunk of a prompt over a cache, both sharded. Collective; no gradients.

    Args:
        q: [b, n, h, d], this rank's queries of the chunk; n may differ between ranks, and may be 0.
        k_cache, v_cache: [b, s_local, h_kv, d] and [b, s_local, h_kv, d_v]: all keys that this rank holds, including
            the chunk's.
        cp_group: the process group over which both are sharded, or a 1-D DeviceMesh; None for one rank.
        head_dim_v: as in `tree_decode`, also with expand: then that of the values that it makes.
        expand: with v_cache=None: makes keys [b, n, h_kv, d] and values [b, n, h_kv, d_v] of n entries of k_cache
            [b, n, 1, any size]; it is called for a part of them at a time.
        shares: for each group rank the positions of its queries, in order, as runs (first position, count).
        key_segments: the positions of this rank's keys, as (row, position, length) each; without a window or slopes,
            keys before the chunk may be in any order. Or a list of these for every group rank, where keys are gathered.
        attention_chunk_size: queries see keys of their own chunk of so many positions only (Llama 4's local layers).
        selected: int32 [b, n, m], the positions of the keys that each of these queries sees, -1 for none
            (`tree_select_prefill`); all positions in key_segments are the keys' own then.
        head_shares: as in `tree_decode`: the queries' heads are sharded then, not their tokens. q holds all queries of
            the chunk, shares has one entry for them. Where keys are gathered, k_cache has one head.
        grid: (a, b) with a * b = ranks: queries are gathered over a ranks, keys over b. (ranks, 1) sends least once the
            cache is long, (1, ranks) while there are few keys. None: one of these, the second if there are key_segments
            for every rank.
        Others as in `tree_decode`; comm_dtype of config is used as well.
    Returns: out [b, n, h, d_v] in q's dtype; with return_lse also lse [b, h, n].
    Raises: as `tree_decode`.
    Source: Tree Attention's reduction (arXiv 2408.04093) on a grid (docs/design.md, section 3).
    """
    outside, q, k_cache, v_cache = autocast(q, k_cache, v_cache)
    if expand is not None and isinstance(outside, torch.autocast):
        expand = torch.autocast(outside.device)(expand)  # its weights are the caller's
    ranks = comm.Ranks.of(cp_group, q.device, config)
    with ranks.call("tree_prefill") as call, outside, torch.no_grad():
        head_shares = check_head_shares(head_shares, q, ranks)
        whole, cache = all_heads_of(q, head_shares), KVCache(k_cache, v_cache, head_dim_v=head_dim_v)
        if expand is None:
            check_cache(whole, cache)
        else:
            check_latents(q, k_cache, v_cache, head_dim_v)
        options = dict(deterministic=config.deterministic, alibi_slopes=alibi_slopes)
        spec = make_spec(whole, True, softmax_scale, window_size, softcap, **options)
        size = check_positive("attention_chunk_size", attention_chunk_size)
        check_sinks(sinks, q, None if head_shares is None else head_shares[ranks.rank])
        check_selected(selected, q, spec, None)
        chunk = PromptChunk(ranks.rank, check_runs(shares), check_segments(key_segments), size, head_shares)
        chunk.check(q.shape[1], cache.k.shape[1], ranks.size)
        if config.deterministic == "ranks" and head_shares is not None:
            raise ValueError("deterministic='ranks' does not take head_shares in a prefill: use deterministic=True")
        if config.deterministic == "ranks" and expand is not None:
            raise ValueError("deterministic='ranks' does not take expand: attend to latents as keys, or leave it out")
        grid = chunk.checked_grid(grid, ranks.size, num_heads_kv=cache.k.shape[2], expands=expand is not None)
        like = (cache.k, cache.values) if expand is None else (q[:, :1], q[:, :1, :, :head_dim_v])
        backend = kernels.choose(whole, *like, spec, config.backend, selects=selected is not None)
        if config.deterministic == "ranks" and grid[0] > 1:
            raise ValueError(
                f"grid={grid} merges states of ranks, which deterministic='ranks' rules out: choose (1, {ranks.size}), "
                "with key_segments of every rank"
            )
        if not in_torch(ranks, backend):
            check_tangents(q=q, k_cache=cache.k, v_cache=cache.v, sinks=sinks)
        check_finite_cache(ranks, q, cache, sinks)
        prefill = PrefillCall(
            batch=q.shape[0],
            num_heads=whole.shape[2],
            num_heads_kv=cache.k.shape[2],
            head_dim=q.shape[3],
            head_dim_v=like[1].shape[3],
            latent=cache.v is None,
            expanded=expand is not None,
            dtype=q.dtype,
            spec=spec,
            sinks=sinks is not None,
            selected=None if selected is None else selected.shape[2],
            head_shares=head_shares,
            gathers_heads=not has_all_heads(q, head_shares),
            shares=str(chunk.shares),
            attention_chunk_size=size,
            grid=grid,
            num_keys=chunk.num_keys if grid[1] > 1 else None,
            config=config,
            topology=ranks.fingerprint,
        )
        call.agree(**vars(prefill))
        out, lse = prefill.run(q, cache, ranks, chunk, backend, expand, selected)
        if sinks is not None:
            out, lse = merge_sinks(out, lse, sinks)
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)


@dataclass(frozen=True, kw_only=True)
class PrefillCall:
    """What the ranks of a prefill agree on, and what its plan is made of."""

    batch: int
    num_heads: int
    """Of all ranks."""
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    latent: bool
    """Whether values are the beginnings of keys, or made of them."""
    expanded: bool
    dtype: torch.dtype
    spec: AttnSpec
    sinks: bool
    selected: int | None
    """Keys of each query, if it does not see all within the mask."""
    head_shares: tuple[int, ...] | None
    gathers_heads: bool
    shares: str
    attention_chunk_size: int | None
    grid: tuple[int, int]
    num_keys: tuple[int, ...] | None
    """Of every rank, where keys are gathered."""
    config: TreeConfig
    topology: str
    """`Ranks.fingerprint`."""

    def run(
        self,
        q: Tensor,
        cache: KVCache,
        ranks: comm.Ranks,
        chunk: PromptChunk,
        backend: kernels.Backend,
        expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None,
        selected: Tensor | None,
    ) -> State:
        """The state of this rank's queries over the whole cache, without sinks."""
        (query_team, key_team, n), (k, v) = self._planned(cache, ranks, chunk), cache[:2]
        queries, spec = chunk.queries(query_team, self.spec)
        wire, keys = wire_dtype(self.dtype, self.config), chunk.keys(key_team)
        own = None if selected is None else SelectedKeys(selected, queries)
        parts = dict(queries=queries, keys=keys, backend=backend, wire=wire, selected=own)
        if v is None:  # latents travel once
            cell, kv = LatentCell(**parts, expand=expand, head_dim_v=self.head_dim_v), (k,)
        else:
            cell, kv = Cell(**parts), (k, v)
        chunks = [HeadChunk.all(spec)] if n == 1 else head_chunks(q.shape[2], k.shape[2], n, spec)
        chunks = [CellForward(cell, head_chunk, q, kv) for head_chunk in chunks]
        run_stages(chunks, streams=comm.on_streams(q.device))
        return join_heads([head_chunk.state for head_chunk in chunks])

    def _planned(self, cache: KVCache, ranks: comm.Ranks, chunk: PromptChunk) -> tuple[comm.Team, comm.Team, int]:
        k, v = cache[:2]
        sizes = chunk_sizes(
            ranks.size,
            sum(chunk.num_queries),
            sum(self.num_keys) if self.num_keys else chunk.end,
            num_heads=self.num_heads,
            head_dims=(self.head_dim, self.head_dim_v),
            key_numbers=k.shape[2] * (k.shape[3] + (0 if v is None else v.shape[3])),
            bytes_per_word=self.dtype.itemsize,
            sends_queries=self.head_shares is None or self.gathers_heads,
        )
        divided = v is not None and self.head_shares is None
        return place_on_grid(self.grid, sizes, k.shape[2] if divided else 1, ranks)


EXPANDED = 4096  # latents whose keys and values exist at a time


def why_not(grid: tuple[int, int], *, shares_heads: bool, num_heads_kv: int, expands: bool) -> str | None:
    """Why a chunk can't run on a grid (a, b), as an error message ends; None if it can.

    shares_heads: the queries' heads are sharded, not their tokens. expands: keys are made of latents.
    """
    if shares_heads and grid[1] > 1 and num_heads_kv > 1:
        return f"keys are gathered for head_shares if there is one KV head, not {num_heads_kv}: choose b = 1"
    if shares_heads and grid[0] > 1 and expands:
        return "expand makes keys of one rank's heads, with head_shares: choose a = 1"
    return None


@dataclass(frozen=True)
class PromptChunk:
    """Where a chunk's queries and the cache's keys are. Fields as the arguments of `tree_prefill`."""

    rank: int
    """This one, in the group."""
    shares: list[list[tuple[int, int]]]
    key_segments: list[Segment] | list[list[Segment]]
    attention_chunk_size: int | None
    head_shares: tuple[int, ...] | None

    @property
    def knows_all_keys(self) -> bool:
        """Whether key_segments has every rank's segments."""
        return bool(self.key_segments) and isinstance(self.key_segments[0], list)

    @property
    def num_queries(self) -> list[int]:
        """For each entry of shares."""
        return [sum(count for _, count in runs) for runs in self.shares]

    @property
    def num_keys(self) -> tuple[int, ...]:
        """On every rank, if key_segments has them all."""
        return tuple(sum(s.length for s in segments) for segments in self.key_segments)

    @property
    def end(self) -> int:
        """The position after the last query."""
        return max((sum(run) for runs in self.shares for run in runs), default=0)

    def check(self, num_queries: int, num_keys: int, world: int) -> None:
        """Raise ValueError unless this describes that many queries and keys on this rank."""
        described = self.num_queries
        if self.head_shares is not None and described != [num_queries]:
            raise ValueError(f"q has {num_queries} queries, but shares={described}: with head_shares one entry for all")
        if self.head_shares is None and (len(described) != world or described[self.rank] != num_queries):
            raise ValueError(f"q has {num_queries} queries, but shares={described} for {world} ranks")
        if self.knows_all_keys and len(self.key_segments) != world:
            raise ValueError(f"key_segments has {len(self.key_segments)} lists for {world} ranks")
        if sum(segment.length for segment in self._keys_of(self.rank)) != num_keys:
            raise ValueError(f"k_cache has {num_keys} keys, but key_segments describes a different number")

    def checked_grid(
        self, grid: tuple[int, int] | None, world: int, *, num_heads_kv: int, expands: bool
    ) -> tuple[int, int]:
        """The grid given, or by default one row or column of ranks; ValueError if the chunk can't run on it.

        expands: keys are made of latents.
        """
        if grid is None:
            grid = (1, world) if self.knows_all_keys else (world, 1)
        check_grid(grid := check_pair("grid", grid), world)
        kind = dict(shares_heads=self.head_shares is not None, num_heads_kv=num_heads_kv, expands=expands)
        if (reason := why_not(grid, **kind)) is not None:
            raise ValueError(f"grid={grid}: {reason}")
        if grid[1] > 1 and not self.knows_all_keys:
            raise ValueError(f"grid={grid}: key_segments must hold a list for each of the {world} ranks if b > 1")
        return grid

    def queries(self, team: comm.Team, spec: AttnSpec) -> tuple[TeamRows | HeadRows, AttnSpec]:
        """What a team gathers of the chunk's queries, and the call's mathematics for the heads of these."""
        if self.head_shares is not None:
            segments = self._one_after_another([run_segments(runs) for runs in self.shares], 0)
            if spec.alibi_slopes is not None:
                of_ranks = [slice_of(self.head_shares, r) for r in sorted(team.order)]
                slopes = tuple(tuple(x for part in of_ranks for x in row[part]) for row in spec.alibi_slopes)
                spec = replace(spec, alibi_slopes=slopes)
            return HeadRows(team, segments, self.head_shares), spec
        counts = self.num_queries
        rows = max(counts[r] for r in team.order)
        return TeamRows(
            team, rows, self._one_after_another([run_segments(self.shares[r]) for r in team.order], rows)
        ), spec

    def keys(self, team: comm.Team) -> TeamRows:
        """What a team gathers of the cache's keys."""
        of_ranks = [self._keys_of(rank) for rank in team.order]
        rows = max(sum(segment.length for segment in segments) for segments in of_ranks)
        return TeamRows(team, rows, self._one_after_another(of_ranks, rows))

    def _keys_of(self, rank: int) -> list[Segment]:
        return self.key_segments[rank] if self.knows_all_keys else self.key_segments

    def _one_after_another(self, of_ranks: list[list[Segment]], rows: int) -> Segments:
        """Segments of several ranks' tensors one after another, `rows` rows for each, that end at chunks' ends."""
        size = self.attention_chunk_size
        cut = of_ranks if size is None else [in_chunks(segments, size) for segments in of_ranks]
        return tuple(s._replace(row=s.row + i * rows) for i, segments in enumerate(cut) for s in segments)


def run_segments(runs: list[tuple[int, int]]) -> list[Segment]:
    """Segments of one rank's queries."""
    ends = itertools.accumulate(count for _, count in runs)
    return [Segment(end - count, position, count) for end, (position, count) in zip(ends, runs)]


@dataclass(frozen=True, kw_only=True)
class LatentCell(Cell):
    """A cell whose values are part of its keys, or whose keys and values are made of latents."""

    expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None
    head_dim_v: int

    def attend(
        self,
        q: Tensor,
        kv: tuple[Tensor, ...],
        q_segments: Segments,
        k_segments: Segments,
        spec: AttnSpec,
        out_dtype: torch.dtype | None = None,
        *,
        arrived: bool = False,
    ) -> State:
        """As `Cell.attend`, of kv = (k,); with expand over what it makes of k [b, s, 1, any], a part at a time."""
        (k,), attend = kv, functools.partial(super().attend, arrived=arrived)
        if self.expand is None:
            return attend(q, (k, k[..., : self.head_dim_v]), q_segments, k_segments, spec, out_dtype)
        state = None
        for segments in _parts(k_segments):
            made = self.expand(torch.cat([k[:, s.row : s.row + s.length] for s in segments] or [k[:, :0]], 1))
            ends = itertools.accumulate(s.length for s in segments)
            segments = [s._replace(row=end - s.length) for s, end in zip(segments, ends)]
            part = attend(q, made, q_segments, segments, spec)
            if state is None:
                state = round_state(part, state_dtype(q.dtype))
            else:
                merge_into(state, part)
        return state


def _parts(segments: Segments) -> list[list[Segment]]:
    """Segments in lists of at most EXPANDED rows, at least one list."""
    pieces = [
        s._replace(row=s.row + i, pos=s.pos + i, length=min(EXPANDED, s.length - i))
        for s in segments
        for i in range(0, s.length, EXPANDED)
    ]
    parts, room = [[]], EXPANDED
    for piece in pieces:
        if piece.length > room:
            parts.append([])
            room = EXPANDED
        parts[-1].append(piece)
        room -= piece.length
    return parts


def place_on_grid(
    grid: tuple[int, int], sizes: CallSizes, num_heads_kv: int, ranks: comm.Ranks
) -> tuple[comm.Team, comm.Team, int]:
    """(query team, key team, number of head chunks) of this rank for a prompt's chunk of these sizes, as planned.

    num_heads_kv: KV heads that may be gathered in chunks.
    """
    network = ranks.network_of_memory
    of_grids = tuple(sizes if other == grid else None for other in grids(ranks.size))
    plan = plan_prefill_grid(of_grids, num_heads_kv=num_heads_kv, **network._asdict())
    at = neighbours(network.placement.order, ranks.rank, plan.arrangement)

    def team(name: str, places: tuple[tuple[int, ...], ...]) -> comm.Team:
        if ranks.memory is not None and sum(map(len, places)) == ranks.size:  # it takes whole groups only
            return ranks.everyone_in_memory
        return comm.Team(ranks, places, (name, *plan.arrangement))

    return team("queries", at.query_team), team("keys", at.key_team), plan.head_chunks
