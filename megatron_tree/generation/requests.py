"""Requests and events of the scheduler, and the state of a request that is served."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .grammars import Grammars
from .sampling import Choice, Sampler, SamplingParams
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


@dataclass(frozen=True, kw_only=True)
class Event:
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
    """One answer under way: a row of the cache once it has tokens of its own."""

    index: int
    sampler: Sampler
    stopper: Stopper
    handle: int | None = None
    forked: bool = False
    token: int | None = None
    """The last one, while no plan holds it."""
    length: int = 0
    """Tokens in its row."""
    tokens: list[int] = field(default_factory=list)
    finished: bool = False

    def row_tokens(self, prompt: Tensor) -> list[int]:
        """What its row holds."""
        return prompt.tolist() + self.tokens[: self.length - len(prompt)]


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
        self.id, self.prompt, self.sink = number, prompt, sink
        self.row, self.priority, self.client = request.row, request.priority, request.client
        self.params = request.sampling.with_seed()
        ends = () if self.params.ignore_eos else end_tokens
        self.handle: int | None = None  # of the prompt's row while it is prefilled
        self.num_prefilled = self.num_cached = 0
        self.digests: list[bytes] | None = None  # of the prompt's blocks, once they were asked for
        self.scored: list[Choice] = []  # tokens of the prompt but the first
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

    @property
    def unfinished(self) -> list[ActiveAnswer]:
        return [answer for answer in self.answers if not answer.finished]

    def reserved(self, page: int) -> int:
        """Tokens, in whole pages, that all unfinished answers may need."""
        return len(self.unfinished) * _whole(len(self.prompt) + self.params.max_tokens, page)

    def held(self, page: int) -> int:
        """Tokens, in whole pages, that its rows have certainly taken from the cache.

        The prompt of a copied row may still be shared with the row that it was copied from; it counts as not taken.
        """
        if self.handle is not None:
            return _whole(self.num_prefilled, page)
        shared = _whole(len(self.prompt), page)
        return sum(_whole(a.length, page) - shared * a.forked for a in self.unfinished if a.handle is not None)

    def send(self, answer: ActiveAnswer, choice: Choice | None, text: str, finish_reason: str | None, **more) -> None:
        """Send an event of one answer, and record its end."""
        usage = None
        if finish_reason is not None:
            answer.finished = True
            usage = Usage(len(self.prompt), answer.stopper.num_tokens, self.num_cached)
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


def _whole(tokens: int, page: int) -> int:
    return -(-tokens // page) * page


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
