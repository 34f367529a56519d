"""One run of a model over new tokens of some rows of a sharded KV cache: what its attention layers call."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..attention.decode import DecodeStep
from ..attention.decode_call import DecodeOptions
from ..attention.head_shares import slice_of
from ..attention.prefill import tree_prefill
from ..attention.token_shares import HeadsForTokens, count_tokens, shares_by_rank
from ..attention.topology import GroupTopology
from ..comm import Team, collective_call
from ..config import TreeConfig, default_config
from ..kernels import KVCache
from . import Append, ShardedCache, View
from .chunks import ChunkPlan, plan_chunk
from .latent import LatentHeads
from .packed import Packed

PREFILL_TOKENS = 32  # from here on a pass over one row is a prefill, whose kernels skip what is hidden


@contextlib.contextmanager
def forward_pass(
    store: ShardedCache,
    rows: Sequence[int],
    num_tokens: int,
    *,
    cp_group,
    schedule: str = "auto",
    head_shares: tuple[int, ...] | None = None,
    sharded: bool = False,
    place: Team | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[ForwardPass]:
    """Context of one run of a model over num_tokens new tokens of each of these rows.

    A failure inside removes the tokens again.

    Args:
        head_shares: query heads of every rank of cp_group, whose weights are split; see `tree_decode`.
        sharded: this rank runs its share of one row's tokens, given by `ForwardPass.shares`.
        place: with several head groups and sharded: the ranks at this rank's place of each.
        progress: called as progress(layers done, all of them).
    """
    with appended(store, rows, num_tokens, sharded=sharded) as append:
        forward = ForwardPass(store, cp_group, schedule, tuple(rows), append, head_shares, progress)
        if sharded:
            forward.share_tokens(place)
        yield forward


@contextlib.contextmanager
def appended(store: ShardedCache, rows: Sequence[int], num_tokens: int, *, sharded: bool = False) -> Iterator[Append]:
    """Context in which num_tokens new tokens of each of these rows are run; a failure inside removes them again."""
    append = store.append(rows, num_tokens, sharded=sharded)
    try:
        yield append
    except BaseException:
        for row, length in zip(rows, append.first, strict=True):
            store.crop(row, length)
        raise


@dataclass
class ForwardPass:
    """One run of a model over new tokens of some rows: every layer calls `write` and then `attend`, once."""

    store: ShardedCache
    cp_group: object
    schedule: str
    rows: tuple[int, ...]
    append: Append
    head_shares: tuple[int, ...] | None = None
    progress: Callable[[int, int], None] | None = None
    written: set[int] = field(default_factory=set)
    """Layers that have stored their tokens."""
    views: dict[int, View] = field(default_factory=dict)
    """By kind of layer: where the kernels find the rows."""
    step: DecodeStep = field(default_factory=DecodeStep)
    """Of all layers, where each rank has all tokens."""
    seen: dict[tuple, tuple] = field(default_factory=dict)
    """What the queries see in pages, for all layers of a kind: `visible`, and what `_seen` makes of it."""
    default_config: TreeConfig = field(default_factory=default_config)
    nets: dict[TreeConfig, GroupTopology] = field(default_factory=dict)
    """The network that prefills are planned for."""
    shares: list[list[tuple[int, int]]] | None = None
    """Sharded: by rank of all head groups, the tokens that it runs, as runs (position, count)."""
    positions: Tensor | None = None
    """int64 [b, n], those of the tokens that this rank runs, where the runner says so."""
    packed: Packed | None = None
    """Set if the model runs the rows' tokens packed: q, k, v and attention's result are so; the cache takes padding."""
    exchange: HeadsForTokens | None = None
    """Sharded, with several head groups: heads of the own tokens for tokens of the own heads."""

    def share_tokens(self, place: Team | None) -> None:
        """Let each rank run its own tokens; place: see `forward_pass`."""
        groups, own = 1 if place is None else place.size, self.append.shares[self.store.book.rank]
        self.shares = shares_by_rank(self.append.shares, groups)
        if groups > 1:
            self.exchange = HeadsForTokens(place, [count_tokens(runs) for runs in shares_by_rank([own], groups)])

    @property
    def end(self) -> int:
        """Tokens of the longest row, the new ones among them."""
        return max(self.append.first) + self.append.num_tokens

    def new_positions(self, device: torch.device) -> Tensor:
        """int64 [b, n]: those of each row's new tokens."""
        first = torch.tensor(self.append.first, device=device)[:, None]
        return first + torch.arange(self.append.num_tokens, device=device)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store a layer's new keys and values, positions already applied.

        k [b, n, h_kv, d], v [b, n, h_kv, d_v]: the new tokens of each row; in a sharded prefill this rank's share of
        the one row's, or one token if it has none.
        """
        kind = self.store.kind_of[layer]
        self.written.add(layer)
        if self.packed is not None:
            k, v = self.packed.pad(k), self.packed.pad(v)
        if self.exchange is not None:
            k, v = self.exchange.to_heads(torch.cat((k, v), -1)).split((k.shape[-1], v.shape[-1]), -1)
        self.store.write(layer, self.append, k, v)
        if kind not in self.views:
            self.views[kind] = self.store.view(kind, self.rows, k.device)

    def attend(
        self,
        layer: int,
        q: Tensor,
        *,
        latent: LatentHeads | None = None,
        visible: Tensor | None = None,
        config: TreeConfig | None = None,
        **options,
    ) -> Tensor:
        """Attend to all that the ranks hold of the rows, the new tokens among it. Collective over cp_group.

        Args:
            q: [b, n, h, d]: the new tokens of each row, or this rank's share of them, see `write`. With head_shares
                of this rank's heads; so are the result, sinks and latent.
            latent: how these heads read the cache, where it holds latents; with q of all heads how all of them do.
            visible: bool [b, tokens], tokens of a row up to the end of this pass: False hides one (padding). All rows
                have the same length then.
            config: see `tree_decode`. options: softmax_scale, window_size, softcap, sinks, alibi_slopes of all
                heads of cp_group, and attention_chunk_size: a query sees its own chunk of so many tokens only, counted
                from the first visible one.
        Returns: [b, n, h, d_v] in q's dtype.
        Raises: ValueError as `tree_decode`, and for `visible` of another size or in a sharded prefill.
        """
        run = self._decode
        if self.packed is not None:
            q = self.packed.pad(q)
        if self.append.shares is not None:
            run = self._prefill if self.exchange is None else self._prefill_exchanged
        elif self.head_shares is not None:
            options["head_shares"] = self.head_shares
            if latent is not None and len(latent.up) == sum(self.head_shares):
                latent = latent._replace(own=slice_of(self.head_shares, self.store.book.rank))
        has_all = self.append.shares is None and (self.head_shares is not None or self.store.book.world == 1)
        if has_all and len(self.rows) == 1 and q.shape[1] >= PREFILL_TOKENS and visible is None:
            run = self._prefill_whole
        if latent is not None and options.get("softmax_scale") is None:
            options["softmax_scale"] = q.shape[-1] ** -0.5  # of the heads, not of latents
        out = run(layer, q, latent, visible, cp_group=self.cp_group, config=config, **options)
        if self.progress is not None:
            self.progress(len(self.written), len(self.store.layers))
        return out if self.packed is None else self.packed.pack(out)

    def _prefill(self, layer: int, q: Tensor, latent, visible: Tensor | None, **options) -> Tensor:
        """One row's tokens, each on one rank."""
        if visible is not None:
            raise ValueError("attention_mask: a sequence-sharded prefill takes prompts without padding only")
        append = self.append
        own = count_tokens(append.shares[self.store.book.rank])
        plan = self._plan(layer, q, latent, q.shape[2], config=options["config"])
        out = self._run_prefill(layer, q[:, :own], latent, plan, shares=append.shares, **options)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, q.shape[1] - own))  # a rank without tokens still runs one

    def _prefill_exchanged(self, layer: int, q: Tensor, *args, sinks: Tensor | None = None, **options) -> Tensor:
        """`_prefill` of this head group, for all tokens of this rank's place; q of its own tokens, with all heads."""
        if sinks is not None:
            options["sinks"] = self.exchange.own_heads(sinks, 0)
        out = self._prefill(layer, self.exchange.to_heads(q), *args, **options)
        return self.exchange.to_tokens(out, num_rows=q.shape[1])

    def _prefill_whole(self, layer: int, q: Tensor, latent, visible, **options) -> Tensor:
        """Many tokens of one row, all on every rank: heads are sharded, or there is one rank."""
        num_heads = q.shape[2] if self.head_shares is None else sum(self.head_shares)
        plan = self._plan(layer, q, latent, num_heads, config=options["config"])
        shares = [[(self.append.first[0], q.shape[1])]]
        return self._run_prefill(layer, q, latent, plan, shares=shares, **options)

    def _plan(self, layer: int, q: Tensor, latent, num_heads: int, *, config: TreeConfig | None) -> ChunkPlan:
        """The plan of a chunk; num_heads: query heads of all ranks."""
        book, append = self.store.book, self.append
        visible = book.num_visible(append, self.store.kind_of[layer])
        sizes = dict(num_queries=append.num_tokens, num_keys=visible, num_heads=num_heads)
        if (config := config or self.default_config) not in self.nets:
            with collective_call("tree_prefill", self.cp_group, config) as call:
                GroupTopology.of(self.cp_group, q.device, config)  # what one rank raises, all raise
                call.start()
                self.nets[config] = GroupTopology.over_cache(self.cp_group, q.device, config)
        sizes.update(shares_heads=append.shares is None, net=self.nets[config])
        return plan_chunk(q, self.store.layers[layer], latent, **sizes)

    def _run_prefill(self, layer: int, q: Tensor, latent, plan: ChunkPlan, **options) -> Tensor:
        store, kind, view = self.store, self.store.kind_of[layer], self.views[self.store.kind_of[layer]]
        by_position = any(options.get(name) is not None for name in ("alibi_slopes", "attention_chunk_size"))
        segments = store.key_segments(self.append, kind, of_all_ranks=plan.gathers_keys, by_position=by_position)
        held = sum(segment.length for segment in (segments[store.book.rank] if plan.gathers_keys else segments))
        k, v = store.layers[layer].row(view.block_table, 0, held, q.dtype)
        options.update(key_segments=segments, grid=plan.grid)
        if latent is None:
            return tree_prefill(q, k, v, **options)
        q, of_latents, finish = latent.prepare(q, expands=plan.expands)
        return finish(tree_prefill(q, k, v, **of_latents, **options))

    def _held(self, layer: int, dtype: torch.dtype) -> Tensor:
        """The latents and rotary keys that this rank holds: [b, longest row, 1, ...] in dtype, then zeros."""
        pages, view = self.store.layers[layer], self.views[self.store.kind_of[layer]]
        rows = [pages.row(view.block_table, i, n, dtype)[0][0] for i, n in enumerate(view.lengths.tolist())]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def _decode(
        self,
        layer: int,
        q: Tensor,
        latent,
        visible: Tensor | None,
        *,
        config,
        attention_chunk_size: int | None = None,
        sinks: Tensor | None = None,
        **options,
    ) -> Tensor:
        pages, kind = self.store.layers[layer], self.store.kind_of[layer]
        num_queries, projection = q.shape[1], None
        cache = KVCache(pages.k, pages.v, pages.k_scale, pages.v_scale)
        # most of the keys are new: as many are made as there are queries
        expands = latent is not None and self.head_shares is None and self.end <= 2 * num_queries
        if expands and latent.pays_to_expand(num_queries):
            cache = KVCache(*latent.expand(self._held(layer, q.dtype)))
        elif latent is not None:
            q, projection = latent.absorb(q), latent.values
            cache = KVCache(pages.k if pages.joined else self._held(layer, q.dtype), None, head_dim_v=latent.rank)
        config = config or self.default_config
        by_position = options.get("window_size", (-1, -1)) != (-1, -1) or options.get("alibi_slopes") is not None
        by_position = by_position or attention_chunk_size is not None
        if cache.k is pages.k:
            if (seen := self.seen.get((kind, by_position, id(visible)))) is None:
                seen = visible, self._seen(kind, num_queries, visible, by_position, config, paged=True)
                self.seen[kind, by_position, id(visible)] = seen
            cache = KVCache(*cache[:5], **seen[1])
        else:
            cache = cache._replace(**self._seen(kind, num_queries, visible, by_position, config, paged=False))
            if cache.k_positions is not None:
                cache = cache._replace(k_positions=cache.k_positions[:, : cache.k.shape[1]])
        call = dict(options=DecodeOptions(config=config, schedule=self.schedule, **options), sinks=sinks)
        call.update(projection=projection)
        if attention_chunk_size is None:
            return self.step.decode(q, cache, **call)[0]
        return self._decode_in_chunks(q, cache, attention_chunk_size, visible, **call)

    def _seen(
        self, kind: int, num_queries: int, visible: Tensor | None, by_position: bool, config: TreeConfig, *, paged: bool
    ) -> dict:
        """What a decode step's queries see in layers of a kind, as fields of a `KVCache`.

        by_position: whether a window or slopes need positions. paged: whether keys are read from pages.
        """
        view, seen = self.views[kind], {}
        if paged:
            reads_shared = self.schedule != "ring" and not (by_position or config.deterministic)
            if view.shared and visible is None and reads_shared:
                seen["shared"], view = view.shared, view.rest
            seen["block_table"] = view.block_table
        seen["lengths"], device = view.lengths, view.lengths.device
        if visible is not None and visible.shape[1] != self.end:
            raise ValueError(
                f"attention_mask {list(visible.shape)} must cover all {self.end} slots: "
                f"{self.append.first[0]} in the cache and {num_queries} new ones"
            )
        if num_queries == 1 and visible is None and not by_position:
            return seen
        positions, queries = view.positions, self.new_positions(device)
        if self.packed is not None:  # padding sees nothing
            queries = queries.where(self.packed.inside, -1)
        if visible is not None:
            shown = visible.gather(1, positions.clamp(max=self.end - 1))
            positions = torch.where(shown, positions, -1)
        return {**seen, "q_positions": queries, "k_positions": positions}

    def _decode_in_chunks(self, q, cache: KVCache, size: int, visible, **call) -> Tensor:
        """Each query sees keys of its own chunk of `size` tokens: a call for queries up to where some row's ends."""
        n = q.shape[1]
        padding = [0] * len(self.rows) if visible is None else (visible.cumsum(1) == 0).sum(1).tolist()
        starts = [first - hidden for first, hidden in zip(self.append.first, padding)]
        cuts = sorted({0, n, *(i for start in starts for i in range(-start % size, n, size))})
        parts = []
        for i, end in itertools.pairwise(cuts):
            begin = [(start + i) // size * size + hidden for start, hidden in zip(starts, padding)]
            outside = cache.k_positions < torch.tensor(begin, device=q.device)[:, None]
            positions = cache.q_positions[:, i:end], cache.k_positions.masked_fill(outside, -1)
            part = cache._replace(q_positions=positions[0], k_positions=positions[1])
            parts.append(DecodeStep().decode(q[:, i:end], part, **call)[0])
        return torch.cat(parts, 1)
