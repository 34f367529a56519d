"""Attention leaf by leaf in torch: the bits of a row depend neither on the other rows nor on who has them.

A leaf is `LEAF` consecutive positions of a document, the first one a multiple of `LEAF`. Every product is of the
queries of one leaf (of one row of the batch and one KV head) and the keys of one leaf, padded with zeros, or of `WIDE`
leaves, a node of the tree, where all pairs are visible: so a product's shape follows from positions, and torch adds up
in the same order. States are merged along the tree over the leaves of keys (`merge_tree`), dq is added up from the
first leaf of keys to the last: all keys that a query sees must be here. dk and dv are sums of integers (steps.py) over
the leaves of queries, in any order: other ranks' are added where they are (attention/gather.py). The numbers at the
formulas are those of docs/design.md, section 1.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from ..dropout import keep_weights
from ..layout import Segment, Sharding, by_document, in_chunks, join
from ..merge import NEG_INF, finite, merge_tree, state_dtype
from ..spec import AttnSpec
from .blocks import alibi_bias, window_mask
from .steps import Steps, largest_of

LEAF = 128  # with fewer positions products are slow; with more, the end of every document costs more
WIDE = 4  # a power of two; with more, products are no faster

Sums = tuple[Tensor, Tensor, Tensor]
"""Of a node's keys: numerators [rows, d_v], denominators and largest logits [rows, 1]. An lse would be rounded at every
node, which gradients see."""


def attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, q_segments, k_segments, spec: AttnSpec, out_dtype=None
) -> tuple[Tensor, Tensor]:
    """See `Backend.attn_fwd`; out_dtype changes nothing."""
    pairs, n = _Pairs(q, k, q_segments, k_segments, spec), k.shape[2]
    of_q, of_k, of_v = pairs.queries.cut(q, n) * spec.softmax_scale, pairs.keys.cut(k, n), pairs.keys.cut(v, n)
    out, lse = of_q.new_zeros((*of_q.shape[:-1], v.shape[-1])), of_q.new_full((*of_q.shape[:-1], 1), NEG_INF)

    def state(at: tuple[int, int, int], leaf: int) -> Sums:
        j, heads = pairs.visible[at[-1]][leaf], at[:-1]
        s, _ = pairs.logits(_rows(of_q, at), _rows(of_k, (*heads, j)), at, j)
        top = s.amax(-1, keepdim=True)
        p = s.sub_(finite(top)).exp_()
        den = p.sum(-1, keepdim=True)
        weights = pairs.dropout_weights(at, j)
        return torch.mm(p if weights is None else p * weights, _rows(of_v, (*heads, j))), den, top

    for at in pairs.tiles(q.shape[0], n):
        num, den, top = merge_tree(list(pairs.visible[at[-1]]), functools.partial(state, at), _merge)
        torch.div(num, den.clamp(min=torch.finfo(den.dtype).tiny), out=_rows(out, at))  # (3)
        torch.add(top, den.log_(), out=_rows(lse, at))  # (2)
    return pairs.queries.join(out), pairs.queries.join(lse, NEG_INF)[..., 0].transpose(1, 2).contiguous()


def attn_bwd(
    dout,
    q,
    k,
    v,
    lse,
    delta,
    *,
    q_segments,
    k_segments,
    spec: AttnSpec,
    own: tuple[slice, slice] | None = None,
    steps: Steps | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Backend.attn_bwd`. own: the rows of queries and of keys whose gradients are asked for, if not all are; in
    other rows they are incomplete. steps: of all ranks' queries, if these are not all; dk and dv are then sums in
    `steps.dtype`, which add up over ranks."""
    pairs, n = _Pairs(q, k, q_segments, k_segments, spec), k.shape[2]
    lse = lse.masked_fill(lse == NEG_INF, -NEG_INF)  # exp(s - lse) is 0 where nothing is seen
    of_q, of_dout, *statistics = (
        pairs.queries.cut(x, n) for x in (q, dout, *(x.transpose(1, 2)[..., None] for x in (lse, delta)))
    )
    of_keys = [pairs.keys.cut(k, n), pairs.keys.cut(v, n)]
    of_q = of_q * spec.softmax_scale
    local = steps or _steps_of_all(dout, q, v, delta, q_segments, k_segments, spec)
    dq, dk, dv = torch.zeros_like(of_q), *(torch.zeros_like(x, dtype=local.dtype) for x in of_keys)
    has_q, has_k = (x.has(rows) for x, rows in zip((pairs.queries, pairs.keys), own or (slice(None),) * 2))

    def derive(at: tuple[int, int, int]) -> None:
        i, heads = at[-1], at[:-1]
        q_i, dout_i, lse_i, delta_i, dq_i = (_rows(x, at) for x in (of_q, of_dout, *statistics, dq))
        per_unit = local.per_unit[local.numbers[pairs.queries.numbers[i][0]]][at[0]][at[1]]
        for j in pairs.visible[i].values():
            for_keys = any(has_k[j])
            if not (has_q[i] or for_keys):
                continue
            k_j, v_j, dk_j, dv_j = (_rows(x, (*heads, j)) for x in (*of_keys, dk, dv))
            s, slope = pairs.logits(q_i, k_j, at, j)
            p, weights = s.sub_(lse_i).exp_(), pairs.dropout_weights(at, j)
            dp = torch.mm(dout_i, v_j.T, out=pairs.memory(1, len(v_j)))
            dropped = p
            if weights is not None:
                dropped, dp = p * weights, dp.mul_(weights)
            ds = dp.sub_(delta_i).mul_(p)  # d2F/ds dzeta: (6)
            ds = ds if slope is None else ds.mul_(slope)
            if has_q[i]:
                dq_i.addmm_(ds, k_j)  # d2F/dq dzeta: (7)
            if for_keys:
                local.add(dk_j, torch.mm(ds.T, q_i), per_unit[0])  # d2F/dk dzeta: (7)
                local.add(dv_j, torch.mm(dropped.T, dout_i), per_unit[1])  # d2F/dv dzeta: (5)

    for at in pairs.tiles(q.shape[0], n):
        derive(at)
    of_keys.clear()  # memory for dk, and then dv, in another order
    dk = pairs.keys.join(dk)
    dv = pairs.keys.join(dv)
    return pairs.queries.join(dq.mul_(spec.softmax_scale)), *(local.values(dk, dv) if steps is None else (dk, dv))


