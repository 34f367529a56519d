"""Rows that begin alike as one packed row: a tree of tokens, in which every shared prefix is stored once.

A token of the packed row predicts one next token, or several by multi-token prediction. So rows share a token if they
agree up to the last one that it predicts, and the tokens before they part are stored once for each way on
(docs/prefix-trees.md).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import checked
from ..config import check_positive, integers
from ..spec import AttnSlice
from .documents import TreeRun

NO_LABEL = -100


class Branch(NamedTuple):
    """A run of the packed row whose tokens follow each other in the tree."""

    first: int
    end: int
    """One past its last token."""
    depth: int
    """Position of its first token in the rows."""
    parent: int
    """Number of the branch that has the token before it; -1: it begins a tree."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefixTree:
    """n rows of at most s tokens, packed into t: `prefix_tree` makes it.

    `rows_of` turns what a model gives for the packed row into what it gives for the rows; its gradient is the sum over
    the rows that have a token.
    """

    input_ids: Tensor
    """int64 [1, t]."""
    position_ids: Tensor
    """int64 [1, t]: positions in the rows."""
    labels: Tensor
    """int64 [1, t]: the token after each, -100 where no row counts it. Not to be shifted any more."""
    weights: Tensor
    """fp32 [1, t]: of the labels, summed over the rows that have them."""
    row_index: Tensor
    """int64 [n, s]: where the packed row has each row's tokens, -1 after its end."""
    row_weights: Tensor
    """fp32 [n, s]: the weight of the token after each, 0 for a row's last one."""
    branches: tuple[Branch, ...] = field(repr=False)
    num_predicted: int = 1
    """Rows that share a token agree in so many after it."""

    def ranges(self, window: int | None = None, chunk: int | None = None) -> tuple[AttnSlice, ...]:
        """The mask for `tree_attn_func(ranges=)`: a token sees those before it in its rows, and itself; of these the
        last `window`, or those of its own `chunk` positions, if given."""
        if chunk is not None:
            return _in_chunks(self.branches, chunk)
        return _all_before(self.branches) if window is None else _last_before(self.branches, window)

    def runs(self) -> list[TreeRun]:
        """The packed row, cut where rows part."""
        cuts: list[set[int]] = [{b.depth, b.depth + b.end - b.first} for b in self.branches]
        for b in self.branches:
            if b.parent >= 0:
                cuts[b.parent].add(b.depth)
        spans = [(i, *span) for i, of_branch in enumerate(cuts) for span in itertools.pairwise(sorted(of_branch))]
        parted = {(b.parent, b.depth) for b in self.branches}
        ending = {(i, end): number for number, (i, _, end) in enumerate(spans)}
        runs = []
        for i, a, end in spans:
            before = self.branches[i].parent if a == self.branches[i].depth else i
            runs.append(TreeRun(end - a, a, (i, end) in parted, ending.get((before, a), -1)))
        return runs

    def to(self, device, non_blocking: bool = False) -> PrefixTree:
        """The same tree on a device, as of a tensor."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **{name: x.to(device, non_blocking=non_blocking) for name, x in tensors.items()})

    def rows_of(self, x: Tensor) -> Tensor:
        """[n, s, ...] of the rows from x [1, t, ...] of the packed row; 0 after a row's end. Differentiable."""
        _check_shape("x", x, self.input_ids.shape)
        index = self.row_index.to(x.device)
        there = index.unflatten(1, (-1,) + (1,) * (x.dim() - 2)) >= 0
        return torch.where(there, x[0][index.clamp(min=0)], 0)

    def next_of_rows(self, x: Tensor) -> Tensor:
        """`rows_of` for what belongs to the labels, such as their log-probabilities [1, t]: [n, s], 0 also where a
        row's weight is 0."""
        return torch.where(self.row_weights.to(x.device) != 0, self.rows_of(x), 0)

    def sum_of_rows(self, x: Tensor) -> Tensor:
        """[1, t]: for each token of the packed row the sum over the rows that have it of x [n, s]."""
        _check_shape("x", x, self.row_index.shape)
        index = self.row_index.to(x.device)
        return x.new_zeros(self.input_ids.shape[1]).index_add(0, index[index >= 0], x[index >= 0])[None]


