"""The command train: its options, and what it runs on every rank."""

from __future__ import annotations

from ...launching import check_launched, run_script


def train(argv: list[str]) -> int:
    """Train a GPT with Megatron-core. Returns the exit status."""
    from .arguments import build_parser, check_arguments, complete

    def check(args, world_size):
        check_launched("-m megatron_tree train")
        check_arguments(complete(args), world_size)

    def load():
        from .loop import LossTooHigh, run

        return run, (LossTooHigh,)

    return run_script("megatron-tree train", argv, build_parser, check, load)
