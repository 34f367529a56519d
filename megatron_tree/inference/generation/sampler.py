"""From logits to a token: what changes scores (biases, penalties, temperature, cuts), and the choice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ...core.errors import TreeError
from .grammars import Matcher
from .sampling import SamplingParams, derived_seed

MIN_LOGPROB = -9999.0  # OpenAI's number for minus infinity, which JSON lacks
DRAWN = 32  # numbers that a sampler draws at once
LEAST_TEMPERATURE = 1e-30  # smaller ones would be subnormal or 0 in fp32


class CountPenalty(LogitsProcessor):
    """Presence and frequency penalties as OpenAI's API defines them, for the tokens of input_ids int64 [1, n] from
    position `first` on: the answer."""

    def __init__(self, presence: float, frequency: float, first: int):
        self.presence, self.frequency, self.first = presence, frequency, first

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self.first :], minlength=scores.shape[-1]).to(scores.dtype)
        return scores - (counts * self.frequency + (counts > 0) * self.presence)[None]


class LogitBias(LogitsProcessor):
    """Adds numbers to the scores of some tokens."""

    def __init__(self, bias: Mapping[int, float]):
        self.tokens, self.values = torch.tensor(list(bias)), torch.tensor(list(bias.values()), dtype=torch.float32)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_add(1, self.tokens.to(scores.device), self.values.to(scores.device)[None])


class MinTokens(LogitsProcessor):
    """No end token until the answer, input_ids int64 [1, n] from position `first` on, has this many tokens."""

    def __init__(self, count: int, end_tokens: Collection[int], first: int):
        self.most, self.tokens = first + count, torch.tensor(sorted(end_tokens), dtype=torch.int64)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= self.most:
            return scores
        return scores.index_fill(1, self.tokens.to(scores.device), -math.inf)


class Temperature(LogitsProcessor):
    """Divides scores by a temperature; the largest becomes 0 before, so that none overflows however low it is."""

    def __init__(self, temperature: float):
        self.temperature = max(temperature, LEAST_TEMPERATURE)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return (scores - scores.amax(-1, keepdim=True)) / self.temperature


def processors(params: SamplingParams, num_prompt_tokens: int, end_tokens: Collection[int]) -> LogitsProcessorList:
    """In the order of Transformers' own generate."""
    chain = LogitsProcessorList()
    if params.logit_bias:
        chain.append(LogitBias(params.logit_bias))
    if params.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.presence_penalty or params.frequency_penalty:
        chain.append(CountPenalty(params.presence_penalty, params.frequency_penalty, num_prompt_tokens))
    if params.min_tokens:
        chain.append(MinTokens(params.min_tokens, end_tokens, num_prompt_tokens))
    if params.temperature == 0:
        return chain
    if params.temperature != 1:
        chain.append(Temperature(params.temperature))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    return chain


class Choice(NamedTuple):
    """One chosen token."""

    token: int
    logprob: float | None = None
    """Natural logarithm of its probability by the model's logits, before penalties and temperature, at least
    MIN_LOGPROB; if asked for."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the most likely tokens, in falling order."""


