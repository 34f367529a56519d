"""Options of the benchmarks. Does not import torch, so that help and mistakes answer at once."""

from __future__ import annotations

import argparse
import ast
import pathlib
import re

from ...core.arguments import Parser
from ...core.config import DECODE_SCHEDULES
from ...core.units import parse_bits_per_second, parse_count, parse_nodes_by_ranks, parse_seconds

COMMANDS = {
    "kernels": "attention kernels of one device",
    "local": "a decode step's attention on one CPU: our kernel, reading alone, torch's kernel",
    "decode": "a decode step over a sharded KV cache on several ranks: all schedules, over a network",
    "generate": "a whole model with a sharded KV cache: one rank, ring and trees, token by token",
    "serve": "many requests at once by the scheduler, and as one padded batch of Transformers",
    "step": "a Llama's training step on several ranks: ours, DeepSpeed's Ulysses, torch's context parallelism",
    "train": "attention forward and backward on several ranks: the plan, ring, Ulysses, torch's own, ...",
}
EXAMPLES = {
    "kernels": """\
  megatron-tree bench kernels --out docs/gpu-results/today --budget 540
  megatron-tree bench kernels --only correct decode --dtype fp16
  megatron-tree bench kernels --device cpu
  TRITON_INTERPRET=1 megatron-tree bench kernels --device cpu --dtype fp16      a rehearsal
""",
    "local": """\
  megatron-tree bench local                                               docs/benchmarks.md
  megatron-tree bench local --cases 32/8x128,16k,int8 9/3x64,4k,fp32,paged --threads 1
""",
    "decode": """\
  megatron-tree bench decode --ranks 4 --seq-len 16k
  megatron-tree bench decode --emulate 4x4 --latency 1ms --rate 1gbit --seq-len 128k
  megatron-tree bench decode --emulate 2x2 2x4 4x4 --seq-len 16k 64k       over ranks and lengths
  megatron-tree bench decode --emulate 4x4 --dilate 10                     slow motion: many ranks on few cores
""",
    "generate": """\
  megatron-tree bench generate --ranks 2 --prompt-tokens 2k --new-tokens 8
  megatron-tree bench generate --emulate 4x1 --prompt-tokens 16k 64k --cache made-up   docs/benchmarks.md
  megatron-tree bench generate --ranks 2 --model smollm2 --prompt-tokens 4k
""",
    "serve": """\
  megatron-tree bench serve                                   50 requests of 32 tokens, on one rank
  megatron-tree bench serve --ranks 2
  megatron-tree bench serve --model smollm2 --requests 16
""",
    "step": """\
  megatron-tree bench step --ranks 2 --seq-len 1k
  megatron-tree bench step --emulate 4x1 --seq-len 2k 8k --kv-heads 8,2
  megatron-tree bench step --emulate 4x1 --seq-len 4k --heads 14 --kv-heads 14,2      DeepSpeed's heads are padded to 16
  megatron-tree bench step --emulate 4x1 --seq-len 4k --wrapper fsdp2
  megatron-tree bench step --emulate 4x1 --seq-len 2k --kv-heads 8 --schedules auto --profile
""",
    "train": """\
  megatron-tree bench train --ranks 4 --seq-len 2k
  megatron-tree bench train --emulate 4x4 --kv-heads 16,4,2 --dilate 10
  megatron-tree bench train --emulate 2x4 4x4 --seq-len 2k 4k --dilate 10       over ranks and lengths
  megatron-tree bench train --pass jvp --ranks 4 --seq-len 2k --heads 8 --kv-heads 8,2 --head-dim 64 --dtype fp32
  megatron-tree bench train --pass no-grad --emulate 4x1 --kv-heads 4 --schedules auto torch_ring --compute real
""",
}

# The contenders of each benchmark; their files have what they do.
DECODE = ("ring", "allreduce", "allgather", "butterfly", "scatter", "two_level", "auto")
TORCH = ("torch_ring", "torch_gather")
TRAIN = ("ring", "kv_gather", "pure_tree", "grid", "ulysses", "auto", "same_bits", *TORCH, "all_gather")
STEP = ("auto", "ulysses", "grid", "ring", "deepspeed", *TORCH)
GENERATE = ("auto", "ring", "allreduce")

