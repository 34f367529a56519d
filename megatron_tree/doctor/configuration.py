"""What a configuration, the options of the command line, would use, and why: Megatron's integration, attention kernels,
the plan."""

from __future__ import annotations

import math

import torch

from ..config import TREE_CP_COMM_TYPES, AttnSpec
from ..kernels import choose
from ..launching import missing_package
from ..plan import (
    Cost,
    Shape,
    check_heads,
    default_topology,
    load_topology,
    place,
    plan_decode,
    plan_training,
)
from ..units import format_bytes, format_seconds
from .findings import MISSING, NOTE, OK, Finding, Section

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ROWS = 16  # tokens of the tensors that a backend is chosen for; the choice does not depend on their number
_RUNS = {"a2a": "Ulysses", "a2a+tree": "Ulysses x tree", "a2a+p2p": "Ulysses x ring"}


def check(args) -> None:
    """Raise ``ValueError`` for options that contradict one another."""
    check_heads(args.heads, args.kv_heads, args.tp)
    if args.cp > 1 and args.seq_len % (2 * args.cp):
        raise ValueError(
            f"--seq-len {args.seq_len} must be a multiple of 2 x --cp {args.cp}: every rank holds two chunks of "
            "equal length"
        )
    sizes = args.hierarchical_context_parallel_sizes or ()
    if args.cp > 1 and args.cp_comm_type.startswith("a2a+") and (len(sizes) != 2 or math.prod(sizes) != args.cp):
        raise ValueError(
            f"--cp-comm-type {args.cp_comm_type} needs --hierarchical-context-parallel-sizes U R with U x R = --cp "
            f"{args.cp}"
        )


def _ulysses(args) -> int:
    """Number of ranks over which heads are split by all-to-all."""
    if args.cp == 1 or not args.cp_comm_type.startswith("a2a"):
        return 1
    return args.cp if args.cp_comm_type == "a2a" else args.hierarchical_context_parallel_sizes[0]


def _shape(args, ranks: int) -> Shape:
    """Heads of each of `ranks` ranks that share them."""
    return Shape(args.heads, args.kv_heads, args.head_dim, args.head_dim).over(ranks)


def megatron(cp: int, cp_comm_type: str) -> Section:
    """Megatron's integration; only what is wrong if megatron-core can't be used."""
    try:
        from ..integrations.megatron import compat

        version = compat.megatron_version()
        compat.attention_classes()
    except ImportError as error:
        why = missing_package(error) or str(error)
        return Section("Megatron", [Finding("megatron-core", "unusable", why, MISSING)])
    return _integration(cp, cp_comm_type, version)


def _integration(cp: int, cp_comm_type: str, version: str) -> Section:
    """How `cp_comm_type` selects tree attention in this megatron-core."""
    from ..integrations.megatron import compat

    if cp == 1:
        state, way = "not used", "--cp 1: Megatron's own attention, which needs no context parallelism"
    elif cp_comm_type not in TREE_CP_COMM_TYPES:
        state = "by the layer spec"
        way = "ours with --spec or use_tree_attention, else TransformerEngine's: docs/megatron-lm.md"
    elif compat.is_patched():
        state, way = "works as it is", "this megatron-core is patched (patches/megatron-lm)"
    else:
        state = "needs one line"
        way = "by install() in the program, --spec, or bash patches/apply.sh: docs/megatron-lm.md"
    findings = [
        Finding("megatron-core", version, "has all that tree attention needs"),
        Finding(f"cp_comm_type {cp_comm_type!r}", state, way),
    ]
    if compat.misreads_cp_comm_type_list():
        note = "this release reads it off by one entry; install() and the patch correct that"
        findings.append(Finding("a list in cp_comm_type", "needs install()", note))
    return Section("Megatron", findings)


def kernels(args) -> Section:
    """The backend of the attention kernels."""
    device, shape = "cuda" if torch.cuda.is_available() else "cpu", _shape(args, args.tp * _ulysses(args))
    q, k = (
        torch.empty(1, _ROWS, heads, args.head_dim, dtype=DTYPES[args.dtype], device=device)
        for heads in (shape.num_heads, shape.num_heads_kv)
    )
    what = f"{shape.num_heads} heads, {shape.num_heads_kv} KV heads, head_dim {args.head_dim}, {args.dtype}"
    try:
        choice = choose(q, k, k, AttnSpec(softmax_scale=args.head_dim**-0.5), args.backend)
    except ValueError as error:
        return Section("attention kernels", [Finding(what, "refused", str(error), MISSING)])
    slow = choice.name == "reference" and args.backend == "auto"
    return Section("attention kernels", [Finding(what, choice.name, choice.reason, NOTE if slow else OK)])


def plan(args) -> Section:
    """The planned schedule and its predicted cost: of decoding for DeepSpeed, else of training."""
    if args.topology is None:
        topology = default_topology("nccl" if torch.cuda.is_available() else "gloo")
    else:
        topology = load_topology(args.topology)
    # Megatron numbers ranks by tensor parallelism first: neighbours in the tree are tp ranks apart.
    hosts = [r * args.tp // topology.host_size for r in range(args.cp)]
    network = dict(topology=topology, placement=place(topology, hosts))
    source = "named" if args.topology else "assumed, since --topology names none"
    findings = [Finding("topology", topology.name, f"{source}; ranks on {len(set(hosts))} of its hosts")]
    if (ulysses := _ulysses(args)) > 1:
        findings.append(Finding("all-to-all", f"{ulysses} ranks", f"{_RUNS[args.cp_comm_type]}: heads are split"))
    if args.cp == 1:
        return Section("plan", [*findings, Finding("tree", "1 rank", "nothing to exchange")])
    shape, word = _shape(args, args.tp), DTYPES[args.dtype].itemsize
    if args.purpose == "deepspeed":
        kv_bytes = -(-args.seq_len // args.cp) * shape.num_heads_kv * 2 * args.head_dim * word
        chosen = plan_decode(args.cp, rows=shape.num_heads, head_dim_v=args.head_dim, kv_bytes=kv_bytes, **network)
        findings.append(_cost_finding("decode", chosen.schedule, chosen.cost))
    else:
        second = args.cp_comm_type.removeprefix("a2a+")
        chosen = plan_training(
            args.cp,
            shape,
            batch=1,
            seq_len=args.seq_len,
            bytes_per_word=word,
            schedule="ring" if second == "p2p" else "auto",
            ulysses_size=None if args.cp_comm_type == "tree" else ulysses,
            grid=(1, args.cp) if second == "all_gather" else None,
            **network,
        )
        findings.append(_cost_finding("forward", str(chosen.forward), chosen.forward.cost))
        findings.append(_cost_finding("backward", str(chosen.backward), chosen.backward.cost))
    return Section("plan", [*findings, Finding("why", "", chosen.reason)])


def _cost_finding(name: str, value: str, cost: Cost) -> Finding:
    sent, buffers = format_bytes(cost.bytes), format_bytes(cost.peak_bytes)
    return Finding(name, value, f"predicted {format_seconds(cost.time_s)} a layer, {sent} sent, {buffers} buffers")