class Sampler:
    """Chooses the tokens of one answer. They depend on its parameters, prompt and logits, not on other requests.

    It takes one number per token from its own generator on the CPU; that is its only state.

    Args: params: with a seed unless greedy. prompt: int64 [n], for the repetition penalty. sample: the number of this
        answer among several to one prompt. matcher: of `params.json_schema`. end_tokens: those that end the answer.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Tensor | None = None,
        *,
        sample: int = 0,
        matcher: Matcher | None = None,
        end_tokens: Collection[int] = (),
    ):
        assert params.seed is not None or params.temperature == 0
        assert (matcher is None) == (params.json_schema is None)
        self.params, self.matcher = params, matcher
        self._points: list[float] = []  # drawn and not used, the next one last
        if params.temperature > 0:
            self._generator = torch.Generator().manual_seed(derived_seed(params.seed, sample))
        penalizes = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        reads_prompt = prompt is not None and params.repetition_penalty != 1
        self._tokens = prompt.unique() if reads_prompt else torch.empty(0, dtype=torch.int64)
        """What penalties look at: the prompt's tokens, each once, and the answer's."""
        self._processors = processors(params, len(self._tokens), end_tokens)
        reports = matcher is not None or params.logprobs is not None
        self.is_plain = not (params.temperature or self._processors or reports)
        """Whether the token is simply the most likely one, and nothing else is asked for."""
        changes = reports or penalizes or params.logit_bias or params.min_tokens
        self.only_warps = params.temperature > 0 and not changes
        """Whether the token depends on the logits, temperature and cuts alone, apart from the draw."""

    def draw(self) -> float:
        """The number that chooses the next token, from 0 to 1."""
        if not self._points:
            self._points = torch.rand(DRAWN, generator=self._generator, dtype=torch.float64).tolist()[::-1]
        return self._points.pop()

    def replay(self, tokens: Sequence[int]) -> None:
        """Be as after these choices of an equal sampler."""
        for token in tokens:
            if self.params.temperature > 0:
                self.draw()
            self._note(token)

    def _note(self, token: int) -> None:
        if self.matcher is not None:
            self.matcher.take(token)
        if self._processors:
            self._tokens = torch.cat((self._tokens, torch.tensor([token])))

    def choose(self, logits: Tensor) -> Choice:
        """The next token after logits fp32 [vocab], which hold a finite largest value.

        It waits for the matcher's mask. Raises: `TreeError` where penalties or the temperature make them overflow, or
        nothing that may follow keeps to the schema."""
        scores = logits.float()
        if self.matcher is not None:
            scores = scores.masked_fill(~self.matcher.mask.result().to(scores.device), -math.inf)
        scores = self._processors(self._tokens.to(logits.device)[None], scores[None])
        if not math.isfinite(largest := scores.max().item()):
            raise _not_finite(largest)
        token = int(scores.argmax()) if self.params.temperature == 0 else _draw(scores, [self.draw()])[0]
        self._note(token)
        if self.params.logprobs is None:
            return Choice(token)
        return with_logprobs(logits[None], [token], self.params.logprobs)[0]

    def warp(self, logits: Tensor) -> Tensor:
        """Logits fp32 [b, vocab] after temperature and cuts, where these are all; see `only_warps`."""
        return self._processors(self._tokens[None], logits)


def with_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[Choice]:
    """Tokens with their log-probabilities, and those of the num_top most likely ones, by logits [n, vocab]."""
    scores = logits.double() if logits.device.type == "cpu" else logits.float()
    logprobs = torch.log_softmax(scores, -1).clamp(min=MIN_LOGPROB)
    top = torch.topk(logprobs, min(num_top, logprobs.shape[-1]))
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0]
    columns = tokens, chosen.tolist(), top.indices.tolist(), top.values.tolist()
    return [
        Choice(token, logprob, tuple(zip(indices, values)))
        for token, logprob, indices, values in zip(*columns, strict=True)
    ]


def choose_tokens(samplers: Sequence[Sampler], logits: Tensor) -> tuple[list[int], list[Choice | TreeError | None]]:
    """(the next token of every sequence, what else there is to report of it) by logits fp32 [b, vocab].

    One sampler each; those with equal options choose at once. A sequence without a finite largest logit (NaN in the
    model) has an error, and no token; others are not affected.
    """
    top, tokens = logits.max(-1)
    tokens, reports, alike = tokens.tolist(), [None] * len(samplers), defaultdict(list)
    if not top.isfinite().all():
        reports = [None if math.isfinite(x) else _not_finite(x) for x in top.tolist()]
    for i in [i for i, sampler in enumerate(samplers) if not sampler.is_plain and reports[i] is None]:
        sampler, params = samplers[i], samplers[i].params
        if sampler.only_warps:
            alike[params.temperature, params.top_k, params.top_p, params.min_p].append(i)
            continue
        try:
            reports[i] = sampler.choose(logits[i])
            tokens[i] = reports[i].token
        except TreeError as error:
            reports[i] = error
    for indices in alike.values():
        scores = samplers[indices[0]].warp(logits[indices].float())
        for i, token in zip(indices, _draw(scores, [samplers[i].draw() for i in indices])):
            tokens[i] = token
    return tokens, reports


def _draw(scores: Tensor, points: list[float]) -> list[int]:
    """The tokens at these points, from 0 to 1, of the distributions with these scores, fp32 [b, vocab]."""
    points = torch.tensor(points, dtype=torch.float64)
    weights = torch.softmax(scores.cpu().double(), -1).cumsum(-1)
    total = weights[:, -1:].contiguous()
    places = torch.searchsorted(weights, points[:, None] * total, right=True)
    return places.clamp(max=torch.searchsorted(weights, total))[:, 0].tolist()


def _not_finite(largest: float) -> TreeError:
    return TreeError(
        f"the largest logit is {largest}: the model overflows (bfloat16 or float32 has the range that float16 lacks), "
        "or its weights are broken"
    )
