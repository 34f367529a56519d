"""Images in training on shards: a rank puts the features of its own image tokens in their places.

A model of images and text computes the features of all images (`get_image_features`), and puts them, one after another,
where its input has the image token. In a shard's input there are the image tokens of this rank only, so `share_images`
makes the model get their features only: everything that follows (also DeepStack) is as in a batch of text.

A rank computes the images of which it has tokens. One without any computes the first: with ZeRO 3 and FSDP all ranks
gather a layer's weights together, and DDP waits for gradients. What a rank's loss says about the vision part's weights
is a part of a sum over ranks, as for all other weights.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....attention.functional import tree_attn_func
from ....config import AttnSlice
from ..train.batch_shards import OF_IMAGES, SequenceShard, current_shard


class Images(NamedTuple):
    """What a model with images does beside what all do."""

    videos: bool = False
    """It also has videos, with a token of their own."""
    blocks: bool = False
    """With token_type_ids the tokens of an image see each other."""
    features: str = "pooler_output"
    """Where `get_image_features` returns what becomes the tokens of images."""


MODELS = {
    "aya_vision": Images(),
    "cohere2_vision": Images(),
    "gemma3": Images(blocks=True),
    "glm46v": Images(),
    "glm4v": Images(),
    "glm4v_moe": Images(),
    "idefics3": Images(),
    "internvl": Images(),
    "llama4": Images(features="last_hidden_state"),
    "llava": Images(),
    "llava_next": Images(),
    "llava_onevision": Images(),
    "mistral3": Images(),
    "qwen2_5_vl": Images(videos=True),
    "qwen2_vl": Images(videos=True),
    "qwen3_5": Images(videos=True),
    "qwen3_5_moe": Images(videos=True),
    "qwen3_vl": Images(videos=True),
    "qwen3_vl_moe": Images(videos=True),
    "smolvlm": Images(),
    "vipllava": Images(),
}
"""By model_type: those that are tested."""
FEATURES = {"get_image_features": "image_token_id", "get_video_features": "video_token_id"}
GRIDS = ("image_grid_thw", "video_grid_thw")


def share_images(model) -> None:
    """Make a model compute the features of the images of its shard; no effect on models of text, and others that are
    not known, which `with_image_positions` refuses."""
    inner = model.base_model
    for name, token in FEATURES.items() if model.config.model_type in MODELS else ():
        if hasattr(inner, name):
            setattr(inner, name, functools.partial(_features, getattr(inner, name), inner.config, token))


def with_image_positions(model, kwargs: dict) -> dict:
    """The arguments of a model's run over a shard, with positions of images if the batch has none.

    Raises: ValueError for images in a model that can't have them on shards.
    """
    shard, config = kwargs["sequence_shard"], model.config
    batch = shard.whole.inputs
    known, given = MODELS.get(config.model_type), [name for name in OF_IMAGES if batch.get(name) is not None]
    if known is None and given:
        raise ValueError(
            f"batch has {given}: {type(model).__name__} ({config.model_type}) trains on shards of text only. Models "
            f"that also take images there: {', '.join(MODELS)}"
        )
    if shard.image_blocks and not known.blocks:
        raise ValueError(f"batch has token_type_ids with images: {type(model).__name__} does not take them")
    dropout = getattr(config.get_text_config(decoder=True), "attention_dropout", 0.0)
    if shard.image_blocks and dropout and model.training:
        raise ValueError(
            f"attention_dropout={dropout}: {type(model).__name__} has none on shards of images whose tokens see each "
            "other; set it to 0"
        )
    if "pixel_values_videos" in given and not known.videos:
        raise ValueError(f"batch has pixel_values_videos: {type(model).__name__} does not train on shards of videos")
    compute = getattr(model.base_model, "compute_3d_position_ids", None)
    if compute is None or not given or batch.get("position_ids") is not None:
        return kwargs
    # of what it takes inputs_embeds and a cache are None
    positions = compute(**{name: batch.get(name) for name in inspect.signature(compute).parameters})
    return kwargs | {"position_ids": shard.whole.share(positions)}


def _features(compute: Callable, config, token: str, *args, **kwargs):
    """What the model's `compute` returns, of the tokens in this rank's shard."""
    shard = current_shard.get()
    if shard is None:
        return compute(*args, **kwargs)
    kwargs = {name: x for name, x in kwargs.items() if name not in ("sequence_shard", "num_items_in_batch")}
    is_token = shard.whole.inputs["input_ids"] == getattr(config, token)
    number = (is_token.flatten().cumsum(0) - 1).view_as(is_token)  # of a token, among those of all images
    chosen = shard.whole.share(number)[shard.whole.share(is_token)]
    arguments, num_tokens = inspect.signature(compute).bind(*args, **kwargs).arguments, int(is_token.sum())
    arguments |= arguments.pop("kwargs", {})
    if (images := _images(arguments, num_tokens)) is not None:
        chosen, num_tokens = _compute_only(images, arguments, chosen)
    current_shard.set(None)  # not for the vision part
    try:
        output = compute(**arguments)
    finally:
        current_shard.set(shard)
    field = MODELS[config.model_type].features
    output[field] = _choose(output[field], chosen, num_tokens)
    if (deep := getattr(output, "deepstack_features", None)) is not None:
        output.deepstack_features = [_choose(x, chosen, num_tokens) for x in deep]
    return output


def _images(arguments: dict, num_tokens: int) -> tuple[Tensor, Tensor] | None:
    """(rows of the pixels, tokens) of each image, int64 [n] both; None if these arguments don't tell."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    if not tensors:
        return None
    pixels, *others = tensors.values()
    if set(tensors) & set(GRIDS) and len(others) == 1:
        rows = others[0].prod(-1)
    elif not others and pixels.dim() == 4:  # [n, channels, height, width]
        rows = torch.ones(len(pixels), dtype=torch.int64, device=pixels.device)
    else:
        return None
    if (rows * num_tokens % rows.sum()).any():
        raise ValueError(f"input_ids have {num_tokens} image tokens for images of {rows.tolist()} patches or tiles")
    return rows, rows * num_tokens // rows.sum()


