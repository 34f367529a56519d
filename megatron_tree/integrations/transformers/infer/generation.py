"""Greedy decoding of a batch by a Transformers model with a sharded KV cache: a `Scheduler` with b requests.

All rows advance together, and every rank has all results.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ....core.arguments import checked
from ....core.comm import Ranks, check_local, shared_checks
from ....core.config import check_choice
from ....inference.generation.conversation import Answer, answer_all
from ....inference.generation.executor import Executor
from ....inference.generation.requests import Request, prompt_tensor
from ....inference.generation.sampling import SamplingParams
from ....inference.generation.scheduler import Scheduler
from ..attention import TreeCache, check_model
from ..families.rope import num_positions
from .runner import CHUNK_SIZE, Runner

PREFILLS = ("sharded", "replicated")


@dataclass
class Generation:
    """The result of `generate`; times are rank 0's, in seconds."""

    tokens: Tensor
    """int64 [b, n]: the new tokens, the same on all ranks; rows that ended early are padded with the end token."""
    cache: TreeCache
    """The cache after the last step; it holds all tokens of each row but the last one."""
    prefill: str
    """How the prompt was run: "sharded", or "replicated": as asked for, or as `Runner.shares_prompts` tells."""
    prefill_s: float = 0.0
    """Until all prompts had been run, and their first tokens were chosen."""
    first_token_s: float = 0.0
    """Time from the call to the first new token."""
    step_s: list[float] = field(default_factory=list)
    """Time of every later step: running the model and choosing the token."""
    logits: list[Tensor] = field(default_factory=list)
    """fp32 [b, vocab] for every new token, if asked for; NaN for rows that ended before."""


@torch.no_grad()
@checked
def generate(
    model,
    input_ids: Tensor,
    *,
    cache: TreeCache,
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
    prefill: str = "sharded",
    chunk_size: int = CHUNK_SIZE,
    progress=None,
    keep_logits: bool = False,
    token_group=None,
    cuda_graphs: bool = False,
    record_steps: bool = False,
) -> Generation:
    """Greedy decoding with the KV cache sharded over the cache's group. Call it on all ranks with equal arguments.

    The token of every step is chosen on one rank and broadcast: layers may round differently on different machines, and
    caches of ranks that chose different tokens would diverge without an error.

    Args:
        model: a causal language model whose attention implementation is "tree".
        input_ids: int64 [b, s]: the whole conversation; what the cache holds is not run again.
        cache: a `TreeCache`, empty or with the beginning of the conversation.
        max_new_tokens: maximum number of new tokens.
        eos_token_id: token or tokens that end a row.
        attention_mask: [b, s] with 0 for padding on the left or on the right, which is neither run nor cached.
        prefill: "sharded": every rank runs its share of a prompt; "replicated": every rank runs all of it.
        chunk_size, cuda_graphs, record_steps: see `Runner`.
        progress: called as progress(done, total) during the prefill, in tokens.
        keep_logits: keep the logits of every new token.
        token_group: the ranks that run the same tokens, if they are more than the cache's group (tensor parallelism).
    Raises: ValueError before anything is sent: shapes, padding in the middle, a sequence longer than the model's
        positions, tokens that the model lacks, nothing new to run. `TreeError` for logits that are not finite.
    """
    ends = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or []
    with shared_checks("generate", cache.cp_group):
        check_model(model)
        check_choice("prefill", prefill, PREFILLS)
        options = dict(chunk_size=chunk_size, cuda_graphs=cuda_graphs, record_steps=record_steps)
        runner = Runner(model, cache, token_group=token_group, **options)
        prefill = prefill if runner.shares_prompts else "replicated"
        check_local(input_ids=input_ids, attention_mask=attention_mask)
        prompts = _check_prompts(model, input_ids, attention_mask, cache, max_new_tokens, runner.vocab_size)
        scheduler = Scheduler(
            runner,
            max_rows=len(prompts),
            max_waiting=len(prompts),
            end_tokens=ends,
            timeout_s=runner.config.timeout_s,
            transport=runner.config.transport,
            executor=Executor(runner, sharded=prefill == "sharded"),
            prefill_first=True,
        )
    _agree(cache, input_ids, prefill=prefill, max_new_tokens=max_new_tokens)
    cache.rows = cache.rows or [runner.add() for _ in prompts]
    cache.note_tokens(prompts)
    params = SamplingParams(max_tokens=max_new_tokens)
    kept = [scheduler.keep(row, prompt[: runner.length(row)].tolist()) for row, prompt in zip(cache.rows, prompts)]
    options = {"sampling": params, "keep_logits": keep_logits}
    requests = [Request(prompt=prompt, row=row, **options) for prompt, row in zip(prompts, kept, strict=True)]
    answers = answer_all(scheduler, requests, progress=progress)
    texts = [torch.cat((prompt, torch.tensor(a.tokens[:-1]))) for prompt, a in zip(prompts, answers, strict=True)]
    cache.texts = [(cache.store.book.rows[row], text) for row, text in zip(cache.rows, texts, strict=True)]
    longest = max(answers, key=lambda answer: len(answer.tokens))
    tokens = torch.stack([_column(answers, i, ends) for i in range(len(longest.tokens))], 1).to(input_ids.device)
    times = longest.prefill_s, max(answer.first_token_s for answer in answers), longest.step_s
    return Generation(tokens, cache, prefill, *times, logits=_logits(answers, longest) if keep_logits else [])


