"""`tree_scan`: the exclusive scan of affine maps in the order of positions.

Before it stand what all of recurrence/ uses: rows sent to ranks and back, differentiable (`exchange`: the only
communication here), and every document's segments over all ranks (`Chains`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import comm
from ..attention.autograd import with_signature
from ..attention.sequences import sharding_of
from ..config import TreeConfig, check_choice
from ..duals import goes_backward, has_tangents
from ..layout import Dispatched, Layout, Packed, Segment, check_layout, shard_lengths, shard_segments
from ..merge import AffineMaps
from ..plan import plan_scan


@dataclass(frozen=True)
class Route:
    """Who sends how many rows to whom, in one collective call."""

    name: str
    ranks: comm.Ranks
    sent: tuple[int, ...]
    """Rows for every rank."""
    received: tuple[int, ...]
    """Rows from every rank."""

    @property
    def back(self) -> Route:
        name = f"the backward of {self.name.removeprefix('the backward of ')}"
        return Route(name, self.ranks, self.received, self.sent)

    def send(self, x: Tensor) -> Tensor:
        return comm.start_all_to_all_v(list(x.split(self.sent)), self.received, self.ranks.everyone).wait()


def exchange(x: Tensor, route: Route) -> Tensor:
    """x [sum(sent), ...], rows for each rank one after another -> [sum(received), ...], rows from each rank.

    Collective; so are its derivatives.
    """
    return x if route.ranks.size == 1 else Exchange.apply(x, route, None)


class Exchange(torch.autograd.Function):
    """`exchange`. after: the stamp of the forward's call, where this is a call of its own, as part of a backward."""

    @staticmethod
    @with_signature
    def forward(x: Tensor, route: Route, after: int | None):
        if after is None:
            return route.send(x)
        with route.ranks.call(route.name) as call:
            call.start(after)
            return route.send(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.route, ctx.after = inputs
        ctx.stamp = comm.call_stamp(ctx.route.ranks.group)

    @staticmethod
    @comm.derivative
    def backward(ctx, dx):
        return Exchange.apply(dx, ctx.route.back, ctx.stamp), None, None

    @staticmethod
    @comm.derivative
    def jvp(ctx, tangent, *_):
        return Exchange.apply(tangent, ctx.route, ctx.after)


def nothing(like: Tensor, shape: Sequence[int], *others: Tensor) -> Tensor:
    """A tensor of this shape, which has no elements, in the dtype of `like`. To autograd it depends on all others
    (none: on `like`), and so do its derivatives of every order.

    Joined to whatever a call sends and returns, it makes all ranks take part in the same exchanges in every derivative
    of the call, in the same order, also a rank without tokens or whose own rows depend on no other's.
    """
    # exp: the gradient of what is not linear depends on the others as well. [0, 1]: torch.cat would give [0] a gradient
    # that depends on nothing.
    return torch.cat([x[:0].reshape(0, 1) for x in others or (like,)]).exp().to(like.dtype).view(shape)


def depending_on(x: Tensor, *others: Tensor) -> Tensor:
    """A copy of x that depends on the others as `nothing` does."""
    return torch.cat((x, nothing(x, (0, *x.shape[1:]), *others)))


Place = tuple[int, int]
"""(rank, number of a segment among the rank's)."""


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
        sharding = sharding_of(x, name, ranks, layout)
        return chains_of(sharding.seq_len, sharding.world, sharding.layout)

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
    documents = {}
    segments = tuple(shard_segments(seq_len, rank, world, layout, in_rows=True) for rank in range(world))
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


SCHEDULES = ("auto", "gather", "exchange")


@comm.public_call
def tree_scan(
    transition: Tensor,
    update: Tensor,
    *,
    cp_group,
    layout: Layout = "zigzag",
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    schedule: str = "auto",
    config: TreeConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The state with which each of this rank's segments begins, where a segment takes S to M S + U. Collective,
    differentiable.

    `tree_recurrence` calls it; on its own it serves kernels that compute M and U themselves.

    Args:
        transition: M of this rank's n segments in the order of its rows, [n, b, h, d, d], or where it is diagonal
            [n, b, h, d], or one number [n, b, h]. float32 or float64.
        update: U [n, b, h, d, d_v] in the same dtype.
        cp_group: the process group over which the sequence is sharded, or a 1-D DeviceMesh; None for one rank.
        layout: as in `tree_attn_func`, or of packed documents, whose states begin with zeros. A rank has one segment
            ("zigzag": two, but the last rank, whose two are neighbours, one; documents: one for each run of rows of a
            document, or of a prefix tree between two places where rows part).
        initial_state: [b, h, d, d_v], the sequence's, equal on all ranks; default: zeros. Not with several documents.
        return_final_state: whether to return what the sequence leaves behind. Not with several documents.
        schedule: "gather" (every rank gets all maps: one round), "exchange" (every rank scans its share of the b * h
            heads: two rounds, fewer bytes; docs/recurrent.md has the formulas) or "auto" (by predicted time).
        config: `check`, `timeout_s`, `transport`, `topology` and `tune` are used.

    Returns: (initial states [n, b, h, d, d_v], final state [b, h, d, d_v] on every rank, or None). Gradients of
        initial_state are those of this rank's share: their sum over the ranks is the whole.
    Raises: ``ValueError`` on every rank for shapes or dtypes that don't fit, or calls that differ between ranks.
    Source: scan of the affine maps of linear recurrences (Blelloch 1990; Martin and Cundy, arXiv 1709.04057).
    """
    ranks = comm.Ranks.of(cp_group, update.device, config)
    with ranks.call("tree_scan", differentiable=True) as call:
        _check_maps(transition, update)
        world, rank = ranks.size, ranks.rank
        chains = _chains(check_layout(layout, world), world)
        if len(chains.segments[rank]) != update.shape[0]:
            raise ValueError(
                f"update has {update.shape[0]} segments on rank {rank}, but layout={layout!r} gives it "
                f"{len(chains.segments[rank])}"
            )
        maps = AffineMaps(*update.shape[3:], tuple(transition.shape[3:]))
        scan = Scan.checked(chains, maps, update, initial_state, return_final_state, schedule, ranks)
        given = transition, update, initial_state
        call.agree(layout=layout, tangents=has_tangents(*given), goes_backward=goes_backward(*given), **scan.agreed)
        linked = torch.tensor(chains.linked[rank], dtype=torch.int64, device=update.device)
        with torch.autocast(update.device.type, enabled=False):
            states, final = scan.run(transition[linked], update[linked], initial_state)
            return torch.zeros_like(update).index_put((linked,), states), final


def _chains(layout: Layout, world: int) -> Chains:
    """Of a sequence of any length: only the order of its segments is asked for."""
    if isinstance(layout, str):
        return chains_of(2 * world, world, layout)
    return chains_of(sum(layout) if isinstance(layout, tuple) else layout.rows(world) * world, world, layout)


def _check_maps(transition: Tensor, update: Tensor) -> None:
    if update.dim() != 5 or 0 in update.shape[2:] or update.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"update must be float32 or float64 [n, b, h, d, d_v], got {update.dtype} {list(update.shape)}"
        )
    n, b, h, d, _ = update.shape
    if tuple(transition.shape) not in ((n, b, h), (n, b, h, d), (n, b, h, d, d)) or transition.dtype != update.dtype:
        raise ValueError(
            f"transition must be {update.dtype} [n, b, h], [n, b, h, d] or [n, b, h, d, d] of update "
            f"{list(update.shape)}, got {transition.dtype} {list(transition.shape)}"
        )


@dataclass(frozen=True, kw_only=True)
class Scan:
    """A checked scan."""

    chains: Chains
    maps: AffineMaps
    batch: tuple[int, int]
    """(b, h): their product is the number of heads that are scanned, each by itself."""
    begins: bool
    """Whether there is an initial state."""
    ends: bool
    """Whether the final state is asked for."""
    schedule: str
    ranks: comm.Ranks

    @classmethod
    def checked(
        cls,
        chains: Chains,
        maps: AffineMaps,
        update: Tensor,
        initial_state: Tensor | None,
        ends: bool,
        schedule: str,
        ranks: comm.Ranks,
    ) -> Scan:
        """update: U, or a tensor with its shape [..., b, h, d, d_v], dtype and device."""
        check_choice("schedule", schedule, SCHEDULES)
        chains.check_sequence(initial_state=initial_state, return_final_state=ends)
        shape = tuple(update.shape[-4:])
        if initial_state is not None and tuple(initial_state.shape) != shape:
            raise ValueError(f"initial_state must be [b, h, d, d_v] = {list(shape)}, got {list(initial_state.shape)}")
        begins = initial_state is not None
        fields = dict(batch=shape[:2], begins=begins, ends=ends, schedule=schedule, ranks=ranks)
        return cls(chains=chains, maps=maps, **fields)

    @property
    def agreed(self) -> dict:
        """What the ranks must agree on, besides the layout."""
        return dict(
            maps=self.maps,
            batch=self.batch,
            initial_state=self.begins,
            return_final_state=self.ends,
            schedule=self.schedule,
            config=self.ranks.config,
            topology=self.ranks.fingerprint,
        )

    def run(
        self, transition: Tensor, update: Tensor, initial_state: Tensor | None, *others: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """As `tree_scan`, of the segments in `chains.linked` alone, in a collective call.

        others: what the maps are made of, also on ranks without one.
        """
        rank, rows = self.ranks.rank, self.batch[0] * self.batch[1]
        begin = update.new_zeros(rows, self.maps.state_numbers)
        if initial_state is not None:
            begin = initial_state.to(update.dtype).reshape(begin.shape)
        given = nothing(begin, (0, 1), begin, transition, update, *others)
        shape = (*self.batch, self.maps.head_dim, self.maps.head_dim_v)
        if not any(self._sent):
            states = depending_on(begin.expand(len(update), *begin.shape), given)
            return states.view(-1, *shape), depending_on(begin, given).view(shape) if self.ends else None
        gathers = self._planned(update) == "gather"
        bounds = self._bounds(rows, gathers)
        arrived, maps = self._send_maps(self.maps.pack(transition, update).transpose(0, 1), bounds, given)
        begin_here = begin[slice(*bounds[rank])]
        states, final = self._prefixes(maps, begin_here)
        if not gathers:
            arrived, states, final = self._send_states(states, final, begin_here, bounds, given, arrived)
        local = [states.get((rank, i), begin) for i in self.chains.linked[rank]]
        initial = torch.stack(local) if local else begin.new_zeros(0, *begin.shape)
        initial, final = (None if x is None else depending_on(x, given, arrived) for x in (initial, final))
        return initial.view(-1, *shape), None if final is None else final.view(shape)

    @property
    def _sent(self) -> Numbers:
        """The segments whose maps are needed."""
        return self.chains.linked if self.ends else self.chains.before_others

    def _planned(self, update: Tensor) -> str:
        if self.schedule != "auto":
            return self.schedule
        network = self.ranks.network
        return plan_scan(
            self.ranks.size,
            segments=max(map(len, self.chains.linked)),
            rows=self.batch[0] * self.batch[1],
            map_numbers=self.maps.transition_numbers,
            state_numbers=self.maps.state_numbers,
            with_final=self.ends,
            bytes_per_word=update.element_size(),
            topology=network.topology,
            placement=network.placement,
        )

    def _bounds(self, rows: int, gathers: bool) -> list[tuple[int, int]]:
        """The rows of b * h, first to before the last, that every rank scans."""
        world = self.ranks.size
        if gathers:
            return [(0, rows)] * world
        return [(rows * r // world, rows * (r + 1) // world) for r in range(world)]

    def _send_maps(self, packed: Tensor, bounds, given: Tensor) -> tuple[Tensor, dict[Place, Tensor]]:
        """packed [rows, segments, numbers] of this rank -> what arrived: all maps of the rows that this rank scans."""
        rank = self.ranks.rank
        packed = packed[:, [self.chains.linked[rank].index(i) for i in self._sent[rank]]]
        first, last = bounds[rank]
        sizes = [(last - first, len(x)) for x in self._sent]
        arrived, parts = self._send([packed[a:b] for a, b in bounds], sizes, given)
        return arrived, {(r, i): x[:, k] for r, x in enumerate(parts) for k, i in enumerate(self._sent[r])}

    def _prefixes(self, maps: dict[Place, Tensor], begin: Tensor) -> tuple[dict[Place, Tensor], Tensor | None]:
        """The state [rows, d * d_v] before every segment that does not begin a document, and the final state."""
        states, ends = {}, []
        for place, _, before in self.chains.links:
            state = begin if before < 0 else ends[before]
            if before >= 0:
                states[place] = state
            ends.append(self.maps.merge(state, maps[place]) if place in maps else None)
        return states, ends[-1] if self.ends else None

    def _send_states(self, states: dict[Place, Tensor], final: Tensor | None, begin: Tensor, bounds, *others: Tensor):
        """What this rank has scanned, to the ranks whose segments begin with it -> what arrived, and as `_prefixes` for
        all rows."""
        rank = self.ranks.rank
        wanted = [[(r, i) for i in numbers] for r, numbers in enumerate(self.chains.after_others)]
        ends = [] if final is None else [final]
        none = begin.new_zeros(len(begin), 0, begin.shape[1])
        parts = [torch.stack([states[place] for place in x] + ends, 1) if x or ends else none for x in wanted]
        sizes = [(last - first, len(wanted[rank]) + len(ends)) for first, last in bounds]
        arrived, parts = self._send(parts, sizes, *others)
        whole = torch.cat(list(parts)).unbind(1)
        return arrived, dict(zip(wanted[rank], whole)), whole[-1] if ends else None

    def _send(self, parts: list[Tensor], sizes: list[tuple[int, int]], *others: Tensor):
        """parts [rows, n, numbers] for every rank, made of others -> what arrived, and its parts, whose (rows, n) are
        known."""
        route = Route(
            "tree_scan",
            self.ranks,
            sent=tuple(len(x) * x.shape[1] for x in parts),
            received=tuple(rows * n for rows, n in sizes),
        )
        arrived = exchange(depending_on(torch.cat([x.flatten(0, 1) for x in parts]), *others), route)
        return arrived, [x.unflatten(0, size) for x, size in zip(arrived.split(route.received), sizes)]