def _steps_of_all(dout, q, v, delta, q_segments, k_segments, spec: AttnSpec) -> Steps:
    """From all queries."""
    call = dict(q_segments=q_segments, k_segments=k_segments, spec=spec)
    largest = largest_of(dout, q, delta, v.shape[2], all_segments=q_segments, **call)
    return Steps(largest, v, **call, group=q.shape[2] // v.shape[2])


def sum_rows(x: Tensor, q_segments) -> Tensor:
    """[h]: the sum of x [b, h, s] over the batch and the rows of segments, leaf by leaf."""
    tiles = Leaves.of(tuple(q_segments), x.shape[2]).cut(x.transpose(1, 2)[..., None], x.shape[1])
    of_leaves = tiles[..., 0, :, 0].contiguous().sum(-1)  # [b, h, leaves]
    return functools.reduce(torch.add, of_leaves.transpose(1, 2).flatten(0, 1), x.new_zeros(x.shape[1]))


@functools.lru_cache(maxsize=64)
def are_whole(queries: Sharding) -> bool:
    """Whether every leaf of the queries lies on one rank."""
    by_rank = [
        {(seq, piece.seq) for seq, x in by_document(queries.segments((r,))).items() for piece in in_chunks(x, LEAF)}
        for r in range(queries.world)
    ]
    return sum(map(len, by_rank)) == len(set().union(*by_rank))


def _rows(tiles: Tensor, at: tuple) -> Tensor:
    """[positions, d], a view: all heads of a leaf of queries at (row, KV head, leaf), or some leaves of keys."""
    return tiles[at].flatten(0, -2)


def _merge(sums: Sums, part: Sums) -> Sums:
    (num, den, top), (more, more_den, other) = sums, part
    largest = torch.maximum(top, other)
    kept, joined = (x.sub_(finite(largest)).exp_() for x in (top, other))
    return num.mul_(kept).addcmul_(more, joined), den.mul_(kept).addcmul_(more_den, joined), largest


class Leaves:
    """The leaves of some segments' rows, in the order of (document, position)."""

    def __init__(self, segments: tuple[Segment, ...], num_rows: int):
        pieces: dict[tuple[int, int], list[Segment]] = {}
        for seq, of_document in by_document(segments).items():
            for piece in in_chunks(of_document, LEAF):
                pieces.setdefault((seq, piece.seq), []).append(piece)
        self.num_rows, self.numbers = num_rows, sorted(pieces)
        self.rows = torch.full((len(pieces), LEAF), num_rows)  # of every position; num_rows: none
        runs = []
        for i, number in enumerate(self.numbers):
            for piece in sorted(pieces[number], key=lambda piece: piece.pos):
                at = piece.pos % LEAF
                self.rows[i, at : at + piece.length] = torch.arange(piece.row, piece.row + piece.length)
                runs.append(Segment(i * LEAF + at, piece.pos, piece.length, number[0]))
        self.segments = join(runs)
        """The same segments of the rows `in_order`."""

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, segments: tuple[Segment, ...], num_rows: int) -> Leaves:
        """Made once for the layers of a model."""
        return cls(segments, num_rows)

    def has(self, rows: slice) -> list[bool]:
        """Of each leaf: whether any of these rows is in it."""
        first, end, _ = rows.indices(self.num_rows)
        return ((self.rows >= first) & (self.rows < end)).any(1).tolist()

    def whole(self, rows: slice = slice(None)) -> tuple[Segment, ...]:
        """The segments of leaves in which any of these rows is, of all of their positions, in the order of leaves."""
        leaves = enumerate(zip(self.numbers, self.has(rows)))
        return join(Segment(i * LEAF, leaf * LEAF, LEAF * has, seq) for i, ((seq, leaf), has) in leaves)

    def in_order(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """[b, leaves * LEAF, ...] of x [b, s, ...]; `fill` where there is no row."""
        filled = torch.cat((x, x.new_full((x.shape[0], 1, *x.shape[2:]), fill)), 1)
        return filled.index_select(1, self.rows.flatten().to(x.device))

    def back(self, whole: Tensor, fill: float = 0.0) -> Tensor:
        """The inverse of `in_order`; `fill` in rows of no segment."""
        x = whole.new_full((whole.shape[0], self.num_rows + 1, *whole.shape[2:]), fill)
        return x.index_copy_(1, self.rows.flatten().to(x.device), whole)[:, :-1]

    def cut(self, x: Tensor, num_heads_kv: int) -> Tensor:
        """[b, num_heads_kv, leaves, heads of a KV head, LEAF, d] of x [b, s, heads, d], in the dtype of states."""
        x = self.in_order(x).unflatten(1, self.rows.shape).unflatten(3, (num_heads_kv, -1)).to(state_dtype(x.dtype))
        return x.permute(0, 3, 1, 4, 2, 5).contiguous()

    def join(self, tiles: Tensor, fill: float = 0.0) -> Tensor:
        """The inverse of `cut`; `fill` in rows of no segment."""
        return self.back(tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2).flatten(2, 3), fill)


