"""The logger "megatron_tree": the package logs its choices at level INFO, and what one would not expect as a warning,
each text once per process."""

import logging
import time

logger = logging.getLogger("megatron_tree")
_said: set[str] = set()
_said_at: dict[str, float] = {}
MOST_KEPT = 100


def say_once(text: str, about: str | None = None) -> None:
    """Log a text, each line as one of its own, unless this process has logged it before, or one about the same."""
    _log_once(logging.INFO, text, about)


def warn_once(text: str, about: str | None = None) -> None:
    """`say_once` as a warning."""
    _log_once(logging.WARNING, text, about)


def _log_once(level: int, text: str, about: str | None) -> None:
    if (about or text) not in _said:
        _said.add(about or text)
        for line in text.splitlines():
            logger.log(level, line)


def is_due(about: str, every_s: float) -> bool:
    """Whether it is this long ago that this process asked the same: for lines that others can cause at will."""
    now = time.monotonic()
    if now - _said_at.get(about, float("-inf")) < every_s:
        return False
    if len(_said_at) >= MOST_KEPT:
        _said_at.clear()
    _said_at[about] = now
    return True


class Seldom(logging.Filter):
    """Lets a line with the same beginning through once in so many seconds."""

    def __init__(self, every_s: float):
        super().__init__()
        self._every_s = every_s

    def filter(self, record: logging.LogRecord) -> bool:
        return is_due(f"{record.name}: {str(record.msg).partition(chr(10))[0]}", self._every_s)
