"""The commands generate, chat and serve: their options, and what they run on every rank.

Options are checked before the slow imports, and before any rank communicates.
"""

from __future__ import annotations

from collections.abc import Callable

from ...launching import check_launched, run_script


def generate(argv: list[str]) -> int:
    """Ask a model about a long text, or answer a file of prompts. Returns the exit status."""
    from .arguments import build_parser, check_arguments

    def load():
        from .generate import BatchError, CheckError, run

        return run, (BatchError, CheckError)

    check = _of_launched("generate", check_arguments)
    return run_script("megatron-tree generate", argv, build_parser, check, load)


def chat(argv: list[str]) -> int:
    """Chat in the terminal. Returns the exit status."""
    from .arguments import build_chat_parser, check_chat_arguments

    def load():
        from .chat import NoInput, run

        return run, (NoInput,)

    check = _of_launched("chat", check_chat_arguments)
    return run_script("megatron-tree chat", argv, build_chat_parser, check, load, choices=False)


def serve(argv: list[str]) -> int:
    """Serve a model over HTTP. Returns the exit status."""
    from .http.arguments import build_parser, check_arguments

    def load():
        from .http.ranks import RanksError
        from .http.server import run, run_apart

        return lambda args: run_apart(args, argv) if args.starts_ranks else run(args), (RanksError,)

    check = _of_launched("serve", check_arguments)
    return run_script("megatron-tree serve", argv, build_parser, check, load)


def _of_launched(name: str, check_arguments: Callable) -> Callable:
    """Checks the options, then that a launcher has started this process, unless it starts the ranks itself."""

    def check(args, world_size: int) -> None:
        check_arguments(args, world_size)
        if name != "serve":
            check_launched(f"-m megatron_tree {name}")
        elif not args.starts_ranks:
            check_launched("-m megatron_tree serve", "; or let the command start its ranks: --ranks 4")

    return check
