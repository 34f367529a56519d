"""What a configuration would use, and why: Megatron's integration, fused kernels, attention kernels, the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..config import TREE_CP_COMM_TYPES, AttnSpec
from ..kernels import choose
from ..launching import missing_package
from ..plan import (
    Cost,
    Shape,
    Topology,
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


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A configuration, in Megatron's terms."""

    cp: int
    tp: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    seq_len: int
    batch: int
    dtype: str
    cp_comm_type: str
    hierarchical: tuple[int, ...] | None
    topology: str | None
    backend: str
    normalization: str

    def __post_init__(self):
        check_heads(self.heads, self.kv_heads, self.tp)
        if self.cp > 1 and self.seq_len % (2 * self.cp):
            raise ValueError(
                f"--seq-len {self.seq_len} must be a multiple of 2 x --cp {self.cp}: every rank holds two chunks of "
                "equal length"
            )
        sizes = self.hierarchical or ()
        if self.cp > 1 and self.cp_comm_type.startswith("a2a+") and (len(sizes) != 2 or math.prod(sizes) != self.cp):
            raise ValueError(
                f"--cp-comm-type {self.cp_comm_type} needs --hierarchical-context-parallel-sizes U R with U x R = --cp "
                f"{self.cp}"
            )

    @property
    def ulysses(self) -> int:
        """Number of ranks over which heads are split by all-to-all."""
        if self.cp == 1 or not self.cp_comm_type.startswith("a2a"):
            return 1
        return self.cp if self.cp_comm_type == "a2a" else self.hierarchical[0]

    @property
    def shape(self) -> Shape:
        """Heads of one rank during attention."""
        return self.shape_over(self.tp * self.ulysses)

    def shape_over(self, ranks: int) -> Shape:
        """Heads of each of `ranks` ranks that share them."""
        return Shape(self.heads, self.kv_heads, self.head_dim, self.head_dim_v or self.head_dim).over(ranks)


def megatron(wanted: Wanted) -> list[Section]:
    """Megatron's integration, and its fused kernels; only what is wrong if megatron-core can't be used."""
    try:
        from ..integrations.megatron import compat

        version = compat.megatron_version()
        compat.attention_classes()
    except ImportError as error:
        return [
            Section("Megatron", [Finding("megatron-core", "unusable", missing_package(error) or str(error), MISSING)])
        ]
    return [_integration(wanted, version), _fusions(wanted)]


def _integration(wanted: Wanted, version: str) -> Section:
    """How `cp_comm_type` selects tree attention in this megatron-core."""
    from ..integrations.megatron import compat

    findings = [Finding("megatron-core", version, "has all that tree attention needs")]
    patched = compat.is_patched()
    flag = f"cp_comm_type {wanted.cp_comm_type!r}"
    if wanted.cp == 1:
        findings.append(
            Finding(flag, "not used", "--cp 1: Megatron's own attention, which needs no context parallelism")
        )
    elif patched and wanted.cp_comm_type in TREE_CP_COMM_TYPES:
        findings.append(Finding(flag, "works as it is", "this megatron-core is patched (patches/megatron-lm)"))
    elif wanted.cp_comm_type in TREE_CP_COMM_TYPES:
        way = "by install() in the program, --spec, or bash patches/apply.sh: docs/megatron-lm.md"
        findings.append(Finding(flag, "needs one line", way))
    else:
        way = "ours with --spec or use_tree_attention, else TransformerEngine's: docs/megatron-lm.md"
        findings.append(Finding(flag, "by the layer spec", way))
    if compat.misreads_cp_comm_type_list():
        note = "this release reads it off by one entry; install() and the patch correct that"
        findings.append(Finding("a list in cp_comm_type", "needs install()", note))
    return Section("Megatron", findings)


def _fusions(wanted: Wanted) -> Section:
    """Megatron's fused kernels, and the options that enable them."""
    from ..integrations.megatron import fusions as megatron_fusions

    findings, needs = [], set()
    for fusion in megatron_fusions.fusions(normalization=wanted.normalization):
        set_to = ", ".join(f"{name}={value}" for name, value in fusion.options.items())
        lacks = f"needs {' and '.join(fusion.needs)}" if fusion.needs else ""
        if megatron_fusions.GPU not in fusion.needs:
            needs |= {name for need in fusion.needs for name in megatron_fusions.HOW_TO_GET if name in need}
        note = "; ".join(part for part in (lacks, set_to and f"set {set_to}") if part)
        findings.append(Finding(fusion.name, fusion.by, note, OK if fusion.used else NOTE))
    problem = megatron_fusions.apex_problem()
    if problem:
        findings.append(Finding("apex", "another package", problem, MISSING))
    findings += [Finding(name, "how to get it", megatron_fusions.HOW_TO_GET[name], NOTE) for name in sorted(needs)]
    return Section("Megatron's fused kernels", findings)


