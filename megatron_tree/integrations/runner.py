"""Runs a Transformers model over the rows of a `TreeCache`: prompts in sharded chunks, new tokens of many rows at once.

    runner = Runner(model, TreeCache(model.config, cp_group=group))
    row = runner.add()
    logits = runner.prefill(row, prompt)                 # every rank runs its share of each chunk
    logits = runner.step([row], logits.argmax(-1).view(1, 1))

Every rank calls the same methods in the same order with the same arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..agree import telling
from ..comm import broadcast
from .transformers import TreeCache, agree_on_prompt, check_model

CHUNK_SIZE = 2048


class Runner:
    """A model and the cache that it runs over.

    Args:
        model: a causal language model whose attention implementation is "tree".
        cache: a `TreeCache`; rows that it holds already stay.
        token_group: the ranks that run the same tokens, if they are more than the cache's group (tensor parallelism).
        chunk_size: tokens of a prompt that are run at once; it bounds the memory of activations.
        capacity_tokens: tokens that the cache may hold on all ranks together; None = it grows as needed. It is up to
            the caller not to exceed it: see `free_tokens`.
    Raises: ValueError for another attention implementation or sizes below 1.
    """

    def __init__(
        self,
        model,
        cache: TreeCache,
        *,
        token_group=None,
        chunk_size: int = CHUNK_SIZE,
        capacity_tokens: int | None = None,
    ):
        check_model(model)
        for name, value in (("chunk_size", chunk_size), ("capacity_tokens", capacity_tokens)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} must be a positive number of tokens")
        text = model.config.get_text_config(decoder=True)
        self.model, self.cache, self.chunk_size, self.capacity_tokens = model, cache, chunk_size, capacity_tokens
        self.token_group = cache.cp_group if token_group is None else token_group
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.max_positions: int | None = getattr(text, "max_position_embeddings", None)
        self.vocab_size: int = text.vocab_size
        self._book = cache.store.book

    def add(self) -> int:
        """A new, empty row; returns its id."""
        return self._book.add()

    def length(self, row: int) -> int:
        """Tokens that the cache holds of a row."""
        return self._book.rows[row].length

    def crop(self, row: int, length: int) -> None:
        """Forget a row's tokens at position `length` and later. Raises ValueError, see `RowBook.crop`."""
        self.cache.store.crop(row, length)

    def fork(self, row: int) -> int:
        """A copy of a row, which shares its memory until one of the two goes on; returns its id."""
        return self._book.fork(row)

    def remove(self, row: int) -> None:
        """Forget a row; its memory is free for others."""
        self.cache.store.remove(row)

    @property
    def page_size(self) -> int:
        """Tokens of a page; a row takes whole pages."""
        return self._book.page_size

    @property
    def free_tokens(self) -> int | None:
        """Tokens that still fit into the cache, in whole pages; None = it grows."""
        if self.capacity_tokens is None:
            return None
        return (self.capacity_tokens // self._book.page_size - sum(self._book.loads)) * self._book.page_size

    @torch.no_grad()
    def prefill(self, row: int, tokens: Tensor, *, sharded: bool = True, progress=None) -> Tensor:
        """Append a prompt, or more of it, to a row; in chunks of chunk_size tokens.

        Every rank runs its share of a chunk through the whole network. Chunks shorter than a page for each rank, or all
        with sharded=False, are run on every rank.

        Args:
            tokens: int64 [n], n >= 1.
            progress: called as progress(tokens done, all of them) while the ranks work, layer by layer.
        Returns: fp32 logits [vocab] of the last token, the same on all ranks of the cache's group.
        Raises: ValueError for a row that there is not, other tokens, or more than the model's positions. A failure
            takes back the tokens of the chunk that it happened in; those of the chunks before stay.
        """
        with telling(self.cache.cp_group):
            self._check_rows([row], tokens[None] if tokens.dim() == 1 else tokens, "int64 [n]")
        tokens = tokens.to(self.device)
        agree_on_prompt(
            self.cache, tokens, f"prefill; row={row}; held={self.length(row)}; chunk_size={self.chunk_size}"
        )
        total = tokens.shape[0]
        for begin in range(0, total, self.chunk_size):
            chunk = tokens[begin : begin + self.chunk_size]
            tell = None
            if progress is not None:
                done, n = begin, len(chunk)
                tell = lambda layer, layers, done=done, n=n: progress(done + n * layer // layers, total)  # noqa: E731
            if sharded and self.cache.world > 1 and len(chunk) >= self.cache.world * self._book.page_size:
                logits = self._sharded_chunk(row, chunk, tell)
            else:
                with self.cache.calling([row], len(chunk), progress=tell) as call:
                    logits = self._run(chunk[None], call.append.first, keep=1)[0, -1]
        return logits.float()

    def _sharded_chunk(self, row: int, chunk: Tensor, progress) -> Tensor:
        """Logits of the chunk's last token."""
        with self.cache.calling([row], len(chunk), sharded=True, progress=progress) as call:
            first, shares = call.append.first[0], call.append.shares
            runs = shares[self.cache.rank] or [(first, 1)]  # a rank without tokens runs one all the same
            positions = torch.cat([torch.arange(start, start + count) for start, count in runs]).to(self.device)
            last = first + len(chunk) - 1
            owner = next(rank for rank, runs in enumerate(shares) if runs and sum(runs[-1]) == last + 1)
            at = len(positions) - 1 if owner == self.cache.rank else 0
            output = self.model(
                input_ids=chunk[positions - first][None],
                position_ids=positions[None],
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=torch.tensor([at], device=self.device),
            )
        logits = output.logits[0, -1].contiguous()
        return broadcast(logits, self.cache.cp_group, owner)

    @torch.no_grad()
    def step(self, rows: list[int], tokens: Tensor) -> Tensor:
        """Append tokens to some rows, each at its own end.

        Args: rows: ids, each once. tokens: int64 [len(rows), n], n >= 1; more than one for speculation.
        Returns: fp32 logits [len(rows), n, vocab].
        Raises: ValueError as `prefill`, and for a row given twice. A failure takes all these tokens back.
        """
        with telling(self.cache.cp_group):
            self._check_rows(rows, tokens, f"int64 [{len(rows)}, n]")
        with self.cache.calling(rows, tokens.shape[1]) as call:
            return self._run(tokens.to(self.device), call.append.first, keep=0).float()

    def _check_rows(self, rows: list[int], tokens: Tensor, shape: str) -> None:
        if not rows or len(set(rows)) < len(rows) or any(row not in self._book.rows for row in rows):
            raise ValueError(
                f"rows={rows} must be one or more of the {len(self._book.rows)} rows of the cache, each once"
            )
        if tokens.dtype != torch.int64 or tokens.dim() != 2 or len(tokens) != len(rows) or not tokens.shape[1]:
            raise ValueError(f"tokens must be {shape}, n >= 1, got {list(tokens.shape)} {tokens.dtype}")
        longest, limit = max(self.length(row) for row in rows), self.max_positions
        if limit is not None and longest + tokens.shape[1] > limit:
            raise ValueError(
                f"{tokens.shape[1]} tokens after the {longest} of a row exceed the model's {limit} positions: crop the "
                "row or start another one"
            )

    def _run(self, tokens: Tensor, first: tuple[int, ...], keep: int) -> Tensor:
        """Logits [b, n, vocab] of tokens [b, n] that are on all ranks; of the last `keep` ones unless 0."""
        positions = torch.tensor(first, device=self.device)[:, None] + torch.arange(tokens.shape[1], device=self.device)
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return output.logits
