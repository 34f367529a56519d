"""The model of `bench generate` and `bench serve`: a random Llama of given sizes, SmolLM2, or a user's; and its cache,
prefilled or made up, sharded and as Transformers has it on one rank."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from transformers import DynamicCache

from ...integrations.transformers import models
from ...integrations.transformers.architectures import num_heads_kv
from ...integrations.transformers.attention import TreeCache
from ...integrations.transformers.families.rope import num_positions
from ...integrations.transformers.families.table import families_of
from .options import SIZES

CHUNK = 2048  # tokens of a made-up cache that are drawn at once


def check_model(args, positions: int) -> None:
    """Raise ``ValueError`` for a model that is not there, has fewer positions, or an odd number of heads."""
    if args.model == "tiny":
        if args.heads % args.kv_heads:
            raise ValueError(f"--kv-heads {args.kv_heads}: must divide --heads {args.heads}")
        return
    limit = num_positions(models.load_config(models.model_folder(args.model)).get_text_config(decoder=True))
    if limit is not None and positions > limit:
        raise ValueError(f"--prompt-tokens and --new-tokens: {positions} exceed the {limit} positions of {args.model}")


def model_text(args) -> str:
    """The model in words."""
    shape = f" ({args.layers} layers, {args.heads}/{args.kv_heads} heads x {args.head_dim})"
    return f"{args.model}{shape if args.model == 'tiny' else ''}, fp32"


def load_model(args, positions: int):
    """The model in fp32 on this rank, with random weights for `positions` tokens if it is "tiny"."""
    if args.model == "tiny":
        return models.random_llama(**{name: getattr(args, name) for name in SIZES}, positions=positions)
    return models.load_model(models.model_folder(args.model), torch.float32)


def cache_shape(config) -> tuple[int, int, int]:
    """(layers, KV heads, head size) of a model. Raises ValueError where the cache holds no plain keys and values."""
    text, families = config.get_text_config(decoder=True), families_of(config)
    if "recurrent" in families:
        raise ValueError(f"{type(text).__name__} has recurrent layers: a synthetic cache is not supported, prefill it")
    if "compressed" in families:
        raise ValueError(f"{type(text).__name__} caches keys of blocks of tokens: a synthetic cache is not supported")
    if "latent" in families:
        raise ValueError(f"{type(text).__name__} caches latents: a synthetic cache is not supported, prefill it")
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_hidden_layers, num_heads_kv(text), head_dim


def made_up(config, num_tokens: int, layer: int):
    """Keys and values of one layer, fp32 [1, h_kv, n <= CHUNK, d] each, chunk by chunk: the same on every rank.

    Values have a different mean in every chunk, so that wrong weights show.
    """
    _, h_kv, d = cache_shape(config)
    for begin in range(0, num_tokens, CHUNK):
        generator = torch.Generator().manual_seed(1_000_003 * layer + begin)
        shape = (1, h_kv, min(CHUNK, num_tokens - begin), d)
        k, v = (torch.randn(shape, generator=generator) for _ in range(2))
        yield k, v.add_(torch.randn(1, h_kv, 1, d, generator=generator))


def made_up_row(cache: TreeCache, config, num_tokens: int) -> int:
    """A new row of a sharded cache with made-up content, this rank's share of it; returns its id."""
    row = cache.store.book.add()
    layers = [made_up(config, num_tokens, layer) for layer in range(cache_shape(config)[0])]
    for chunk in zip(*layers, strict=True):
        with cache.forward_pass([row], chunk[0][0].shape[2]) as forward:
            for layer, (k, v) in enumerate(chunk):
                forward.write(layer, k.transpose(1, 2), v.transpose(1, 2))
    return row


def made_up_plain(config, num_tokens: int) -> DynamicCache:
    """Transformers' own cache with the same content, all of it."""
    cache = DynamicCache(config=config)
    for layer in range(cache_shape(config)[0]):
        k, v = (torch.cat(parts, 2) for parts in zip(*made_up(config, num_tokens, layer), strict=True))
        cache.update(k, v, layer)
    return cache


@torch.no_grad()
def plain_prefill(model, tokens: Tensor, chunk_size: int) -> DynamicCache:
    """Transformers' own cache of a prompt int64 [n], which is run in chunks."""
    cache = DynamicCache(config=model.config)
    for begin in range(0, len(tokens), chunk_size):
        chunk = tokens[None, begin : begin + chunk_size]
        model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


class TokenClock(BaseStreamer):
    """Notes the times at which Transformers' generate has its prompt and each token: `time.perf_counter()`."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass
