"""Runs a Transformers model over the rows of a `TreeCache`: prompts in sharded chunks, new tokens of many rows at once.

    runner = Runner(model, TreeCache(model.config, cp_group=group))
    row = runner.add()
    logits = runner.prefill(row, prompt)                 # every rank runs its share of each chunk
    logits = runner.step([row], logits.argmax(-1).view(1, 1))

Every rank calls the same methods in the same order with the same arguments.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from ...cache.runner import CHUNK_SIZE, RowRunner
from .architectures import CHUNKED
from .attention import TreeCache, check_model
from .rope import RowNote, follow_whole_rows, num_positions, rows_of

__all__ = ["CHUNK_SIZE", "Runner"]


class Runner(RowRunner):
    """A Transformers model and the cache that it runs over.

    Args:
        model: a causal language model whose attention implementation is "tree".
        cache: a `TreeCache`; rows that it holds already stay.
        token_group: the ranks that run the same tokens, if they are more than the cache's group (tensor parallelism).
        chunk_size, capacity_tokens, cuda_graphs: see `RowRunner`.
    Raises: ValueError for another attention implementation, sizes below 1, or CUDA graphs that can't be had.
    """

    def __init__(
        self,
        model,
        cache: TreeCache,
        *,
        token_group=None,
        chunk_size: int = CHUNK_SIZE,
        capacity_tokens: int | None = None,
        cuda_graphs: bool = False,
    ):
        check_model(model)
        self.model, self.cache = model, cache
        text = model.config.get_text_config(decoder=True)
        super().__init__(
            cache.store,
            cp_group=cache.cp_group,
            token_group=cache.cp_group if token_group is None else token_group,
            device=model.get_input_embeddings().weight.device,
            vocab_size=text.vocab_size,
            max_positions=num_positions(text),
            chunk_size=chunk_size,
            capacity_tokens=capacity_tokens,
            schedule=cache.schedule,
            head_shares=cache.head_shares,
            weight_gathering=getattr(model, "weight_gathering", None),  # where its weights are split over ranks
            config=cache.tree_config,
            cuda_graphs=cuda_graphs,
        )
        follow_whole_rows(model)
        cache.runs.follow(model)

    @property
    def has_states(self) -> bool:
        return self.cache.runs.has_states

    @property
    def depends_on_host(self) -> str | None:
        if self.has_states:
            return "recurrent layers have states of their own for every run"
        if self.cache.rope is not None:
            return "the model's rotary embedding depends on the rows' lengths"
        if self.cache.selects_keys:
            return "layers with an index select keys, whose number on a rank depends on their scores"
        if self.model.config.get_text_config(decoder=True).model_type in CHUNKED:
            return "layers whose queries see their chunk only depend on the rows' lengths"
        return None

    def running(self, forward):
        return self.cache.running(forward)

    @property
    def shares_prompts(self) -> bool:
        """As of any runner, but not with recurrent layers whose functions are unknown (mixers.py)."""
        return super().shares_prompts and self.cache.runs.can_share

    def most_at_once(self, length: int) -> int | None:
        limits = [super().most_at_once(length)]
        if self.cache.rope is not None:
            limits.append(self.cache.rope.most_at_once(length))
        return min((limit for limit in limits if limit is not None), default=None)

    def _forward_pass(self, rows, num_tokens: int, *, sharded: bool = False, progress=None):
        return self.cache.forward_pass(rows, num_tokens, sharded=sharded, place=self._place, progress=progress)

    @property
    def _begins_rows(self) -> bool:
        return self.cache.rope is not None

    def _begin(self, row: int, tokens: Tensor, row_length: int) -> Tensor:
        rule, held = self.cache.rope, self._book.rows[row]
        if rule is None:
            return tokens
        known = tokens.new_zeros(0) if held.note is None else held.note.tokens.to(tokens.device)[: held.length]
        before, after = rule.kind(held.length) if held.note is None else held.note.kind, rule.kind(row_length)
        if held.length and before != after:
            if len(known) < held.length:
                raise ValueError(
                    f"row {row} grows to {row_length} tokens and needs another rotary embedding (rope_type='longrope', "
                    f"more than {rule.switches} tokens), but its {held.length} tokens are not known: start a new row "
                    "with the whole text"
                )
            self.crop(row, 0)
            tokens = torch.cat((known, tokens))
            held.note = rule.note(tokens, row_length)
        elif len(known) == held.length:
            held.note = rule.note(torch.cat((known, tokens)), row_length)
        else:
            held.note = RowNote(after, known, row_length)
        return tokens

    def _run(self, forward, tokens: Tensor, positions: Tensor, keep: list[int] | None) -> Tensor:
        forward.positions = positions
        with self._whole_rows(forward), self._recurrent(tokens.shape[1]):
            output = self.model(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=0 if keep is None else torch.tensor(keep, device=self.device),
            )
        return output.logits

    def _recurrent(self, num_tokens: int):
        options = {"cp_group": self.cp_group, "config": self.config}
        of_layers = self.cache.runs.of_recurrent(num_tokens, **options)
        return contextlib.nullcontext() if of_layers is None else of_layers.running()

    def _whole_rows(self, forward):
        if self.cache.rope is None:
            return contextlib.nullcontext()
        lengths = [self._book.rows[row].note.length for row in forward.append.rows]
        lengths = torch.tensor(lengths, device=self.device)[:, None]
        return rows_of(lengths if forward.packed is None else forward.packed.pack(lengths))
