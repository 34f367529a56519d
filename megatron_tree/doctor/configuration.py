"""What a configuration, the options of the command line, would use, and why: Megatron's integration and attention
kernels."""

from __future__ import annotations

import torch

from ..config import TREE_CP_COMM_TYPES, AttnSpec, default_config
from ..kernels import choose
from ..launching import missing_package
from ..plan import Shape
from .findings import MISSING, NOTE, OK, Finding, Section

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ROWS = 16  # tokens of the tensors that a backend is chosen for; the choice does not depend on their number


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
