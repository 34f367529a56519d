"""From logits to a token: the options of a request, and the sampler."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..errors import TreeError

MIN_TEMPERATURE = 1e-3  # below it fp32 logits divided by it may overflow
MAX_LOGPROBS = 100
MAX_PENALTY = 100.0  # far beyond useful values; much larger ones make fp32 logits overflow
SEEDS = 2**63


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of an answer are chosen and where it ends. The default is greedy.

    Lists become tuples, and one stop string a tuple of one. Raises: ``ValueError`` that names the option.
    """

    max_tokens: int = 256
    """New tokens at most."""
    temperature: float = 0.0
    """0: always the most likely token (greedy); otherwise logits are divided by it."""
    top_k: int = 0
    """Sample from this many most likely tokens (more if logits are equal at the limit); 0: from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities add up to this; 1: from all."""
    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the highest probability; 0: from all."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the answer are divided by it (multiplied where negative), from 0.01 to 100; 1:
    none."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that occurs in the answer, from -100 to 100."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time it occurs in the answer, from -100 to 100."""
    seed: int | None = None
    """0 <= seed < 2**63: the same request gives the same tokens. None: a random one."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, in addition to the model's."""
    ignore_eos: bool = False
    """Ignore the model's end tokens; `stop` and `stop_token_ids` still end the answer."""
    logprobs: int | None = None
    """Report the log-probabilities, before penalties and temperature, of the chosen token and of this many
    most likely tokens."""

    def __post_init__(self):
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, list) or (name == "stop" and isinstance(value, str)):
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        _check_int("max_tokens", self.max_tokens, 1)
        _check_int("top_k", self.top_k, 0)
        _check_number("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 1 / MAX_PENALTY, MAX_PENALTY)
        _check_number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_number("temperature", self.temperature, 0.0, math.inf)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature!r} is too small: use 0 (greedy), or {MIN_TEMPERATURE} or more"
            )
        if self.seed is not None:
            _check_int("seed", self.seed, 0, SEEDS - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r} must be true or false")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop={self.stop!r} must be texts that are not empty, or one of them")
        if not isinstance(self.stop_token_ids, tuple):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r} must be a list of token numbers")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The options' names."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def with_options(self, options: Mapping[str, Any]) -> SamplingParams:
        """These, with some options changed. Raises: ``ValueError`` for an unknown option or a bad value."""
        unknown = sorted(set(options) - set(self.names()))
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no sampling option: choose from {', '.join(self.names())}")
        return dataclasses.replace(self, **options)

    def with_seed(self) -> SamplingParams:
        """These; if there is no seed, one is drawn, on this rank alone."""
        return self if self.seed is not None else dataclasses.replace(self, seed=secrets.randbits(63))


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    if not fits:
        limits = f"{low} or more" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}={value!r} must be a whole number, {limits}")


def _check_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    finite = number and abs(value) <= sys.float_info.max  # whole numbers may be larger
    if not finite or not low <= value <= high or (above and value == low):
        border = "more than" if above else "at least"
        limits = [f"{border} {low:g}"] * math.isfinite(low) + [f"at most {high:g}"] * math.isfinite(high)
        raise ValueError(f"{name}={value!r} must be a finite number{', ' if limits else ''}{' and '.join(limits)}")


def derived_seed(seed: int, index: int) -> int:
    """The seed of the index-th of several independent draws; 0 <= result < 2**63."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "little") % SEEDS


class Choice(NamedTuple):
    """One chosen token."""

    token: int
    logprob: float | None = None
    """Natural logarithm of its probability by the model's logits, before penalties and temperature; if asked for."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the most likely tokens, in falling order."""


class CountPenalty(LogitsProcessor):
    """Presence and frequency penalties as OpenAI's API defines them, for the tokens of input_ids int64 [1, n] from
    position `first` on: the answer."""

    def __init__(self, presence: float, frequency: float, first: int):
        self.presence, self.frequency, self.first = presence, frequency, first

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self.first :], minlength=scores.shape[-1]).to(scores.dtype)
        return scores - (counts * self.frequency + (counts > 0) * self.presence)[None]


