"""Requests and events of the scheduler, whether a request can be served, and its state while it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.cache.runner import RowRunner
from .grammars import Grammar, Grammars
from .images import PromptImages
from .sampler import Choice, Sampler
from .sampling import SamplingParams
from .speculation import DraftState
from .stopping import Stopper


@dataclass(kw_only=True)
class OwnRow:
    """A row of the cache that stays when a request has ended, for the next one; see `Scheduler.keep`.

    The next request may share a beginning with what the row holds: that is not run again.
    """

    handle: int
    tokens: list[int] = field(default_factory=list)
    """What the row holds, by `ServedRequest.named`; up to date on the leader only."""

    def shared(self, prompt: Tensor) -> int:
        """How many tokens of a prompt, likewise, the row holds already; at least the prompt's last one is to be run."""
        most = min(len(self.tokens), len(prompt) - 1)
        different = (prompt[:most] != torch.tensor(self.tokens[:most], dtype=torch.int64)).nonzero()
        return int(different[0]) if len(different) else most


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to answer it; `Scheduler.check` and `submit` validate it."""

    prompt: Sequence[int] | Tensor
    """Tokens, one or more."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    """Answers to the prompt, sampled independently."""
    row: OwnRow | None = None
    """Use this row of the cache and leave it there; one request at a time, with n=1."""
    begun: Sequence[Sequence[int] | None] = ()
    """The tokens of each answer, one or more, if another scheduler began them: they go on from there, and only what
    follows is sent. None: the answer has ended."""
    continues: bool = False
    """Whether the answers' texts continue the prompt's, instead of beginning anew as in a chat: a tokenizer may leave
    out the space before a first word."""
    salt: str = ""
    """Only requests with the same one use what the cache holds of this one's prompt and answers."""
    keep_logits: bool = False
    """Whether events have the logits of their tokens."""
    images: Mapping[str, Tensor] | None = None
    """What the model's processor returns beside the tokens of a prompt with images: pixel_values and so on."""


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


class Usage(NamedTuple):
    """Tokens of one answer, and of its prompt."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt's, those that the cache held already."""
    waited_s: float = 0.0
    """Until it had a row."""


class Event(NamedTuple):
    """A new token of one answer of a request, its end, or both."""

    request: int
    answer: int = 0
    """0 <= answer < n."""
    token: int | None = None
    """None: it ended without another token."""
    text: str = ""
    """What this adds to the answer's text; an incomplete character adds nothing yet."""
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: tuple[Choice, ...] | None = None
    """With an answer's first event, if asked for: of the prompt's tokens but the first."""
    finish_reason: str | None = None
    """"stop", "length", "cancelled", or "error"; None: it continues."""
    stop_reason: int | str | None = None
    """With "stop": the token or the text that ended it."""
    error: str | None = None
    """With "error": what failed."""
    usage: Usage | None = None
    """With every finish_reason."""
    last: bool = False
    """Whether all answers of the request have ended."""
    logits: Tensor | None = None
    """fp32 [vocab] that the token was chosen from, if asked for."""


EventSink = Callable[[Event], None]


