"""Errors of the package. Bad input from a user is always a plain ``ValueError``."""


class TreeError(RuntimeError):
    """Something went wrong at run time that is not the caller's input."""


class CommError(TreeError):
    """A collective failed or ran past its time limit. The message names the operation and the ranks."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.ranks = ranks
        """Global ranks that failed, where it is known."""
