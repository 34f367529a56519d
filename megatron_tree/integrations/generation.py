"""Greedy decoding of a Transformers model with a sharded KV cache: the loop, with its times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..agree import tell_failure
from ..comm import broadcast
from ..config import check_choice
from ..shard import Layout
from .transformers import TreeCache, agree_on_prompt, check_model, sharded_prefill

PREFILLS = ("auto", "sharded", "replicated")


@dataclass
class Generation:
    """What `generate` returns; times are this rank's, in seconds."""

    tokens: Tensor
    """int64 [b, n]: the new tokens, the same on all ranks; rows that ended early are filled up with the end token."""
    cache: TreeCache
    """The cache after the last step; it holds all tokens but the last one."""
    prefill: str
    """How the prompt went in: "sharded" or "replicated"."""
    prefill_s: float = 0.0
    """From the call to the logits of the last prompt token."""
    first_token_s: float = 0.0
    """From the call to the first new token."""
    step_s: list[float] = field(default_factory=list)
    """Of every decoding step after that: running the model and choosing the token."""
    logits: list[Tensor] = field(default_factory=list)
    """fp32 [b, vocab] for every new token, if asked for."""


@torch.no_grad()
def generate(
    model,
    input_ids: Tensor,
    *,
    cache: TreeCache,
    max_new_tokens: int,
    eos_token_id: int | list[int] | None = None,
    attention_mask: Tensor | None = None,
    prefill: str = "auto",
    layout: Layout = "zigzag",
    chunk_size: int = 512,
    streamer=None,
    progress=None,
    keep_logits: bool = False,
    token_group=None,
) -> Generation:
    """Greedy decoding with the KV cache sharded over the cache's group. Call it on all ranks alike.

    The token of every step is chosen on one rank and broadcast. The merged attention is bit-identical on all ranks, but
    the layers around it are only as equal as the ranks' machines: should two ranks round differently and disagree on
    one token, their caches would part without an error. One broadcast of b integers per step rules that out.

    Args:
        model: a causal language model whose attention implementation is "tree".
        input_ids: int64 [b, s]: the whole conversation, as for Transformers' generate; what the cache holds is skipped.
        cache: a `TreeCache`, empty or with the beginning of the conversation.
        max_new_tokens: tokens to add at most.
        eos_token_id: token or tokens that end a row.
        attention_mask: [b, s] with 0 for padding on the left; default no padding.
        prefill: "sharded": every rank runs its share of the prompt (new cache, no padding); "replicated": every rank
            runs all of it in chunks of chunk_size tokens and keeps its share of the cache; "auto": sharded if possible.
        layout: of the sharded prefill, see `sharded_prefill`.
        streamer: gets the prompt and every new token on this rank, as from Transformers' generate (`put`, `end`).
        progress: called as progress(done, total) during the prefill, see `sharded_prefill`; else with tokens.
        keep_logits: keep the logits of every new token.
        token_group: the ranks that run the same tokens, if they are more than the cache's group (tensor parallelism).
    Raises: ValueError before anything is sent: shapes, padding on the right, a sequence longer than the model's
        positions, nothing new to run, a sharded prefill that is not possible.
    """
    try:
        mask, prefill = _check_prompt(model, input_ids, attention_mask, cache, max_new_tokens, prefill, chunk_size)
    except ValueError as error:
        tell_failure(cache.cp_group, error)
        raise
    ends = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or []
    ends = torch.tensor(ends, dtype=torch.int64, device=input_ids.device)
    token_group = cache.cp_group if token_group is None else token_group
    if streamer is not None:
        streamer.put(input_ids.cpu())
    start = _now(input_ids.device)
    if prefill == "sharded":
        logits = sharded_prefill(model, input_ids, cache, layout=layout, progress=progress)
    else:
        logits = _replicated_prefill(model, input_ids, mask, cache, chunk_size, progress)
    result = Generation(tokens=input_ids[:, :0], cache=cache, prefill=prefill)
    result.prefill_s = _now(input_ids.device) - start
    done = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    tokens = []
    for step in range(max_new_tokens):
        if step > 0:
            mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)
            logits = _run(model, tokens[-1][:, None], mask, cache)
        if keep_logits:
            result.logits.append(logits.float())
        token = logits.argmax(-1)
        broadcast(token, token_group, 0)
        if len(ends):
            token = torch.where(done, ends[0], token)
            done |= torch.isin(token, ends)
        tokens.append(token)
        end = _now(input_ids.device)
        if step == 0:
            result.first_token_s = end - start
        else:
            result.step_s.append(end - start)
        if streamer is not None:
            streamer.put(token.cpu())
        if bool(done.all()):
            break
        start = _now(input_ids.device)
    if streamer is not None:
        streamer.end()
    result.tokens = torch.stack(tokens, 1)
    return result


