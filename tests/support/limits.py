"""A disk that is full, as far as a process can be told so."""

import contextlib
import resource


@contextlib.contextmanager
def files_of_at_most(size):
    """In this context this process, and those that it starts, can't write files of more bytes: errno EFBIG."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
