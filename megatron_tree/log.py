"""The logger "megatron_tree": the package logs its choices at level INFO, each line once per process."""

import logging

logger = logging.getLogger("megatron_tree")
_said: set[str] = set()


def say_once(line: str, about: str | None = None) -> None:
    """Log a line unless this process has logged it before, or one about the same."""
    if (about or line) not in _said:
        _said.add(about or line)
        logger.info(line)
