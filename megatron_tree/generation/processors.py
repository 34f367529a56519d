"""What changes the scores of the next token before one is chosen: biases, penalties, temperature, cuts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

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

from .sampling import SamplingParams

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
