"""Exceptions of the package. Invalid input always raises a plain ``ValueError``."""

from collections.abc import Sequence


class TreeError(RuntimeError):
    """A failure at run time that invalid input did not cause."""


class CommError(TreeError):
    """A collective failed or timed out. The message names the operation and the ranks."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.ranks = ranks
        """Global ranks that failed, if known."""


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in a message: "rank 1" or "ranks [1, 2]"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
