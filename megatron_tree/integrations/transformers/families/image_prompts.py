"""Prompts with images: what a model hands to its text part, made once for the whole prompt and run in chunks like text.

A model of images and text runs its vision part, puts what that gives in the place of the prompt's image tokens, counts
positions (of time, height and width in Qwen's models), and calls its text part. `embed_prompt` runs it as far as this
call and keeps the arguments; `EmbeddedPrompt.given` makes the text part take those of some tokens instead of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....generation.images import outside
from .image_blocks import ImageMask, blocks_of

KNOWN = ("inputs_embeds", "position_ids", "attention_mask", "visual_pos_masks", "deepstack_visual_embeds")


class _Reached(Exception):
    """The text part was called; its keyword arguments."""


class EmbeddedPrompt(NamedTuple):
    """What the text part of a model is given for the first tokens of a row."""

    embeds: Tensor
    """[1, s, hidden]."""
    positions: Tensor | None
    """int64 [axes, 1, s]; None: tokens are numbered from 0."""
    next_positions: Tensor | None
    """int64 [s], on the CPU: the position of text that follows each of these tokens; None likewise."""
    visual: Tensor | None
    """bool [1, s]: tokens of images ..."""
    added: list[Tensor]
    """... and what the first layers add to these: [tokens of images, hidden] each."""
    joined: Tensor | None
    """bool [s]: whether a token sees the next one, of the same image; None: attention is causal."""

    @property
    def num_tokens(self) -> int:
        return self.embeds.shape[1]

    def chunk(self, first: int, count: int, size: int) -> int:
        """How many of `count` tokens from `first` on to run at once, `size` unless an image must not be cut.

        Raises: ValueError if the last of `count` tokens is not the last of its image.
        """
        end = first + min(count, size)
        if first < self.num_tokens < end:
            end = self.num_tokens
        end = outside([] if self.joined is None else blocks_of(self.joined), first, end)
        if end > first + count:
            raise ValueError(
                f"the {count} tokens from {first} on end inside of an image whose tokens see each other, which ends at "
                f"{end}: prefill its last token with the others"
            )
        return end - first

    @contextlib.contextmanager
    def given(self, text_part, slots: Tensor) -> Iterator[Tensor | None]:
        """Context of a run over tokens at `slots`, int64 [1, n]: the text part is given theirs. Yields positions."""
        slots = slots[0]
        given = {"inputs_embeds": self.embeds[:, slots]}
        positions = None if self.positions is None else self.positions[..., slots]
        if positions is not None:
            given["position_ids"] = positions
        if self.visual is not None:
            shown = self.visual[:, slots]
            places = (self.visual[0].cumsum(0) - 1)[slots[shown[0]]]
            given["visual_pos_masks"] = shown if shown.any() else None
            given["deepstack_visual_embeds"] = [x[places] for x in self.added] if shown.any() else None
        if self.joined is not None and self.joined[slots].any():
            mask = ImageMask(None, self.joined[slots][None])
            given["attention_mask"] = dict.fromkeys(("full_attention", "sliding_attention"), mask)

        def replace(module, args, kwargs):
            return args, kwargs | given

        hook = text_part.register_forward_pre_hook(replace, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


def text_part_of(model):
    """The module that a model of images and text runs over embeddings. Raises: ValueError for a model of text alone."""
    part = model.get_decoder()
    if part is model or part is model.base_model or getattr(model.config, "vision_config", None) is None:
        raise ValueError(
            f"{type(model).__name__} takes no images: load the model with AutoModelForImageTextToText, or leave out "
            "what is not text"
        )
    return part


def set_text_attention(model, name: str) -> None:
    """Give a model an attention implementation, and leave a vision part its own."""
    vision = getattr(model.config, "vision_config", None)
    if vision is None:
        model.set_attn_implementation(name)
    else:
        model.set_attn_implementation({"text_config": name, "vision_config": vision._attn_implementation})


def without_vision(model) -> tuple[list[tuple[str, nn.Module]], set[str]]:
    """(a model's modules, by name, but for those of a vision part, the names of all parameters of the latter)."""
    modules = list(model.named_modules())
    if getattr(model.config, "vision_config", None) is None:
        return modules, set()
    kept = {id(module) for module in (*text_part_of(model).modules(), model.get_output_embeddings())}
    modules = [(name, module) for name, module in modules if id(module) in kept]
    names, inside = (name for name, _ in model.named_parameters(remove_duplicate=False)), dict(modules)
    return modules, {name for name in names if name.rpartition(".")[0] not in inside}


def image_tokens(config) -> tuple[int, ...]:
    """The tokens that stand for parts of images and videos; none for a model of text alone."""
    if getattr(config, "vision_config", None) is None:
        return ()
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    return tuple(sorted({x for name in names if isinstance(x := getattr(config, name, None), int)}))


def embed_prompt(model, tokens: Tensor, inputs: Mapping[str, Tensor]) -> EmbeddedPrompt:
    """Run a model's vision part, as far as its text part.

    Args:
        tokens: int64 [s], the whole text of the row, with image tokens.
        inputs: what the model's processor returns beside them: pixel_values and so on.
    Raises: ValueError for a model without a vision part, one that gives its text part what this does not know, and
        for inputs that don't fit the tokens.
    """
    part, name = text_part_of(model), type(model).__name__

    def stop(module, args, kwargs):
        raise _Reached(kwargs)

    hook = part.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(input_ids=tokens[None], use_cache=False, **inputs)
    except _Reached as reached:
        (given,) = reached.args
    except (ValueError, RuntimeError, TypeError, KeyError, IndexError) as error:
        raise ValueError(
            f"{name} can't embed a prompt of {len(tokens)} tokens with {_shapes(inputs)}: {error}. Pass what its "
            "processor returns for this prompt"
        ) from error
    finally:
        hook.remove()
    unknown = sorted(key for key, x in given.items() if isinstance(x, Tensor) and key not in KNOWN)
    if unknown:
        raise ValueError(
            f"{name} gives its text part {', '.join(unknown)} for images, which a Runner does not know: use "
            "model.generate with Transformers' own cache"
        )
    positions, visual, mask = given.get("position_ids"), given.get("visual_pos_masks"), given.get("attention_mask")
    after = None
    if positions is not None:
        after = positions.flatten(0, -2).amax(0).cummax(0).values.cpu() + 1
        if torch.equal(after, torch.arange(1, len(tokens) + 1)):
            after = None
    masks = mask.values() if isinstance(mask, dict) else (mask,)
    joined = next((x.joined[0] for x in masks if isinstance(x, ImageMask)), None)
    added = [] if visual is None else list(given["deepstack_visual_embeds"])
    return EmbeddedPrompt(given["inputs_embeds"], positions, after, visual, added, joined)


def _shapes(inputs: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{key} {list(x.shape)}" for key, x in inputs.items()) or "nothing beside them"