def _replicated_prefill(model, input_ids: Tensor, mask: Tensor | None, cache: TreeCache, chunk_size: int, progress):
    agree_on_prompt(cache, input_ids, f"replicated prefill; chunk_size={chunk_size}")
    first, total = cache.get_seq_length(), input_ids.shape[1]
    for begin in range(first, total, chunk_size):
        end = min(begin + chunk_size, total)
        logits = _run(model, input_ids[:, begin:end], None if mask is None else mask[:, :end], cache)
        if progress is not None:
            progress(end - first, total - first)
    return logits


def _run(model, input_ids: Tensor, mask: Tensor | None, cache: TreeCache) -> Tensor:
    """Logits [b, vocab] of the last of these tokens, which are replicated."""
    n = input_ids.shape[1]
    if mask is None:
        positions = torch.arange(cache.get_seq_length(), cache.get_seq_length() + n, device=input_ids.device)
        positions = positions.expand(input_ids.shape[0], -1)
    else:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -n:]
    output = model(
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


def _check_prompt(model, input_ids, attention_mask, cache, max_new_tokens, prefill, chunk_size):
    """Returns the attention mask (None if all ones) and the kind of prefill."""
    check_model(model)
    check_choice("prefill", prefill, PREFILLS)
    if input_ids.dim() != 2 or 0 in input_ids.shape or input_ids.dtype != torch.int64:
        raise ValueError(f"input_ids must be int64 [batch, tokens], got {list(input_ids.shape)} {input_ids.dtype}")
    for name, value in (("max_new_tokens", max_new_tokens), ("chunk_size", chunk_size)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")
    held, num_tokens = cache.get_seq_length(), input_ids.shape[1]
    if held >= num_tokens:
        raise ValueError(f"the cache holds {held} tokens and input_ids {num_tokens}: pass the whole conversation")
    check_length(model.config, num_tokens, max_new_tokens)
    mask = attention_mask
    if mask is not None:
        if mask.shape != input_ids.shape or not bool(mask[:, -1].all()) or bool((mask.diff(dim=1) < 0).any()):
            raise ValueError(f"attention_mask {list(mask.shape)} must fit input_ids and hold padding on the left only")
        mask = None if bool(mask.all()) else mask.to(torch.int64)
    if prefill == "auto":
        prefill = "sharded" if mask is None and not held else "replicated"
    elif prefill == "sharded" and (mask is not None or held):
        reason = "padding" if mask is not None else f"a cache of {held} tokens"
        raise ValueError(f"prefill='sharded' is not possible with {reason}: use prefill='replicated' or 'auto'")
    return mask, prefill


def check_length(config, num_tokens: int, max_new_tokens: int) -> None:
    """Raise ``ValueError`` when a prompt and its answer are longer than the model's positions."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and num_tokens + max_new_tokens > limit:
        raise ValueError(
            f"{num_tokens} prompt tokens and max_new_tokens={max_new_tokens} exceed the model's {limit} positions: "
            f"shorten the prompt to {max(limit - max_new_tokens, 0)} tokens or ask for fewer new ones"
        )


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
