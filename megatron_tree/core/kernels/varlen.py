"""Attention of segments by kernels that take packed documents (flash-attn's `cu_seqlens`), in few calls.

A pair of segments is a document of the rows that see anything and the keys that are seen. Its mask is a band aligned at
the ends, as flash-attn's masks are: query i of n sees key j of m if -left <= j - i - (m - n) <= right. Documents with
the same band and different queries share a call.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import Segment, join
from ..merge import NEG_INF, empty_state, state_dtype
from ..spec import AttnSpec
from . import aten
from .states import merge_into


class Band(NamedTuple):
    """The mask of a document; None: unbounded."""

    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        """Whether it is flash-attn's causal mask."""
        return self == (None, 0)

    @property
    def window(self) -> tuple[int, int]:
        """flash-attn's window_size: -1 is unbounded."""
        return tuple(-1 if side is None else side for side in self)


Runs = tuple[tuple[int, int], ...]
"""(first, one past the last) of consecutive rows."""


class Document(NamedTuple):
    """Queries of some rows over keys of some rows, in this order."""

    band: Band
    q_runs: Runs
    k_runs: Runs


class Packing(NamedTuple):
    """Where the documents of packed rows [rows, heads, d] begin: int32 [documents + 1], the last entry is their number
    of rows; and the longest one's rows."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


class Rows:
    """Rows of tensors [b, s, ...] in the order of runs."""

    def __init__(self, runs: Iterable[tuple[int, int]], device: torch.device):
        joined: list[list[int]] = []
        for first, end in runs:
            if joined and joined[-1][1] == first:
                joined[-1][1] = end
            else:
                joined.append([first, end])
        self.slice = slice(*joined[0]) if len(joined) == 1 else None
        self.index = None
        if self.slice is None:
            self.index = torch.cat([torch.arange(*run) for run in joined]).to(device)

    def of(self, x: Tensor, dim: int = 1) -> Tensor:
        """These rows of x: a view where they lie one after another."""
        if self.slice is None:
            return x.index_select(dim, self.index)
        return x.narrow(dim, self.slice.start, self.slice.stop - self.slice.start)

    def put(self, total: Tensor, part: Tensor, dim: int = 1) -> None:
        """Replace them in `total`."""
        if self.slice is None:
            total.index_copy_(dim, self.index, part.to(total.dtype))
        else:
            self.of(total, dim).copy_(part)

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add a part for them; a row may be there more than once."""
        if self.slice is None:
            total.index_add_(1, self.index, part.to(total.dtype))
        else:
            self.of(total).add_(part)


class Call(NamedTuple):
    """One call of the kernel."""

    band: Band
    q: Rows
    k: Rows
    packing: Packing | None
    """None: one document, in tensors [b, s, h, d]."""
    begins: bool
    """Whether its queries are in no call before."""

    def arguments(self, rows: Rows, *tensors: Tensor) -> list[Tensor]:
        """Tensors [b, s, h, d] as the kernel takes these rows of them."""
        some = [rows.of(x) for x in tensors]
        return some if self.packing is None else [x.flatten(0, 1) for x in some]


def attn_fwd(forward: Callable, q, k, v, *, q_segments, k_segments, spec: AttnSpec) -> tuple[Tensor, Tensor]:
    """See `Backend.attn_fwd`. forward(q, k, v, band, packing) -> out, lse of dense tensors [b, s, h, d], or packed ones
    [rows, h, d]; lse [b, h, s] or [h, rows]."""
    b, s_q, h, _ = q.shape
    calls = plan(tuple(q_segments), tuple(k_segments), spec, b, q.device)
    state = None
    for call in calls:
        queries, keys = call.arguments(call.q, q), call.arguments(call.k, k, v)
        out, lse = forward(*queries, *keys, call.band, call.packing)
        if call.packing is not None:
            out, lse = out.unflatten(0, (b, -1)), lse.unflatten(1, (b, -1)).transpose(0, 1)
        if len(calls) == 1 and call.q.slice == slice(0, s_q):
            return out, lse
        state = state or empty_state((b, s_q, h, v.shape[-1]), dtype=state_dtype(q.dtype), device=q.device)
        if not call.begins:
            before = call.q.of(state[0]), call.q.of(state[1], 2)
            merge_into(before, (out, lse))
            out, lse = before
        if call.begins or call.q.slice is None:
            call.q.put(state[0], out)
            call.q.put(state[1], lse, 2)
    return state or empty_state((b, s_q, h, v.shape[-1]), dtype=state_dtype(q.dtype), device=q.device)


