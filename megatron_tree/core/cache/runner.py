"""Runs a model over the rows of a sharded KV cache, whatever framework the model is from.

A `RowRunner` cuts prompts into chunks and gives every rank its tokens and their positions. A framework adds
`RowRunner._run`, and its attention layers call `ForwardPass.attend`.
"""

from __future__ import annotations

import contextlib
import hashlib

import torch
from torch import Tensor

from ..arguments import shown
from ..attention.shares import count_tokens
from ..comm import Ranks, Team, monitored, process_group, shared_checks
from ..config import DECODE_SCHEDULES, TreeConfig, check_choice, default_config
from . import ShardedCache
from .forward import ForwardPass, PackedRows, forward_pass
from .graph import GraphedSteps
from .weight_gathering import WeightGathering

CHUNK_SIZE = 2048


class RowRunner:
    """A model and the rows that it runs over. Every rank calls the same methods in the same order with equal arguments.

    Args:
        store: the sharded cache, one layer for each attention layer. cp_group: the group that it is sharded over.
        token_group: the ranks that run the same tokens: the ranks of cp_group, and tensor-parallel ones.
        device, vocab_size, max_positions: of the model; max_positions None = no limit.
        chunk_size: tokens of a prompt per forward pass; it bounds the memory for activations.
        capacity_tokens: tokens that the cache may hold on all ranks together; None = it grows as needed. The
            caller must not exceed it: see `free_tokens`.
        schedule: how partial attention is merged, see `tree_decode`.
        head_shares: query heads of every rank of cp_group, where the ranks share the model's weights. All of them
            then run all tokens, unless weight_gathering runs a chunk.
        weight_gathering: set where weights are split over ranks; its ranks are those of all head groups.
        config: `TreeConfig`; its check, transport and timeout_s are used to compare prompts between ranks, and for
            the logits of a chunk that is sharded.
        cuda_graphs: whether steps of one token in each row are captured in CUDA graphs and replayed, see graph.py.
            Prompts and steps of several tokens run without. The model's weights must stay where they are.
        record_steps: the same for CPU ranks that share memory: steps are written down on a `Tape` and replayed.
    Raises: ValueError for an unknown schedule, sizes below 1, or CUDA graphs that can't be had.
    """

    image_tokens: tuple[int, ...] = ()
    """Those that stand for parts of images, where the model takes some and the runner has `embed`."""
    joins_images = False
    """Whether the tokens of an image see each other, so that all are run at once."""

    def __init__(
        self,
        store: ShardedCache,
        *,
        cp_group,
        token_group,
        device: torch.device,
        vocab_size: int,
        max_positions: int | None,
        chunk_size: int = CHUNK_SIZE,
        capacity_tokens: int | None = None,
        schedule: str = "auto",
        head_shares: tuple[int, ...] | None = None,
        weight_gathering: WeightGathering | None = None,
        config: TreeConfig | None = None,
        cuda_graphs: bool = False,
        record_steps: bool = False,
    ):
        check_choice("schedule", schedule, DECODE_SCHEDULES)
        for name, value in (("cuda_graphs", cuda_graphs), ("record_steps", record_steps)):
            check_choice(name, value, (False, True))
        for name, value in (("chunk_size", chunk_size), ("capacity_tokens", capacity_tokens)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} must be a positive number of tokens")
        self.store, self.cp_group, self.token_group = store, process_group(cp_group), process_group(token_group)
        self.device, self.vocab_size, self.max_positions = device, vocab_size, max_positions
        self.chunk_size, self.capacity_tokens, self.schedule = chunk_size, capacity_tokens, schedule
        self.head_shares, self.weight_gathering, self.config = head_shares, weight_gathering, config or default_config()
        self.of_passes = {"cp_group": self.cp_group, "schedule": schedule, "head_shares": head_shares}
        """Options of every pass over the cache, see `forward_pass`."""
        self.ranks, self.token_ranks = (Ranks.of(x, device, self.config) for x in (self.cp_group, self.token_group))
        self._book = store.book
        self._graphs: GraphedSteps | None = None
        if cuda_graphs:
            self._graphs = GraphedSteps(self)
        if record_steps:
            self._graphs = GraphedSteps(self, option="record_steps")

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent layers: rows can't go back."""
        return False

    @property
    def shares_prompts(self) -> bool:
        """Whether each rank runs its share of a long prompt; all of it if not."""
        return self.head_shares is None or self.weight_gathering is not None

    @property
    def depends_on_host(self) -> str | None:
        """Why a step of this model can't be captured in a CUDA graph; None: no reason is known before it runs."""
        return None

    def add(self) -> int:
        """A new, empty row; returns its id."""
        return self._book.add()

    def length(self, row: int) -> int:
        """Tokens that the cache holds of a row."""
        return self._book.rows[row].length

    def crop(self, row: int, length: int) -> None:
        """Forget a row's tokens at position `length` and later. Raises ValueError, see `RowBook.crop`."""
        self.store.crop(row, length)

    def can_crop(self, row: int, length: int) -> bool:
        """Whether `crop` to this length is possible: layers with a window may have dropped what would be needed."""
        try:
            self._book.check_crop(row, length)
        except ValueError:
            return False
        return True

    def most_at_once(self, length: int) -> int | None:
        """Upper bound of tokens in one `step` of a row of this length whose logits equal those of single steps, where
        the last tokens may be removed again; None: any number."""
        if self.has_states:
            return 1
        return None if self.max_positions is None else self.max_positions - length

    def fork(self, row: int) -> int:
        """A copy of a row, which shares its memory until one of the two is appended to; returns its id."""
        return self._book.fork(row)

    def remove(self, row: int) -> None:
        """Forget a row; its memory is free for others."""
        self.store.remove(row)

    @property
    def page_size(self) -> int:
        """Tokens of a page; a row takes whole pages."""
        return self._book.page_size

    @property
    def free_tokens(self) -> int | None:
        """Tokens that still fit into the cache, in whole pages, once shared ones that no row has are evicted; None = it
        grows. What rows share counts once."""
        if self.capacity_tokens is None:
            return None
        size, unused = self._book.page_size, len(self._book.prefixes.unused)
        return (self.capacity_tokens // size - sum(self._book.loads) + unused) * size

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages and recurrent states that rows use on this rank; what several share counts once."""
        return self.store.used_bytes

    @torch.no_grad()
    def prefill(
        self, row: int, tokens: Tensor, *, sharded: bool = True, row_length: int | None = None, progress=None
    ) -> Tensor:
        """Append a prompt, or more of it, to a row; in chunks of chunk_size tokens. Collective over token_group.

        Every rank runs its share of a chunk through the whole network. All ranks run all tokens of chunks shorter than
        a page for each rank, with sharded=False and, of a model whose weights are split, where that moves fewer bytes.
        A failure removes the tokens of its chunk again; earlier chunks stay.

        Args:
            tokens: int64 [n], n >= 1.
            row_length: tokens that the row will have with the rest of its prompt, if these are not the last of it.
            progress: called as progress(tokens done, all of them) while the ranks work, layer by layer.
        Returns: fp32 logits [vocab_size] of the last token, the same on all ranks of the cache's group.
        Raises: ValueError for tokens of another shape or dtype, more than the model has positions for, or ranks that
            disagree.
        """
        with self.token_ranks.call("prefill") as call:
            self._check([row], tokens, dims=1)
            tokens = tokens.to(self.device)
            row_length = max(self.length(row) + len(tokens), row_length or 0)
            values = {"row": row, "held": self.length(row), "chunk_size": self.chunk_size, "num_tokens": len(tokens)}
            digest = ""
            if self.token_ranks.size > 1:
                digest = hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest()[:16]
            call.agree(**values, row_length=row_length, **{"digest of tokens": digest})
            tokens = self._begin(row, tokens, row_length)
        return self._prefill(row, tokens, sharded, progress)

    def _prefill(self, row: int, tokens: Tensor, sharded: bool = True, progress=None) -> Tensor:
        begin, total = 0, len(tokens)
        while begin < total:
            chunk = tokens[begin : begin + self._chunk(row, total - begin)]
            tell = None
            if progress is not None:
                done, n = begin, len(chunk)
                tell = lambda layer, layers, done=done, n=n: progress(done + n * layer // layers, total)  # noqa: E731
            if sharded and self._shares_tokens(len(chunk)):
                logits = self._sharded_chunk(row, chunk, tell)
            else:
                with self._forward_pass([row], len(chunk), progress=tell) as forward:
                    positions = forward.new_positions(self.device)
                    logits = self._run(forward, chunk[None], positions, keep=[len(chunk) - 1])[0, -1]
            begin += len(chunk)
        return logits.float()

    @torch.no_grad()
    def prefill_rows(self, rows: list[int], prompts: list[Tensor]) -> Tensor:
        """`prefill` of several short prompts in one forward pass, on every rank. Collective.

        The model runs them packed, without padding; the cache takes padding for this pass and needs room for the
        longest prompt in every row. Models with recurrent layers run them in separate passes.

        Args: rows: ids, each once. prompts: int64 [n] each, n >= 1.
        Returns: fp32 logits [len(rows), vocab_size] of the last tokens.
        Raises: ValueError as `step`.
        """
        with shared_checks("prefill_rows", self.cp_group):
            tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(self.device)
            self._check(rows, tokens, dims=2)
            counts, held = [prompt.shape[0] for prompt in prompts], self._book.rows
            ends = [held[row].length + n for row, n in zip(rows, counts, strict=True)]
            whole = [self._begin(*x) for x in zip(rows, prompts, ends)] if self._begins_rows else prompts
        if self.has_states or [new.shape[0] for new in whole] != counts:
            return torch.stack([self._prefill(row, new.to(self.device)) for row, new in zip(rows, whole, strict=True)])
        with self._forward_pass(rows, tokens.shape[1]) as forward:
            packed = forward.packed = PackedRows(counts, self.device)
            tokens, positions = packed.pack(tokens), packed.pack(forward.new_positions(self.device))
            logits = self._run(forward, tokens, positions, keep=packed.ends)[0].float()
        for row, end in zip(rows, ends, strict=True):
            if held[row].length > end:
                self.crop(row, end)
        return logits

    @torch.no_grad()
    def step(self, rows: list[int], tokens: Tensor, *, row_length: int | None = None) -> Tensor:
        """Append tokens to some rows, each at its own end. Collective; a failure removes the tokens of its pass again.

        Args: rows: ids, each once. tokens: int64 [len(rows), n], n >= 1; more than one for speculation, and for the
            logits of all tokens of a prompt, with row_length as in `prefill`.
        Returns: fp32 logits [len(rows), n, vocab_size].
        Raises: ValueError as `prefill`, and for another number of rows.
        """
        with shared_checks("step", self.cp_group):
            self._check(rows, tokens, dims=2)
            tokens, n = tokens.to(self.device), tokens.shape[1]
            whole = {}
            if self._begins_rows:
                lengths = {row: max(self.length(row) + n, row_length or 0) for row in rows}
                whole = {row: self._begin(row, new, lengths[row]) for row, new in zip(rows, tokens, strict=True)}
        for row, new in whole.items():
            if len(new) > n:
                self._prefill(row, new[:-n])
        if self._graphs is not None and n == 1:
            return self._graphs.step(rows, tokens)
        with self._forward_pass(rows, n) as forward:
            return self._run(forward, tokens, forward.new_positions(self.device), keep=None).float()

    @property
    def _begins_rows(self) -> bool:
        """Whether `_begin` does anything."""
        return False

    def _begin(self, row: int, tokens: Tensor, row_length: int) -> Tensor:
        """Called before tokens are appended to a row that is to have row_length of them, with the rest of its prompt.

        Returns: the tokens to run: these, or more, if what the cache held of the row had to go.
        """
        return tokens

    def _chunk(self, row: int, num_tokens: int) -> int:
        """How many of so many tokens to append to a row in one pass."""
        return min(num_tokens, self.chunk_size)

    def _run(self, forward: ForwardPass, tokens: Tensor, positions: Tensor, keep: list[int] | None) -> Tensor:
        """Run the model over tokens [b, n] at positions [b, n], int64; its attention layers call `forward.attend`.

        Returns: logits [b, n, vocab_size], or [b, len(keep), vocab_size] of the tokens at these indices.
        """
        raise NotImplementedError

    def running(self, forward: ForwardPass):
        """Context of a run of the model in a pass that `_forward_pass` did not make."""
        return contextlib.nullcontext()

    def _sharded_chunk(self, row: int, chunk: Tensor, progress) -> Tensor:
        """Logits of the chunk's last token."""
        gathering = self.weight_gathering
        # ranks may wait in several groups: a rank that fails must end the waits in all of them
        monitor = contextlib.nullcontext() if gathering is None else monitored("prefill")
        with monitor, self._forward_pass([row], len(chunk), sharded=True, progress=progress) as forward:
            shares, owner = self._token_shares(forward)
            if gathering is not None:
                with gathering.run([len(positions) for positions in shares], owner):
                    return self._run_share(forward, chunk, shares, gathering.rank)
            logits = self._run_share(forward, chunk, shares, self._book.rank)
            return self.ranks.broadcast(logits.contiguous(), owner)

    def _shares_tokens(self, num_tokens: int) -> bool:
        """Whether each rank runs its share of a chunk's tokens, not all of them."""
        if self.shares_prompts and self.weight_gathering is not None:
            return self.weight_gathering.plan(num_tokens).shares_tokens
        world = self._book.world
        return self.shares_prompts and world > 1 and num_tokens >= world * self._book.page_size

    @property
    def _place(self) -> Team | None:
        """With several head groups: the ranks at this rank's place of each."""
        return None if self.weight_gathering is None else self.weight_gathering.place

    def _token_shares(self, forward: ForwardPass) -> tuple[list[Tensor], int]:
        """(by rank the positions of the tokens that it runs, int64 [n], the rank with the last one).

        A rank without tokens still runs one; before recurrent layers all ranks run as many, see `ForwardPass.layout`.
        """
        first, end = forward.append.first[0], forward.end
        owner = next(i for i, runs in enumerate(forward.shares) if runs and sum(runs[-1]) == end)
        least, shares = forward.layout.num_rows if self.has_states else 1, []
        for runs in forward.shares:
            ranges = [torch.arange(start, start + count) for start, count in runs]
            padding = torch.full((max(0, least - count_tokens(runs)),), first)
            shares.append(torch.cat((*ranges, padding)).to(self.device))
        return shares, owner

    def _run_share(self, forward: ForwardPass, chunk: Tensor, shares: list[Tensor], rank: int) -> Tensor:
        """Run one rank's tokens of a chunk; the logits of the last one of them."""
        positions = shares[rank]
        tokens = chunk[positions - forward.append.first[0]]
        keep = [max(0, count_tokens(forward.shares[rank]) - 1)]
        return self._run(forward, tokens[None], positions[None], keep=keep)[0, -1]

    def _forward_pass(self, rows, num_tokens: int, *, sharded: bool = False, progress=None):
        """Context of one run of the model over num_tokens new tokens of each of these rows, see `forward_pass`."""
        options = {"sharded": sharded, "place": self._place, "progress": progress, "token_group": self.token_group}
        return forward_pass(self.store, rows, num_tokens, **self.of_passes, **options)

    def _check(self, rows, tokens: Tensor, dims: int) -> None:
        of_tokens = isinstance(tokens, Tensor) and tokens.dtype == torch.int64
        if not of_tokens or tokens.dim() != dims or 0 in tokens.shape:
            wanted = "[tokens]" if dims == 1 else "[rows, tokens]"
            given = f"{list(tokens.shape)} {tokens.dtype}" if isinstance(tokens, Tensor) else shown(tokens)
            raise ValueError(f"tokens must be int64 {wanted}, got {given}")
        if tokens.is_cpu:  # a GPU would have to be waited for
            low, high = map(int, tokens.aminmax())
            if low < 0 or high >= self.vocab_size:
                wrong, last = low if low < 0 else high, self.vocab_size - 1
                raise ValueError(f"tokens hold {wrong}, the model has 0 to {last}: is the tokenizer the model's own?")
        unknown = [row for row in rows if row not in self._book.rows]
        if unknown or not rows or len(set(rows)) != len(rows) or (dims == 2 and len(rows) != tokens.shape[0]):
            raise ValueError(
                f"rows={list(rows)} with tokens {list(tokens.shape)}: name each row of the cache once, with its tokens"
                + (f"; {unknown} don't exist" if unknown else "")
            )
        longest = max([self._book.rows[row].length for row in rows]) + tokens.shape[-1]
        if self.max_positions is not None and longest > self.max_positions:
            raise ValueError(
                f"a row would hold {longest} tokens, but the model has {self.max_positions} positions: end it earlier, "
                "or build the model for longer sequences"
            )
