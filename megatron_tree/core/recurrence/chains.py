"""Every document's segments, over all ranks, in the order of positions."""

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


@dataclass(frozen=True, eq=False)
class Chains:
    """The segments of all ranks: by rank in the order of its rows, and by document in the order of positions.

    Documents of one segment are left out, but a sequence's only one.
    """

    segments: tuple[tuple[Segment, ...], ...]
    documents: tuple[tuple[Link, ...], ...]
    is_packed: bool
    """Whether there may be several documents."""

    @functools.cached_property
    def before_others(self) -> Numbers:
        """The segments after which a document goes on."""
        return self._by_rank(link for links in self.documents for link in links[:-1])

    @functools.cached_property
    def after_others(self) -> Numbers:
        """The segments that don't begin a document."""
        return self._by_rank(link for links in self.documents for link in links[1:])

    @functools.cached_property
    def linked(self) -> Numbers:
        """The segments of `documents`."""
        return self._by_rank(link for links in self.documents for link in links)

    def _by_rank(self, links: Iterable[Link]) -> Numbers:
        numbers: list[list[int]] = [[] for _ in self.segments]
        for (rank, index), _ in links:
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
                raise ValueError(f"{name} is of one sequence, but the layout is of several documents: leave it out")


@functools.lru_cache(maxsize=256)
def chains_of(seq_len: int, world: int, layout: Layout) -> Chains:
    """The chains of a sequence. Raises ``ValueError`` where the layout can't cut it."""
    shard_lengths(seq_len, world, layout)
    segments = tuple(shard_segments(seq_len, rank, world, layout) for rank in range(world))
    is_packed, documents = isinstance(layout, (Packed, Dispatched)) and len(layout.lengths) != 1, {}
    for rank, of_rank in enumerate(segments):
        for index, segment in enumerate(of_rank):
            documents.setdefault(segment.seq, []).append(Link((rank, index), segment))
    in_order = (tuple(sorted(links, key=lambda link: link.segment.pos)) for links in documents.values())
    return Chains(segments, tuple(x for x in in_order if len(x) > 1 or not is_packed), is_packed)