@dataclass(kw_only=True, eq=False)
class ActiveAnswer:
    """One answer under way."""

    request: ServedRequest
    index: int
    sampler: Sampler
    stopper: Stopper
    handle: int | None = None
    """Of its row. While a prompt is run the first answer has it."""
    length: int = 0
    """Tokens in its row."""
    tokens: list[int] = field(default_factory=list)
    token: int | None = None
    """The last of them, while no turn holds it."""
    finished: bool = False
    draft_state: DraftState | None = None
    """With speculation, once it makes steps."""
    drafted: list[int] = field(default_factory=list)
    """Tokens that were appended to its row in the step under way, since they may be the next ones."""
    num_right: int = 0
    """How many of them are; `length` counts these."""
    filled: bool = False
    """Whether its row holds `num_known` tokens."""
    embedded: bool = False
    """Whether a turn has embedded the prompt's images for its row."""
    logits: Tensor | None = None
    """fp32 [vocab], for its next token, while the mask for that is computed; its row then holds all its tokens."""

    @property
    def is_right(self) -> bool:
        """Whether its last token is the one that was drafted."""
        return not self.finished and self.num_right < len(self.drafted) and self.token == self.drafted[self.num_right]

    @property
    def num_known(self) -> int:
        """Tokens that its row is to hold before the next one can be chosen from its last token."""
        return self.request.num_prompt + len(self.tokens) - (self.token is not None)

    def missing_tokens(self) -> list[int]:
        """Those of them that its row lacks."""
        prompt = self.request.prompt[self.length :].tolist()
        num_prompt = self.request.num_prompt
        return prompt + self.tokens[max(self.length - num_prompt, 0) : self.num_known - num_prompt]

    def row_tokens(self) -> list[int]:
        """What its row holds, by `ServedRequest.named`."""
        return self.request.named((self.request.prompt.tolist() + self.tokens)[: self.length])

    @property
    def lacks_images(self) -> bool:
        """Whether some of the prompt's images are not in its row."""
        return self.request.images is not None and self.length < self.request.images.end

    def chunk(self, size: int) -> list[int]:
        """The tokens that its row is to have next, about so many."""
        images = self.request.images
        return self.missing_tokens()[: size if images is None else images.chunk(self.length, size)]

    def length_after(self, tokens: int) -> int:
        """What its row holds after this many more tokens; a kept row of its own is never taken back."""
        most = self.request.num_prompt + self.request.params.max_tokens
        return most if self.request.row is not None else min(max(self.length, self.num_known) + tokens, most)

    def take_row(self, handle: int, length: int = 0) -> None:
        """Its row is this one, which holds so many of its tokens."""
        self.handle, self.length, self.embedded = handle, length, False
        self.filled = length >= self.num_known
        if not self.request.begun:
            self.request.num_cached = length

    def resume(self, tokens: Sequence[int]) -> None:
        """It has these tokens; their text was sent."""
        self.tokens, self.token = list(tokens), tokens[-1]
        self.sampler.replay(tokens)
        for token in tokens:
            self.stopper.add(token)

    @property
    def lacks_mask(self) -> bool:
        """Whether the mask for its next token is still being computed. Answers to a prompt begin together."""
        if self.sampler.matcher is None:
            return False
        answers = [self] if self.tokens else self.request.unfinished
        return any(not answer.sampler.matcher.mask.done() for answer in answers)

    def lose_row(self) -> None:
        """Its token that no turn holds is still to come first."""
        self.handle, self.length, self.filled = None, 0, False
        if not self.request.begun:
            self.request.scored = []

    def fill(self, chunk: Sequence[int]) -> None:
        """These tokens were appended to its row."""
        if self.request.row is not None:
            self.request.row.tokens += self.request.named(chunk, self.length)
        self.length += len(chunk)
        self.filled = self.length >= self.num_known

    def finish(self) -> None:
        self.finished, self.logits = True, None
        self.request.unfinished = [answer for answer in self.request.answers if not answer.finished]
        if self.request.grammar is not None and not self.request.unfinished:
            self.request.grammar.close()

    def send(self, token: int | None, text: str, report: Choice | None = None, **end) -> None:
        """Send an event. end: its last fields; with a finish_reason the answer's end is recorded."""
        request = self.request
        if "finish_reason" in end:
            self.finish()
            tokens = request.num_prompt, self.stopper.num_tokens, request.num_cached
            end |= {"usage": Usage(*tokens, request.waited_s), "last": not request.unfinished}
        if report is not None:
            end |= {"logprob": report.logprob, "top_logprobs": report.top_logprobs}
        if request.scores and token is not None and self.stopper.num_tokens == 1:
            end["prompt_logprobs"] = tuple(request.scored)
        request.sink(Event(request.id, self.index, token, text, **end))


def append_tokens(answers: Sequence[ActiveAnswer]) -> None:
    """The last token of each answer goes to its row."""
    for answer in answers:
        request = answer.request
        if request.row is not None:
            request.row.tokens += request.named([answer.token], answer.length)
        answer.length += 1
        answer.token = None


class ServedRequest:
    """A request that waits or is served. On the leader only."""

    def __init__(self, request: Request, prompt: Tensor, tokenizer, end_tokens: Collection[int], sink: EventSink,
                 grammar: Grammar | None = None, images: PromptImages | None = None):  # fmt: skip
        self.id = -1  # until it is queued
        self._queued_at, self._row_at = time.monotonic(), None
        self.prompt, self.num_prompt, self.sink = prompt, len(prompt), sink
        self.row, self.images, self.grammar, self.salt = request.row, images, grammar, request.salt
        self.named_prompt = prompt if images is None else torch.tensor(self.named(prompt.tolist()))
        self.params, self.keep_logits = request.sampling.with_seed(), request.keep_logits
        self.num_cached = 0
        """Tokens of the prompt that the cache held."""
        self.prefix_keys: list[bytes] | None = None  # of the prompt's pages, once they were asked for
        self.scored: list[Choice] = []  # tokens of the prompt but the first
        self.scores = self.params.prompt_logprobs is not None
        self.answers = []
        for i in range(request.n):
            matcher = None if grammar is None else grammar.matcher(i)
            stopper = Stopper(tokenizer, self.params, end_tokens, prompt if request.continues else ())
            sampler = Sampler(self.params, prompt, sample=i, matcher=matcher, end_tokens=stopper.end_tokens)
            self.answers.append(ActiveAnswer(request=self, index=i, sampler=sampler, stopper=stopper))
        self.begun = bool(request.begun)
        """Whether the prompt has been run: every answer has a token, and each goes on in a row of its own."""
        for answer, tokens in zip(self.answers, request.begun):
            if tokens is None:
                answer.finished = True
            else:
                answer.resume(tokens)
        self.unfinished = [answer for answer in self.answers if not answer.finished]

    def named(self, tokens: list[int], first: int = 0) -> list[int]:
        """Tokens of its rows from position `first` on, as they are compared with other requests' tokens."""
        return tokens if self.images is None else self.images.named(tokens, first)

    def has_row(self) -> None:
        """It has stopped waiting; masks for its answers are computed from now on."""
        self._row_at = time.monotonic()
        for answer in self.unfinished if self.grammar is not None else ():
            answer.sampler.matcher.compute()

    @property
    def waited_s(self) -> float:
        return (self._row_at or time.monotonic()) - self._queued_at

    @property
    def num_rows(self) -> int:
        """Rows that an answer's row stands for: a prompt's is copied for all answers."""
        return 1 if self.begun else len(self.unfinished)
