"""The options of a request: how its tokens are chosen, and where its answers end."""

from __future__ import annotations

import hashlib
import re
import reprlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

MAX_BIAS = 100.0
MAX_LOGPROBS = 100
MAX_PENALTY = 100.0  # far beyond useful values; much larger ones make fp32 logits overflow
MAX_BIASES = 4096
MAX_STOP_TOKENS = 4096
MAX_FIELDS = 100
SEEDS = 2**63
FEW = 4  # faults of one field that are reported


class Strict(BaseModel):
    """Fields that come from outside: no unknown ones, and no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _not_too_many(cls, data: Any) -> Any:
        """So many unknown ones would make as many errors."""
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"has {len(data):,} fields, more than {MAX_FIELDS}")
        return data


def first_fault(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """(field, what is wrong with it) of the first bad field; alternatives of a union are reported together, the first
    few of them.

    errors: those of a pydantic `ValidationError`, at least one.
    """
    name = errors[0]["loc"][0]
    own = [error for error in errors if error["loc"][:1] == (name,)]
    more = f", and {len(own) - FEW} more" if len(own) > FEW else ""
    return str(name), " or ".join(dict.fromkeys(map(_fault, own[:FEW]))) + more


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
    if len(bias) > MAX_BIASES:
        raise ValueError(f"must have at most {MAX_BIASES:,} tokens, not {len(bias):,}")
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
StopTexts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True), BeforeValidator(_listed)]
StopTokens = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKENS), BeforeValidator(_listed)]


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
    logit_bias: Annotated[dict[TokenId, Bias], BeforeValidator(_numbered)] = {}
    """Added to the logits of these tokens, from -100 to 100 each."""
    seed: Annotated[Annotated[int, Field(ge=0, lt=SEEDS)] | None, BeforeValidator(_seed)] = None
    """64 bits: the same request gives the same tokens. None or -1: a random one."""
    stop: StopTexts = []
    """Texts that end the answer, or one of them; they are not part of it."""
    stop_token_ids: StopTokens = []
    """Tokens that end the answer, in addition to the model's."""
    ignore_eos: bool = False
    """Ignore the model's end tokens; `stop` and `stop_token_ids` still end the answer."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """New tokens at least: no end token is chosen before, and no text of `stop` within their text ends the answer."""
    include_stop_str_in_output: bool = False
    """The text or token that ends the answer is part of it."""
    skip_special_tokens: bool = True
    """Special tokens, end tokens among them, add nothing to the text."""


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
    json_schema: str | None = None
    """A JSON schema, as JSON: only tokens that keep to it are chosen, and the answer ends with it; see `Grammars`."""

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
        """These; where tokens are drawn and there is no seed, with a random one, on this rank alone."""
        if self.seed is not None or self.temperature == 0:
            return self
        return self.with_options({"seed": secrets.randbits(63)})


def derived_seed(seed: int, index: int) -> int:
    """The seed of the index-th of several independent draws; 0 <= result < 2**63."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "little") % SEEDS
