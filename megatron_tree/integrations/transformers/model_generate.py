"""What Transformers' own `generate` does before a step over a `TreeCache`.

It compares the tokens of the ranks, and it runs a row again whose rotary embedding has changed (longrope).
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

from ...comm import all_reduce, collective_call
from ...config import default_config
from .architectures import model_class
from .rope import follow_whole_rows


def prepare_generate(config) -> None:
    """Make `generate` of a configuration's model do this. No effect on other models and caches."""
    model = model_class(config)
    if model is not None and not hasattr(model.prepare_inputs_for_generation, "without_tree_cache"):
        model.prepare_inputs_for_generation = _prepare_with(model.prepare_inputs_for_generation)


def _prepare_with(plain):
    @functools.wraps(plain)  # Transformers reads the signature
    def prepare_inputs_for_generation(self, input_ids, *args, past_key_values=None, **kwargs):
        if not hasattr(past_key_values, "cp_group"):
            return plain(self, input_ids, *args, past_key_values=past_key_values, **kwargs)
        cache, mask = past_key_values, kwargs.get("attention_mask")
        _compare_tokens(cache, input_ids)
        if (rule := cache.rope) is None:
            return plain(self, input_ids, *args, past_key_values=cache, **kwargs)
        if rule.switches and kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "inputs_embeds with a TreeCache: this model (rope_type='longrope') may have to run its tokens again, "
                "pass input_ids"
            )
        follow_whole_rows(self)
        slots = input_ids.shape[1]
        lengths = [slots] * input_ids.shape[0] if mask is None else mask.sum(1).tolist()
        kinds = [rule.kind(length) for length in lengths]
        if kinds != cache.rope_kinds and cache.get_seq_length():
            cache.reset()
        if not cache.get_seq_length():
            past_key_values, kwargs["next_sequence_length"] = None, None
        inputs = plain(self, input_ids, *args, past_key_values=past_key_values, **kwargs)
        if inputs.get("past_key_values") is None:
            cache.reset()
            inputs["past_key_values"] = cache
        cache.rope_kinds, cache.rope_slots = kinds, slots
        return inputs

    prepare_inputs_for_generation.without_tree_cache = plain
    return prepare_inputs_for_generation


def _compare_tokens(cache, input_ids: Tensor) -> None:
    """Raise the same ``ValueError`` on all ranks of the cache's group unless they are about to run the same tokens.

    Not with check="never" of `TreeConfig`. One message of 16 bytes: the sum of a number made of the tokens and of its
    square, which tell whether all are equal.
    """
    config, held = cache.tree_config or default_config(), cache.get_seq_length()
    if cache.world == 1 or config.check == "never":
        return
    with collective_call("model.generate", cache.cp_group, config) as call:
        call.start()
        new = input_ids[:, held:].cpu().contiguous()
        digest = hashlib.blake2b(f"{list(input_ids.shape)}".encode() + new.numpy().tobytes(), digest_size=3).digest()
        number = int.from_bytes(digest, "big")
        sums = torch.tensor((number, number**2), device=input_ids.device)
        total, squares = all_reduce(sums, cache.cp_group, timeout_s=config.timeout_s).tolist()
        if cache.world * squares != total**2:
            raise ValueError(
                f"the ranks' input_ids differ, here {list(input_ids.shape)}, from token {held} on: pass the same "
                "prompts and options on all ranks and, to sample, set the same seed on all of them before generate"
            )