class _Pairs:
    """The leaves of queries and of keys, and which see one another."""

    def __init__(self, q: Tensor, k: Tensor, q_segments, k_segments, spec: AttnSpec):
        self.queries, self.keys = Leaves.of(tuple(q_segments), q.shape[1]), Leaves.of(tuple(k_segments), k.shape[1])
        self.spec, self.heads, self.dtype, self.device = spec, q.shape[2] // k.shape[2], state_dtype(q.dtype), q.device
        self.whole = (self.keys.rows < k.shape[1]).all(1).tolist()
        self._memory = torch.empty(2, self.heads * WIDE * LEAF**2, dtype=self.dtype, device=self.device)
        self._masks: dict[tuple[int, int], Tensor] = {}
        of_documents: dict[int, dict[int, int]] = {}
        for j, (seq, leaf) in enumerate(self.keys.numbers):
            of_documents.setdefault(seq, {})[leaf] = j
        self.visible = [self._visible(i, of_documents.get(seq, {})) for i, (seq, _) in enumerate(self.queries.numbers)]
        """By leaf of queries: the number of each leaf of keys that it sees, rising, and which one of `keys` that is, or
        which ones begin there and are one product."""

    def tiles(self, batch: int, num_heads_kv: int) -> itertools.product:
        """(row, KV head, leaf of queries) where something is seen."""
        some = [i for i, of_leaf in enumerate(self.visible) if of_leaf]
        return itertools.product(range(batch), range(num_heads_kv), some)

    def memory(self, n: int, columns: int) -> Tensor:
        """[queries of a leaf, columns]: memory n, of two, for the pairs of a leaf of queries and some keys."""
        rows = self.heads * LEAF
        return self._memory[n, : rows * columns].view(rows, columns)

    def logits(self, q: Tensor, k: Tensor, at: tuple[int, int, int], block: slice) -> tuple[Tensor, Tensor | None]:
        """s_a of (1), [queries, keys], in memory 0, of a tile's scaled queries and some keys, and the slope of softcap,
        None where it is off."""
        s, slope = torch.mm(q, k.T, out=self.memory(0, len(k))), None
        if self.spec.softcap:
            s.div_(self.spec.softcap).tanh_()
            slope = 1 - s**2
            s.mul_(self.spec.softcap)
        by_head = s.view(self.heads, LEAF, -1)
        if self.spec.alibi_slopes is not None:
            by_head += self._bias(at, block)
        hidden = self._hidden(at[-1], block)
        if hidden is not None:
            by_head.masked_fill_(hidden, NEG_INF)
        return s, slope

    def _visible(self, i: int, keys: dict[int, int]) -> dict[int, slice]:
        left, right, first = self.spec.left, self.spec.right, self.queries.numbers[i][1] * LEAF
        least = 0 if left is None else (first - left) // LEAF
        most = max(keys, default=0) if right is None else (first + LEAF - 1 + right) // LEAF
        seen = {number: j for number, j in keys.items() if least <= number <= most}
        wide = set()
        if self.spec.alibi_slopes is None and self.spec.dropout is None:
            full = {number for number, j in seen.items() if self._sees_all(i, j)}
            wide = {n for n in full if n % WIDE == 0 and full.issuperset(range(n, n + WIDE))}
        lengths = {n: WIDE if n in wide else 1 for n in seen if n in wide or n // WIDE * WIDE not in wide}
        return {n: slice(seen[n], seen[n] + length) for n, length in lengths.items()}

    def _sees_all(self, i: int, j: int) -> bool:
        """Whether all pairs of two leaves are visible."""
        spec, apart = self.spec, (self.queries.numbers[i][1] - self.keys.numbers[j][1]) * LEAF
        in_window = spec.left is None or apart + LEAF - 1 <= spec.left
        in_window &= spec.right is None or LEAF - 1 - apart <= spec.right
        return in_window and self.whole[j]

    def _hidden(self, i: int, block: slice) -> Tensor | None:
        """bool [LEAF, LEAF]; None: all pairs are visible."""
        j = block.start
        if self._sees_all(i, j):
            return None
        if (i, j) not in self._masks:
            seen = window_mask(self._positions(self.queries, i), self._positions(self.keys, j), self.spec)
            self._masks[i, j] = ~(seen & (self.keys.rows[j] < self.keys.num_rows).to(self.device))
        return self._masks[i, j]

    def _bias(self, at: tuple[int, int, int], block: slice) -> Tensor:
        """What ALiBi adds to logits, [heads, LEAF, LEAF]."""
        row, head, i = at
        spec = self.spec.batch_row(row).heads_from(head * self.heads, self.heads)
        positions = self._positions(self.queries, i), self._positions(self.keys, block.start)
        return alibi_bias(spec, *positions, self.dtype)[0]

    def dropout_weights(self, at: tuple[int, int, int], block: slice) -> Tensor | None:
        """Dropout's factors of the values, [heads * LEAF, LEAF]; None where it is off."""
        if self.spec.dropout is None:
            return None
        row, head, i = at
        q_positions = self._positions(self.queries, i)
        return keep_weights(
            self.spec.heads_from(head * self.heads, self.heads).dropout,
            batch=1,
            num_heads=self.heads,
            q_positions=q_positions,
            k_positions=self._positions(self.keys, block.start),
            q_sequences=torch.full_like(q_positions, self.queries.numbers[i][0] + row),
            dtype=self.dtype,
        )[0].flatten(0, 1)

    def _positions(self, leaves: Leaves, i: int) -> Tensor:
        first = leaves.numbers[i][1] * LEAF
        return torch.arange(first, first + LEAF, device=self.device)
