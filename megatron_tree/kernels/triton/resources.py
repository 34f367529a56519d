"""Compile the kernels, without a GPU, and read what they use: registers, spills, shared memory.

    python -m megatron_tree.kernels.triton.resources \\
        --kernel fwd dq dkdv decode merge --head-dim 128 576 --out docs/kernel-resources.md

Every row of the table in configs.py is compiled as a launch would compile it; tests/kernels/test_triton_compile.py
fails when one exceeds the limits below.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import tempfile
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import bwd, common, configs, decode, fwd, host, merge

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm86": GPUTarget("cuda", 86, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm80": 166912, "sm86": 101376, "sm90": 232448, "sm100": 232448, "gfx942": 65536}  # bytes per block
TENSOR_MEMORY_LIMIT = 512  # columns, sm_100
SPILL_LIMIT = 600  # bytes a thread may keep in local memory
LOOP_SPILL_LIMIT = 0.06  # share of the instructions of the loop over unmasked tiles that may access it
WIDTHS = {64: (64, 64), 128: (128, 128), 192: (192, 128), 256: (256, 256)}  # head_dim of q and k, of v (192/128: MLA)
LATENT = {576: (576, 512)}  # keys that hold their values, in decoding only
_BIN = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"


ABOUT = f"""bf16, causal, compiled by triton {triton.__version__}. loop: instructions of the loop over tiles that need
no mask; loop spills: those of them that access spilled registers. Other kernels and head dims, and tiles with dropout:
`python -m megatron_tree.kernels.triton.resources --help`.
"""


class KernelUsage(NamedTuple):
    """The resources of one compiled kernel; -1 where the tool does not report one.

    The loop is the one over tiles that need no mask, where the time goes: its instructions, and how many of them read
    or write spilled registers.
    """

    kernel: str
    dtype: str
    head_dim: str
    arch: str
    tiles: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix_ops: int
    warpgroup_ops: int = 0  # those of them that only sm_90 and sm_100 have
    tensor_memory: int = 0
    loop_instructions: int = -1
    loop_spills: int = -1


def constants(kernel: str, dims: tuple[int, int], tiles: configs.Tiles) -> dict:
    """The constexpr arguments of a launch: causal, GQA 4:1."""
    heads = host.head_dims(*dims)
    mask = dict(CAUSAL=True, WINDOW=False, SOFTCAP=False, DROPOUT=kernel.endswith(_DROPOUT))
    if KERNELS[kernel] is decode.attn_decode_kernel:
        flags = dict(
            HAS_LENGTHS=True, HAS_POSITIONS=False, WINDOW=False, SOFTCAP=False, PAGE=0, SCALED=False, NARROW=False
        )
        return dict(GROUP=8, **heads, M=tiles.m, N=tiles.n, **flags, STAGES=tiles.stages)
    if kernel == "merge":
        return dict(E=dims[1], COLS=triton.next_power_of_2(dims[1]), STATES=32)
    more = {"SPECIALIZED": tiles.specialized} if kernel.startswith("fwd") else {}
    return dict(GROUP=4, **heads, M=tiles.m, N=tiles.n, **mask, STAGES=tiles.stages, **more)


_DROPOUT = "+dropout"
KERNELS = {
    "fwd": fwd.attn_fwd_kernel,
    "dq": bwd.attn_bwd_dq_kernel,
    "dkdv": bwd.attn_bwd_dkdv_kernel,
    "fwd+dropout": fwd.attn_fwd_kernel,
    "dq+dropout": bwd.attn_bwd_dq_kernel,
    "dkdv+dropout": bwd.attn_bwd_dkdv_kernel,
    "decode": decode.attn_decode_kernel,
    "decode, 64 rows": decode.attn_decode_kernel,
    "decode, 128 rows": decode.attn_decode_kernel,
    "merge": merge.merge_states_kernel,
}
ROWS = {"decode": 8, "decode, 64 rows": 64, "decode, 128 rows": 128, "merge": 8}  # that share a KV head
LATENT_KERNEL = "decode, 64 rows"
_FP32 = {"OUT", "LSE", "LSE2", "DELTA", "DQ", "DK", "DV", "STATE", "IN"}
_FLOATS = {"scale", "softcap", "keep_weight"}
_INT32 = {"q_tiles", "k_tiles", "k_segments", "q_segments"}
_BY_16 = [["tt.divisibility", 16]]
_UNUSED = {"Q_POS", "K_POS", "BLOCK_TABLE", "K_SCALE", "V_SCALE", "SLOPES"}  # None in this launch


def compile_kernel(kernel: str, dims: tuple[int, int], arch: str, dtype: str = "bf16"):
    """The compiled kernel for head dims (of q and k, of v), as a launch with inputs in bf16 or fp32 would have it."""
    itemsize, width = 4 if dtype == "fp32" else 2, host.head_width(*dims)
    if kernel in ROWS:
        tiles = configs.decode_tiles(ROWS[kernel] if dtype == "bf16" else 16, width, arch, itemsize)
    else:
        dropout = kernel.endswith(_DROPOUT)
        tiles = configs.tiles(kernel.removesuffix(_DROPOUT), width, arch, itemsize, dropout)
    values = constants(kernel, dims, tiles)
    function = KERNELS[kernel]
    signature, attributes = {}, {}
    for i, parameter in enumerate(function.params):
        name = parameter.name
        if parameter.is_constexpr or name in _UNUSED:
            signature[name] = "constexpr"
            values.setdefault(name, None)
        elif name.endswith("_BOXES"):
            box = f"{dtype}[1, {tiles.n}, 1, {values['E0' if name[0] == 'V' else 'D0']}]"
            if name == "DQ_BOXES":
                box = f"fp32[1, {tiles.m}, 1, {values['D0']}]"
            signature[name] = f"tensordesc<{box}>"
            if not (tiles.fused if name == "DQ_BOXES" else tiles.boxes):
                signature[name], values[name] = "constexpr", None
        elif name == "LENGTHS":
            signature[name] = "*i64"
        elif name in _INT32:
            signature[name] = "*i32"
        elif name in _FP32:
            signature[name] = "*fp32"
        elif name in ("Q", "K", "V", "DOUT"):
            signature[name] = f"*{dtype}"
        elif name in _FLOATS:
            signature[name] = "fp32"
        elif name.endswith("_strides"):
            signature[name] = ("i32",) * (2 if name in ("lse_strides", "scales_strides") else 3)
            attributes |= {(i, axis): _BY_16 for axis in range(len(signature[name]))}
        else:
            signature[name] = "i32"
        if signature[name][0] == "*" or (name.endswith("_stride") and not parameter.do_not_specialize):
            attributes[(i,)] = _BY_16
    source = ASTSource(fn=function, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return triton.compile(source, target=TARGETS[arch], options=options), tiles


def usage(kernel: str, dims: tuple[int, int], arch: str, dtype: str = "bf16") -> KernelUsage:
    """Compile and read the resources."""
    compiled, tiles = compile_kernel(kernel, dims, arch, dtype)
    shape = "-" if kernel == "merge" else tiles.label
    dim = f"{dims[0]}" if dims[0] == dims[1] else f"{dims[0]}/{dims[1]}"
    if arch.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        found = {k: re.search(rf"\.{k}:\s*(\d+)", text) for k in ("vgpr_count", "vgpr_spill_count")}
        registers, spills = (int(m.group(1)) if m else -1 for m in found.values())
        matrix = text.count("v_mfma")
        return KernelUsage(kernel, dtype, dim, arch, shape, registers, 4 * spills, compiled.metadata.shared, matrix)
    registers, spills = _nvidia_usage(compiled, arch)
    ptx = compiled.asm["ptx"]
    warpgroup = ptx.count("wgmma.mma_async") + ptx.count("tcgen05.mma")
    matrix = warpgroup + ptx.count("mma.sync")
    loop = _main_loop(compiled.asm["cubin"])
    local = sum(instruction.startswith(("LDL", "STL")) for instruction in loop)
    shared, tensor_memory = compiled.metadata.shared, getattr(compiled.metadata, "tmem_size", None) or 0
    found = registers, spills, shared, matrix, warpgroup, tensor_memory, len(loop), local
    return KernelUsage(kernel, dtype, dim, arch, shape, *found)


def _nvidia_usage(compiled, arch: str) -> tuple[int, int]:
    """(registers, spilled bytes) as ptxas reports them."""
    ptx = compiled.asm["ptx"]
    tool = _BIN / ("ptxas-blackwell" if arch == "sm100" else "ptxas")
    name = re.search(r"\.target (sm_\w+)", ptx).group(1)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [str(tool), "-v", f"--gpu-name={name}", str(path), "-o", str(path.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = (re.findall(p, said) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    return max(map(int, registers), default=-1), max(map(int, spills), default=-1)


def _main_loop(cubin: bytes) -> list[str]:
    """The instructions of the loop over unmasked tiles: the shortest innermost one that has matrix products."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        said = subprocess.run([str(_BIN / "nvdisasm"), "-c", str(path)], capture_output=True, text=True, check=True)
    code, labels, loops = [], {}, []
    for line in said.stdout.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label.group(1)] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*(\S.*?);", line):
            code.append(found.group(1))
            back = re.match(r"BRA.*`\((\.L_x_\d+)\)", code[-1])
            if back and back.group(1) in labels:
                loops.append(code[labels[back.group(1)] :])
    return min((x for x in loops if any("MMA" in op for op in x)), key=len, default=[])