DTYPES = ("bf16", "fp16", "fp32")
LOCAL = (
    *("8/8x128,16k,fp32", "16/8x128,16k,fp32", "16/8x128,16k,fp32,paged", "9/3x64,64k,fp32", "9/3x64,4k,fp32"),
    *("32/8x128,16k,bf16", "32/8x128,16k,fp16", "32/8x128,16k,int8", "32/8x128,512,bf16", "16/8x128,512,fp32"),
    *("16/1x128,64k,fp32", "64/1x128,16k,fp32", "128/1x576,4k,fp32,latent"),
)
SIZES = {"layers": 4, "hidden_size": 512, "heads": 16, "kv_heads": 4, "head_dim": 128}
STAGES = {
    "machine": "driver, clocks, power, links; a copy and matrix products",
    "correct": "every kernel and dtype against dense attention; under compute-sanitizer; more than 2^31 elements",
    "beside": "forward and backward: our backends, torch's kernels and libraries",
    "tiles": "other tile sizes, of which the fastest are kept (GPU)",
    "decode": "caches in tensors, in pages, in 8 bits, and latents, beside libraries; the time of a launch",
    "step": "steps of the cache's runner, launched and in a CUDA graph",
    "ranks": "ranks on one device, or on several: tests over NCCL, what is hidden behind attention, memory",
    "verdict": "what was measured beside what was aimed at",
}


def _kernels(parser) -> None:
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="(default: cuda if there is a GPU)")
    add("--dtype", choices=DTYPES, default="bf16")
    what = "; ".join(f"{name}: {text}" for name, text in STAGES.items())
    add("--only", choices=STAGES, nargs="+", default=list(STAGES), help=f"stages, in this order: {what}")
    add("--budget", type=float, default=3600.0, metavar="SECONDS", help="the whole run's, kept")


def _local(parser) -> None:
    add = parser.add_argument
    add("--cases", type=_local_case, nargs="+", default=[_local_case(case) for case in LOCAL],
        metavar="CASE", help="HEADS/KV_HEADSxHEAD_DIM,TOKENS,DTYPE[,FORM]; DTYPE: fp32, bf16, fp16, or int8 and fp8, "
        f"which are paged; FORM: paged, or latent (MLA) (default: {' '.join(LOCAL)})")  # fmt: skip
    add("--threads", type=parse_count, nargs="+", default=[1, 2], metavar="N", help="(default: 1 2)")
    add("--budget", type=float, default=1.0, metavar="SECONDS", help="of a case (default: %(default)s)")


def _local_case(text: str) -> tuple[int, int, int, int, str, str]:
    shape, tokens, dtype, form = [*text.split(","), "", "", ""][:4]
    match = re.fullmatch(r"0*([1-9]\d*)/0*([1-9]\d*)x0*([1-9]\d*)", shape)
    if not match or dtype not in (*DTYPES, "int8", "fp8") or form not in ("", "paged", "latent") or text.count(",") > 3:
        raise argparse.ArgumentTypeError(f"{text!r} is no case, for instance 16/8x128,16k,bf16 or {LOCAL[2]}")
    return *map(int, match.groups()), parse_count(tokens), dtype, form


def _decode(parser) -> None:
    _cases(parser, DECODE, seq_len=131072, kv_heads="8")
    _modelled(parser)


def _generate(parser) -> None:
    add = parser.add_argument
    _machines(parser)
    _model(parser)
    add("--prompt-tokens", type=parse_count, nargs="+", default=[16384], metavar="N", help="one or several, such as "
        "16k 64k (default: 16k)")  # fmt: skip
    add("--new-tokens", type=parse_count, default=16, metavar="N", help="(default: %(default)s; at least 2)")
    add("--cache", choices=("prefilled", "made-up"), default="prefilled", help="made-up: random keys and values "
        "instead of a prefill, the same for all; there is no time to the first token then")  # fmt: skip
    add("--prefill-chunk", type=parse_count, default=2048, metavar="N", help="tokens run at once")
    add("--schedules", nargs="+", choices=DECODE_SCHEDULES, default=GENERATE, help="(default: auto ring allreduce)")


def _serve(parser) -> None:
    add = parser.add_argument
    _model(parser)
    add("--requests", type=parse_count, default=50, help="(default: %(default)s)")
    add("--prompt-tokens", type=parse_count, nargs=2, default=[16, 100], metavar=("LEAST", "MOST"), help="lengths are "
        "drawn between these (default: 16 100)")  # fmt: skip
    add("--new-tokens", type=parse_count, default=32, help="of each answer (default: %(default)s)")
    add("--ranks", type=parse_count, default=1, help="processes of this machine for our scheduler (default: 1)")
    add("--turns", type=parse_count, default=5, help="timed, after one that is not (default: %(default)s)")


