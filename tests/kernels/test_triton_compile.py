"""The Triton kernels compile for GPUs that are not there, fit their shared memory, and keep within the spill budget."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from megatron_tree.kernels.triton import configs, resources

REPO = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
from megatron_tree.kernels.triton import configs, resources
cases = json.loads(sys.argv[1])
widths = resources.WIDTHS | resources.LATENT
print(json.dumps([resources.usage(k, widths[w], a, *d)._asdict() for k, w, a, *d in cases]))
"""
FAST = [  # the slow test has all
    ("fwd", 128, "sm90"),
    ("dkdv+dropout", 128, "sm90"),
    ("merge", 128, "sm90"),
    ("dq", 64, "gfx942"),
    (resources.LATENT_KERNEL, 576, "sm90"),
]


def usages(cases, cache):
    """Compiled in a process of its own: here the kernels may be decorated for the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env.update(PYTHONPATH=str(REPO), TRITON_CACHE_DIR=str(cache))
    command = [sys.executable, "-c", PROGRAM, json.dumps(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


COUNT_COMPILATIONS = """
import json, torch, triton
from triton.backends.compiler import GPUTarget
from megatron_tree.bench.kernel_cases import KernelCase, inputs, ours
from megatron_tree.bench.precompile import Machine, compile_only
from megatron_tree.config import AttnSpec, Dropout
from megatron_tree.kernels import KVCache, backends
from megatron_tree.kernels.triton import decode, host
from megatron_tree.layout import Segment

compile_only(Machine(GPUTarget("cuda", 90, 32), "sm90", 132))
compiled = []
triton.knobs.runtime.jit_post_compile_hook = lambda **kwargs: compiled.append(kwargs["repr"])
"""
GROWING_CACHE = """
spec, cache = AttnSpec(softmax_scale=0.1), torch.zeros(2, 70000, 2, 64, dtype=torch.bfloat16)
q = torch.zeros(2, 1, 8, 64, dtype=torch.bfloat16)
counts = []
for n in (16384, 16385, 17000, 20011, 33333, 64000, 70000):
    decode.attn_decode(q, KVCache(cache[:, :n], cache[:, :n]), spec)
    k = cache[:, :n].clone()  # another allocation: other strides
    decode.attn_decode(q, KVCache(k, k, lengths=torch.tensor([n, 3])), spec)
    counts.append(len(compiled))
print(counts)
"""


ALL_LAUNCHES = """
from megatron_tree.bench import kernel_cases, low_precision, precompile
triton.JITFunction.run = lambda self, *args, **kwargs: compiled.append(self.__name__)
cases = [*low_precision.TRAINING.values(), *low_precision.DECODING.values()]
cases += kernel_cases.GPU_CASES + kernel_cases.GPU_DECODING
launches = precompile.launches(cases, torch.bfloat16)
launches += precompile.race_launches(kernel_cases.GPU_CASES[:2], torch.bfloat16)
print(json.dumps([[error for error in map(precompile._try, launches) if error], sorted(set(compiled))]))
"""


SHARED_MEMORY = """
used = []
warm_up = triton.JITFunction.run
def run_and_note(self, *args, **kwargs):
    kernel = warm_up(self, *args, **kwargs)
    used.append(kernel.metadata.shared)
    return kernel
triton.JITFunction.run = run_and_note
for dtype in (torch.float32, torch.bfloat16):
    for s_q, heads in ((1, 8), (8, 8), (1, 128)):
        q, k = torch.zeros(1, s_q, heads, 256, dtype=dtype), torch.zeros(1, 1000, 1, 256, dtype=dtype)
        decode.attn_decode(q, KVCache(k, k), AttnSpec(softmax_scale=0.1))
print(json.dumps(used))
"""


SEEDS_AND_PAGES = """
q, k = (torch.zeros(1, 256, h, 16, dtype=torch.bfloat16) for h in (4, 2))
lse, counts = torch.zeros(1, 4, 256), []
whole = dict(q_segments=(Segment(0, 0, 256),), k_segments=(Segment(0, 0, 256),))
for dropout in (
    None, Dropout(0.1, 5), Dropout(0.1, 0), Dropout(0.5, 1), Dropout(0.25, 16, 1), Dropout(0.3, 0x80000000, 16),
    Dropout(0.3, 1 << 40, 3), Dropout(0.3, (1 << 63) - 1, 32),
):
    spec = AttnSpec(softmax_scale=0.1, dropout=dropout)
    host.attn_fwd(q, k, k, **whole, spec=spec)
    host.attn_bwd(q, q, k, k, lse, lse, **whole, spec=spec)
    counts.append(len(compiled))