class Sampler:
    """Chooses the tokens of one answer. They depend on its parameters, prompt and logits, not on other requests.

    It draws one number per token from its own generator on the CPU; that is its only state.

    Args: params: with a seed unless greedy. prompt: int64 [n], for the repetition penalty. sample: the number of this
        answer among several to one prompt.
    """

    def __init__(self, params: SamplingParams, prompt: Tensor | None = None, *, sample: int = 0):
        assert params.seed is not None or params.temperature == 0
        self.params = params
        self._generator = torch.Generator()
        if params.temperature > 0:
            self._generator.manual_seed(derived_seed(params.seed, sample))
        empty = torch.empty(0, dtype=torch.int64)
        self._tokens = empty if prompt is None or params.repetition_penalty == 1 else prompt.unique()
        """What penalties look at: the prompt's tokens, each once, and the answer's."""
        self._processors = _processors(params, len(self._tokens))

    @property
    def is_plain(self) -> bool:
        """Whether the token is simply the most likely one, and nothing else is asked for."""
        return self.params.temperature == 0 and self.params.logprobs is None and not self._processors

    def choose(self, logits: Tensor) -> Choice:
        """The next token after logits fp32 [vocab]. Raises: `TreeError` when they hold no finite largest value."""
        (choice,) = choose_tokens([self], logits[None])
        if isinstance(choice, TreeError):
            raise choice
        return choice

    def choose_finite(self, logits: Tensor) -> Choice:
        """As `choose`, for logits that are known to hold a finite largest value. Raises: `TreeError` where penalties or
        the temperature make them overflow."""
        scores = self._processors(self._tokens.to(logits.device)[None], logits.float()[None])[0]
        if not math.isfinite(value := scores.max().item()):
            raise _not_finite(value)
        return self.took(int(scores.argmax()) if self.params.temperature == 0 else self._draw(scores), logits)

    def _draw(self, scores: Tensor) -> int:
        kept = (scores > -math.inf).nonzero()[:, 0]
        weights = torch.softmax(scores[kept].cpu().double(), 0).cumsum(0)
        point = torch.rand((), generator=self._generator, dtype=torch.float64) * weights[-1]
        place = torch.searchsorted(weights, point, right=True).clamp(max=int(torch.searchsorted(weights, weights[-1])))
        return int(kept[place])

    def took(self, token: int, logits: Tensor) -> Choice:
        """Record a token of this answer, chosen from logits [vocab]; returns it with its log-probabilities."""
        if self._processors:
            self._tokens = torch.cat((self._tokens, torch.tensor([token])))
        if self.params.logprobs is None:
            return Choice(token)
        logprobs = torch.log_softmax(logits.double() if logits.device.type == "cpu" else logits.float(), -1)
        top = torch.topk(logprobs, min(self.params.logprobs, logprobs.shape[-1]))
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist()))
        return Choice(token, logprobs[token].item(), pairs)


def _processors(params: SamplingParams, num_prompt_tokens: int) -> LogitsProcessorList:
    """In the order of Transformers' own generate."""
    found = LogitsProcessorList()
    if params.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.presence_penalty or params.frequency_penalty:
        found.append(CountPenalty(params.presence_penalty, params.frequency_penalty, num_prompt_tokens))
    if params.temperature == 0:
        return found
    if params.temperature != 1:
        found.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        found.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        found.append(MinPLogitsWarper(params.min_p))
    return found


def choose_tokens(samplers: Iterable[Sampler], logits: Tensor) -> list[Choice | TreeError]:
    """The next token of every row of logits fp32 [b, vocab], one sampler each; plainly greedy rows in one operation.

    A row without a finite largest value (NaN in the model) gets an error in its place; other rows are not affected.
    """
    top, tokens = logits.max(-1)
    chosen = []
    for row, (sampler, value, token) in enumerate(zip(samplers, top.tolist(), tokens.tolist(), strict=True)):
        if not math.isfinite(value):
            chosen.append(_not_finite(value))
            continue
        try:
            chosen.append(Choice(token) if sampler.is_plain else sampler.choose_finite(logits[row]))
        except TreeError as error:
            chosen.append(error)
    return chosen


def _not_finite(value: float) -> TreeError:
    return TreeError(
        f"the largest logit is {value}: the model overflows (bfloat16 or float32 has the range that float16 lacks), or "
        "its weights are broken"
    )
