"""A request that the front end has sent to rank 0, as it keeps it for other ranks."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from ...generation.requests import Event, EventSink, Request


@dataclass(kw_only=True, eq=False)
class OpenRequest:
    """A request, and what has been sent of its answers."""

    request: Request
    sink: EventSink
    taken: Future = field(default_factory=Future)
    """Whether the scheduler takes it."""
    begun: list[list[int] | None]
    """As `Request.begun`, with [] for answers without a token."""
    resumed: int = 0
    cancelled: bool = False

    @property
    def tokens(self) -> list[list[int] | None]:
        """For another scheduler: nothing until there are tokens, which all answers get in the same turn."""
        return self.begun if any(tokens != [] for tokens in self.begun) else []

    def take(self) -> None:
        """The scheduler has taken it; any number of times."""
        if not self.taken.done():
            self.taken.set_result(None)

    def note(self, event: Event) -> None:
        if event.token is not None:
            self.begun[event.answer].append(event.token)
        if event.finish_reason is not None:
            self.begun[event.answer] = None
        self.sink(event)

    def end(self, number: int, reason: str, error: str | None = None) -> None:
        """End all answers that have not ended."""
        going = [i for i, tokens in enumerate(self.begun) if tokens is not None]
        for i in going:
            self.note(Event(number, i, finish_reason=reason, error=error, last=i == going[-1]))
