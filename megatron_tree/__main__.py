"""The console command: `megatron-tree COMMAND`, or `python -m megatron_tree COMMAND` for launchers, on every rank."""

from __future__ import annotations

import importlib
import os
import sys
from typing import NamedTuple

import megatron_tree

from .core.arguments import suggestion


class Command(NamedTuple):
    """What a command runs."""

    function: str
    """module:function below this package; takes the arguments, returns the exit status."""
    help: str
    on_ranks: bool = False
    """Whether a launcher may start it on several ranks."""


COMMANDS = {
    "train": Command("tools.training.command:train", "train a GPT with Megatron-core and context parallelism", True),
    "generate": Command(
        "inference.serving.command:generate", "ask a model about a long text, or answer a file of prompts", True
    ),
    "chat": Command("inference.serving.command:chat", "chat with a model in the terminal", True),
    "serve": Command("inference.serving.command:serve", "serve a model over HTTP with OpenAI's API", True),
    "convert": Command("tools.convert.command:main", "Hugging Face weights to a Megatron checkpoint, and back"),
    "plan": Command("core.plan.command:main", "what a call, a pass or a decode step sends, computes and takes"),
    "doctor": Command("tools.doctor.command:main", "what is installed, what would run, what is missing"),
    "config": Command("core.config_fields:main", "the fields of TreeConfig: values, default, meaning"),
    "calibrate": Command(
        "tools.calibrate.command:main", "measure a cluster, and write its topology for the planner", True
    ),
    "bench": Command("tools.bench.command:main", "benchmarks, which check their results first"),
}
USAGE = "usage: megatron-tree COMMAND [options]      megatron-tree COMMAND --help      megatron-tree --version"


def main(argv: list[str] | None = None) -> None:
    """Run one command, and end the process with its exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "help":
        name, *rest = [*rest, "--help"]
    if name in ("-h", "--help"):
        print("\n".join([USAGE, "", *(f"  {name:<10} {command.help}" for name, command in COMMANDS.items())]))
        print("\nOn several ranks: torchrun --nproc-per-node 4 -m megatron_tree COMMAND [options], or")
        print("deepspeed --num_gpus 4 --no_local_rank --module megatron_tree COMMAND [options]")
        sys.exit(0)
    if name in ("-V", "--version"):
        print(f"megatron_tree {megatron_tree.__version__}")
        sys.exit(0)
    if name not in COMMANDS:
        meant = suggestion([name], COMMANDS)
        print(f"megatron-tree: {name!r} is no command, only {', '.join(COMMANDS)} are{meant}", file=sys.stderr)
        sys.exit(2)
    try:
        status = _status(name, rest)
    except BrokenPipeError:  # who read it has had enough, as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"megatron-tree {name}: stopped by Ctrl-C", file=sys.stderr, flush=True)
        os._exit(130)
    sys.exit(status)


def _status(name: str, arguments: list[str]) -> int:
    """Run a command, in a process that a launcher may have started; returns its exit status."""
    from .launching import explain_missing, leave, quiet

    command = COMMANDS[name]
    quiet()
    with explain_missing(f"megatron-tree {name}"):
        module, _, function = command.function.partition(":")
        status = getattr(importlib.import_module(f".{module}", __package__), function)(arguments)
    if command.on_ranks:
        leave(status)
    if sys.stdout is not None:
        sys.stdout.flush()
    return status


if __name__ == "__main__":
    main()
