"""Every document's segments, over all ranks, in the order of positions; of a prefix tree those of its runs."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .. import comm
from ..layout import Dispatched, Layout, Packed, Segment, check_layout, shard_lengths, shard_segments

Place = tuple[int, int]
"""(rank, number of a segment among those of the rank)."""


Numbers = tuple[tuple[int, ...], ...]
"""Numbers of segments, by rank."""


class Link(NamedTuple):
    """A segment of a document."""

    place: Place
    segment: Segment
    before: int
    """Number of the link that has the position before its first one; -1: it begins a document, or a tree."""


@dataclass(frozen=True, eq=False)
class Chains:
    """The segments of all ranks: by rank in the order of its rows, and as links, each after the one before it.

    Documents are chains of links; where rows of a prefix tree part, several links come after one. Segments alone in
    their document are no links, but a sequence's only one.
    """

    segments: tuple[tuple[Segment, ...], ...]
    links: tuple[Link, ...]
    is_packed: bool
    """Whether there may be several documents, or there is a tree."""

    @functools.cached_property
    def before_others(self) -> Numbers:
        """The segments after which others come."""
        return self._by_rank(self.links[i] for i in dict.fromkeys(x.before for x in self.links) if i >= 0)

    @functools.cached_property
    def after_others(self) -> Numbers:
        """The segments that don't begin a document."""
        return self._by_rank(link for link in self.links if link.before >= 0)

    @functools.cached_property
    def linked(self) -> Numbers:
        """The segments of `links`."""
        return self._by_rank(self.links)

    @functools.cached_property
    def waves(self) -> tuple[tuple[dict[int, int], ...], ...]:
        """By rank the segments that it can run by itself, since it has all that lie before them. In waves, each after
        the one before it: {number of a segment: that of the segment before it, -1 for none}."""
        waves = [
            [{i: -1 for i in range(len(segments)) if i not in linked}]
            for segments, linked in zip(self.segments, map(set, self.linked))
        ]
        depths = {-1: -1}  # of links, by their number
        for i, ((rank, index), _, before) in enumerate(self.links):
            holder, number = (rank, -1) if before < 0 else self.links[before].place
            if holder == rank and before in depths:
                depths[i] = depths[before] + 1
                if depths[i] == len(waves[rank]):
                    waves[rank].append({})
                waves[rank][depths[i]][index] = number
        return tuple(map(tuple, waves))

    @functools.cached_property
    def rest(self) -> Chains:
        """What is left once every rank has run its `waves`: chains that begin with the last segments of these."""
        own = [{number for wave in of_rank for number in wave} for of_rank in self.waves]
        known = {i for i, ((rank, index), _, _) in enumerate(self.links) if index in own[rank]}
        needed = {link.before for i, link in enumerate(self.links) if i not in known}
        if not self.is_packed:
            needed.add(len(self.links) - 1)  # the sequence's end
        links, numbers = [], {}
        for i, link in enumerate(self.links):
            if i not in known or i in needed:
                numbers[i] = len(links)
                links.append(link._replace(before=-1 if i in known else numbers[link.before]))
        return Chains(self.segments, tuple(links), self.is_packed)

    def _by_rank(self, links: Iterable[Link]) -> Numbers:
        numbers: list[list[int]] = [[] for _ in self.segments]
        for link in links:
            rank, index = link.place
            numbers[rank].append(index)
        return tuple(map(tuple, numbers))

    @staticmethod
    def of(x: Tensor, name: str, ranks: comm.Ranks, layout: Layout) -> Chains:
        """Those of the sequence of which x [b, s_local, ...] is this rank's shard. Raises ``ValueError``."""
        world, rank = ranks.size, ranks.rank
        layout = check_layout(layout, world)
        if isinstance(layout, tuple) and x.shape[1] != layout[rank]:
            raise ValueError(
                f"{name} has {x.shape[1]} tokens on rank {rank}, but layout={layout} gives it {layout[rank]}"
            )
        return chains_of(sum(layout) if isinstance(layout, tuple) else x.shape[1] * world, world, layout)

    def check_sequence(self, **given: object) -> None:
        """Raise ``ValueError`` for what only a single sequence has; packed documents are one if there is one."""
        for name, value in given.items():
            if value is not None and value is not False and self.is_packed:
                raise ValueError(
                    f"{name} is of one sequence, but the layout is of several documents or a prefix tree: leave it out"
                )


@functools.lru_cache(maxsize=256)
def chains_of(seq_len: int, world: int, layout: Layout) -> Chains:
    """The chains of a sequence. Raises ``ValueError`` where the layout can't cut it."""
    shard_lengths(seq_len, world, layout)
    tree = layout.tree if isinstance(layout, Dispatched) else ()
    cut, documents = layout.by_run if tree else layout, {}
    segments = tuple(shard_segments(seq_len, rank, world, cut) for rank in range(world))
    if tree:  # at their positions in the tree's rows
        segments = tuple(tuple(s._replace(pos=tree[s.seq].depth + s.pos) for s in of_rank) for of_rank in segments)
    for rank, of_rank in enumerate(segments):
        for index, segment in enumerate(of_rank):
            documents.setdefault(segment.seq, []).append(((rank, index), segment))
    is_packed = isinstance(layout, (Packed, Dispatched)) and (len(layout.lengths) != 1 or bool(tree))
    parents = {i: run.parent for i, run in enumerate(tree) if run.parent >= 0}
    joined = {*parents, *parents.values()}
    links, ends = [], {}
    for number, document in sorted(documents.items()):
        if is_packed and len(document) == 1 and number not in joined:
            continue
        last = ends.get(parents.get(number), -1)
        for place, segment in sorted(document, key=lambda part: part[1].pos):
            links.append(Link(place, segment, last))
            last = len(links) - 1
        ends[number] = last
    return Chains(segments, tuple(links), is_packed)
