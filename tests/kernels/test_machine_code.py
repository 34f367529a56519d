"""What the assembler makes of the Triton kernels, for GPUs that are not there: they fit, products do not wait for one
another, and inner loops keep in registers what they need."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from support.machine_code import EIGHT_BITS, TF32, Code, amd_loops, loops

REPO = Path(__file__).resolve().parents[2]
SHARED = {"sm_80": 166912, "sm_86": 101376, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376}
SHARED["gfx942"] = 65536
HEAD_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]  # of q and k, of v
EVERYTHING = "training", "tangents", "decoding"


def codes(folder, *what) -> list[Code]:
    path = os.pathsep.join((str(REPO), str(REPO / "tests")))
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= dict(PYTHONPATH=path, TRITON_CACHE_DIR=str(folder / "cache"))
    command = [sys.executable, "-m", "support.machine_code", what[0], *map(json.dumps, what[1:])]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [Code(**json.loads(line)) for line in done.stdout.splitlines()]


def check(found: list[Code], arch: str, known: dict = {}) -> None:  # noqa: B006
    """known: (kernel, head dims, dtype) -> accesses to a thread's own memory in the loop that are put up with; fp16 has
    bf16's."""
    bad = []
    for code in found:
        dtype = "bfloat16" if code.dtype == "float16" else code.dtype
        local = known.get((code.kernel, *code.head_dims, dtype), 0)
        has_loop = code.instructions > 50
        if code.shared > SHARED[arch] or code.serialized or not has_loop or code.local > local:
            bad.append(code)
    assert not bad, "\n".join(map(str, bad))


def test_a_sample(tmp_path):
    """MLA's training on sm_90; decoding in fp32 of many heads where there is little shared memory, and from 8 bits on
    gfx942."""
    found = codes(tmp_path, "sm_90", [(192, 128)], ["bfloat16"], ["training"])
    assert [x.kernel for x in found] == ["attn_fwd_kernel", "attn_bwd_dq_kernel", "attn_bwd_dkdv_kernel"]
    check(found, "sm_90")
    found = codes(tmp_path, "sm_86", [(256, 256)], ["float32"], ["decoding"])
    assert {x.kernel for x in found} == {f"attn_decode_kernel, {n} heads" for n in (8, 64, 128)}
    check(found, "sm_86")
    found = codes(tmp_path, "gfx942", [(128, 128)], ["float16"], ["pages in 8 bits"])
    assert [x.kernel for x in found] == [f"attn_decode_kernel, 8 heads over {stored}" for stored in EIGHT_BITS]
    check(found, "gfx942")


def test_serialized_products_and_spills_are_noticed():
    """In the text of the assembler and of the disassembler."""
    sass = "\n".join(
        f"        /*{at:04x}*/                   {text} ;"
        for at, text in enumerate(
            (
                "MOV R1, R2",
                "LDL R3, [R1]",
                "HMMA.16816.F32 R4, R5, R6, R4",
                "@P0 BRA 0x1",
                "STL [R1], R3",
                "@!P1 BRA 0x0",
                "EXIT",
            )
        )
    )
    [inner] = loops(sass)
    assert inner[0].startswith("LDL") and inner[-1].startswith("@P0 BRA")
    amd = """
_kernel:
	s_load_dwordx2 s[4:5], s[0:1], 0x0
.LBB0_1:                                ; =>This Loop Header: Depth=1
	v_mov_b32_e32 v0, 0
.LBB0_2:
	scratch_load_dword v1, off, off
	v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
	s_cbranch_scc1 .LBB0_2
; %bb.3:
	s_cbranch_vccnz .LBB0_1
	s_endpgm
.Lfunc_end0:
	.size	_kernel, .Lfunc_end0-_kernel
"""
    [inner] = amd_loops(amd)
    assert [x.split()[0][:9] for x in inner] == ["scratch_l", "v_mfma_f3", "s_cbranch"]
    good = Code("k", (64, 64), "bfloat16", 1024, 0, False, 0, 100, 8)
    check([good], "sm_90")
    for change in (dict(shared=1 << 20), dict(serialized=True), dict(local=1), dict(instructions=0)):
        with pytest.raises(AssertionError):
            check([good._replace(**change)], "sm_90")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", [arch for arch in SHARED if arch != "gfx942"])
def test_fp32_on_tensor_cores(arch, tmp_path):
    """Three products of TF32 up to a head_dim of 192; none of wider heads and without torch's switch."""
    found = codes(tmp_path, arch, HEAD_DIMS[:3], ["float32"], [TF32])
    assert len(found) == 9
    check(found, arch, {("attn_bwd_dkdv_kernel", 192, 128, "float32"): 2} if arch == "sm_80" else {})
    assert all(x.products and x.products % 3 == 0 for x in found)
    plain = codes(tmp_path, arch, HEAD_DIMS[:1], ["float32"], ["training"])
    assert not any(x.products for x in plain + codes(tmp_path, arch, HEAD_DIMS[3:], ["float32"], [TF32]))


FEW = {  # accesses to memory of their own that tiles without any would be slower for
    "sm_80": {
        ("attn_fwd_kernel", 256, 256, "bfloat16"): 1,
        ("attn_bwd_dkdv_kernel with tangents", 128, 128, "float32"): 3,
    },
    "sm_90": {
        ("attn_bwd_dq_kernel with tangents", 128, 128, "float32"): 1,
        ("attn_decode_kernel, 64 heads", 256, 256, "bfloat16"): 1,
    },
    "sm_100": {
        ("attn_fwd_kernel", 192, 128, "bfloat16"): 11,
        **{(f"attn_decode_kernel, {heads} heads", 576, 512, "bfloat16"): 1 for heads in (64, 128)},
        ("attn_fwd_kernel with tangents", 128, 128, "float32"): 2,
        ("attn_bwd_dq_kernel with tangents", 128, 128, "float32"): 6,
    },
    "sm_120": {
        ("attn_decode_kernel, 128 heads", 256, 256, "bfloat16"): 2,
        ("attn_bwd_dq_kernel with tangents", 64, 64, "bfloat16"): 1,
        ("attn_fwd_kernel with tangents", 128, 128, "float32"): 2,
    },
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("arch", SHARED)
def test_every_head_size(arch, dtype, tmp_path):
    """Training, with tangents, and decoding for few and many heads of one KV head; in half precision from 8 bits and of
    latents, too."""
    found = codes(tmp_path, arch, HEAD_DIMS, [dtype], EVERYTHING)
    if dtype != "float32":
        found += codes(tmp_path, arch, HEAD_DIMS, [dtype], ["pages in 8 bits"])
        found += codes(tmp_path, arch, [(576, 512)], [dtype], ["decoding"])
    half = 4 * 9 + 3 + 4 * (len(EIGHT_BITS) - (arch in ("sm_80", "sm_86")))
    assert len({(x.kernel, *x.head_dims) for x in found}) == (4 * 6 + 2 * 3 if dtype == "float32" else half)
    check(found, arch, FEW.get(arch, {}))
