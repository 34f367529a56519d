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
MATRIX = re.compile(r"\b(?:HMMA|HGMMA|IMMA|QGMMA|UTC\w*MMA)\b")
LOCAL = re.compile(r"\b(?:LDL|STL)\b")


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


def loops(sass: str) -> list[list[str]]:
    """The instructions of each innermost loop of a disassembled kernel."""
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.M)
    places = {int(at, 16): i for i, (at, _) in enumerate(lines)}
    found = []
    for i, (_, text) in enumerate(lines):
        jump = re.search(r"\bBRA\w*(?:\.\w+)*\s+(?:\S+,\s*)?`?\(?(?:0x)?([0-9a-f]+)\)?", text)
        if jump and (first := places.get(int(jump[1], 16))) is not None and first < i:
            found.append((first, i))
    inner = [x for x in found if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in found)]
    return [[text for _, text in lines[first : last + 1]] for first, last in inner]


def tool(name: str) -> str:
    """One of the programs that come with Triton."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def examine(kernel: str, head_dims, dtype: str, compiled, said: str) -> Code:
    """said: what ptxas has printed with -v."""
    path = Path(f"{os.getpid()}.cubin")
    path.write_bytes(compiled.asm["cubin"])
    sass = subprocess.run([tool("cuobjdump"), "-sass", path], capture_output=True, text=True, check=True).stdout
    inner = loops(sass)
    main = min([x for x in inner if any(map(MATRIX.search, x))] or inner, key=len, default=[])
    stack = re.search(r"(\d+) bytes stack frame", said)
    return Code(
        kernel,
        tuple(head_dims),
        dtype,
        compiled.metadata.shared,
        int(stack[1]) if stack else 0,
        bool(SERIALIZED.search(said)),
        sum(bool(LOCAL.search(x)) for x in main),
        len(main),
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

    capability = int(target.removeprefix("sm_"))
    compile_only(Machine(GPUTarget("cuda", capability, 32), configs.arch_of(divmod(capability, 10)), 132))
    triton.knobs.nvidia.dump_ptxas_log = True
    warm_up, now, seen = triton.JITFunction.run, {}, set()

    def run(self, *args, **options):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            compiled = warm_up(self, *args, **options)
        if self.__name__.startswith("attn_") and compiled.hash not in seen:
            seen.add(compiled.hash)
            name = f"{self.__name__} with tangents" if options.get("DUAL") else self.__name__
            rows = f", {now['heads']} heads" if "decode" in name else ""
            code = examine(name + rows, now["head_dims"], now["dtype"], compiled, said.getvalue())
            print(json.dumps(code._asdict()), flush=True)
        return compiled

    triton.JITFunction.run = run
    spec, whole = AttnSpec(softmax_scale=0.1), dict(q_segments=(Segment(0, 0, 512),), k_segments=(Segment(0, 0, 512),))
    for dtype in dtypes:
        for d, d_v in head_dims:
            now |= dict(head_dims=(d, d_v), dtype=dtype)
            of = dict(dtype=getattr(torch, dtype))
            if "training" in what or "tangents" in what:
                q, k, v, dout = (torch.zeros(1, 512, h, n, **of) for h, n in ((8, d), (2, d), (2, d_v), (8, d_v)))
            if "training" in what:
                lse = torch.zeros(1, 8, 512)
                host.attn_fwd(q, k, v, **whole, spec=spec)
                host.attn_bwd(dout, q, k, v, lse, lse, **whole, spec=spec)
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


if __name__ == "__main__":
    main(sys.argv[1], *map(json.loads, sys.argv[2:]))
