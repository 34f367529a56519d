"""From logits to a token: the options of a request, and the sampler."""

from __future__ import annotations

import hashlib
import math
import re
import reprlib
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import Tensor

from ..errors import TreeError
from .grammars import Matcher
from .processors import processors

MAX_BIAS = 100.0
MAX_LOGPROBS = 100
MAX_PENALTY = 100.0  # far beyond useful values; much larger ones make fp32 logits overflow
MIN_LOGPROB = -9999.0  # OpenAI's number for minus infinity, which JSON lacks
SEEDS = 2**63


class Strict(BaseModel):
    """Fields that come from outside: no unknown ones, and no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def first_fault(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """(field, what is wrong with it) of the first bad field; alternatives of a union are reported together.

    errors: those of a pydantic `ValidationError`, at least one.
    """
    name = errors[0]["loc"][0]
    return str(name), " or ".join(dict.fromkeys(_fault(error) for error in errors if error["loc"][0] == name))


def _fault(error: Mapping[str, Any]) -> str:
    """What is wrong, with the place inside the field if it is not the field itself."""
    inner = [part for part in error["loc"][1:] if part not in ("int", "str")]  # those name types of a union
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" * part.isidentifier() for part in inner)
    message = "is missing" if error["type"] == "missing" else error["msg"].removeprefix("Value error, ")
    message = re.sub(r"^\w+ should ", "must ", message)
    return f"{place} {message}" if place else message


def _seed(value: Any) -> Any:
    """-1 is "draw one", as in vLLM and llama.cpp; OpenAI takes any 64-bit number."""
    if type(value) is not int or not -SEEDS <= value < 0:
        return value
    return None if value == -1 else value % SEEDS


def _all_tokens(top_k: Any) -> Any:
    return 0 if type(top_k) is int and top_k == -1 else top_k


def _numbered(bias: Any) -> Any:
    """JSON has no numbers as keys."""
    if not isinstance(bias, dict):
        return bias
    return {
        int(key) if isinstance(key, str) and key.isdecimal() and key.isascii() else key: x for key, x in bias.items()
    }


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else list(value) if isinstance(value, tuple) else value


Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Fraction = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(ge=0)]
StopTexts = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_listed)]


class Sampling(Strict):
    """How tokens are chosen and where an answer ends, apart from its length."""

    temperature: Temperature = 0.0
    """0: always the most likely token (greedy); otherwise logits are divided by it."""
    top_k: Annotated[int, Field(ge=0), BeforeValidator(_all_tokens)] = 0
    """Sample from this many most likely tokens (more if logits are equal at the limit); 0 or -1: from all."""
    top_p: Annotated[Fraction, Field(gt=0)] = 1.0
    """Sample from the most likely tokens whose probabilities add up to this; 1: from all."""
    min_p: Fraction = 0.0
    """Sample from tokens with at least this fraction of the highest probability; 0: from all."""
    repetition_penalty: Annotated[float, Field(ge=1 / MAX_PENALTY, le=MAX_PENALTY)] = 1.0
    """Logits of tokens in the prompt or the answer are divided by it (multiplied where negative), from 0.01 to 100; 1:
    none."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of every token that occurs in the answer, from -100 to 100."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit for every time it occurs in the answer, from -100 to 100."""
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]], BeforeValidator(_numbered)
    ] = {}
    """Added to the logits of these tokens, from -100 to 100 each."""
    seed: Annotated[Annotated[int, Field(ge=0, lt=SEEDS)] | None, BeforeValidator(_seed)] = None
    """64 bits: the same request gives the same tokens. None or -1: a random one."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """No end token, token of `stop_token_ids` or text of `stop` ends the answer before it has this many tokens."""
    stop: StopTexts = []
    """Texts that end the answer, or one of them; they are not part of it."""
    stop_token_ids: Annotated[list[TokenId], BeforeValidator(_listed)] = []
    """Tokens that end the answer, in addition to the model's."""
    ignore_eos: bool = False
    """Ignore the model's end tokens; `stop` and `stop_token_ids` still end the answer."""


