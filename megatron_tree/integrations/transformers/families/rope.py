"""Rotary embeddings that depend on a sequence's length: "longrope" and "dynamic" NTK.

Transformers chooses their frequencies from the largest position of a call. But a call of ours runs a chunk of a prompt,
one rank's tokens of it, or rows of many lengths, so `rotate` makes every token's frequencies those of its
whole row. Rows don't change each other, whereas in a plain Transformers batch the longest row decides for all.

- longrope switches from one set of frequencies to another when a row grows beyond a length. Keys in the cache were made
  with the old set, so the row is run again, as Transformers' own models do in `generate`.
- dynamic NTK changes with every token. Keys in the cache stay as they are, as in Transformers; a prompt is run with the
  frequencies of its whole length, and no longer depends on rows that the model ran before.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....core.cache.pages import kept

row_lengths: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("tree_row_lengths", default=None)
"""int64 [b, n] or [b, 1]: tokens of the row that a token belongs to, in the model's current run."""


@contextlib.contextmanager
def rows_of(lengths: Tensor):
    """Context of a model's run over tokens of rows with these lengths, see `row_lengths`."""
    token = row_lengths.set(lengths)
    try:
        yield
    finally:
        row_lengths.reset(token)


class RowNote(NamedTuple):
    """What a cache's row remembers of its keys; forks share it."""

    kind: int
    """`RopeRule.kind` of the length that they were made for."""
    tokens: Tensor
    """int64: the row's first tokens, as many as may have to be run again. Those beyond the row's length are void."""
    length: int
    """Tokens that the row has after the run that goes on, with all of its prompt."""


class RopeRule(NamedTuple):
    """How the rotary embedding of a model depends on a row's length."""

    switches: tuple[int, ...]
    """Lengths beyond which all tokens of a row get other frequencies (longrope), ascending."""
    limit: int | None
    """Length beyond which the frequencies differ for every length (dynamic NTK); None: they don't."""

    def kind(self, length: int) -> int:
        """Which set of frequencies a row of this length has."""
        return sum(length > switch for switch in self.switches)

    def most_at_once(self, length: int) -> int | None:
        """Upper bound of tokens that a row of this length takes at once with the frequencies of single ones."""
        if self.limit is not None and length >= self.limit:
            return 1
        ends = [end for end in (*self.switches, self.limit) if end is not None and end > length]
        return min(ends, default=length) - length or None

    def representatives(self, lengths: Tensor) -> Tensor:
        """For each length the least one of those with the same frequencies, of the same shape and dtype."""
        least = torch.ones_like(lengths)
        for switch in self.switches:
            least = least.masked_fill(lengths > switch, switch + 1)
        return least if self.limit is None else torch.where(lengths > self.limit, lengths, least)

    def note(self, tokens: Tensor, length: int) -> RowNote:
        """Of a row with keys for this length."""
        return RowNote(self.kind(length), tokens[: max(self.switches, default=0)].cpu(), length)


def _parameters(config) -> list[dict]:
    """The rotary parameters of a model, by kind of layer if they differ."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return [parameters] if "rope_type" in parameters else [x for x in parameters.values() if isinstance(x, dict)]


def rope_rule(config) -> RopeRule | None:
    """The rule of a model's configuration; None if its rotary embedding doesn't depend on lengths."""
    parameters = [x for x in _parameters(config) if x.get("rope_type") == "longrope" or _is_dynamic(x)]
    if not parameters:
        return None
    switches = {x["original_max_position_embeddings"] for x in parameters if not _is_dynamic(x)}
    limit = config.get_text_config(decoder=True).max_position_embeddings
    return RopeRule(tuple(sorted(switches)), limit if any(map(_is_dynamic, parameters)) else None)


def _is_dynamic(parameters: dict) -> bool:
    return "dynamic" in parameters.get("rope_type", "")


def num_positions(config) -> int | None:
    """Tokens that a row may have; None: no limit. Dynamic NTK is made for `factor` times the configuration's."""
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    factors = [x.get("factor") or 1.0 for x in _parameters(config) if _is_dynamic(x)]
    return int(limit * min(factors)) if limit is not None and factors else limit


def rotate(forward: Callable, module, *args, **kwargs):
    """`forward` of a rotary embedding, whose frequencies are those of whole rows where the attention is "tree"."""
    types = getattr(module, "rope_type", None)
    types = types.values() if isinstance(types, dict) else [types]
    follows = any(kind == "longrope" or "dynamic" in (kind or "") for kind in types)
    if not follows or module.config._attn_implementation != "tree":
        return forward(module, *args, **kwargs)
    return _of_whole_rows(functools.partial(forward, module), module, *args, **kwargs)


def _of_whole_rows(plain: Callable, module, x: Tensor, position_ids: Tensor, *args, **kwargs):
    """What `plain` returns for every token if its row is alone and run at once."""
    if position_ids.dim() != 2:
        raise ValueError(
            f"{type(module).__name__}: position_ids {list(position_ids.shape)} must be [batch, tokens] for a rotary "
            "embedding that depends on lengths with attn_implementation='tree'; use 'sdpa'"
        )
    lengths = row_lengths.get()
    if lengths is None:
        lengths = position_ids.amax(1, keepdim=True) + 1
    lengths = lengths.to(position_ids.device)
    position_ids = torch.minimum(position_ids, lengths - 1)  # padding on the right has positions beyond its row
    lengths, out = rope_rule(module.config).representatives(lengths), None
    # plain asks for the largest position only: one more column holds the last one of a row
    for length in lengths.unique().tolist():
        _forget_lengths(module)
        last = position_ids.new_full((position_ids.shape[0], 1), length - 1)
        chosen = lengths == length
        parts = plain(x, torch.cat((position_ids * chosen, last), 1), *args, **kwargs)
        parts = [part[:, :-1] for part in (parts if isinstance(parts, tuple) else (parts,))]
        pairs = zip(parts, out or parts, strict=True)
        out = [torch.where(chosen[..., None], new, old) for new, old in pairs]
    return out[0] if len(out) == 1 else tuple(out)


def _forget_lengths(module) -> None:
    """Dynamic NTK keeps the frequencies of the longest row that it has seen: back to those that it began with."""
    limit = getattr(module, "original_max_seq_len", None)
    for name, original in list(module.named_buffers(recurse=False)):
        if name.endswith("original_inv_freq"):
            prefix = name.removesuffix("original_inv_freq")
            with kept():  # inv_freq may be a tensor of inference mode, which nothing else can change
                setattr(module, f"{prefix}inv_freq", original.clone())
            if limit is not None:
                setattr(module, f"{prefix}max_seq_len_cached", limit)
