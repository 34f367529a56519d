"""Greedy decoding of a batch by a Transformers model with a sharded KV cache, with times.

All rows advance together, every rank has all results, and a step costs one broadcast of b integers. Requests that come
and go, sampling and text: `serving.scheduler.Scheduler`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...comm import broadcast, shared_checks
from ...config import check_choice
from .attention import TreeCache, agree_on_prompt, check_model
from .runner import CHUNK_SIZE, Runner

PREFILLS = ("sharded", "replicated")


@dataclass
class Generation:
    """What `generate` returns; times are this rank's, in seconds."""

    tokens: Tensor
    """int64 [b, n]: the new tokens, the same on all ranks; rows that ended early are padded with the end token."""
    cache: TreeCache
    """The cache after the last step; it holds all tokens but the last one."""
    prefill: str
    """How the prompt was run: "sharded" or "replicated"."""
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
    prefill: str = "sharded",
    chunk_size: int = CHUNK_SIZE,
    streamer=None,
    progress=None,
    keep_logits: bool = False,
    token_group=None,
) -> Generation:
    """Greedy decoding with the KV cache sharded over the cache's group. Call it on all ranks with equal arguments.

    The token of every step is chosen on one rank and broadcast. The merged attention is bit-identical on all ranks, but
    other layers may round differently on different machines. If ranks then chose different tokens, their caches would
    diverge without an error; one broadcast of b integers per step prevents that.

    Args:
        model: a causal language model whose attention implementation is "tree".
        input_ids: int64 [b, s]: the whole conversation; what the cache holds is not run again.
        cache: a `TreeCache`, empty or with the beginning of the conversation.
        max_new_tokens: maximum number of new tokens.
        eos_token_id: token or tokens that end a row.
        attention_mask: [b, s] with 0 for padding on the left or on the right; default no padding. Padding is left out:
            it is neither run nor cached.
        prefill: "sharded": every rank runs its share of a prompt, "replicated": every rank runs all of it.
        chunk_size: tokens of a prompt per forward pass; it bounds the memory for activations.
        streamer: receives the prompt and every new token on this rank, as from Transformers' generate (`put`, `end`).
        progress: called as progress(done, total) during the prefill, in tokens.
        keep_logits: keep the logits of every new token.
        token_group: the ranks that run the same tokens, if they are more than the cache's group (tensor parallelism).
    Raises: ValueError before anything is sent: shapes, padding in the middle, a sequence longer than the model's
        positions, nothing new to run.
    """
    with shared_checks("generate", cache.cp_group):
        prompts = _check_prompt(model, input_ids, attention_mask, cache, max_new_tokens, prefill)
        runner = Runner(model, cache, token_group=token_group, chunk_size=chunk_size)
    agree_on_prompt(cache, input_ids, "generate", prefill=prefill, max_new_tokens=max_new_tokens)
    ends = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or []
    ends = torch.tensor(ends, dtype=torch.int64, device=input_ids.device)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    start = _now(input_ids.device)
    cache.rows = cache.rows or [runner.add() for _ in prompts]
    total, ran, first = sum(map(len, prompts)), 0, []
    for row, prompt in zip(cache.rows, prompts, strict=True):
        tell = None if progress is None else lambda done, _, ran=ran: progress(ran + done, total)
        first.append(runner.prefill(row, prompt, sharded=prefill == "sharded", progress=tell))
        ran += len(prompt)
    logits = torch.stack(first)
    result = Generation(tokens=input_ids[:, :0], cache=cache, prefill=prefill)
    result.prefill_s = _now(input_ids.device) - start
    done = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
    tokens = []
    for step in range(max_new_tokens):
        if step > 0:
            logits = runner.step(cache.rows, tokens[-1][:, None])[:, -1]
        if keep_logits:
            result.logits.append(logits)
        token = logits.argmax(-1)
        broadcast(token, runner.token_group, 0, timeout_s=runner.config.timeout_s)
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


def _check_prompt(model, input_ids, attention_mask, cache, max_new_tokens, prefill) -> list[Tensor]:
    """By row, the tokens int64 [n] that the cache does not hold."""
    check_model(model)
    check_choice("prefill", prefill, PREFILLS)
    if input_ids.dim() != 2 or 0 in input_ids.shape or input_ids.dtype != torch.int64:
        raise ValueError(f"input_ids must be int64 [batch, tokens], got {list(input_ids.shape)} {input_ids.dtype}")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r} must be a positive integer")
    check_length(model.config, input_ids.shape[1], max_new_tokens)
    if cache.rows and len(cache.rows) != input_ids.shape[0]:
        raise ValueError(
            f"the cache holds {len(cache.rows)} rows and input_ids {input_ids.shape[0]}: they must be equal"
        )
    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask {list(mask.shape)} must have the shape of input_ids {list(input_ids.shape)}")
    prompts = []
    for i, (row, seen) in enumerate(zip(input_ids, mask, strict=True)):
        runs = int(seen[0]) + int((seen.diff() & seen[1:]).sum())
        if runs != 1:
            raise ValueError(
                f"attention_mask has {runs} runs of tokens in row {i}: padding goes on the left or the right"
            )
        prompt, held = row[seen], cache.length(i)
        if held >= len(prompt):
            raise ValueError(
                f"the cache holds {held} tokens of row {i} and input_ids {len(prompt)}: pass the whole text"
            )
        prompts.append(prompt[held:])
    return prompts


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
