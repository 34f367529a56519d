"""Whether a request can be served once there is room."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache.runner import RowRunner
from .grammars import Grammars
from .images import PromptImages
from .requests import Request


def check_request(
    request: Request, runner: RowRunner, capacity: int | None, max_rows: int, tokenizer, grammars: Grammars
) -> Tensor:
    """See `Scheduler.check`. capacity: tokens of the whole cache; None: it grows."""
    params = request.sampling
    prompt = prompt_tensor(request.prompt, runner.vocab_size)
    if not isinstance(request.n, int) or not 1 <= request.n <= max_rows:
        raise ValueError(f"n={request.n!r} must be from 1 to max_rows={max_rows}: ask for fewer answers")
    if request.row is not None and request.n > 1:
        raise ValueError(f"n={request.n}: a request with a row of its own has one answer")
    if request.begun:
        _check_begun(request)
    for name in ("stop_token_ids", "logit_bias"):
        value = getattr(params, name)
        if any(token >= runner.vocab_size for token in value):
            raise ValueError(f"{name}={value}: the model has tokens 0 to {runner.vocab_size - 1}")
    if params.stop and tokenizer is None:
        raise ValueError(f"stop={params.stop!r} needs a tokenizer: give one to the scheduler, or use stop_token_ids")
    if params.json_schema is not None:
        if params.ignore_eos:
            raise ValueError("ignore_eos: an answer with a JSON schema ends with it: leave ignore_eos out")
        if params.min_tokens:
            raise ValueError("min_tokens: an answer with a JSON schema ends with it: leave min_tokens out")
        grammars.require(params.json_schema)
    if params.min_tokens > params.max_tokens:
        raise ValueError(f"min_tokens={params.min_tokens} must be at most max_tokens={params.max_tokens}")
    if prompt_images(request, prompt, runner) is not None and params.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs: a prompt with images has none: leave it out")
    num_prompt = len(prompt)
    length = num_prompt + params.max_tokens
    asked = f"{num_prompt:,} prompt tokens and max_tokens={params.max_tokens:,}"
    if runner.max_positions is not None and length > runner.max_positions:
        raise ValueError(
            f"{asked} exceed the model's {runner.max_positions:,} positions: shorten the prompt, or ask for at "
            f"most {max(runner.max_positions - num_prompt, 0):,} new tokens"
        )
    page = runner.page_size
    pages = request.n * -(-length // page) - (request.n - 1) * (num_prompt // page)
    if capacity is not None and pages * page > capacity:
        each = f" for each of {request.n} answers" if request.n > 1 else ""
        raise ValueError(
            f"{asked}{each} exceed the cache of {capacity:,} tokens: shorten the prompt, ask for less, or "
            "give the cache more memory"
        )
    return prompt


def _check_begun(request: Request) -> None:
    if len(request.begun) != request.n or request.row is not None:
        raise ValueError(f"begun: {len(request.begun)} answers of n={request.n}, which have no row of their own")
    going = [tokens for tokens in request.begun if tokens is not None]
    if not going or not all(0 < len(tokens) < request.sampling.max_tokens for tokens in going):
        raise ValueError("begun: an answer that goes on has one token or more, and fewer than max_tokens")
    if request.sampling.temperature > 0 and request.sampling.seed is None:
        raise ValueError("begun: sampled answers go on with their seed: pass the one that they were begun with")


def prompt_images(request: Request, prompt: Tensor, runner: RowRunner) -> PromptImages | None:
    """The images of a request. Raises: ``ValueError`` for a model that takes none, or a prompt without their tokens."""
    if request.images is None:
        return None
    tokens = runner.image_tokens
    if not tokens:
        raise ValueError("images: this model takes none: leave them out, or start one of images and text")
    if not torch.isin(prompt, torch.tensor(tokens)).any():
        raise ValueError(f"images: the prompt has none of the tokens {list(tokens)} that stand for them")
    return PromptImages(prompt, request.images, tokens, joined=runner.joins_images)


def prompt_tensor(prompt: Sequence[int] | Tensor, vocab_size: int) -> Tensor:
    """int64 [n], on the CPU. Raises: ``ValueError`` for an empty one, other shapes, tokens that the model lacks."""
    try:
        tokens = torch.as_tensor(prompt).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"prompt must be a list of token numbers: {error}") from None
    if tokens.dim() != 1 or len(tokens) == 0 or tokens.dtype.is_floating_point or tokens.dtype == torch.bool:
        given = f"{list(tokens.shape)} of {tokens.dtype}"
        raise ValueError(f"prompt must be a list of one token number or more, got {given}")
    tokens = tokens.to(torch.int64)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"prompt holds the token {low if low < 0 else high}, the model has 0 to {vocab_size - 1}: is the tokenizer "
            "the model's own?"
        )
    return tokens
