"""What the assembler makes of the compiled Triton kernels, for GPUs that are not there; a program of its own:

    python -m support.machine_code sm_90 '[[128, 128]]' '["bfloat16"]' '["training"]'

prints a line of JSON for each kernel, a `Code`.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

SERIALIZED = re.compile(r"\(C75(?:10|12)\)")  # wgmma of sm_90 that wait for one another
TF32 = "tf32x3"  # of fp32: training with torch's switch for TF32 on
MATRIX = re.compile(r"\b(?:HMMA|HGMMA|IMMA|QGMMA|UTC\w*MMA|v_mfma\w*)\b")
LOCAL = re.compile(r"\b(?:LDL|STL|scratch_(?:load|store)\w*)\b")
EIGHT_BITS = {"int8": "sm_80", "float8_e4m3fn": "sm_89"}  # of pages, and the first GPU that has them


class Code(NamedTuple):
    """A kernel's."""

    kernel: str
    head_dims: tuple[int, int]
    dtype: str
    shared: int
    """Bytes of a block's shared memory."""
    stack: int
    """Bytes of a thread's stack."""
    serialized: bool
    """Whether ptxas says that wgmma instructions wait for one another."""
    local: int
    """Loads and stores of a thread's own memory, which spilled registers are in, in the shortest inner loop with matrix
    products (fp32: in the shortest inner loop): the one over unmasked tiles."""
    instructions: int
    """Of that loop."""
    products: int
    """Of them, those of matrix units."""


def loops(sass: str) -> list[list[str]]:
    """The instructions of each innermost loop of a disassembled kernel."""
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.M)
    places = {int(at, 16): i for i, (at, _) in enumerate(lines)}
    found = []
    for i, (_, text) in enumerate(lines):
        jump = re.search(r"\bBRA\w*(?:\.\w+)*\s+(?:\S+,\s*)?`?\(?(?:0x)?([0-9a-f]+)\)?", text)
        if jump and (first := places.get(int(jump[1], 16))) is not None and first < i:
            found.append((first, i))
    return _innermost(found, [text for _, text in lines])


def amd_loops(assembly: str) -> list[list[str]]:
    """The same of a kernel as LLVM writes it for AMD's GPUs."""
    lines, places, found = [], {}, []
    for line in assembly.split("\n.Lfunc_end")[0].splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            places[label[1]] = len(lines)
        elif text := re.match(r"\t([a-z]\w+.*)", line):
            jump = re.match(r"s_c?branch\w* (\.LBB\w+)", text[1])
            if jump and jump[1] in places:
                found.append((places[jump[1]], len(lines)))
            lines.append(text[1])
    return _innermost(found, lines)


