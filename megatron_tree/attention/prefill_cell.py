"""Attention of a chunk of a prompt over a sharded cache, on a grid of a x b ranks. No gradients.

Rank (i, j) gathers the queries of its column and the keys of its row, and attends. The partial states are reduced down
the column, so that every rank ends with those of its own queries. On p x 1 no key moves, so the traffic does not grow
with the cache; on 1 x p no query moves, and nothing is left to be merged.

KV heads go in groups: while one group is computed, the next group's gathers and the last group's reduction are under
way (`plan/pipeline.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import comm, kernels
from ..config import AttnSpec, TreeConfig, check_pair
from ..layout import Segment, in_chunks
from ..merge import StateReducer, merge_into, pack_state, state_dtype, unpack_state
from ..plan import CallSizes, check_grid, grids, plan_prefill_grid
from ..plan.pipeline import run_chunks
from .call import neighbours
from .grid import Gather, State
from .head_shares import by_owner, heads_of, own_heads, start_gather_heads
from .heads import Heads
from .topology import GroupTopology

EXPANDED = 4096  # latents whose keys and values exist at a time


class ByTokens(NamedTuple):
    """Every rank of a column has the queries of its own tokens."""

    column: comm.Team
    num_own: int
    rows: int
    """In which each rank's queries travel."""

    def start_gather(self, q: Tensor) -> Callable[[], Tensor]:
        """Gather q [b, n, h, d]; what is returned waits for the queries of the column [b, a * rows, h, d]."""
        gather = Gather((q,), self.column, self.rows)
        return lambda: gather.wait()[0]

    def message(self, packed: Tensor) -> Tensor:
        """Packed states of the column's queries [b, s, h, w], as they are reduced: an entry for each rank."""
        return packed.transpose(0, 1)

    def own(self, merged: Tensor) -> Tensor:
        """This rank's entry, reduced, as [b, n, h, w]."""
        return merged.transpose(0, 1)[:, : self.num_own]


class ByHeads(NamedTuple):
    """Every rank of a column has the queries of its own heads, or of all heads. Methods as of `ByTokens`."""

    column: comm.Team
    num_own: int
    shares: tuple[int, ...]
    """Heads of every rank of the group."""

    def start_gather(self, q: Tensor) -> Callable[[], Tensor]:
        return start_gather_heads(q, self.shares, self.column)

    def message(self, packed: Tensor) -> Tensor:
        return by_owner(packed, self.shares, self.column.order).flatten(0, 1)

    def own(self, merged: Tensor) -> Tensor:
        return own_heads(merged, self.num_own)


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
class Chunk:
    """Where a chunk's queries and the cache's keys are. Fields as the arguments of `tree_prefill`."""

    rank: int
    """This one, in the group."""
    shares: list[list[tuple[int, int]]]
    key_segments: list[Segment] | list[list[Segment]]
    attention_chunk_size: int | None
    head_shares: tuple[int, ...] | None

    @property
    def knows_all_keys(self) -> bool:
        """Whether key_segments has those of every rank."""
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

    def queries(self, column: comm.Team, spec: AttnSpec) -> tuple[ByTokens | ByHeads, list[Segment], AttnSpec]:
        """What a column gathers, its segments, and the call's mathematics for the heads of these."""
        if self.head_shares is not None:
            gathered = ByHeads(column, self.head_shares[self.rank], self.head_shares)
            spec = spec_of_heads(spec, heads_of(self.head_shares, column.order))
            return gathered, self._one_after_another([_of_runs(runs) for runs in self.shares], 0), spec
        counts = self.num_queries
        gathered = ByTokens(column, counts[self.rank], max(counts[r] for r in column.order))
        segments = [_of_runs(self.shares[r]) for r in column.order]
        return gathered, self._one_after_another(segments, gathered.rows), spec

    def keys(self, row: comm.Team) -> tuple[int, list[Segment]]:
        """Rows in which each rank's keys travel, and the segments of what a row gathers."""
        of_row = [self._keys_of(rank) for rank in row.order]
        rows = max(sum(segment.length for segment in segments) for segments in of_row)
        return rows, self._one_after_another(of_row, rows)

    def _keys_of(self, rank: int) -> list[Segment]:
        return self.key_segments[rank] if self.knows_all_keys else self.key_segments

    def _one_after_another(self, of_ranks: list[list[Segment]], rows: int) -> list[Segment]:
        """Segments of several ranks' tensors one after another, `rows` rows for each, that end at chunks' ends."""
        size = self.attention_chunk_size
        cut = of_ranks if size is None else [in_chunks(segments, size) for segments in of_ranks]
        return [s._replace(row=s.row + i * rows) for i, own in enumerate(cut) for s in own]


def _of_runs(runs: list[tuple[int, int]]) -> list[Segment]:
    """Segments of one rank's queries."""
    ends = itertools.accumulate(count for _, count in runs)
    return [Segment(end - count, position, count) for end, (position, count) in zip(ends, runs)]