def _step(parser) -> None:
    _cases(parser, STEP, seq_len=2048, kv_heads="8,2", heads=8, head_dim=64, dtype="fp32")
    add = parser.add_argument
    add("--layers", type=parse_count, default=2)
    add("--wrapper", choices=("average", "fsdp2"), default="average", help="average: one all-reduce of all gradients "
        "(default); fsdp2: torch's fully_shard of every layer")  # fmt: skip
    add("--profile", action="store_true", help="of one contender: write what rank 0 does in five steps into "
        "profile.txt (calls and CPU time)")  # fmt: skip
    parser.set_defaults(compute="real", dilate=1.0)


def _train(parser) -> None:
    _cases(parser, TRAIN, seq_len=4096, kv_heads="16,4,2")
    _modelled(parser)
    parser.add_argument("--pass", dest="passes", choices=("training", "jvp", "no-grad"), default="training", help=
        "training: forward and backward (default); jvp: a forward with tangents; no-grad: a forward alone")  # fmt: skip


def _cases(parser, contenders: tuple[str, ...], *, seq_len: int, kv_heads: str, heads=16, head_dim=128, dtype="bf16"):
    """Where ranks run (`cases.machines_of`), sizes of attention, who takes part, and for how long."""
    _machines(parser)
    add = parser.add_argument
    add("--seq-len", type=parse_count, nargs="+", default=[seq_len], help="of the whole sequence; one or several")
    add("--heads", type=parse_count, default=heads)
    add("--kv-heads", type=_numbers, default=kv_heads, help="one or several")
    add("--head-dim", type=parse_count, default=head_dim)
    add("--dtype", choices=DTYPES, default=dtype)
    add("--schedules", nargs="+", choices=contenders, help="(default: all that can run here)")
    add("--steps", type=parse_count, default=20, help="timed steps of each schedule; at least 3, whatever the budget")
    add("--budget", type=float, default=10.0, help="seconds for the timed steps of a schedule")


def _modelled(parser) -> None:
    """How time goes by."""
    add = parser.add_argument
    add("--compute", choices=("real", "modelled"), help="modelled: timed steps sleep as long as an accelerator "
        "would compute and reuse the checked step's results (default with more ranks than cores); real: run the "
        "kernels")  # fmt: skip
    add("--dilate", type=float, default=1.0, help="run with all times this much longer, and report them divided by it")


def _machines(parser) -> None:
    add = parser.add_argument_group("ranks").add_mutually_exclusive_group(required=True).add_argument
    add("--ranks", type=parse_count, metavar="N", help="N processes of this machine, over loopback")
    add("--emulate", type=parse_nodes_by_ranks, nargs="+", metavar="NxM", help="N nodes with M ranks each (Linux, "
        "root); one or several")  # fmt: skip
    add = parser.add_argument
    add("--latency", type=parse_seconds, default="1ms", help="between emulated nodes (default: %(default)s)")
    add("--rate", type=parse_bits_per_second, default="1gbit", help="per node's port (default: %(default)s)")


def _model(parser) -> None:
    """See `model.load_model`."""
    add = parser.add_argument
    add("--model", default="tiny", help="tiny: a Llama with random weights (the default); smollm2; or a folder with a "
        "Transformers model")  # fmt: skip
    for name, value in SIZES.items():
        add(f"--{name.replace('_', '-')}", type=parse_count, default=value, help="of tiny (default: %(default)s)")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(parse_count(part) for part in text.split(","))


OPTIONS = dict(kernels=_kernels, local=_local, decode=_decode, generate=_generate, serve=_serve)
OPTIONS |= dict(step=_step, train=_train)


def build_parser() -> argparse.ArgumentParser:
    """`megatron-tree bench`: the docstring of a benchmark's file is what its help says."""
    parser = Parser(prog="megatron-tree bench", description="Benchmarks, which check results first.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        source = pathlib.Path(__file__).with_name(f"{name}.py").read_text()
        command = commands.add_parser(
            name,
            help=text,
            description=ast.get_docstring(ast.parse(source)),
            epilog=f"examples:\n{EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        OPTIONS[name](command)
        command.add_argument("--out", type=pathlib.Path, default=pathlib.Path(f"bench-results/{name}"))
    return parser