class Grammar(Strict):
    """What an answer must look like; see `Grammars`."""

    kind: Literal["json", "regex", "lark"]
    text: str
    """A JSON schema as JSON, a regular expression, or a grammar in llguidance's form of Lark."""


class SamplingParams(Sampling):
    """How the tokens of an answer are chosen and where it ends. The default is greedy.

    Raises: ``ValueError`` that begins with the option and its value.
    """

    max_tokens: Annotated[int, Field(ge=1)] = 256
    """New tokens at most."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Report the log-probabilities, before penalties and temperature, of the chosen token and of this many
    most likely tokens."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """The same of every token of the prompt but the first; the prompt is run on every rank then, in small chunks."""
    grammar: Grammar | None = None
    """The answer's form: only tokens that keep to it are chosen, and it ends with it."""

    def __init__(self, **options):
        try:
            super().__init__(**options)
        except ValidationError as error:
            errors = error.errors()
            name, fault = first_fault(errors)
            if errors[0]["type"] == "extra_forbidden":
                fields = ", ".join(type(self).model_fields)
                raise ValueError(f"{name!r} is not a sampling option: choose from {fields}") from None
            raise ValueError(f"{name}={reprlib.repr(options[name])}{':' * (fault[0] in '[.')} {fault}") from None

    def with_options(self, options: Mapping[str, Any]) -> SamplingParams:
        """These, with some options changed. Raises: ``ValueError`` for an unknown option or a bad value."""
        return type(self)(**self.model_dump() | dict(options))

    def with_seed(self) -> SamplingParams:
        """These; if there is no seed, one is drawn, on this rank alone."""
        return self if self.seed is not None else self.with_options({"seed": secrets.randbits(63)})


