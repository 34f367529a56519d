"""Packed documents, and which rank holds which part of them.

- `Packed`: every document is cut zigzag on its own. This is Megatron's packed (thd) layout.
- `Dispatched`: every rank holds any runs of rows, for instance whole documents (`dispatch.py`), or the zigzag chunks of
  the whole sequence, whatever documents lie in them.
"""

from __future__ import annotations

import itertools
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arguments import checked
from ..config import integers
from .segments import Segment, join

if TYPE_CHECKING:
    from torch import Tensor


class ReadOnce:
    """What `read(x, *arguments)` returns of tensors, until they change: a host that reads values stalls an accelerator.
    Tensors of inference mode don't count their
    changes: they are read every time."""

    def __init__(self, read: Callable[..., Any]):
        self._read = read

    @cached_property
    def _known(self):
        from torch.utils.weak import WeakTensorKeyDictionary

        return WeakTensorKeyDictionary()

    def __call__(self, x: Tensor, *arguments) -> Any:
        if x.is_inference():
            return self._read(x, *arguments)
        state, known = (x._version, arguments), self._known.get(x)
        if known is None or known[0] != state:
            known = self._known[x] = state, self._read(x, *arguments)
        return known[1]


Run = tuple[int, int]
"""(first row, number of rows) of the packed sequence."""


class TreeRun(NamedTuple):
    """Tokens that follow each other in a tree of prefixes, and that the same rows have; a document is such a run."""

    length: int
    depth: int = 0
    """Tokens before it, which its tokens see as well."""
    is_shared: bool = False
    """Whether others follow it in the tree."""
    parent: int = -1
    """Number of the run that has the token before it, which is less than its own; -1: it begins a tree."""


@dataclass(frozen=True, repr=False)
class _Documents:
    """What `Packed` and `Dispatched` have in common."""

    lengths: tuple[int, ...]
    padded: tuple[int, ...]

    def __post_init__(self):
        if len(self.lengths) != len(self.padded) or any(not 0 <= n <= m for n, m in zip(self.lengths, self.padded)):
            raise ValueError(
                f"cu_seqlens and cu_seqlens_padded give documents of {shown(self.lengths)} and {shown(self.padded)} "
                "rows: they must have equally many, none longer than its padded length"
            )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first row of every document in the packed sequence, and the number of all rows."""
        return (0, *itertools.accumulate(self.padded))

    @property
    def pairs(self) -> int:
        """(query, key) pairs within one document."""
        return sum(n * n for n in self.lengths)

    def __repr__(self) -> str:
        """Short and, through the checksum, different for different documents: ranks compare it."""
        return self._text

    @cached_property
    def _text(self) -> str:
        # vars() holds what was cached, too
        fields = [getattr(self, name) for name in self.__dataclass_fields__]
        return f"{len(self.lengths)} documents ({zlib.crc32(str(fields).encode()):08x})"

    def runs(self, rank: int, world: int) -> Iterable[Run]:
        """The rows of the packed sequence, padding too, that a rank of `world` has, in the order of its rows."""
        raise NotImplementedError

    def segments(self, rank: int, world: int) -> tuple[Segment, ...]:
        """The rank's parts of documents, without padding."""
        row, pieces = 0, []
        for first, count in self.runs(rank, world):
            end = first + count
            while first < end:
                seq = bisect_right(self.starts, first) - 1
                pos, rows = first - self.starts[seq], min(end, self.starts[seq + 1]) - first
                pieces.append(Segment(row, pos, max(0, min(rows, self.lengths[seq] - pos)), seq))
                first, row = first + rows, row + rows
        return join(pieces)

    def in_rows(self, rank: int, world: int) -> tuple[Segment, ...]:
        """The same; of a prefix tree the parts of its runs, at their positions in its rows."""
        return self.segments(rank, world)

    @property
    def longest(self) -> int:
        """Tokens of the longest document, or of a prefix tree's longest row."""
        return max(self.lengths, default=0)

    def source(self, rank: int, world: int) -> tuple[Segment, ...]:
        """The rank's rows that hold a row of the packed sequence, padding too; positions are those rows."""
        row, segments = 0, []
        for first, count in self.runs(rank, world):
            segments.append(Segment(row, first, count))
            row += count
        return join(segments)


