"""What Transformers' own `generate` does over a `TreeCache`.

First, it refuses options that would run the model without the cache. Before a step it compares the tokens of the ranks,
and it runs a row again whose rotary embedding has changed (longrope).
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

from ....core.comm import Ranks
from ....core.config import default_config
from ..families.modeling import model_class, replace

RUN_BESIDE = {"guidance_scale": (None, 1), "assistant_early_exit": (None,), "use_mtp": (None, False)}
"""Options with which `generate` runs the model over another cache, too, and their values that don't."""


def prepare_generate(config) -> None:
    """Make `generate` of a configuration's model do this. No effect on other models and caches."""
    if (model := model_class(config)) is not None:
        replace(model, "prepare_inputs_for_generation", _prepare_inputs)  # Transformers reads the signature
        replace(model, "_prepare_cache_for_generation", _prepare_cache)


def _prepare_cache(plain, model, generation_config, model_kwargs, *args, **kwargs):
    if hasattr(model_kwargs.get("past_key_values"), "cp_group"):
        for option, allowed in RUN_BESIDE.items():
            if (value := getattr(generation_config, option, None)) not in allowed:
                raise ValueError(
                    f"{option}={value!r}: generate would run the model over a second cache, which is no TreeCache. "
                    f"Leave {option} out, or use attn_implementation='sdpa' and Transformers' own cache"
                )
        generation_config.use_cache = True  # else every step would run all tokens again over those in the cache
    return plain(model, generation_config, model_kwargs, *args, **kwargs)


def _prepare_inputs(plain, model, input_ids, *args, past_key_values=None, **kwargs):
    plain, cache, mask = functools.partial(plain, model), past_key_values, kwargs.get("attention_mask")
    if not hasattr(cache, "cp_group"):
        return plain(input_ids, *args, past_key_values=cache, **kwargs)
    _compare_tokens(cache, input_ids)
    if (rule := cache.rope) is None:
        return plain(input_ids, *args, past_key_values=cache, **kwargs)
    if rule.switches and kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "inputs_embeds with a TreeCache: this model (rope_type='longrope') may have to run its tokens again, "
            "pass input_ids"
        )
    slots = input_ids.shape[1]
    lengths = [slots] * input_ids.shape[0] if mask is None else mask.sum(1).tolist()
    kinds = [rule.kind(length) for length in lengths]
    if kinds != cache.rope_kinds and cache.get_seq_length():
        cache.reset()
    if not cache.get_seq_length():
        past_key_values, kwargs["next_sequence_length"] = None, None
    inputs = plain(input_ids, *args, past_key_values=past_key_values, **kwargs)
    if inputs.get("past_key_values") is None:
        cache.reset()
        inputs["past_key_values"] = cache
    cache.rope_kinds, cache.rope_slots = kinds, slots
    return inputs


def _compare_tokens(cache, input_ids: Tensor) -> None:
    """Raise the same ``ValueError`` on all ranks of the cache's group unless they are about to run the same tokens.

    Not with check="never" of `TreeConfig`. One message of 16 bytes: the sum of a number made of the tokens and of its
    square, which tell whether all are equal.
    """
    config, held = cache.tree_config or default_config(), cache.get_seq_length()
    if cache.world == 1 or config.check == "never":
        return
    ranks = Ranks.of(cache.cp_group, input_ids.device, config)
    with ranks.call("model.generate") as call:
        call.start()
        new = input_ids[:, held:].cpu().contiguous()
        digest = hashlib.blake2b(f"{list(input_ids.shape)}".encode() + new.numpy().tobytes(), digest_size=3).digest()
        number = int.from_bytes(digest, "big")
        sums = torch.tensor((number, number**2), device=input_ids.device)
        total, squares = ranks.reduce(sums).tolist()
        if cache.world * squares != total**2:
            raise ValueError(
                f"the ranks' input_ids differ, here {list(input_ids.shape)}, from token {held} on: pass the same "
                "prompts and options on all ranks and, to sample, set the same seed on all of them before generate"
            )
