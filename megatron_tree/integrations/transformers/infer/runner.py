"""Runs a Transformers model over the rows of a `TreeCache`: prompts in sharded chunks, new tokens of many rows at once.

    runner = Runner(model, TreeCache(model.config, cp_group=group))
    row = runner.add()
    logits = runner.prefill(row, prompt)                 # every rank runs its share of each chunk
    logits = runner.step([row], logits.argmax(-1).view(1, 1))

A prompt with images is embedded first, by a model of images and text and what its processor returns:

    embedded = runner.embed(inputs.pop("input_ids")[0], inputs)
    logits = runner.prefill(row, prompt, embedded=embedded)

Every rank calls the same methods in the same order with the same arguments.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ....core.arguments import checked
from ....core.cache.runner import CHUNK_SIZE, RowRunner
from ....core.comm import in_step
from ....inference.generation.images import bytes_of
from ..attention import TreeCache, check_model
from ..families.images import EmbeddedPrompt, embed_prompt, image_tokens, text_part_of
from ..families.mixers import follow_passes
from ..families.rope import RowNote, num_positions, rows_of

__all__ = ["CHUNK_SIZE", "Runner"]


class Runner(RowRunner):
    """A Transformers model and the cache that it runs over.

    Args:
        model: a causal language model whose attention implementation is "tree".
        cache: a `TreeCache`; rows that it holds already stay.
        token_group: the ranks that run the same tokens, if they are more than the cache's group (tensor parallelism).
        chunk_size, capacity_tokens, cuda_graphs, record_steps: see `RowRunner`.
    Raises: ValueError for another attention implementation, sizes below 1, or CUDA graphs that can't be had.
    """

    @checked
    def __init__(
        self,
        model,
        cache: TreeCache,
        *,
        token_group=None,
        chunk_size: int = CHUNK_SIZE,
        capacity_tokens: int | None = None,
        cuda_graphs: bool = False,
        record_steps: bool = False,
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
            record_steps=record_steps,
        )
        self.image_tokens = image_tokens(model.config)
        self._embedded: EmbeddedPrompt | None = None  # of the row that is prefilled
        if self.has_states:
            cache.runs.share(follow_passes(model))

    @property
    def has_states(self) -> bool:
        return self.cache.runs.has_states

    @property
    def joins_images(self) -> bool:
        return "joined images" in self.cache.families

    @property
    def depends_on_host(self) -> str | None:
        return next((family.not_captured for family in self.cache.families.values() if family.not_captured), None)

    @torch.no_grad()
    def embed(self, tokens: Tensor, inputs: Mapping[str, Tensor]) -> EmbeddedPrompt:
        """What the model's text part is given for a prompt with images. Collective over token_group: every rank runs
        the vision part.

        Args:
            tokens: int64 [s], the whole text of a row from its first token on, what it holds already included.
            inputs: what the model's processor returns beside input_ids (attention_mask left out).
        Raises: ValueError on all ranks: see `embed_prompt`; ranks with other images; CUDA graphs, and rotary embeddings
            that depend on a row's length, with which images can't be run.
        """
        inputs = {name: x.to(self.device) for name, x in inputs.items() if name != "attention_mask"}
        with self.token_ranks.call("embed") as call:
            if (what := self._without_images) is not None:
                raise ValueError(f"images can't be run with {what}: leave them out")
            if tokens.dim() != 1 or not len(tokens) or tokens.dtype != torch.int64:
                raise ValueError(f"tokens must be int64 [tokens], got {list(tokens.shape)} {tokens.dtype}")
            text_part_of(self.model)
            values = {name: x.shape for name, x in inputs.items()}
            if self.token_ranks.size > 1:
                of_all = hashlib.sha256(tokens.cpu().numpy().tobytes())
                for x in inputs.values():
                    of_all.update(bytes_of(x))
                values["digest of tokens and images"] = of_all.hexdigest()[:16]
            call.agree(num_tokens=len(tokens), **values)
        with in_step(self.token_group):
            return embed_prompt(self.model, tokens.to(self.device), inputs)

    @property
    def _without_images(self) -> str | None:
        """Why images can't be run."""
        if self._graphs is not None:
            return f"{self._graphs.option}=True"
        if self.cache.rope is not None:
            return "a rotary embedding that depends on lengths"
        if self.joins_images and self.head_shares is not None:
            return "weights='sharded', where their tokens see each other"
        return "n-grams of tokens and blocks of keys (Qwen4-Exp)" if "pooled" in self.cache.families else None

    def prefill(self, row: int, tokens: Tensor, *, embedded: EmbeddedPrompt | None = None, **options) -> Tensor:
        """As `RowRunner.prefill`. embedded: of the row's text, where there are images in these tokens; chunks end
        where an image ends whose tokens see each other, and all ranks run all tokens of such a prompt."""
        self._embedded = embedded
        try:
            if embedded is not None and embedded.joined is not None:
                options["sharded"] = False
            return super().prefill(row, tokens, **options)
        finally:
            self._embedded = None

    def _chunk(self, row: int, num_tokens: int) -> int:
        if self._embedded is None:
            return super()._chunk(row, num_tokens)
        return self._embedded.chunk(self.length(row), num_tokens, self.chunk_size)

    def running(self, forward):
        return self.cache.running(forward)

    @property
    def shares_prompts(self) -> bool:
        """As of any runner, but not with recurrent layers whose functions are unknown (families/mixers.py)."""
        return super().shares_prompts and self.cache.runs.can_share

    def most_at_once(self, length: int) -> int | None:
        limits = [super().most_at_once(length)]
        if self.cache.rope is not None:
            limits.append(self.cache.rope.most_at_once(length))
        return min((limit for limit in limits if limit is not None), default=None)

    def _forward_pass(self, rows, num_tokens: int, *, sharded: bool = False, progress=None):
        options = {"sharded": sharded, "place": self._place, "progress": progress, "token_group": self.token_group}
        return self.cache.forward_pass(rows, num_tokens, **options)

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
        with self._whole_rows(forward), self._recurrent(tokens.shape[1]), self._images(forward, positions):
            output = self.model(
                input_ids=tokens,
                position_ids=self._text_positions(forward, positions),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=0 if keep is None else torch.tensor(keep, device=self.device),
            )
        return output.logits

    def _images(self, forward, slots: Tensor):
        """Context in which the text part is given what `prefill` was given for these tokens, int64 [1, n]."""
        embedded, end = self._embedded, forward.end
        if embedded is None or forward.append.first[0] >= embedded.num_tokens:
            return contextlib.nullcontext()
        if embedded.next_positions is not None:
            (row,) = forward.append.rows
            self._book.rows[row].next_positions = embedded.next_positions[:end]
        return embedded.given(text_part_of(self.model), slots)

    def _text_positions(self, forward, slots: Tensor) -> Tensor:
        """int64, the positions of text at `slots`: further on behind images."""
        if not self.image_tokens or self._graphs is not None:
            return slots
        after = [self._book.rows[row].next_positions for row in forward.append.rows]
        if all(x is None for x in after):
            return slots
        ahead = [0 if x is None else int(x[-1]) - len(x) for x in after]
        ahead = torch.tensor(ahead, device=self.device)[:, None]
        return slots + (ahead if forward.packed is None else forward.packed.pack(ahead))

    def _recurrent(self, num_tokens: int):
        options = {"cp_group": self.cp_group, "config": self.config}
        of_layers = self.cache.runs.recurrent_pass(num_tokens, **options)
        return contextlib.nullcontext() if of_layers is None else of_layers.running()

    def _whole_rows(self, forward):
        if self.cache.rope is None:
            return contextlib.nullcontext()
        lengths = [self._book.rows[row].note.length for row in forward.append.rows]
        lengths = torch.tensor(lengths, device=self.device)[:, None]
        return rows_of(lengths if forward.packed is None else forward.packed.pack(lengths))