@dataclass(frozen=True, kw_only=True)
class PrefillCall:
    """A checked and planned call, on this rank's cell of the grid."""

    queries: ByTokens | ByHeads
    row: comm.Team
    key_rows: int
    """Rows in which each rank's keys travel along the row."""
    q_segments: list[Segment]
    """Of the column's queries."""
    k_segments: list[Segment]
    """Of the row's keys."""
    spec: AttnSpec
    """Of the column's heads."""
    backend: kernels.Backend
    wire: torch.dtype
    head_chunks: int
    expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None
    head_dim_v: int

    @classmethod
    def on(cls, cell: Cell, chunk: Chunk, spec: AttnSpec, **options) -> PrefillCall:
        """The call of a chunk on a cell; spec is of all heads, options are the other fields."""
        queries, q_segments, spec = chunk.queries(cell.column, spec)
        key_rows, k_segments = chunk.keys(cell.row)
        return cls(
            queries=queries, row=cell.row, key_rows=key_rows, q_segments=q_segments, k_segments=k_segments, spec=spec,
            head_chunks=cell.head_chunks, **options,
        )  # fmt: skip

    def run(self, q: Tensor, k: Tensor, v: Tensor | None) -> State:
        """(out [b, n, h, d_v], lse [b, h, n]) of this rank's queries over the whole cache, without sinks.

        q [b, n, h, d]; k, v [b, s_local, h_kv, d or d_v] of this rank. v None: values begin keys, or expand makes both.
        """
        if self.head_chunks == 1:
            return run_chunks([self._group(q, k, v, self.spec)])[0]
        heads, groups = Heads(q.shape[2], k.shape[2], self.head_chunks), []
        for i in range(heads.groups):
            share = q[:, :, heads.queries(i)], k[:, :, heads.kv(i)], v[:, :, heads.kv(i)]
            groups.append(self._group(*share, heads.spec(i, self.spec)))
        outs, lses = zip(*run_chunks(groups))
        return torch.cat(outs, 2), torch.cat(lses, 1)

    def _group(self, q: Tensor, k: Tensor, v: Tensor | None, spec: AttnSpec) -> Generator[None, None, State]:
        column, dtype = self.queries.column, state_dtype(q.dtype)
        yield
        key_gather = Gather((k,) if v is None else (k, v), self.row, self.key_rows)  # latents travel once
        query_gather = self.queries.start_gather(q)
        yield
        keys, queries = key_gather.wait(), query_gather()
        del key_gather, query_gather
        yield
        out, lse = self._attend(queries, *keys, spec=spec)
        del keys, queries
        if column.size == 1:
            return out, lse
        packed = self.queries.message(pack_state(out, lse, self.wire))
        reduction = comm.start_reduce_scatter(packed, column, StateReducer(self.wire, dtype))
        del out, lse, packed
        yield
        reduction.advance()
        yield
        return unpack_state(self.queries.own(reduction.wait()), dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor | None = None, *, spec: AttnSpec) -> State:
        """`Backend.attn_fwd`; with expand over what it makes of k [b, s, 1, any], a part at a time."""
        attn_fwd, options = self.backend.attn_fwd, dict(q_segments=self.q_segments, spec=spec)
        if self.expand is None:
            return attn_fwd(q, k, k[..., : self.head_dim_v] if v is None else v, k_segments=self.k_segments, **options)
        state = None
        for segments in _parts(self.k_segments):
            keys, values = self.expand(torch.cat([k[:, s.row : s.row + s.length] for s in segments] or [k[:, :0]], 1))
            ends = itertools.accumulate(s.length for s in segments)
            segments = [s._replace(row=end - s.length) for s, end in zip(segments, ends)]
            out, lse = attn_fwd(q, keys, values, k_segments=segments, **options)
            if state is None:
                state = out.to(state_dtype(q.dtype)), lse
            else:
                merge_into(state, (out, lse))
        return state


def _parts(segments: list[Segment]) -> list[list[Segment]]:
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


class Cell(NamedTuple):
    """Where this rank is on a grid."""

    column: comm.Team
    row: comm.Team
    head_chunks: int

    @classmethod
    def on(
        cls, grid: tuple[int, int], sizes: CallSizes, num_heads_kv: int, group, device: torch.device, config: TreeConfig
    ) -> Cell:
        """The cell for a chunk of these sizes, nested and in head chunks as planned; num_heads_kv may be divided."""
        net, world = GroupTopology.over_cache(group, device, config), comm.group_size(group)
        of_grids = tuple(sizes if other == grid else None for other in grids(world))
        plan = plan_prefill_grid(of_grids, num_heads_kv=num_heads_kv, topology=net.topology, placement=net.placement)
        at = neighbours(net.placement.order, comm.group_rank(group), plan.arrangement)

        def team(name: str, ranks: tuple[tuple[int, ...], ...]) -> comm.Team:
            transport = net.transport
            if transport == "shm":  # takes whole groups only
                if sum(map(len, ranks)) == world:
                    return comm.Team.flat(group, transport=transport, timeout_s=config.timeout_s)
                transport = GroupTopology.of(group, device, config).transport
            return comm.Team(group, ranks, transport, config.timeout_s, (name, *plan.arrangement))

        return cls(team("column", at.column), team("row", at.row), plan.head_chunks)


def spec_of_heads(spec: AttnSpec, heads: list[int]) -> AttnSpec:
    """The call's mathematics for tensors with some of its query heads."""
    if spec.alibi_slopes is None:
        return spec
    return replace(spec, alibi_slopes=tuple(tuple(row[head] for head in heads) for row in spec.alibi_slopes))
