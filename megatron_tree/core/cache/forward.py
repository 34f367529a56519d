"""One run of a model over new tokens of some rows of a sharded KV cache; its attention layers call `ForwardPass`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.shares import HeadsForTokens, count_tokens, shares_by_rank
from ..comm import Team, in_step
from ..config import TreeConfig, default_config
from ..layout import Dispatched
from ..merge import State, merged
from . import Append, ShardedCache, View
from .attention import Index, PrefillAttention, Selection, StepAttention, select_in_step
from .latent import LatentHeads
from .pages import on_device

PREFILL_TOKENS = 32  # from here on a pass over one row is a prefill, whose kernels skip what is hidden


@contextlib.contextmanager
def forward_pass(
    store: ShardedCache, rows: Sequence[int], num_tokens: int, *, sharded: bool = False, token_group=None, **options
) -> Iterator[ForwardPass]:
    """Context of one run of a model over num_tokens new tokens of each of these rows; options: of `ForwardPass`.

    A failure inside removes the tokens again, and the other ranks hear of it. sharded: each rank runs its share of one
    row's tokens. token_group: the ranks that run the same tokens, if they are more than cp_group.
    """
    with appended(store, rows, num_tokens, (options["cp_group"], token_group), sharded=sharded) as append:
        yield ForwardPass(store, append, **options)


@contextlib.contextmanager
def appended(
    store: ShardedCache, rows: Sequence[int], num_tokens: int, groups: Sequence, *, sharded: bool = False
) -> Iterator[Append]:
    """Context in which the ranks of these groups run num_tokens new tokens of each of these rows; a failure inside
    removes them again, and the other ranks hear of it."""
    lengths = [store.book.rows[row].length for row in rows]
    with in_step(*groups, rows=rows, positions=lengths, num_tokens=num_tokens):
        try:
            yield store.append(rows, num_tokens, sharded=sharded)
        except BaseException:
            for row, length in zip(rows, lengths, strict=True):
                store.crop(row, length)
            raise


class ForwardPass:
    """One run of a model over new tokens of some rows: every layer calls `write` and then `attend`, once.

    Args:
        head_shares: query heads of every rank of cp_group, whose weights are split; see `tree_decode`.
        place: with several head groups and a sharded append: the ranks at this rank's place of each.
        progress: called as progress(layers done, all of them).
    Attributes:
        written: layers that have stored their tokens.
        views: by kind of layer, where the kernels find the rows.
        shares: sharded: by rank of all head groups, the tokens that it runs, as runs (position, count).
        positions: int64 [b, n], those of the tokens that this rank runs, where the runner says so.
        packed: set if the model runs the rows' tokens packed, as are q, k, v and the result; the cache takes padding.
    """

    def __init__(
        self,
        store: ShardedCache,
        append: Append,
        *,
        cp_group,
        schedule: str = "auto",
        head_shares: tuple[int, ...] | None = None,
        place: Team | None = None,
        progress: Callable[[int, int], None] | None = None,
    ):
        self.store, self.append, self.cp_group, self.head_shares = store, append, cp_group, head_shares
        self.written: set[int] = set()
        self.views: dict[int, View] = {}
        self.shares: list[list[tuple[int, int]]] | None = None
        self.positions: Tensor | None = None
        self.packed: PackedRows | None = None
        self._progress, self._default_config = progress, default_config()
        self._prefill = PrefillAttention(store, append, cp_group)
        self._step = StepAttention(store, schedule, head_shares)
        has_all = head_shares is not None or store.book.world == 1
        self._prefills = has_all and len(append.rows) == 1 and append.num_tokens >= PREFILL_TOKENS
        """Whether all ranks have many tokens of one row: heads are sharded, or there is one rank."""
        self._exchange: HeadsForTokens | None = None
        if append.shares is not None:
            groups, local = 1 if place is None else place.size, append.shares[store.book.rank]
            self.shares = shares_by_rank(append.shares, groups)
            if groups > 1:
                self._exchange = HeadsForTokens(place, [count_tokens(x) for x in shares_by_rank([local], groups)])

    @property
    def end(self) -> int:
        """Tokens of the longest row, with the new ones."""
        return max(self.append.first) + self.append.num_tokens

    @functools.cached_property
    def layout(self) -> Dispatched:
        """Sharded: the new tokens over the ranks, for layers that pass states on: all ranks have as many rows, at least
        two, since one token would be a step."""
        first, n = self.append.first[0], self.append.num_tokens
        runs = tuple(tuple((position - first, count) for position, count in share) for share in self.shares)
        return Dispatched((n,), (n,), runs, max(2, *map(count_tokens, self.shares)))

    def new_positions(self, device: torch.device) -> Tensor:
        """int64 [b, n]: of each row's new tokens."""
        first = on_device(torch.tensor(self.append.first), device)[:, None]
        return first + torch.arange(self.append.num_tokens, device=device)

    def _positions_of_share(self, device: torch.device) -> Tensor:
        """`new_positions`, in a sharded prefill of this rank's share, int64 [1, n]."""
        if self.append.shares is None:
            return self.new_positions(device)
        share = self.append.shares[self.store.book.rank]
        positions = [i for first, count in share for i in range(first, first + count)]
        return on_device(torch.tensor([positions], dtype=torch.int64), device)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store a layer's new keys and values, positions already applied.

        k [b, n, h_kv, d], v [b, n, h_kv, d_v]: the new tokens of each row; in a sharded prefill this rank's share of
        the one row's, or one token if it has none. Of a layer of blocks [1, m, ...], those of `ends_of_blocks`.
        """
        kind = self.store.kind_of[layer]
        self.written.add(layer)
        if self.packed is not None:
            k, v = self.packed.pad(k), self.packed.pad(v)
        if self._exchange is not None:
            k, v = self._exchange.to_heads(torch.cat((k, v), -1)).split((k.shape[-1], v.shape[-1]), -1)
        self.store.write(layer, self.append, k, v)
        if kind not in self.views:
            self.views[kind] = self.store.view(kind, self.append.rows, k.device)

    def ends_of_blocks(self, layer: int, device: torch.device) -> Tensor:
        """int64 [m]: which of the new tokens that this rank runs, row by row, complete a block that it stores."""
        return self.store.places(self.append, self.store.kind_of[layer], device)[0]

    def select(
        self,
        layer: int,
        index_k: Tensor,
        index: Index,
        *,
        visible: Tensor | None = None,
        config: TreeConfig | None = None,
    ) -> Selection:
        """Store a layer's new index keys [b, n, d_i], after `write` and like its keys, and select for the new tokens
        among all that the ranks hold of the rows. Collective over cp_group.

        Args: index: of the new tokens, or this rank's share of them. visible, config: as in `attend`.
        """
        config = config or self._default_config
        if self.packed is not None:
            index_k, q, weights = (self.packed.pad(x) for x in (index_k, index.q, index.weights))
            index = index._replace(q=q, weights=weights)
        self.store.write_index(layer, self.append, index_k)
        if index.blocks is not None:
            self.store.finish_blocks(layer, self.append, self._positions_of_share(index_k.device), index.blocks)
        view, shares = self.views[self.store.kind_of[layer]], self.append.shares
        if shares is None and not (self._prefills and visible is None):
            return select_in_step(self, layer, index, visible, config)
        local = index.q.shape[1] if shares is None else count_tokens(shares[self.store.book.rank])
        index = index._replace(q=index.q[:, :local], weights=index.weights[:, :local])
        shares = shares or [[(self.append.first[0], local)]]
        return self._prefill.select(layer, view, index, shares=shares, config=config)

    def attend(
        self,
        layer: int,
        q: Tensor,
        *,
        latent: LatentHeads | None = None,
        selected: Selection | None = None,
        visible: Tensor | None = None,
        beside: State | None = None,
        return_lse: bool = False,
        config: TreeConfig | None = None,
        **options,
    ) -> Tensor | State:
        """Attend to all that the ranks hold of the rows, the new tokens among it. Collective over cp_group.

        Args:
            q: [b, n, h, d]: the new tokens of each row, or this rank's share of them, see `write`. With head_shares
                of this rank's heads; so are the result, sinks and latent.
            latent: how these heads read the cache, where it holds latents; with q of all heads how all of them do.
            selected: the keys that queries see, if not all.
            visible: bool [b, tokens], tokens of a row up to the end of this pass: False hides one (padding). All rows
                have the same length then.
            beside: the state of other keys that these queries see, which is merged into the result.
            config: see `tree_decode`. options: softmax_scale, window_size, softcap, sinks, alibi_slopes of all
                heads of cp_group, and attention_chunk_size: a query sees its own chunk of so many tokens only, counted
                from the first visible one.
        Returns: [b, n, h, d_v] in q's dtype. With return_lse the state to pass as `beside` to another layer's call, not
            packed: also lse [b, h, n], or None in a sharded prefill with several head groups.
        Raises: ValueError as `tree_decode`, and for `visible` of another size or in a sharded prefill.
        """
        config = config or self._default_config
        if self.packed is not None:
            q = self.packed.pad(q)
        is_prefill = self._prefills and visible is None
        if latent is not None:
            if options.get("softmax_scale") is None:
                options["softmax_scale"] = q.shape[-1] ** -0.5  # of the heads, not of latents
            if self.shares is None:
                latent = self._step.local_heads(latent)
        if selected is not None and (self.shares is not None or is_prefill):
            options["selected"] = selected.keys
        if self.shares is not None:
            state = self._attend_share(layer, q, latent, visible, config, **options)
        elif is_prefill:
            view, shares = self.views[self.store.kind_of[layer]], [[(self.append.first[0], q.shape[1])]]
            num_heads = q.shape[2] if self.head_shares is None else sum(self.head_shares)
            options |= {} if self.head_shares is None else {"head_shares": self.head_shares}
            state = self._prefill.attend(layer, view, q, latent, num_heads, shares=shares, config=config, **options)
        elif selected is not None:
            state = self._step.attend_selected(self, layer, q, selected, latent, config, **options)
        else:
            state = self._step.attend(self, layer, q, latent, visible, config, **options)
        if return_lse:
            return state
        out = state[0] if beside is None else merged(state, beside)
        if self._progress is not None:
            self._progress(len(self.written), len(self.store.layers))
        return out if self.packed is None else self.packed.pack(out)

    def _attend_share(
        self, layer: int, q: Tensor, latent, visible, config: TreeConfig, *, sinks: Tensor | None = None, **options
    ) -> State:
        """This rank's tokens of one row; with several head groups, the group's heads of all tokens at this place."""
        if visible is not None:
            raise ValueError("attention_mask: a sequence-sharded prefill takes prompts without padding only")
        exchange, num_rows, shares = self._exchange, q.shape[1], self.append.shares
        if exchange is not None:
            q, sinks = exchange.to_heads(q), None if sinks is None else exchange.own_heads(sinks, 0)
        view, local = self.views[self.store.kind_of[layer]], count_tokens(shares[self.store.book.rank])
        options |= {"shares": shares, "config": config, "sinks": sinks}
        out, lse = self._prefill.attend(layer, view, q[:, :local], latent, q.shape[2], **options)
        if exchange is not None:
            return exchange.to_tokens(out, num_rows=num_rows), None
        out = F.pad(out, (0, 0, 0, 0, 0, num_rows - local))  # a rank without tokens still runs one
        return out, F.pad(lse, (0, num_rows - local))


class PackedRows:
    """Tokens of b rows, `counts` of them each: [1, sum(counts), ...], or padded at the end [b, max(counts), ...].

    Attributes: ends: list[int], the last token of each row among the packed ones. inside: bool [b, max(counts)], False
        for padding.
    """

    def __init__(self, counts: Sequence[int], device: torch.device):
        numbers = torch.tensor(counts)
        self.ends = (numbers.cumsum(0) - 1).tolist()
        inside = torch.arange(max(counts)) < numbers[:, None]
        self.inside = on_device(inside, device)
        self._places = on_device(inside.flatten().nonzero()[:, 0], device)  # of the tokens, among the padded ones

    def pack(self, x: Tensor) -> Tensor:
        """[1, tokens, ...] of x [b, n, ...], or [b, 1, ...] for what a row's tokens have in common."""
        return x.expand(-1, self.inside.shape[1], *x.shape[2:]).flatten(0, 1)[self._places][None]

    def pad(self, x: Tensor) -> Tensor:
        """[b, n, ...] of x [1, tokens, ...]; zeros for padding."""
        padded = x.new_zeros(self.inside.numel(), *x.shape[2:])
        padded[self._places] = x[0]
        return padded.unflatten(0, self.inside.shape)
