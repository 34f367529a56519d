"""What the doctor reports, in sections that are printed as tables: the machine (packages, devices, compiler, network),
and what a configuration, the options of the command line, would use, and why."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
from pathlib import Path
from typing import NamedTuple

import torch

import megatron_tree

from ...core.comm import shared
from ...core.config import TREE_CP_COMM_TYPES, default_config
from ...core.kernels import choose
from ...core.plan import Shape
from ...core.spec import AttnSpec
from ...launching import missing_package

OK, NOTE, MISSING = "ok", "note", "missing"
_MARKS = {OK: " ", NOTE: "-", MISSING: "!"}
# Distribution, what it is for.
PACKAGES = (
    ("torch", "everything"),
    ("triton", "our kernels on a GPU"),
    ("numpy", "everything"),
    ("megatron-core", "training with Megatron"),
    ("transformer-engine", "Megatron's fused layers"),
    ("apex", "Megatron's fused optimizer, norms and weight gradients"),
    ("deepspeed", "launching, ZeRO"),
    ("transformers", "Hugging Face models"),
    ("pyyaml", "topologies and configurations in files"),
)
NEEDED = {  # by framework, as in the command's --for
    "functions": ("torch", "numpy"),
    "megatron": ("torch", "numpy", "megatron-core"),
    "deepspeed": ("torch", "numpy", "deepspeed", "transformers"),
}
_EXTRA = {"megatron-core": "megatron", "deepspeed": "deepspeed", "transformers": "hf"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # as in the command's --dtype
_ROWS = 16  # tokens of the tensors that a backend is chosen for; the choice does not depend on their number


class Finding(NamedTuple):
    """One finding."""

    what: str
    value: str
    note: str = ""
    """The reason, or how to change it."""
    state: str = OK
    """"ok"; "note": works, but could be better; "missing": required by the configuration."""


class Section(NamedTuple):
    """Findings under one heading."""

    title: str
    findings: list[Finding]


def missing(sections: list[Section]) -> list[Finding]:
    """Findings that prevent the configuration from running."""
    return [f for section in sections for f in section.findings if f.state == MISSING]


def table(section: Section) -> str:
    """The heading, and a line for each finding."""
    lines, widths = [section.title], [max(len(f[i]) for f in section.findings) for i in range(2)]
    for f in section.findings:
        cells = [_MARKS[f.state], f.what.ljust(widths[0]), f.value.ljust(widths[1]), f.note]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def as_text(sections: list[Section]) -> str:
    """One table per section, then the list of what is missing."""
    lines = [line for section in sections for line in (table(section), "")]
    lacking = missing(sections)
    lines.append(f"missing ({len(lacking)}, marked ! above):" if lacking else "nothing that is needed is missing")
    return "\n".join([*lines, *(f"  {f.what}: {f.note or f.value}" for f in lacking)])


def tested_versions() -> dict[str, str]:
    """{distribution: tested version} from constraints.txt; empty if that file is not found."""
    files = [Path(megatron_tree.__file__).resolve().parents[1] / "constraints.txt"]
    try:
        installed = importlib.metadata.files("megatron_tree") or []
    except importlib.metadata.PackageNotFoundError:
        installed = []
    files += [Path(f.locate()) for f in installed if f.match("share/megatron_tree/constraints.txt")]
    for file in files:
        if file.is_file():
            return {
                name.lower(): version for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", file.read_text(), re.M)
            }
    return {}


def packages(purpose: str) -> Section:
    """What is installed. `purpose` is a key of `NEEDED`."""
    tested, findings = tested_versions(), []
    findings.append(Finding("megatron_tree", megatron_tree.__version__, str(Path(megatron_tree.__file__).parent)))
    for name, use in PACKAGES:
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            needed = name in NEEDED[purpose]
            extra = _EXTRA.get(name)
            way = f"pip install '.[{extra}]' in the checkout" if extra else f"pip install {name}"
            findings.append(
                Finding(name, "not installed", f"for {use}{f': {way}' * needed}", MISSING if needed else OK)
            )
            continue
        other = tested.get(name, installed) not in (installed, installed.split("+")[0])
        note = f"for {use}; tested with {tested[name]}" if other else f"for {use}"
        findings.append(Finding(name, installed, note, NOTE if other else OK))
    return Section("packages", findings)


def devices() -> Section:
    """Processor, GPU, compiler."""
    findings = [
        Finding("python", platform.python_version()),
        Finding("system", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"),
    ]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(i)
            kind = "ROCm" if torch.version.hip else f"CUDA {torch.version.cuda}"
            capability = f"{kind}, capability {facts.major}.{facts.minor}, {facts.total_memory / 1e9:.0f} GB"
            findings.append(Finding(f"GPU {i}", facts.name, capability))
    else:
        why = "this build of torch has no CUDA" if not torch.backends.cuda.is_built() else "torch sees no device"
        findings.append(Finding("GPU", "none", f"{why}; everything runs on the CPU with gloo, for tests", NOTE))
    compiler = next((path for name in ("c++", "g++", "clang++", "cc") if (path := shutil.which(name))), None)
    needed = torch.cuda.is_available()
    how = "Triton and Megatron's data sets compile with it: apt-get install g++ (Debian, Ubuntu)"
    findings.append(Finding("C++ compiler", compiler or "none", "" if compiler else how, _state(compiler, needed)))
    return Section("machine", findings)


def network(ranks: int) -> Section:
    """Communication backends and the environment variables that configure them, for this many ranks."""
    findings = []
    gloo, nccl = torch.distributed.is_gloo_available(), torch.distributed.is_nccl_available()
    gpu = torch.cuda.is_available()
    findings.append(
        Finding("gloo", "available" if gloo else "none", "for CPU ranks", _state(gloo, ranks > 1 and not gpu))
    )
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl and gpu else "available" if nccl else "none"
    findings.append(Finding("NCCL", version, "for GPU ranks", _state(nccl, ranks > 1 and gpu)))
    used = "nccl" if gpu and nccl else "gloo"
    if used == "gloo":
        why = shared.unavailable()
        note = f"small collectives are messages: {why}" if why else "for small collectives of CPU ranks of one host"
        findings.append(Finding("shared memory", "none" if why else "available", note, _state(not why, False)))
    findings.append(Finding("backend of the ranks", used, "what torch.distributed should be initialized with"))
    findings.append(_gloo_interface(ranks, used))
    threads = os.environ.get("OMP_NUM_THREADS")
    note = "" if threads else "on CPU ranks set it to the cores of one rank, else each rank starts a thread per core"
    findings.append(Finding("OMP_NUM_THREADS", threads or "not set", note, OK if threads or gpu else NOTE))
    return Section("network", findings)


def _gloo_interface(ranks: int, backend: str) -> Finding:
    variable, there = "GLOO_SOCKET_IFNAME", [name for _, name in socket.if_nameindex()]
    value = os.environ.get(variable)
    if not value:
        return Finding(variable, "not set", f"gloo chooses among {', '.join(there)}")
    wrong = [name for name in value.split(",") if name not in there]
    if not wrong:
        return Finding(variable, value)
    note = f"no such interface: {', '.join(wrong)}; ranks would hang. There are {', '.join(there)}"
    return Finding(variable, value, note, _state(None, ranks > 1 and backend == "gloo"))


def _state(there, needed: bool) -> str:
    return OK if there else MISSING if needed else NOTE


def megatron(cp: int, cp_comm_type: str) -> Section:
    """Megatron's integration; only what is wrong if megatron-core can't be used."""
    try:
        from ...integrations.megatron import compat

        version = compat.megatron_version()
        compat.attention_classes()
    except ImportError as error:
        why = missing_package(error) or str(error)
        return Section("Megatron", [Finding("megatron-core", "unusable", why, MISSING)])
    return _integration(cp, cp_comm_type, version)


def _integration(cp: int, cp_comm_type: str, version: str) -> Section:
    """How `cp_comm_type` selects tree attention in this megatron-core."""
    from ...integrations.megatron import compat

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
    """The backend of the attention kernels, for the heads of one of the tensor-parallel ranks."""
    device, backend = "cuda" if torch.cuda.is_available() else "cpu", default_config().backend
    shape = Shape(args.heads, args.kv_heads, args.head_dim, args.head_dim).over(args.tp)
    q, k = (
        torch.empty(1, _ROWS, heads, args.head_dim, dtype=DTYPES[args.dtype], device=device)
        for heads in (shape.num_heads, shape.num_heads_kv)
    )
    what = f"{shape.num_heads} heads, {shape.num_heads_kv} KV heads, head_dim {args.head_dim}, {args.dtype}"
    try:
        choice = choose(q, k, k, AttnSpec(softmax_scale=args.head_dim**-0.5), backend)
    except ValueError as error:
        return Section("attention kernels", [Finding(what, "refused", str(error), MISSING)])
    slow = choice.name == "reference" and backend == "auto"
    return Section("attention kernels", [Finding(what, choice.name, choice.reason, NOTE if slow else OK)])
