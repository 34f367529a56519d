"""Options of the command serve: the command line over a YAML file over the defaults, checked first."""

from __future__ import annotations

import argparse
import ipaddress
import math
import os
from pathlib import Path

from ....launching import new_parser
from ..arguments import add_model_options, check_counts, check_model_options, check_readable

KEY_VARIABLE = "MEGATRON_TREE_API_KEY"
MIN_KEY_LENGTH = 8
LINK = "MEGATRON_TREE_FRONT_END"  # of ranks that a front end starts: rank 0's file descriptor to it, others' is -1

DESCRIPTION = """\
Serve a language model over HTTP with OpenAI's API, the KV cache of every request spread over all ranks. It answers
/v1/chat/completions, /v1/responses, /v1/completions and /v1/models; docs/serving.md explains limits and security.
"""
EXAMPLES = """\
examples:
  the default model on 2 ranks, for programs on this machine
    torchrun --nproc-per-node 2 -m megatron_tree serve
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 16}'
  a model in a local folder on 8 GPUs, for other machines, with a key
    deepspeed --num_gpus 8 --no_local_rank --module megatron_tree serve --model /models/llama --host 0.0.0.0 \\
        --api-key-file key.txt --max-rows 16 --max-model-len 131072
  the same without a launcher; lost ranks are started again
    megatron-tree serve --ranks 8 --restarts 3 --model /models/llama --host 0.0.0.0 --api-key-file key.txt
"""


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("megatron-tree serve", DESCRIPTION, EXAMPLES)
    add_model_options(parser)
    parser.set_defaults(prefill_chunk=None)
    parser.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names that requests may use for the "
        "model (default: the last part of --model)")  # fmt: skip

    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1: this machine "
        "only); any other needs an API key")  # fmt: skip
    http.add_argument("--port", type=int, default=8000, help="0: a free one, which is printed (default: 8000)")
    http.add_argument("--api-key-file", metavar="FILE", help="file with the tokens that clients may send, one a line "
        f"(or one in the variable {KEY_VARIABLE})")  # fmt: skip
    http.add_argument("--request-timeout", type=float, default=600.0, metavar="S", help="seconds from a request's "
        "arrival to the end of its answer; then it is cancelled (default: 600)")  # fmt: skip
    http.add_argument("--wait-timeout", type=float, default=60.0, metavar="S", help="seconds that a rank waits for "
        "another one while it serves; then the server ends with an error that names it (default: 60)")  # fmt: skip

    load = parser.add_argument_group("load")
    load.add_argument("--max-rows", type=int, default=8, metavar="N", help="answers generated at the same time "
        "(default: 8)")  # fmt: skip
    load.add_argument("--max-model-len", type=int, metavar="N", help="tokens of a prompt and its answer together "
        "(default: the model's positions)")  # fmt: skip
    load.add_argument("--cache-tokens", type=int, metavar="N", help="tokens that the cache may hold on all ranks "
        "together (default: it grows, up to --max-rows times --max-model-len)")  # fmt: skip
    load.add_argument("--cache-bytes", type=int, default=1 << 30, metavar="N", help="pages stay in the cache when "
        "requests have ended, for prompts with the same prefix, while it takes at most N bytes on a rank; 0: none "
        "(default: 2**30)")  # fmt: skip
    load.add_argument("--max-waiting", type=int, default=1024, metavar="N", help="prompts that may wait for a row; "
        "more get a 429 (default: 1024)")  # fmt: skip

    ranks = parser.add_argument_group("ranks of this machine, without a launcher")
    ranks.add_argument("--ranks", type=int, metavar="N", help="start N ranks; HTTP is served by a process of its own")
    ranks.add_argument("--restarts", type=int, default=0, metavar="N", help="start the ranks again when one is lost, "
        "at most N times in an hour; requests go on (default: 0)")  # fmt: skip
    return parser


def check_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Check all options before any communication; fill in the keys (args.api_keys) and the model's names.

    Raises: ValueError that names the option, the value seen and the way out.
    """
    check_counts(args, "max_rows", "max_model_len", "cache_tokens", "max_waiting", "ranks")
    args.starts_ranks = args.ranks is not None and LINK not in os.environ
    if args.starts_ranks and "RANK" in os.environ:
        raise ValueError(
            f"--ranks {args.ranks} starts the ranks: leave it out, or start the command without a launcher"
        )
    if args.restarts < 0 or (args.restarts and args.ranks is None):
        raise ValueError(f"--restarts {args.restarts} must be 0 or more, and needs --ranks")
    check_model_options(args, args.ranks if args.starts_ranks else world_size)
    if args.cache_bytes < 0:
        raise ValueError(f"--cache-bytes {args.cache_bytes} must be 0 or more")
    for name in ("request_timeout", "wait_timeout"):
        value = getattr(args, name)
        if not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be a finite number, more than 0")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port {args.port} must be between 0 and 65535")
    if isinstance(args.served_model_name, str):
        args.served_model_name = [args.served_model_name]
    args.served_model_name = args.served_model_name or [Path(args.model).resolve().name]
    check_readable("--api-key-file", args.api_key_file)
    args.api_keys = _api_keys(args)
    if not args.api_keys and not is_loopback(args.host):
        raise ValueError(
            f"--host {args.host}: other machines could use the model without a key and fill its queue; "
            f"pass --api-key-file (or set {KEY_VARIABLE})"
        )


def _api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The tokens in the file, or else in the environment variable."""
    if args.api_key_file is not None:
        place, text = f"--api-key-file {args.api_key_file!r}", Path(args.api_key_file).read_bytes()
    elif KEY_VARIABLE in os.environ:
        place, text = KEY_VARIABLE, os.environ[KEY_VARIABLE].encode()
    else:
        return ()
    keys = [line.strip() for line in text.decode("ascii", "replace").strip().splitlines()]
    if not keys:
        raise ValueError(f"{place} is empty: write a key into it, one a line")
    for key in keys:
        if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(
                f"{place}: an API key must have {MIN_KEY_LENGTH} or more printable ASCII characters without spaces; "
                "python -c 'import secrets; print(secrets.token_urlsafe())' makes one"
            )
    return tuple(keys)


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can reach a server on this address or name."""
    try:
        return ipaddress.ip_address(host.strip("[]").split("%")[0]).is_loopback
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"
