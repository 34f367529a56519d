"""Documents over ranks: short ones whole on one rank, long ones spread, balanced by work and by tokens."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from .documents import Dispatched, Run, TreeRun
from .segments import Segment, join

EVEN = 1.05  # work of the busiest rank, per mean, that is good enough
FINEST = 64  # parts of a rank's mean work: documents with less are not spread any more
SHARED_WEIGHT = 16  # shared runs are spread if they have so much less work: their keys go to many ranks anyway


def spread_documents(lengths: tuple[int, ...], world: int, *, multiple_of: int = 1) -> Dispatched:
    """The documents over `world` ranks: all ranks have equally many rows and about the same causal work.

    A document is spread over several ranks, cut zigzag, if its work exceeds a rank's mean work; if the ranks' work
    still differs by more than 5 %, if it exceeds a half of that, and so on. Of ranks with too many rows the *first*
    tokens of a document move to others: little depends on them, so they bring little work and few keys travel.

    multiple_of: of a rank's number of rows, for instance the tensor-parallel size with sequence parallelism.
    """
    return Dispatched(lengths, lengths, *_spread(list(map(TreeRun, lengths)), world, multiple_of))


def spread_tree(runs: list[TreeRun], world: int, *, multiple_of: int = 1) -> Dispatched:
    """The runs of a tree, one after another, over `world` ranks, as documents are: one packed sequence."""
    total = (sum(run.length for run in runs),)
    return Dispatched(total, total, *_spread(runs, world, multiple_of), tuple(runs))


def _spread(documents: list[TreeRun], world: int, multiple_of: int) -> tuple[tuple[tuple[Run, ...], ...], int]:
    """(every rank's runs of rows, rows of a rank)."""
    lengths = [document.length for document in documents]
    rows = -(-sum(lengths) // (world * multiple_of)) * multiple_of
    mean, parts, best = sum(_work(x.depth, x.length) for x in documents) / world, 1, None
    while parts <= FINEST:
        shares = _assigned(documents, world, rows, mean, mean / parts)
        most = max(share.work for share in shares)
        if best is None or most < best[0]:
            best = most, shares
        if best[0] <= EVEN * mean:
            break
        parts *= 2
    starts = [start - x.depth for start, x in zip(itertools.accumulate(lengths, initial=0), documents)]
    return tuple(share.runs(starts) for share in best[1]), rows


@dataclass
class _Share:
    """What one rank gets: pieces (document, position, tokens)."""

    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    work: float = 0.0
    tokens: int = 0

    def add(self, document: int, pos: int, tokens: int) -> None:
        if tokens:
            self.pieces.append((document, pos, tokens))
            self.work += _work(pos, tokens)
            self.tokens += tokens

    def remove(self, piece: tuple[int, int, int]) -> None:
        self.pieces.remove(piece)
        _, pos, tokens = piece
        self.work -= _work(pos, tokens)
        self.tokens -= tokens

    def runs(self, starts: list[int]) -> tuple[Run, ...]:
        """In the order of the packed sequence; what lies side by side is one run. starts: where position 0 of the
        documents would be there."""
        rows = sorted((starts[document] + pos, tokens) for document, pos, tokens in self.pieces)
        return tuple((s.pos, s.length) for s in join(Segment(first, first, count) for first, count in rows))


def _work(pos: int, tokens: int) -> float:
    """(query, key) pairs of so many tokens from position pos on under a causal mask."""
    return tokens * (2 * pos + tokens + 1) / 2


def _assigned(documents: list[TreeRun], world: int, rows: int, mean: float, limit: float) -> list[_Share]:
    """Shared runs first, and the longest documents, each to the ranks with the least work and the fewest tokens; those
    with more work than `limit` to several."""
    shares = [_Share() for _ in range(world)]

    def load(share: _Share) -> tuple[float, int]:
        return max(share.work / mean, share.tokens / rows), share.tokens

    for document in sorted(range(len(documents)), key=lambda i: (not documents[i].is_shared, -documents[i].length, i)):
        n, depth, is_shared, _ = documents[document]
        if not n:
            break
        ranks = min(world, n, math.ceil(_work(depth, n) / limit * (SHARED_WEIGHT if is_shared else 1)))
        chosen = sorted(shares, key=load)[:ranks]
        if ranks == 1:
            chosen[0].add(document, depth, n)
            continue
        bounds = [i * n // (2 * ranks) for i in range(2 * ranks + 1)]
        for i, share in enumerate(chosen):
            for chunk in (i, 2 * ranks - 1 - i):
                share.add(document, depth + bounds[chunk], bounds[chunk + 1] - bounds[chunk])
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