@checked
def prefix_tree(
    rows: Sequence | Tensor,
    *,
    weights: Sequence | Tensor | None = None,
    min_shared: int = 1,
    num_predicted: int = 1,
    block_size: int = 1,
) -> PrefixTree:
    """Pack rows so that the prefixes that they share are computed once. No communication.

    With the loss sum(weights * losses) of the packed row, loss and gradients are those of the separate rows.

    Args:
        rows: of token ids, lists or int64 tensors [tokens], each with at least one.
        weights: for every row a number for each token: the weight of its prediction in the loss, for instance a loss
            mask. Of a row's first token it is not used. Default: 1.
        min_shared: a run of tokens between two places where rows part is stored for each of them if it is shorter: a
            place costs slices of the mask. Prefixes of at least so many tokens are shared.
        num_predicted: how many tokens the model predicts of each: 1, and one more for each layer of multi-token
            prediction. Before they part, rows have so many tokens each for itself.
        block_size: tokens of the model's blocks, or a common multiple. Rows part between blocks of so many tokens, so
            that every block is of one row, or shared: each row has the tokens of the block in which it parts.
    Returns: the tree, on the CPU; `to(device)` moves it.
    Raises: ValueError for no rows, empty ones, ids that are no integers, and weights of other lengths.
    """
    check_positive("min_shared", min_shared)
    check_positive("num_predicted", num_predicted)
    check_positive("block_size", block_size)
    ids = [_ids(i, row) for i, row in enumerate(rows)]
    if not ids:
        raise ValueError("rows has no row: pass at least one")
    branches, row_index = _placed(ids, min_shared, num_predicted, block_size)
    lengths = torch.tensor([len(row) for row in ids])
    at, longest = torch.arange(row_index.shape[1]), row_index.shape[1]
    tokens = torch.zeros(len(ids), longest, dtype=torch.int64)
    given = torch.zeros(len(ids), longest)
    for i, row in enumerate(ids):
        tokens[i, : len(row)] = torch.tensor(row)
        given[i, : len(row)] = 1 if weights is None else _weights(i, weights, len(ids), len(row))
    followed = at < lengths[:, None] - 1
    row_weights = torch.where(followed, given.roll(-1, 1), 0)
    there = row_index >= 0
    num_tokens = branches[-1].end
    ids_of, labels = torch.empty(num_tokens, dtype=torch.int64), torch.full((num_tokens,), NO_LABEL)
    counted = row_weights != 0
    ids_of[row_index[there]] = tokens[there]
    labels[row_index[counted]] = tokens.roll(-1, 1)[counted]
    positions = torch.cat([torch.arange(b.depth, b.depth + b.end - b.first) for b in branches])
    sums = torch.zeros(num_tokens).index_add(0, row_index[there], row_weights[there])
    packed = dict(input_ids=ids_of, position_ids=positions, labels=labels, weights=sums)
    tensors = {name: x[None] for name, x in packed.items()} | dict(row_index=row_index, row_weights=row_weights)
    return PrefixTree(**tensors, branches=branches, num_predicted=num_predicted)


def _placed(
    rows: list[list[int]], min_shared: int, num_predicted: int, block_size: int
) -> tuple[tuple[Branch, ...], Tensor]:
    """The tree's branches, and `row_index`."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    longest = max(map(len, rows))
    row_index = torch.full((len(rows), longest), -1)
    # a row that others begin with is followed by one of them, and lies in it
    ends = [i for i, j in itertools.pairwise([*order, None]) if j is None or rows[j][: len(rows[i])] != rows[i]]
    alike = [_num_alike(rows[i], rows[j]) for i, j in itertools.pairwise(ends)]
    shared = [0] + [max(0, n - num_predicted) // block_size * block_size for n in alike]
    of_ends = torch.full((len(ends), longest), -1)
    branches = _grown([len(rows[i]) for i in ends], shared, of_ends, min_shared)
    which = 0
    for i in order:
        row_index[i, : len(rows[i])] = of_ends[which, : len(rows[i])]
        which += i == ends[which]
    return branches, row_index


def _grown(lengths: list[int], shared: list[int], row_index: Tensor, min_shared: int) -> tuple[Branch, ...]:
    """The branches of sorted rows, row i of which shares `shared[i]` tokens with the row before; fills row_index.

    Depth first; where rows part, most of them stay on the branch, so that no token has many branches before it.
    """
    branches: list[Branch] = []
    todo = [(0, len(lengths), 0, -1, True)]  # rows, tokens before them, the branch of these, whether to leave it
    while todo:
        first, last, depth, branch, leave = todo.pop()
        parting = min(shared[first + 1 : last], default=lengths[first])
        cuts = [first, *(i for i in range(first + 1, last) if shared[i] == parting), last]
        if len(cuts) > 2 and parting - depth < min_shared:
            parting = depth
        start = branches[-1].end if branches else 0
        end = start + parting - depth
        if leave:
            branches.append(Branch(start, end, depth, branch))
            branch = len(branches) - 1
        else:
            branches[branch] = branches[branch]._replace(end=end)
        row_index[first:last, depth:parting] = torch.arange(start, end)
        if len(cuts) > 2:
            groups = sorted(itertools.pairwise(cuts), key=lambda group: group[1] - group[0])
            before = branch if parting > branches[branch].depth else branches[branch].parent
            todo += [(*group, parting, before, True) for group in groups[:-1]]
            todo.append((*groups[-1], parting, branch, False))
    return tuple(branches)


def _num_alike(a: list[int], b: list[int]) -> int:
    """Tokens that two different rows begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@functools.lru_cache(maxsize=16)