@dataclass(frozen=True, repr=False)
class Packed(_Documents):
    """Documents of `lengths` tokens, each padded at its end to the entry of `padded`. Zeros are allowed in both."""

    def check(self, world: int) -> None:
        """Raise ``ValueError`` if the documents can't be cut zigzag over `world` ranks."""
        bad = next((n for n in self.padded if n % (2 * world)), 0) if world > 1 else 0
        if bad:
            raise ValueError(
                f"a packed document of {bad} padded tokens can't be sharded zigzag over {world} ranks: every document "
                f"must be padded to a multiple of 2 * {world} = {2 * world}; pass the padded boundaries as "
                "cu_seqlens_padded, or use a layout that needs no padding (dispatch_documents, or layout='zigzag' of "
                "tree_attn_varlen_func, which cuts the row as a whole)"
            )

    def rows(self, world: int) -> int:
        """Rows of one rank."""
        return self.starts[-1] // world

    def runs(self, rank: int, world: int) -> Iterator[Run]:
        """Two chunks of every document; all rows if there is only one rank."""
        if world == 1:
            yield 0, self.starts[-1]
            return
        for start, padded in zip(self.starts, self.padded):
            c = padded // (2 * world)
            yield start + rank * c, c
            yield start + (2 * world - 1 - rank) * c, c