def _compute_only(images: tuple[Tensor, Tensor], arguments: dict, chosen: Tensor) -> tuple[Tensor, int]:
    """Leave the images that have the `chosen` tokens in the arguments. Returns: (the tokens' numbers among those of
    these images, tokens of these images)."""
    rows, tokens = (x.to(chosen.device) for x in images)
    ends = tokens.cumsum(0)
    image = torch.bucketize(chosen, ends, right=True)
    kept = torch.zeros(len(rows), dtype=torch.bool, device=chosen.device)
    kept[image if len(image) else 0] = True
    skipped = (tokens * ~kept).cumsum(0)
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            arguments[name] = x[kept if name in GRIDS else kept.repeat_interleave(rows)]
    return chosen - skipped[image], int(tokens[kept].sum())


def _choose(features: Tensor | list | tuple, chosen: Tensor, num_tokens: int) -> Tensor | tuple[Tensor]:
    """The features [n, d] of the chosen tokens; of all images [..., d], or of each in a list, as the model has them."""
    listed = isinstance(features, list | tuple)
    whole = torch.cat([x.flatten(0, -2) for x in features]) if listed else features.flatten(0, -2)
    if len(whole) != num_tokens:
        raise ValueError(f"input_ids have {num_tokens} image tokens, but the images give {len(whole)} features")
    return (whole[chosen],) if listed else whole[chosen]


def attend_to_images(q: Tensor, k: Tensor, v: Tensor, *, shard: SequenceShard, options: dict) -> Tensor:
    """Causal attention in which tokens of an image see each other; arguments as of `attend_to_shard`. Collective."""
    window = options.pop("window_size")[0] + 1
    ranges = _ranges(shard.layout.lengths, shard.image_blocks, window or None)
    return tree_attn_func(q, k, v, ranges=ranges, layout=shard.one_document, **options)


@functools.lru_cache(maxsize=16)
def _ranges(lengths: tuple[int, ...], blocks: tuple[tuple[int, int], ...], window: int | None) -> tuple[AttnSlice, ...]:
    """Of documents one after another, and of runs of tokens that see each other: the keys up to a query, `window` of
    them, and those of its block behind it."""
    slices, start = [], 0
    for end in itertools.accumulate(lengths):
        full = end if window is None else min(end, start + window)  # queries before it see all keys before them
        slices.append(AttnSlice((start, full), (start, full), "causal"))
        if full < end:
            slices.append(AttnSlice((full, end), (full - window + 1, end), "bidirectional"))
        start = end
    return (*slices, *(AttnSlice((a, b - 1), (a + 1, b), "inverse") for a, b in blocks if b - a > 1))
