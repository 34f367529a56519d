"""What /metrics tells, in Prometheus' text format. Used in the event loop only."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from ...generation.requests import Event

PREFIX = "megatron_tree_"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts of seconds, by upper limits."""

    def __init__(self):
        self._counts, self._sum = [0] * (len(SECONDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterable[str]:
        total = 0
        for limit, count in zip((*SECONDS, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{limit}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class Metrics:
    """Numbers since the start."""

    def __init__(self):
        self.served = 0
        """HTTP requests that were answered in full."""
        self._tokens = Counter(prompt=0, generation=0)
        self._answers = Counter(stop=0, length=0, cancelled=0, error=0)
        self._first, self._next, self._whole, self._waited = (Histogram() for _ in range(4))
        self._row_s, self._num_rows = 0.0, 0

    @property
    def row_s(self) -> float:
        """Seconds for which an answer has had a row, on average; 0 before the first."""
        return self._row_s / max(self._num_rows, 1)

    def asked(self, prompt_tokens: int) -> None:
        self._tokens["prompt"] += prompt_tokens

    def heard(self, event: Event, since: float, last: float | None) -> None:
        """An event of an answer that was asked for at `since`; its last token came at `last`, see `time.monotonic`."""
        now = time.monotonic()
        if event.token is not None:
            self._tokens["generation"] += 1
            (self._first if last is None else self._next).add(now - (since if last is None else last))
        if event.finish_reason is not None:
            self._answers[event.finish_reason] += 1
            self._whole.add(now - since)
        if (usage := event.usage) is not None:
            if usage.completion_tokens:
                self._row_s, self._num_rows = self._row_s + now - since - usage.waited_s, self._num_rows + 1
            if event.last:
                self._waited.add(usage.waited_s)

    def text(self, more: Mapping[str, tuple[str, str, float]]) -> str:
        """The whole page. more: by name, the kind of other numbers, what they are and their values now."""
        lines = []

        def put(name: str, kind: str, about: str, values: Iterable[str]) -> None:
            lines.extend((f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {kind}", *values))

        for name, (kind, about, value) in more.items():
            put(name, kind, about, [f"{PREFIX}{name} {value}"])
        for kind, count in self._tokens.items():
            put(f"{kind}_tokens_total", "counter", f"Tokens: {kind}.", [f"{PREFIX}{kind}_tokens_total {count}"])
        ends = [f'{PREFIX}answers_total{{finish_reason="{reason}"}} {n}' for reason, n in self._answers.items()]
        put("answers_total", "counter", "Answers that have ended.", ends)
        for name, about, histogram in (
            ("waiting_seconds", "From a request to its row, of those that ended.", self._waited),
            ("time_to_first_token_seconds", "From a request to an answer's first token.", self._first),
            ("time_per_output_token_seconds", "Between two tokens of an answer.", self._next),
            ("answer_seconds", "From a request to an answer's end.", self._whole),
        ):
            put(name, "histogram", about, histogram.lines(PREFIX + name))
        return "\n".join(lines) + "\n"