def kernels(wanted: Wanted) -> Section:
    """The backend of the attention kernels."""
    device, dtype, shape = "cuda" if torch.cuda.is_available() else "cpu", DTYPES[wanted.dtype], wanted.shape
    q, k, v = (
        torch.empty(1, _ROWS, heads, dim, dtype=dtype, device=device)
        for heads, dim in (
            (shape.num_heads, shape.head_dim),
            (shape.num_heads_kv, shape.head_dim),
            (shape.num_heads_kv, shape.head_dim_v),
        )
    )
    what = f"{shape.num_heads} heads, {shape.num_heads_kv} KV heads, head_dim {shape.head_dim}, {wanted.dtype}"
    try:
        choice = choose(q, k, v, AttnSpec(softmax_scale=shape.head_dim**-0.5), wanted.backend)
    except ValueError as error:
        return Section("attention kernels", [Finding(what, "refused", str(error), MISSING)])
    slow = choice.name == "reference" and wanted.backend == "auto"
    return Section("attention kernels", [Finding(what, choice.name, choice.reason, NOTE if slow else OK)])


def _topology(wanted: Wanted) -> Topology:
    if wanted.topology is not None:
        return load_topology(wanted.topology)
    return default_topology("nccl" if torch.cuda.is_available() else "gloo")


def plan(wanted: Wanted, purpose: str) -> Section:
    """The planned schedule and its predicted cost. `purpose`: a key of `machine.NEEDED`."""
    findings, title = [], "plan"
    topology = _topology(wanted)
    # Megatron numbers ranks by tensor parallelism first: neighbours in the tree are tp ranks apart.
    hosts = [r * wanted.tp // topology.host_size for r in range(wanted.cp)]
    placement, shape = place(topology, hosts), wanted.shape_over(wanted.tp)
    source = "named" if wanted.topology else "assumed, since --topology names none"
    findings.append(Finding("topology", topology.name, f"{source}; ranks on {len(set(hosts))} of its hosts"))
    if wanted.ulysses > 1:
        findings.append(
            Finding("all-to-all", f"{wanted.ulysses} ranks", f"{_RUNS[wanted.cp_comm_type]}: heads are split")
        )
    if wanted.cp == 1:
        findings.append(Finding("tree", "1 rank", "nothing to exchange"))
        return Section(title, findings)
    word = DTYPES[wanted.dtype].itemsize
    if purpose == "deepspeed":
        shard = (
            wanted.batch * -(-wanted.seq_len // wanted.cp) * shape.num_heads_kv * (shape.head_dim + shape.head_dim_v)
        )
        decode = plan_decode(
            wanted.cp,
            rows=wanted.batch * shape.num_heads,
            head_dim_v=shape.head_dim_v,
            kv_bytes=shard * word,
            topology=topology,
            placement=placement,
        )
        findings.append(_cost_finding("decode", decode.schedule, decode.cost))
        findings.append(Finding("why", "", decode.reason))
        return Section(title, findings)
    second = wanted.cp_comm_type.removeprefix("a2a+")
    training = plan_training(
        wanted.cp,
        shape,
        batch=wanted.batch,
        seq_len=wanted.seq_len,
        bytes_per_word=word,
        topology=topology,
        placement=placement,
        schedule="ring" if second == "p2p" else "auto",
        ulysses_size=None if second == wanted.cp_comm_type == "tree" else wanted.ulysses,
        grid=(1, wanted.cp) if second == "all_gather" else None,
    )
    findings.append(_cost_finding("forward", str(training.forward), training.forward.cost))
    findings.append(_cost_finding("backward", str(training.backward), training.backward.cost))
    findings.append(Finding("why", "", training.reason))
    return Section(title, findings)


def _cost_finding(name: str, value: str, cost: Cost) -> Finding:
    sent, buffers = format_bytes(cost.bytes), format_bytes(cost.peak_bytes)
    return Finding(name, value, f"predicted {format_seconds(cost.time_s)} a layer, {sent} sent, {buffers} buffers")
