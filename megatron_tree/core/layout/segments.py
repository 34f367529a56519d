"""Segments: runs of rows with consecutive positions. Kernels and schedules are told of tokens in this way only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..spec import MaskBounds

if TYPE_CHECKING:
    from torch import Tensor


class Segment(NamedTuple):
    """A run of consecutive positions: rows row .. row+length-1 hold positions pos .. pos+length-1.

    seq: number of the packed document. Queries see only keys of the same document.
    """

    row: int
    pos: int
    length: int
    seq: int = 0

    def part(self, first: int, last: int) -> Segment:
        """The positions first .. last-1 that it has; its length may be 0."""
        first, last = max(first, self.pos), min(last, self.pos + self.length)
        return Segment(self.row + first - self.pos, first, max(0, last - first), self.seq)


def join(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Drop empty segments and fuse neighbours that are consecutive in both row and position."""
    done: list[Segment] = []
    for s in segments:
        if s.length == 0:
            continue
        last = done[-1] if done else None
        if last and (last.row + last.length, last.pos + last.length, last.seq) == (s.row, s.pos, s.seq):
            done[-1] = last._replace(length=last.length + s.length)
        else:
            done.append(s)
    return tuple(done)


def in_chunks(segments: Iterable[Segment], size: int) -> list[Segment]:
    """Segments of one sequence, cut where a chunk of `size` positions begins; each chunk is a document of its own."""
    cut = []
    for s in segments:
        for chunk in range(s.pos // size, -(-(s.pos + s.length) // size)):
            cut.append(s.part(chunk * size, (chunk + 1) * size)._replace(seq=chunk))
    return cut


def sequences_of(segments: Iterable[Segment], num_rows: int, *, device=None) -> Tensor:
    """int64 [num_rows]: the sequence each row belongs to, -1 for rows of no segment."""
    import torch

    seq = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
    for s in segments:
        seq[s.row : s.row + s.length] = s.seq
    return seq


def positions_of(segments: Iterable[Segment], num_rows: int, *, device=None, padding: int = -1) -> Tensor:
    """int64 [num_rows]: the position of each row, `padding` for rows of no segment."""
    import torch

    pos = torch.full((num_rows,), padding, dtype=torch.int64, device=device)
    for s in segments:
        pos[s.row : s.row + s.length] = torch.arange(s.pos, s.pos + s.length, device=device)
    return pos


Documents = dict[int, list[Segment]]
"""Segments by document."""


def by_document(segments: Iterable[Segment]) -> Documents:
    """The segments of every document."""
    documents: Documents = {}
    for s in segments:
        documents.setdefault(s.seq, []).append(s)
    return documents


def visible_rows(queries: Documents, keys: Documents, bounds: MaskBounds) -> tuple[Segment, ...]:
    """The parts of `keys` that some query sees, in the order of their rows."""
    visible = []
    for document in queries.keys() & keys.keys():  # few: most documents lie on one rank
        for k in keys[document]:
            visible += (k.part(first, last) for first, last in _united(_spans(queries[document], k, bounds)))
    return tuple(sorted(visible))


def _spans(queries: list[Segment], k: Segment, bounds: MaskBounds) -> Iterator[tuple[int, int]]:
    """The positions of k, from the first to before the last, that queries see."""
    if bounds.slices is None:
        yield from (_span(q, k, bounds.left, bounds.right) for q in queries)
        return
    for piece in bounds.slices:
        of_keys = k.part(*piece.k_range)
        for q in queries if of_keys.length else ():
            yield _span(q.part(*piece.q_range), of_keys, piece.left, piece.right)


def _span(q: Segment, k: Segment, left: int | None, right: int | None) -> tuple[int, int]:
    """Empty if first >= last."""
    if not q.length:
        return 0, 0
    first = k.pos if left is None else max(k.pos, q.pos - left)
    end = k.pos + k.length
    return first, end if right is None else min(end, q.pos + q.length + right)


def _united(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges without the empty ones and without overlaps, in rising order."""
    done: list[tuple[int, int]] = []
    for first, last in sorted(span for span in spans if span[0] < span[1]):
        if done and first <= done[-1][1]:
            done[-1] = done[-1][0], max(done[-1][1], last)
        else:
            done.append((first, last))
    return done