@dataclass(frozen=True, repr=False)
class Dispatched(_Documents):
    """Packed documents whose runs of rows may lie on any ranks.

    A rank's rows are its runs one after another, and padding up to `num_rows`, so that all ranks have equally many.

    Args:
        lengths, padded: as of `Packed`, but no rank's share depends on the padding.
        shares: the runs (first row, number of rows) of each rank; every row of the packed sequence is in one.
        num_rows: rows of each rank.
        tree: of a prefix tree, whose packed row is one document: its runs, one after another.
    Raises: ValueError if a row is in no share or in two, or a share has more rows than num_rows.
    """

    shares: tuple[tuple[Run, ...], ...]
    num_rows: int
    tree: tuple[TreeRun, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        end = 0
        for first, count in sorted(run for share in self.shares for run in share if run[1]):
            if first != end or count < 0:
                raise ValueError(
                    f"the shares of packed documents must hold each of the {self.starts[-1]} rows once: row "
                    f"{min(first, end)} is in {'no share' if first > end else 'two'}"
                )
            end += count
        most = max((sum(count for _, count in share) for share in self.shares), default=0)
        if end != self.starts[-1] or most > self.num_rows:
            raise ValueError(
                f"the shares of packed documents hold {end} of {self.starts[-1]} rows, at most {most} on a rank: they "
                f"must hold all of them, and at most num_rows={self.num_rows} on a rank"
            )

    def __hash__(self) -> int:
        return self._hash  # shares are long: hashed once

    @cached_property
    def _hash(self) -> int:
        return hash((self.lengths, self.shares, self.num_rows))

    def check(self, world: int) -> None:
        """Raise ``ValueError`` unless there is a share for each of `world` ranks."""
        if len(self.shares) != world:
            raise ValueError(
                f"the documents were dispatched over {len(self.shares)} ranks, but cp_group has {world}: call "
                "dispatch_documents with the cp_group of the attention call"
            )

    def rows(self, world: int) -> int:
        """Rows of one rank."""
        return self.num_rows

    def in_chunks(self, size: int) -> Dispatched:
        """The same rows on the same ranks, but every `size` tokens of a document are a document of their own."""
        chunks = []
        for n, padded in zip(self.lengths, self.padded):
            whole = max(0, n - 1) // size  # padding stays with the last chunk
            chunks += [(size, size)] * whole + [(n - whole * size, padded - whole * size)]
        lengths, padded = zip(*chunks) if chunks else ((), ())
        return Dispatched(lengths, padded, self.shares, self.num_rows)

    def blocks(self, size: int) -> Dispatched:
        """The complete blocks of `size` tokens of every document, each on the rank that has its last token: one row a
        block. Those of a tree's runs are a tree.

        Raises: ValueError for a tree whose rows part within a block.
        """
        return _blocks(self, size)

    def runs(self, rank: int, world: int) -> tuple[Run, ...]:
        return self.shares[rank]

    @cached_property
    def by_run(self) -> Dispatched:
        """The same rows on the same ranks, but every run of the tree is a document of its own."""
        lengths = tuple(run.length for run in self.tree)
        return Dispatched(lengths, lengths, self.shares, self.num_rows)

    def in_rows(self, rank: int, world: int) -> tuple[Segment, ...]:
        if not self.tree:
            return super().in_rows(rank, world)
        return tuple(s._replace(pos=self.tree[s.seq].depth + s.pos) for s in self.by_run.segments(rank, world))

    @property
    def longest(self) -> int:
        return max((run.depth + run.length for run in self.tree), default=super().longest)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """For every run of the tree the tokens of the packed row that a row has up to the run's end."""
        paths: list[tuple[int, ...]] = []
        for first, run in zip(self.by_run.starts, self.tree):
            before = () if run.parent < 0 else paths[run.parent]
            paths.append((*before, *range(first, first + run.length)))
        return tuple(paths)


@lru_cache(maxsize=64)  # every layer asks
def _blocks(layout: Dispatched, size: int) -> Dispatched:
    tree, documents = tree_of_blocks(layout.tree, size), layout.by_run if layout.tree else layout
    counts = tuple(n // size for n in documents.lengths)
    starts, shares = (0, *itertools.accumulate(counts)), []
    for rank in range(len(layout.shares)):
        segments = documents.segments(rank, len(layout.shares))
        bounds = ((s.seq, s.pos // size, (s.pos + s.length) // size) for s in segments)
        shares.append(tuple((starts[seq] + first, end - first) for seq, first, end in bounds if first < end))
    num_rows = max(sum(n for _, n in share) for share in shares)
    if layout.tree:
        counts = (starts[-1],)
    return Dispatched(counts, counts, tuple(shares), num_rows, tree)


def tree_of_blocks(tree: Sequence[TreeRun], size: int) -> tuple[TreeRun, ...]:
    """The runs of a tree, in blocks of `size` tokens. Raises ``ValueError`` if rows part within a block."""
    if cut := next((run.depth for run in tree if run.depth % size), 0):
        raise ValueError(
            f"rows of the prefix tree part after {cut} tokens, within a block of {size}: call prefix_tree(rows, "
            f"block_size={size})"
        )
    return tuple(run._replace(length=run.length // size, depth=run.depth // size) for run in tree)


@checked
def packed_layout(
    cu_seqlens: Tensor | Sequence[int],
    cu_seqlens_padded: Tensor | Sequence[int] | None = None,
    *,
    num_rows: int | None = None,
) -> Packed:
    """The layout of packed documents from their boundaries.

    Args:
        cu_seqlens: integers [n + 1], list or tensor, that start at 0 and do not decrease, as in flash-attn.
        cu_seqlens_padded: the same including each document's padding. Default: no padding.
        num_rows: rows on all ranks together; those after the last document are padding.

    Raises: ``ValueError`` for boundaries that are not as described.
    """
    bounds = document_bounds("cu_seqlens", cu_seqlens)
    padded = bounds if cu_seqlens_padded is None else document_bounds("cu_seqlens_padded", cu_seqlens_padded)
    lengths = [[b - a for a, b in itertools.pairwise(x)] for x in (bounds, padded)]
    if num_rows is not None and padded[-1] != num_rows:
        if padded[-1] > num_rows:
            raise ValueError(f"the documents end at row {padded[-1]}, but q has {num_rows} on all ranks together")
        lengths = [lengths[0] + [0], lengths[1] + [num_rows - padded[-1]]]
    return Packed(*map(tuple, lengths))


def document_bounds(name: str, values) -> tuple[int, ...]:
    """The integers of cu_seqlens, a list or tensor; `name` is the argument's. Raises ``ValueError``."""
    return _bounds(list(values), name) if isinstance(values, Sequence) else _bounds_of_tensor(values, name)


def _bounds(given: list, name: str) -> tuple[int, ...]:
    bounds = integers(given)
    if not bounds or bounds[0] != 0 or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"{name}={shown(tuple(given))} must be integers that start at 0 and do not decrease")
    return bounds


# all layers pass the same tensor
_bounds_of_tensor = ReadOnce(lambda values, name: _bounds(values.flatten().tolist(), name))


def shown(lengths: tuple[int, ...]) -> str:
    """Numbers in messages: the first of many."""
    return str(list(lengths)) if len(lengths) <= 16 else f"[{', '.join(map(str, lengths[:16]))}, ...]"
