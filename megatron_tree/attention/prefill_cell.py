"""A chunk of a prompt over a sharded cache: where its queries and the keys are, and this rank's cell of a x b ranks.

A rank gathers the queries of its column and the keys of its row, and attends. The partial states are reduced down the
column, so that every rank ends with those of its own queries. On p x 1 no key moves, so the traffic does not grow with
the cache; on 1 x p no query moves, and nothing is left to be merged.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import comm
from ..config import AttnSpec, check_pair
from ..layout import Segment, in_chunks
from ..merge import State, merge_into, round_state, state_dtype
from ..plan import CallSizes, check_grid, grids, plan_prefill_grid
from .call import neighbours
from .cell import Cell
from .head_shares import heads_of
from .rows import HeadRows, Segments, TeamRows

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

    def queries(self, team: comm.Team, spec: AttnSpec) -> tuple[TeamRows | HeadRows, AttnSpec]:
        """What a team gathers of the chunk's queries, and the call's mathematics for the heads of these."""
        if self.head_shares is not None:
            segments = self._one_after_another([of_runs(runs) for runs in self.shares], 0)
            if spec.alibi_slopes is not None:
                heads = heads_of(self.head_shares, team.order)
                spec = replace(spec, alibi_slopes=tuple(tuple(row[i] for i in heads) for row in spec.alibi_slopes))
            return HeadRows(team, segments, self.head_shares), spec
        counts = self.num_queries
        rows = max(counts[r] for r in team.order)
        return TeamRows(team, rows, self._one_after_another([of_runs(self.shares[r]) for r in team.order], rows)), spec

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


def of_runs(runs: list[tuple[int, int]]) -> list[Segment]:
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
