"""Models of images and text: prompts, batches on shards, and images whose tokens see each other.

- A prompt. A model of images and text runs its vision part, puts what that gives in the place of the prompt's image
  tokens, counts positions (of time, height and width in Qwen's models), and calls its text part. `embed_prompt` runs it
  as far as this call and keeps the arguments, once for the whole prompt; `EmbeddedPrompt.given` makes the text part
  take those of some tokens instead of its own.
- A batch on shards. The model computes the features of all images (`get_image_features`), and puts them, one after
  another, where its input has the image token. In a shard's input there are the image tokens of this rank only, so
  `features_of_shard` gives their features only: everything that follows (also DeepStack) is as in a batch of text. A
  rank computes the images of which it has tokens. One without any computes the first: with ZeRO 3 and FSDP all ranks
  gather a layer's weights together, and DDP waits for gradients. What a rank's loss says about the vision part's
  weights is a part of a sum over ranks, as for all other weights.
- Images whose tokens see each other in both directions (Gemma 3), in the causal text part of a model. Beside what a
  causal mask shows, a token sees those that follow it in its image. Over a cache `ImageMask` says which; a state of
  these keys alone is made on every rank, which has all new tokens, and is merged into that of the cache. On shards
  `attend_to_images` has slices for them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....core.attention.functional import tree_attn_func
from ....core.merge import State, empty_state
from ....core.spec import AttnSlice
from ....inference.generation.images import outside, runs_of
from ..train.batch_shards import OF_IMAGES, SequenceShard, current_shard

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
    """(a model's modules, by name, but for those of a vision or audio part, the names of all parameters of the latter).

    Raises: ValueError for a model whose text part has these inside.
    """
    modules = list(model.named_modules())
    if all(getattr(model.config, x, None) is None for x in ("vision_config", "audio_config")):
        return modules, set()
    text_part = model.get_decoder()
    if text_part is model or text_part is model.base_model:
        raise ValueError(
            f"{type(model).__name__}: weights='sharded' can't split it: its vision or audio part lies inside its text "
            "part. Use weights='replicated'"
        )
    kept = {id(module) for module in (*text_part.modules(), model.get_output_embeddings())}
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


class ImageMask(NamedTuple):
    """A mask of models with such images."""

    visible: Tensor | None
    """bool [b, slots], False for padding; None: there is none."""
    joined: Tensor
    """bool [b, n], of the new tokens: whether a token sees the next one, of the same image."""


def image_mask(
    visible: Tensor | None, mask_function, batch_size: int, num_tokens: int, offset: int, device
) -> ImageMask | Tensor | None:
    """The mask of num_tokens new tokens at slots `offset` and later, by Transformers' function of (row, head, query,
    key); only `visible` where no token sees a later one.

    Raises: ValueError for packed sequences.
    """
    slots = offset + torch.arange(num_tokens, device=device)[None]
    rows, head = torch.arange(batch_size, device=device)[:, None], torch.zeros(1, 1, dtype=torch.int64, device=device)
    if not mask_function(rows, head, slots[:, 1:], slots[:, :-1]).all():
        raise ValueError(
            "position_ids that start again (packed sequences) are not supported with attn_implementation='tree' but in "
            "training on shards; use 'sdpa'"
        )
    joined = F.pad(mask_function(rows, head, slots[:, :-1], slots[:, 1:]).expand(batch_size, -1), (0, 1))
    return ImageMask(visible, joined) if joined.any() else visible


def blocks_of(joined: Tensor) -> list[tuple[int, int]]:
    """(first token, one past the last) of every image with two tokens or more; joined: bool [n] of one row."""
    return [(first, last + 1) for first, last in runs_of(joined)]


def state_ahead(mask: ImageMask, q: Tensor, k: Tensor, v: Tensor, **options) -> State:
    """Attention of new tokens to those that follow them in their image: out [b, n, h, d_v], lse [b, h, n].

    q [b, n, h, d], k [b, n, h_kv, d], v [b, n, h_kv, d_v]: all new tokens. options: softmax_scale, softcap.
    """
    out, lse = empty_state((*q.shape[:3], v.shape[-1]), device=q.device)
    for row, joined in enumerate(mask.joined):
        slices = [AttnSlice((first, last - 1), (first + 1, last), "inverse") for first, last in blocks_of(joined)]
        if slices:
            own = (x[row : row + 1] for x in (q, k, v))
            more = {"ranges": slices, "layout": "contiguous", "return_lse": True}
            out[row : row + 1], lse[row : row + 1] = tree_attn_func(*own, cp_group=None, **more, **options)
    return out, lse


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
    "glm5_next": Images(),
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


def features_of_shard(compute: Callable, module, *args, **kwargs):
    """A model's `get_image_features`, or of videos: of the tokens in this rank's shard."""
    shard, token = current_shard.get(), FEATURES.get(compute.__name__)
    compute = functools.partial(compute, module)
    if shard is None or token is None:
        return compute(*args, **kwargs)
    kwargs = {name: x for name, x in kwargs.items() if name not in ("sequence_shard", "num_items_in_batch")}
    is_token = shard.whole.inputs["input_ids"] == getattr(module.config, token)
    number = (is_token.flatten().cumsum(0) - 1).view_as(is_token)  # of a token, among the tokens of all images
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
    field = MODELS[module.config.model_type].features
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