def _innermost(loops: list[tuple[int, int]], lines: list[str]) -> list[list[str]]:
    """loops: the first and the last line of each."""
    inner = [x for x in loops if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return [lines[first : last + 1] for first, last in inner]


def tool(name: str) -> str:
    """One of the programs that come with Triton."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def examine(kernel: str, head_dims, dtype: str, compiled, said: str) -> Code:
    """said: what ptxas has printed with -v."""
    if "amdgcn" in compiled.asm:
        inner = amd_loops(compiled.asm["amdgcn"])
        stack = re.search(r"\.private_segment_fixed_size: (\d+)", compiled.asm["amdgcn"])
    else:
        path = Path(f"{os.getpid()}.cubin")
        path.write_bytes(compiled.asm["cubin"])
        sass = subprocess.run([tool("cuobjdump"), "-sass", path], capture_output=True, text=True, check=True).stdout
        inner, stack = loops(sass), re.search(r"(\d+) bytes stack frame", said)
    main = min([x for x in inner if any(map(MATRIX.search, x))] or inner, key=len, default=[])
    return Code(
        kernel,
        tuple(head_dims),
        dtype,
        compiled.metadata.shared,
        int(stack[1]) if stack else 0,
        bool(SERIALIZED.search(said)),
        sum(bool(LOCAL.search(x)) for x in main),
        len(main),
        sum(bool(MATRIX.search(x)) for x in main),
    )


def main(target: str, head_dims: list, dtypes: list[str], what: list[str]) -> None:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from megatron_tree.core.kernels import KVCache
    from megatron_tree.core.kernels.triton import configs, decode, host
    from megatron_tree.core.layout import Segment
    from megatron_tree.core.spec import AttnSpec
    from megatron_tree.tools.bench.precompile import Machine, compile_only

    if target == "gfx942":
        machine = Machine(GPUTarget("hip", target, 64), target, 304)
    else:
        capability = int(target.removeprefix("sm_"))
        machine = Machine(GPUTarget("cuda", capability, 32), configs.arch_of(divmod(capability, 10)), 132)
    compile_only(machine)
    triton.knobs.nvidia.dump_ptxas_log = True
    warm_up, now, seen = triton.JITFunction.run, {}, set()

    def run(self, *args, **options):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            compiled = warm_up(self, *args, **options)
        if self.__name__.startswith("attn_") and compiled.hash not in seen:
            seen.add(compiled.hash)
            name = f"{self.__name__} with tangents" if options.get("DUAL") else self.__name__
            rows = f", {now['heads']} heads" if "decode" in name else ""
            code = examine(
                name + rows + now.get("pages", ""), now["head_dims"], now["dtype"], compiled, said.getvalue()
            )
            print(json.dumps(code._asdict()), flush=True)
        return compiled

    triton.JITFunction.run = run
    spec, whole = AttnSpec(softmax_scale=0.1), dict(q_segments=(Segment(0, 0, 512),), k_segments=(Segment(0, 0, 512),))
    for dtype in dtypes:
        for d, d_v in head_dims:
            now |= dict(head_dims=(d, d_v), dtype=dtype)
            of = dict(dtype=getattr(torch, dtype))
            if {"training", TF32, "tangents"} & set(what):
                q, k, v, dout = (torch.zeros(1, 512, h, n, **of) for h, n in ((8, d), (2, d), (2, d_v), (8, d_v)))
            if TF32 in what or "training" in what:
                torch.set_float32_matmul_precision("high" if TF32 in what else "highest")
                lse = torch.zeros(1, 8, 512)
                host.attn_fwd(q, k, v, **whole, spec=spec)
                host.attn_bwd(dout, q, k, v, lse, lse, **whole, spec=spec)
                torch.set_float32_matmul_precision("highest")
            if "tangents" in what and host.takes_duals(of["dtype"], max(d, d_v)):
                q, k, v, dout = (torch.cat((x, x), -1) for x in (q, k, v, dout))
                lse = torch.zeros(1, 8, 512, 2)
                host.attn_jvp(q, k, v, **whole, spec=spec)
                host.attn_bwd_jvp(dout, q, k, v, lse, lse, **whole, spec=spec)
            for heads in (8, 64, 128) if "decoding" in what else ():
                now["heads"] = heads
                latent = d > 256
                k = torch.zeros(1, 1000, 1, d, **of)
                v = None if latent else torch.zeros(1, 1000, 1, d_v, **of)
                cache = KVCache(k, v, head_dim_v=d_v) if latent else KVCache(k, v)
                decode.attn_decode(torch.zeros(1, 1, heads, d, **of), cache, spec)
            for stored in EIGHT_BITS if "pages in 8 bits" in what else ():
                if target.startswith("sm_") and int(target[3:]) < int(EIGHT_BITS[stored][3:]):
                    continue
                now |= dict(heads=8, pages=f" over {stored}")
                k, v = (torch.zeros(40, 64, 1, n, dtype=getattr(torch, stored)) for n in (d, d_v))
                scale, table = torch.ones(40, 64, 1), torch.zeros(1, 30, dtype=torch.int32)
                cache = KVCache(k, v, scale, scale, lengths=torch.tensor([1000]), block_table=table)
                decode.attn_decode(torch.zeros(1, 1, 8, d, **of), cache, spec)
                del now["pages"]


if __name__ == "__main__":
    main(sys.argv[1], *map(json.loads, sys.argv[2:]))