def _all_before(branches: tuple[Branch, ...]) -> tuple[AttnSlice, ...]:
    """Every branch sees itself; all that hang where it parts see it up to there."""
    slices = [AttnSlice((b.first, b.end), (b.first, b.end), "causal") for b in branches]
    ends = [b.end for b in branches]  # of what hangs on a branch, or on that
    hanging: dict[tuple[int, int], tuple[int, int]] = {}
    for i, b in reversed(list(enumerate(branches))):
        if b.parent < 0:
            continue
        ends[b.parent] = max(ends[b.parent], ends[i])
        _, end = hanging.get((b.parent, b.depth), (0, ends[i]))
        hanging[b.parent, b.depth] = b.first, end
    for (parent, depth), queries in hanging.items():
        b = branches[parent]
        slices.append(AttnSlice(queries, (b.first, b.first + depth - b.depth)))
    return tuple(slices)


@functools.lru_cache(maxsize=16)
def _last_before(branches: tuple[Branch, ...], window: int) -> tuple[AttnSlice, ...]:
    """The same within a window, whose distances are those along the rows."""
    slices = []
    for b in branches:
        head = min(b.end, b.first + window)
        slices.append(AttnSlice((b.first, head), (b.first, head), "causal"))
        if head < b.end:
            slices.append(AttnSlice((head, b.end), (b.first + 1, b.end), "bidirectional"))
        least = b.depth - window + 1  # position that the first query sees
        for a, end in _before(branches, b, least):
            shift = a.first - a.depth
            seeing = min(b.end - b.first, end - least)  # queries that see some of a
            all_of_it = min(seeing, max(0, a.depth - least + 1))
            if all_of_it:
                slices.append(AttnSlice((b.first, b.first + all_of_it), (a.first, end + shift)))
            if all_of_it < seeing:
                keys = least + all_of_it + shift, end + shift
                slices.append(AttnSlice((b.first + all_of_it, b.first + seeing), keys, "inverse"))
    return tuple(slices)


@functools.lru_cache(maxsize=16)
def _in_chunks(branches: tuple[Branch, ...], chunk: int) -> tuple[AttnSlice, ...]:
    """The same within chunks of positions."""
    slices = []
    for b in branches:
        last = b.depth + b.end - b.first
        cuts = [b.depth, *range((b.depth // chunk + 1) * chunk, last, chunk), last]
        spans = [tuple(b.first + cut - b.depth for cut in span) for span in itertools.pairwise(cuts)]
        slices += (AttnSlice(span, span, "causal") for span in spans)
        least = b.depth // chunk * chunk
        for a, end in _before(branches, b, least):
            keys = max(a.first, least + a.first - a.depth), end + a.first - a.depth
            slices.append(AttnSlice(spans[0], keys))
    return tuple(slices)


def _before(branches: tuple[Branch, ...], b: Branch, least: int) -> Iterator[tuple[Branch, int]]:
    """The branches before b, and up to which position they are, as far as they have positions from `least` on."""
    end, parent = b.depth, b.parent
    while parent >= 0 and least < end:
        a = branches[parent]
        yield a, end
        end, parent = a.depth, a.parent


def _ids(i: int, row) -> list[int]:
    ids = integers(row.tolist() if hasattr(row, "tolist") else row, 0)
    if not ids:
        raise ValueError(f"rows[{i}] must be token ids, integers of at least 0, and not empty")
    return list(ids)


def _weights(i: int, weights: Sequence, num_rows: int, length: int) -> Tensor:
    counts = [len(row) if hasattr(row, "__len__") else 0 for row in weights]
    if len(counts) != num_rows or counts[i] != length:
        seen = f"{len(counts)} rows" if len(counts) != num_rows else f"{counts[i]} numbers for row {i}"
        raise ValueError(f"weights has {seen}: it must have a number for each token, {num_rows} rows as rows has them")
    return torch.as_tensor(weights[i], dtype=torch.float32)


def _check_shape(name: str, x: Tensor, shape: torch.Size) -> None:
    if tuple(x.shape[:2]) != tuple(shape):
        raise ValueError(f"{name} {list(x.shape)} must begin with {list(shape)}")