spec, q, lengths = AttnSpec(softmax_scale=0.1), torch.zeros(3, 1, 8, 64, dtype=torch.bfloat16), torch.tensor([3, 4, 5])
for dtype in (torch.int8, torch.float8_e4m3fn):
    for n in (64, 100, 1001):
        k, scale = torch.zeros(n, 16, 2, 64, dtype=dtype), torch.zeros(n, 16, 2)
        table = torch.zeros(3, n // 2, dtype=torch.int32)
        decode.attn_decode(q, KVCache(k, k, scale, scale, lengths=lengths, block_table=table), spec)
        counts.append(len(compiled))
print(counts)
"""


def compilations(program, cache):
    """What a program prints that launches on a GPU that is not there and counts compilations."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env.update(PYTHONPATH=str(REPO), TRITON_CACHE_DIR=str(cache))
    command = [sys.executable, "-c", COUNT_COMPILATIONS + program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_growing_cache_does_not_recompile(tmp_path):
    """Two decode variants (with and without lengths) and the merge: three compilations, whatever the length."""
    counts = compilations(GROWING_CACHE, tmp_path)
    assert counts == [3] * len(counts), counts


@pytest.mark.slow
def test_decoding_as_it_is_launched_fits(tmp_path):
    """Wide heads in fp32, many queries, many heads of one KV head: a call launches what `resources` compiles."""
    used = compilations(SHARED_MEMORY, tmp_path)
    assert len(used) >= 6 and max(used) <= resources.SHARED_LIMIT["sm90"], used


@pytest.mark.slow
def test_every_launch_of_the_benchmark_can_be_made_without_memory(tmp_path):
    """At its real sizes, all candidates of the race among them."""
    errors, kernels = compilations(ALL_LAUNCHES, tmp_path)
    assert not errors
    training = ["attn_bwd_dkdv_kernel", "attn_bwd_dq_kernel", "attn_decode_kernel", "attn_fwd_kernel"]
    assert kernels == [*training, "delta_kernel", "merge_states_kernel"]


@pytest.mark.slow
def test_other_seeds_and_more_pages_do_not_recompile(tmp_path):
    """Forward, dq, dkdv without dropout and with it, whatever seed, probability and first head; the merge, and a decode
    kernel for int8 and one for fp8 (which needs sm89 or later), however many pages there are."""
    counts = compilations(SEEDS_AND_PAGES, tmp_path)
    assert counts == [3, *[6] * 7, 8, 8, 8, 9, 9, 9], counts


def check_occupancy(row):
    """As many blocks fit a multiprocessor as decoding counts on: by shared memory, and registers suffice for them."""
    columns = resources.WIDTHS[int(row["head_dim"].split("/")[0])]
    m, n, warps, stages = map(int, re.fullmatch(r"(\d+)x(\d+) w(\d+) s(\d+)", row["tiles"]).groups())
    blocks = configs.decode_blocks(configs.Tiles(m, n, warps, stages), columns, row["arch"])
    assert blocks == (configs._SHARED[row["arch"]] << 10) // (row["shared_bytes"] + configs._RESERVED), row
    assert blocks * warps * 32 * row["registers"] <= 65536, row


def check(rows):
    for row in rows:
        assert (row["kernel"] != "merge") <= row["shared_bytes"] <= resources.SHARED_LIMIT[row["arch"]], row
        assert 0 <= row["spill_bytes"] <= resources.SPILL_LIMIT, row
        assert 0 <= row["tensor_memory"] <= resources.TENSOR_MEMORY_LIMIT, row
        assert 16 <= row["registers"] <= (512 if row["arch"] == "gfx942" else 255), row
        if row["kernel"] == "merge" or row["dtype"] == "fp32":  # no matrix products, or none by matrix instructions
            continue
        assert row["matrix_ops"] > 0, row
        if row["arch"] == "sm90" and not row["kernel"].startswith("decode"):
            assert row["warpgroup_ops"] == row["matrix_ops"], row
        if row["kernel"] == "decode" and row["arch"] != "gfx942":
            check_occupancy(row)
        if row["arch"] != "gfx942":
            assert row["loop_instructions"] > 100, row
            assert row["loop_spills"] <= resources.LOOP_SPILL_LIMIT * row["loop_instructions"], row


def test_the_main_kernels_fit(tmp_path):
    check(usages(FAST, tmp_path))


def test_every_nvidia_gpu_has_a_row():
    """Consumer GPUs have less shared memory than the data centre's, and Blackwell's there no tensor memory."""
    known = {(8, 0): "sm80", (8, 6): "sm86", (8, 9): "sm86", (9, 0): "sm90", (10, 0): "sm100", (12, 0): "sm86"}
    assert {c: configs.arch_of(c) for c in known} == known


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", resources.TARGETS)
def test_every_row_of_the_table_fits(arch, tmp_path):
    cases = [(k, w, arch, d) for k in resources.KERNELS for w in resources.WIDTHS for d in ("bf16", "fp32")]
    cases += [(resources.LATENT_KERNEL, w, arch, "bf16") for w in resources.LATENT]
    check(usages(cases, tmp_path))
