"""The commands generate, chat and serve: their options, and what they run on every rank.

Options are checked before the slow imports, and before any rank communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...launching import run_script


def generate(argv: list[str]) -> int:
    """Ask a model about a long text, or answer a file of prompts. Returns the exit status."""
    from .arguments import build_parser, check_arguments

    def load():
        from .generate import BatchError, CheckError, run
        from .start import StartError

        return run, (BatchError, CheckError, StartError)

    return run_script("megatron-tree generate", argv, build_parser, partial(_check, check_arguments), load)


def chat(argv: list[str]) -> int:
    """Chat in the terminal. Returns the exit status."""
    from .arguments import build_chat_parser, check_chat_arguments

    def load():
        from .chat import NoInput, run
        from .start import StartError

        return run, (NoInput, StartError)

    check = partial(_check, check_chat_arguments)
    return run_script("megatron-tree chat", argv, build_chat_parser, check, load, choices=False)


def serve(argv: list[str]) -> int:
    """Serve a model over HTTP. Returns the exit status."""
    from .http.arguments import build_parser, check_arguments

    def load():
        from .http.ranks import RanksError
        from .http.server import run, run_apart
        from .start import StartError

        return lambda args: run_apart(args, argv) if args.starts_ranks else run(args), (RanksError, StartError)

    return run_script("megatron-tree serve", argv, build_parser, partial(_check, check_arguments), load)


def _check(check: Callable, args, world: int) -> None:
    """Check the options, then that a launcher has started this process, unless it is one."""
    check(args, world)
    if not getattr(args, "starts_ranks", False):
        from ...core.comm.rendezvous import check_launched

        check_launched()
