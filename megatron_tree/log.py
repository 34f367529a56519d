"""What the package tells about its choices: logger "megatron_tree", level INFO, each line once per process."""

import logging

logger = logging.getLogger("megatron_tree")
_said: set[str] = set()


def say_once(line: str) -> None:
    """Log a line the first time it comes up."""
    if line not in _said:
        _said.add(line)
        logger.info(line)
