"""Requests and events of the scheduler, and the state of a request that is served."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .grammars import Grammars
from .sampling import Choice, Sampler, SamplingParams
from .speculation import Guess
from .stopping import Stopper


@dataclass(kw_only=True)
class KeptRow:
    """A row of the cache that stays when a request has ended, for the next one; see `Scheduler.keep`.

    The next request may share a beginning with what the row holds: that is not run again.
    """

    handle: int
    tokens: list[int] = field(default_factory=list)
    """What the row holds; up to date on the leader only."""

    def shared(self, prompt: Tensor) -> int:
        """How many tokens of a prompt the row holds already; at least the prompt's last token is to be run."""
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
    priority: int = 0
    """Lower ones go first."""
    client: str = ""
    """Who asks: clients of the same priority take turns."""
    row: KeptRow | None = None
    """Use this row of the cache and leave it there; one request at a time, with n=1."""


class Usage(NamedTuple):
    """Tokens of one answer, and of its prompt."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt's, those that the cache held already."""


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


EventSink = Callable[[Event], None]


@dataclass(kw_only=True)
class ActiveAnswer:
    """One answer under way."""

    index: int
    sampler: Sampler
    stopper: Stopper
    handle: int | None = None
    """Of its row. While a prompt is run the first answer has it."""
    token: int | None = None
    """The last one, while no plan holds it."""
    length: int = 0
    """Tokens in its row."""
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    guess: Guess | None = None
    """With speculation, once it makes steps."""
    proposed: list[int] = field(default_factory=list)
    """Tokens that were appended to its row in the step that goes on, since they may be the next ones."""
    num_right: int = 0
    """How many of them are; `length` counts these."""

    @property
    def is_right(self) -> bool:
        """Whether its last token is the one that was proposed."""
        return not self.finished and self.num_right < len(self.proposed) and self.token == self.proposed[self.num_right]

    def hold(self, row: KeptRow | None) -> None:
        """Its last token is in its row. row: the request's own."""
        self.length += 1
        if row is not None:
            row.tokens.append(self.token)
        self.token = None


class ServedRequest:
    """A request that waits or is served. On the leader only."""

    def __init__(
        self,
        number: int,
        request: Request,
        prompt: Tensor,
        tokenizer,
        end_tokens: Collection[int],
        sink: EventSink,
        grammars: Grammars,
    ):
        self.id, self.prompt, self.num_prompt, self.sink = number, prompt, len(prompt), sink
        self.row, self.priority, self.client = request.row, request.priority, request.client
        self.params = request.sampling.with_seed()
        ends = () if self.params.ignore_eos else end_tokens
        self.num_cached = 0
        """Tokens of the prompt that the cache held."""
        self.digests: list[bytes] | None = None  # of the prompt's blocks, once they were asked for
        self.scored: list[Choice] = []  # tokens of the prompt but the first
        self.scores = self.params.prompt_logprobs is not None
        self.answers = [
            ActiveAnswer(
                index=i,
                sampler=Sampler(
                    self.params, prompt, sample=i, end_tokens=ends, matcher=grammars.matcher(self.params.grammar)
                ),
                stopper=Stopper(tokenizer, self.params, end_tokens),
            )
            for i in range(request.n)
        ]
        self.unfinished = self.answers
        self.begun = False
        """Whether the prompt has been run: every answer has a token, and each goes on in a row of its own."""

    def finish(self, answer: ActiveAnswer) -> None:
        """An answer has ended."""
        answer.finished = True
        self.unfinished = [answer for answer in self.answers if not answer.finished]

    @property
    def importance(self) -> tuple[int, int]:
        """The smallest is the most important one."""
        return self.priority, self.id

    @property
    def num_rows(self) -> int:
        """Rows that an answer's row stands for: a prompt's is copied for all answers."""
        return 1 if self.begun else len(self.unfinished)

    @property
    def num_rows_held(self) -> int:
        """Rows that all answers have or will have without asking again."""
        return self.num_rows * sum(answer.handle is not None for answer in self.unfinished)

    def num_known(self, answer: ActiveAnswer) -> int:
        """Tokens that an answer's row is to hold before the next one can be chosen from its last token."""
        return self.num_prompt + max(len(answer.tokens) - 1, 0)

    def known(self, answer: ActiveAnswer) -> list[int]:
        """These tokens, from those on that the row holds."""
        own = answer.tokens[max(answer.length - self.num_prompt, 0) : -1]
        return self.prompt[answer.length :].tolist() + own

    def held(self, answer: ActiveAnswer) -> list[int]:
        """The tokens in an answer's row."""
        return (self.prompt.tolist() + answer.tokens)[: answer.length]

    def soon(self, answer: ActiveAnswer, tokens: int) -> int:
        """What an answer's row holds after this many more tokens; a kept row of its own is never taken back."""
        most = self.num_prompt + self.params.max_tokens
        return most if self.row is not None else min(max(answer.length, self.num_known(answer)) + tokens, most)

    def note_cached(self, answer: ActiveAnswer) -> None:
        """An answer has a row, perhaps with the beginning of the prompt."""
        if not self.begun:
            self.num_cached = answer.length

    def preempt(self, answer: ActiveAnswer) -> None:
        """An answer loses its row; its token that no plan holds is still to come first."""
        answer.handle, answer.length = None, 0
        if not self.begun:
            self.scored = []

    def send(self, answer: ActiveAnswer, choice: Choice | None, text: str, finish_reason: str | None, **more) -> None:
        """Send an event of one answer, and record its end."""
        usage = None
        if finish_reason is not None:
            self.finish(answer)
            usage = Usage(self.num_prompt, answer.stopper.num_tokens, self.num_cached)
        if choice is not None:
            if self.params.prompt_logprobs is not None and answer.stopper.num_tokens == 1:
                more["prompt_logprobs"] = tuple(self.scored)
            more |= {"token": choice.token, "logprob": choice.logprob, "top_logprobs": choice.top_logprobs}
        self.sink(
            Event(
                request=self.id,
                answer=answer.index,
                text=text,
                finish_reason=finish_reason,
                usage=usage,
                last=not self.unfinished,
                **more,
            )
        )


def prompt_tensor(prompt: Sequence[int] | Tensor, vocab_size: int) -> Tensor:
    """int64 [n], on the CPU. Raises: ``ValueError`` for an empty one, other shapes, tokens that the model lacks."""
    try:
        tokens = torch.as_tensor(prompt).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"prompt must be a list of token numbers: {error}") from None
    if tokens.dim() != 1 or len(tokens) == 0 or tokens.dtype.is_floating_point or tokens.dtype == torch.bool:
        found = f"{list(tokens.shape)} of {tokens.dtype}"
        raise ValueError(f"prompt must be a list of one token number or more, got {found}")
    tokens = tokens.to(torch.int64)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"prompt holds the token {low if low < 0 else high}, the model has 0 to {vocab_size - 1}: is the tokenizer "
            "the model's own?"
        )
    return tokens