def _agree(cache: TreeCache, input_ids: Tensor, **options) -> None:
    """Raise the same ``ValueError`` on all ranks of the cache's group unless they hold the same prompt and options."""
    digest = hashlib.sha256(input_ids.cpu().numpy().tobytes()).hexdigest()[:16] if cache.world > 1 else ""
    values = {"input_ids": input_ids.shape, "digest of input_ids": digest, "cached": cache.get_seq_length(), **options}
    with Ranks.of(cache.cp_group, config=cache.tree_config).call("generate") as call:
        call.agree(**values)


def _logits(answers: list[Answer], longest: Answer) -> list[Tensor]:
    """fp32 [b, vocab] by index, NaN for answers that ended before."""
    ended = torch.full_like(longest.logits[0], torch.nan)
    rows = itertools.zip_longest(*(answer.logits for answer in answers), fillvalue=ended)
    return [torch.stack(row) for row in rows]


def _column(answers: list[Answer], index: int, ends: list[int]) -> Tensor:
    """int64 [b]: the token of every answer at an index; the first end token for those that ended before."""
    return torch.tensor([a.tokens[index] if index < len(a.tokens) else ends[0] for a in answers])


def _check_prompts(model, input_ids, attention_mask, cache, max_new_tokens, vocab_size) -> list[Tensor]:
    """The tokens of each row without padding, int64 [n]."""
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
        prompts.append(prompt_tensor(prompt, vocab_size))
        _check_text(cache, i, prompts[-1])
    return prompts


def _check_text(cache: TreeCache, i: int, prompt: Tensor) -> None:
    """Raise ``ValueError`` if a prompt does not go on from what `generate` has put into row i of the cache."""
    if i >= len(cache.texts) or cache.texts[i][0] is not cache.store.book.rows[cache.rows[i]]:
        return
    text = cache.texts[i][1]
    known = min(cache.length(i), len(text))
    if not torch.equal(prompt[:known], text[:known]):
        first = int((prompt[:known] != text[:known]).nonzero()[0])
        raise ValueError(
            f"the cache holds another text in row {i} than input_ids, they differ from token {first} on: pass the "
            f"whole conversation, or call cache.reset(), or remove tokens with cache.crop(-{cache.length(i) - first})"
        )


def check_length(config, num_tokens: int, max_new_tokens: int) -> None:
    """Raise ``ValueError`` when a prompt and its answer are longer than the model's positions."""
    limit = num_positions(config)
    if limit is not None and num_tokens + max_new_tokens > limit:
        ways = [f"shorten the prompt to {limit - max_new_tokens} tokens"] * (max_new_tokens < limit)
        ways += [f"ask for at most {limit - num_tokens} new ones"] * (num_tokens < limit)
        raise ValueError(
            f"{num_tokens} prompt tokens and max_new_tokens={max_new_tokens} exceed the model's {limit} positions: "
            f"{' or '.join(ways) or 'shorten both'}"
        )
