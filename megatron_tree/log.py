"""The logger "megatron_tree": the package logs its choices at level INFO, each line once per process."""

import logging

logger = logging.getLogger("megatron_tree")
_said: set[str] = set()


def say_once(line: str) -> None:
    """Log a line unless this process has logged it before."""
    if line not in _said:
        _said.add(line)
        logger.info(line)
