"""Documents over ranks: short ones whole on one rank, long ones spread, balanced by work and by tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from .documents import Dispatched, Run
from .segments import Segment, join

EVEN = 1.05  # work of the busiest rank, per mean, that is good enough
FINEST = 64  # parts of a rank's mean work: documents with less are not spread any more


def spread_documents(lengths: tuple[int, ...], world: int, *, multiple_of: int = 1) -> Dispatched:
    """The documents over `world` ranks: all ranks have equally many rows and about the same causal work.

    A document is spread over several ranks, cut zigzag, if its work exceeds a rank's mean work; if the ranks' work
    still differs by more than 5 %, if it exceeds a half of that, and so on. Of ranks with too many rows the *first*
    tokens of a document move to others: little depends on them, so they bring little work and few keys travel.

    multiple_of: of a rank's number of rows, for instance the tensor-parallel size with sequence parallelism.
    """
    rows = -(-sum(lengths) // (world * multiple_of)) * multiple_of
    mean, parts, best = sum(map(_work, lengths)) / world, 1, None
    while parts <= FINEST:
        shares = _assigned(lengths, world, rows, mean, mean / parts)
        most = max(share.work for share in shares)
        if best is None or most < best[0]:
            best = most, shares
        if best[0] <= EVEN * mean:
            break
        parts *= 2
    starts = list(itertools.accumulate(lengths, initial=0))
    runs = tuple(share.runs(starts) for share in best[1])
    return Dispatched(lengths, lengths, runs, rows)


@dataclass
class _Share:
    """What one rank gets: pieces (document, position, tokens)."""

    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    work: float = 0.0
    tokens: int = 0

    def add(self, document: int, pos: int, tokens: int) -> None:
        if tokens:
            self.pieces.append((document, pos, tokens))
            self.work += _work(pos + tokens) - _work(pos)
            self.tokens += tokens

    def remove(self, piece: tuple[int, int, int]) -> None:
        self.pieces.remove(piece)
        _, pos, tokens = piece
        self.work -= _work(pos + tokens) - _work(pos)
        self.tokens -= tokens

    def runs(self, starts: list[int]) -> tuple[Run, ...]:
        """In the order of the packed sequence; what lies side by side is one run. starts: of the documents there."""
        rows = sorted((starts[document] + pos, tokens) for document, pos, tokens in self.pieces)
        return tuple((s.pos, s.length) for s in join(Segment(first, first, count) for first, count in rows))


def _work(tokens: int) -> float:
    """(query, key) pairs of the first tokens of a document under a causal mask."""
    return tokens * (tokens + 1) / 2


def _assigned(lengths: tuple[int, ...], world: int, rows: int, mean: float, limit: float) -> list[_Share]:
    """The longest documents first, each to the ranks with the least work and the fewest tokens; those with more work
    than `limit` to several."""
    shares = [_Share() for _ in range(world)]

    def load(share: _Share) -> tuple[float, int]:
        return max(share.work / mean, share.tokens / rows), share.tokens

    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        n = lengths[document]
        if not n:
            break
        ranks = min(world, n, math.ceil(_work(n) / limit))
        chosen = sorted(shares, key=load)[:ranks]
        if ranks == 1:
            chosen[0].add(document, 0, n)
            continue
        bounds = [i * n // (2 * ranks) for i in range(2 * ranks + 1)]
        for i, share in enumerate(chosen):
            for chunk in (i, 2 * ranks - 1 - i):
                share.add(document, bounds[chunk], bounds[chunk + 1] - bounds[chunk])
    _level(shares, rows)
    return shares


def _level(shares: list[_Share], rows: int) -> None:
    """Move tokens from ranks that have more than `rows` to those with fewer."""
    while (giver := max(shares, key=lambda share: share.tokens)).tokens > rows:
        taker = min(shares, key=lambda share: share.tokens)
        count = min(giver.tokens - rows, rows - taker.tokens)
        # the longest beginning of a document; else whatever starts earliest
        piece = min(giver.pieces, key=lambda piece: (piece[1], -piece[2]))
        document, pos, tokens = piece
        giver.remove(piece)
        giver.add(document, pos + min(count, tokens), tokens - min(count, tokens))
        taker.add(document, pos, min(count, tokens))