def attn_bwd(backward: Callable, dout, q, k, v, lse, delta, *, q_segments, k_segments, spec: AttnSpec):
    """See `Backend.attn_bwd`. backward(dout, out, q, k, v, lse, band, packing) -> dq, dk, dv, as `attn_fwd`'s; it reads
    the global lse, and `out` for delta only."""
    dtype, out = state_dtype(q.dtype), aten.out_with_delta(dout, delta)
    lse = torch.where(lse == NEG_INF, -NEG_INF, lse)  # rows that see nothing: exp(s - inf) = 0
    calls = plan(tuple(q_segments), tuple(k_segments), spec, len(q), q.device)
    whole = len(calls) == 1 and (calls[0].q.slice, calls[0].k.slice) == (slice(0, q.shape[1]), slice(0, k.shape[1]))
    totals = () if whole else [torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (q, k, v)]
    for call in calls:
        dout_out_q, keys = call.arguments(call.q, dout, out, q), call.arguments(call.k, k, v)
        some = call.q.of(lse, 2)
        some = some if call.packing is None else some.transpose(0, 1).flatten(1)
        grads = backward(*dout_out_q, *keys, some.contiguous(), call.band, call.packing)
        if call.packing is not None:
            grads = [x.unflatten(0, (len(q), -1)) for x in grads]
        if whole:
            return tuple(x.to(dtype) for x in grads)
        for rows, total, grad in zip((call.q, call.k, call.k), totals, grads):
            rows.add(total, grad)
    return tuple(totals)


@functools.lru_cache(maxsize=256)
def plan(q_segments: tuple, k_segments: tuple, spec: AttnSpec, batch: int, device: torch.device) -> tuple[Call, ...]:
    """The calls of a block, once for all layers."""
    calls: list[list] = []  # band, documents, the rows of their queries as bits
    for document in documents(q_segments, k_segments, spec):
        rows = sum((1 << end) - (1 << first) for first, end in document.q_runs)
        call = next((x for x in calls if x[0] == document.band and not x[2] & rows), None)
        if call is None:
            calls.append([document.band, [document], rows])
        else:
            call[1].append(document)
            call[2] |= rows
    planned, begun = [], 0
    for band, together, rows in calls:
        q, k = (Rows([run for document in together for run in document[side]], device) for side in (1, 2))
        packing = _packing(together, batch, device) if len(together) > 1 else None
        planned.append(Call(band, q, k, packing, not begun & rows))
        begun |= rows
    return tuple(planned)


def _packing(documents: list[Document], batch: int, device) -> Packing:
    bounds, longest = [], []
    for side in (1, 2):
        lengths = [sum(end - first for first, end in document[side]) for document in documents]
        ends = [0, *itertools.accumulate(lengths * batch)]
        bounds.append(torch.tensor(ends, dtype=torch.int32).to(device))
        longest.append(max(lengths))
    return Packing(*bounds, *longest)


def documents(q_segments: Iterable[Segment], k_segments: Iterable[Segment], spec: AttnSpec) -> list[Document]:
    """All visible (query, key) pairs of the segments, each in exactly one document."""
    queries, keys = _ByPosition(q_segments), _ByPosition(k_segments)
    by_sequence: dict[int, list[Segment]] = {}
    for k in keys.joined:
        by_sequence.setdefault(k.seq, []).append(k)
    found, all_of = [], {}
    for q in queries.joined:
        for k in by_sequence.get(q.seq, ()):
            for band, q_run, k_run in _pieces(q, k, spec):
                if band == (None, None):
                    all_of.setdefault(q_run, []).append(k_run)
                else:
                    found.append((band, [q_run], [k_run]))
    for_keys: dict[Runs, list[tuple[int, int]]] = {}
    for q_run, k_runs in all_of.items():  # without a mask the order of rows does not matter
        for_keys.setdefault(tuple(k_runs), []).append(q_run)
    found += [(Band(None, None), q_runs, k_runs) for k_runs, q_runs in for_keys.items()]
    return [Document(band, queries.runs(q_runs), keys.runs(k_runs)) for band, q_runs, k_runs in found]


class _ByPosition:
    """Segments in the order of positions, those that follow one another joined: a rank may have all of a document in
    several shards, and a query sees one long segment instead of many. Their rows are numbered in this order."""

    def __init__(self, segments: Iterable[Segment]):
        self._segments = sorted(segments, key=lambda x: (x.seq, x.pos))
        self._starts = [0, *itertools.accumulate(x.length for x in self._segments)]
        self.joined = join(x._replace(row=row) for x, row in zip(self._segments, self._starts))

    def runs(self, numbered: Iterable[tuple[int, int]]) -> Runs:
        """The tensors' rows."""
        found = []
        for first, end in numbered:
            i = bisect.bisect_right(self._starts, first) - 1
            while first < end:
                last, shift = min(end, self._starts[i + 1]), self._segments[i].row - self._starts[i]
                found.append((first + shift, last + shift))
                first, i = last, i + 1
        return tuple(found)


def _pieces(q: Segment, k: Segment, spec: AttnSpec) -> list[tuple]:
    """(band, q_run, k_run) of the rows whose window ends within k, and of those that see the last key."""
    low = -q.length if spec.left is None else q.pos - k.pos - spec.left  # query i sees keys from i + low
    high = k.length if spec.right is None else q.pos - k.pos + spec.right  # to i + high
    first, end = min(max(0, -high), q.length), min(q.length, k.length - low)
    middle = min(max(first, k.length - high), max(first, end))
    pieces = []
    for (row, last), right in (((first, middle), 0), ((middle, end), None)):
        if row >= last:
            continue
        from_key, to_key = max(0, row + low), min(k.length, last + high)
        n, m = last - row, to_key - from_key
        left = m - n - (low + row - from_key)
        band = Band(None if left >= m - 1 else left, None if n == 1 else right)
        pieces.append((band, (q.row + row, q.row + last), (k.row + from_key, k.row + to_key)))
    return pieces