def table(arches, kernels=tuple(KERNELS), widths=(*WIDTHS, *LATENT)) -> list[KernelUsage]:
    """KernelUsage of every row asked for."""
    assert not common.INTERPRET.value, "unset TRITON_INTERPRET: the interpreter compiles nothing"
    found = [usage(k, WIDTHS[w], a) for a in arches for k in kernels for w in widths if w in WIDTHS]
    return found + [usage(LATENT_KERNEL, LATENT[w], a) for a in arches for w in widths if w in LATENT]


def as_markdown(rows: list[KernelUsage]) -> str:
    """A table for docs/."""
    columns = "kernel", "head_dim", "arch", "tiles", "registers", "spilled bytes", "shared bytes", "loop", "loop spills"
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    lines += [
        f"| {r.kernel} | {r.head_dim} | {r.arch} | {r.tiles} | {r.registers} | {r.spill_bytes} | {r.shared_bytes} "
        f"| {_or_dash(r.loop_instructions)} | {_or_dash(r.loop_spills)} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def _or_dash(number: int) -> str:
    return "-" if number < 0 else str(number)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--head-dim", nargs="+", type=int, choices=(*WIDTHS, *LATENT), default=[*WIDTHS, *LATENT])
    parser.add_argument("--out", type=pathlib.Path, help="also write the table to this Markdown file")
    args = parser.parse_args()
    text = as_markdown(table(args.arch, args.kernel, args.head_dim))
    print(text, end="")
    if args.out:
        args.out.write_text(f"# Resources of the Triton kernels\n\n{ABOUT}\n{text}")


if __name__ == "__main__":
    main()