def derived_seed(seed: int, index: int) -> int:
    """The seed of the index-th of several independent draws; 0 <= result < 2**63."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "little") % SEEDS


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

    It draws one number per token from its own generator on the CPU; that is its only state.

    Args: params: with a seed unless greedy. prompt: int64 [n], for the repetition penalty. sample: the number of this
        answer among several to one prompt. end_tokens: the model's, for `min_tokens`. matcher: of `params.grammar`.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Tensor | None = None,
        *,
        sample: int = 0,
        end_tokens: Iterable[int] = (),
        matcher: Matcher | None = None,
    ):
        assert params.seed is not None or params.temperature == 0
        assert (matcher is None) == (params.grammar is None)
        self.params, self._matcher = params, matcher
        self._generator = torch.Generator()
        if params.temperature > 0:
            self._generator.manual_seed(derived_seed(params.seed, sample))
        empty = torch.empty(0, dtype=torch.int64)
        self._tokens = empty if prompt is None or params.repetition_penalty == 1 else prompt.unique()
        """What penalties look at: the prompt's tokens, each once, and the answer's."""
        self._processors = processors(params, len(self._tokens), {*end_tokens, *params.stop_token_ids})
        special = bool(matcher) or params.logprobs is not None
        self.is_plain = not (params.temperature or self._processors or special)
        """Whether the token is simply the most likely one, and nothing else is asked for."""
        counts = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        special = special or counts or params.logit_bias or params.min_tokens
        self.warps_only = params.temperature > 0 and not special
        """Whether the token depends on the logits, temperature and cuts alone, apart from the draw."""

    def draw(self) -> Tensor:
        """The number that chooses the next token, fp64 from 0 to 1."""
        return torch.rand((), generator=self._generator, dtype=torch.float64)

    def choose(self, logits: Tensor) -> Choice:
        """The next token after logits fp32 [vocab]. Raises: `TreeError` when they hold no finite largest value."""
        (choice,) = choose_tokens([self], logits[None])
        if isinstance(choice, TreeError):
            raise choice
        return choice

    def choose_finite(self, logits: Tensor) -> Choice:
        """As `choose`, for logits that are known to hold a finite largest value. Raises: `TreeError` where penalties or
        the temperature make them overflow."""
        scores = logits.float()
        if self._matcher is not None:
            scores = scores.masked_fill(~self._matcher.allowed().to(scores.device), -math.inf)
        scores = self._processors(self._tokens.to(logits.device)[None], scores[None])[0]
        if not math.isfinite(value := scores.max().item()):
            raise _not_finite(value)
        return self.took(
            int(scores.argmax()) if self.params.temperature == 0 else _drawn(scores[None], self.draw()[None])[0], logits
        )

    def warped(self, logits: Tensor) -> Tensor:
        """Logits fp32 [b, vocab] after temperature and cuts, where these are all; see `warps_only`."""
        return self._processors(self._tokens[None], logits)

    def took(self, token: int, logits: Tensor) -> Choice:
        """Record a token of this answer, chosen from logits [vocab]; returns it with its log-probabilities."""
        if self._matcher is not None:
            self._matcher.take(token)
        if self._processors:
            self._tokens = torch.cat((self._tokens, torch.tensor([token])))
        if self.params.logprobs is None:
            return Choice(token)
        return with_logprobs(logits[None], [token], self.params.logprobs)[0]


def with_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[Choice]:
    """Tokens with their log-probabilities, and those of the num_top most likely ones, by logits [n, vocab]."""
    scores = logits.double() if logits.device.type == "cpu" else logits.float()
    logprobs = torch.log_softmax(scores, -1).clamp(min=MIN_LOGPROB)
    top = torch.topk(logprobs, min(num_top, logprobs.shape[-1]))
    own = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    return [
        Choice(token, logprob, tuple(zip(indices, values)))
        for token, logprob, indices, values in zip(tokens, own, top.indices.tolist(), top.values.tolist(), strict=True)
    ]


def choose_tokens(samplers: Iterable[Sampler], logits: Tensor) -> list[Choice | TreeError]:
    """The next token of every row of logits fp32 [b, vocab], one sampler each; those with equal options at once.

    A row without a finite largest value (NaN in the model) gets an error in its place; other rows are not affected.
    """
    samplers = list(samplers)
    top, tokens = logits.max(-1)
    chosen: list[Choice | TreeError | None] = [None] * len(samplers)
    alike = defaultdict(list)
    for row, (sampler, value, token) in enumerate(zip(samplers, top.tolist(), tokens.tolist(), strict=True)):
        if not math.isfinite(value):
            chosen[row] = _not_finite(value)
        elif sampler.is_plain:
            chosen[row] = Choice(token)
        elif sampler.warps_only:
            params = sampler.params
            alike[params.temperature, params.top_k, params.top_p, params.min_p].append(row)
        else:
            try:
                chosen[row] = sampler.choose_finite(logits[row])
            except TreeError as error:
                chosen[row] = error
    for rows in alike.values():
        own = [samplers[row] for row in rows]
        scores = own[0].warped(logits[rows].float())
        points = torch.stack([sampler.draw() for sampler in own])
        for row, token in zip(rows, _drawn(scores, points)):
            chosen[row] = Choice(token)
    return chosen


def _drawn(scores: Tensor, points: Tensor) -> list[int]:
    """The tokens at points fp64 [b], from 0 to 1, of the distributions with these scores, fp32 [b, vocab]."""
    weights = torch.softmax(scores.cpu().double(), -1).cumsum(-1)
    total = weights[:, -1:].contiguous()
    places = torch.searchsorted(weights, points[:, None] * total, right=True)
    return places.clamp(max=torch.searchsorted(weights, total))[:, 0].tolist()


def _not_finite(value: float) -> TreeError:
    return TreeError(
        f"the largest logit is {value}: the model overflows (bfloat16 or float32 has the range that float16 lacks), or "
        "its weights are broken"
    )
