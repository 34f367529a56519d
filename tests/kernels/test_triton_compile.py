"""The Triton kernels compile for GPUs that are not there, and fit their memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from megatron_tree.core.kernels.triton import configs

REPO = Path(__file__).resolve().parents[2]
SHARED = {"sm80": 166912, "sm86": 101376, "sm90": 232448, "sm100": 232448, "gfx942": 65536}  # bytes of a block, at most
TENSOR_MEMORY = 512  # columns of sm_100, at most
TRAINING = {"attn_fwd_kernel", "attn_bwd_dq_kernel", "attn_bwd_dkdv_kernel"}
TRAINING |= {f"{name} with tangents" for name in TRAINING}
HEAD_DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]  # of q and k, of v
COUNT_COMPILATIONS = """
import json, sys, torch, triton
from triton.backends.compiler import GPUTarget
from megatron_tree.tools.calibrate.kernel_cases import KernelCase, inputs, ours
from megatron_tree.tools.bench.precompile import Machine, compile_only
from megatron_tree.core.spec import AttnSpec, Dropout
from megatron_tree.core.kernels import KVCache, backends
from megatron_tree.core.kernels.triton import decode, host, index_entries
from megatron_tree.core.layout import Segment

arch = sys.argv[1]
target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[2:]), 32)
compile_only(Machine(target, arch, 132))
compiled = []
name_of = lambda kernel, arguments: kernel.__name__ + " with tangents" * arguments.get("DUAL", False)
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
    for queries in (1, 3):
        lists = torch.zeros(2, queries, n // 100, dtype=torch.int32)
        decode.attn_decode(q.expand(-1, queries, -1, -1), KVCache(k, k, selected=lists), spec)
        positions = dict(q_positions=lists[..., 0].long(), k_positions=torch.zeros(2, n, dtype=torch.int64))
        keys = KVCache(k[:, :, :1].contiguous(), None, head_dim_v=64, **positions)
        index_entries(q.expand(-1, queries, -1, -1), torch.zeros(2, queries, 8), keys, 0.1)
    counts.append(len(compiled))
print(counts)
"""


ALL_LAUNCHES = """
from megatron_tree.tools.bench import kernels as bench_kernels
from megatron_tree.tools.bench import low_precision, precompile
triton.JITFunction.run = lambda self, *args, **kwargs: compiled.append(name_of(self, kwargs))
cases = [*low_precision.TRAINING.values(), *low_precision.DECODING.values()]
training, decoding = bench_kernels.CASES["cuda"]
cases += training + decoding
launches = precompile.launches(cases, torch.bfloat16)
launches += precompile.race_launches(training[:2], torch.bfloat16)
print(json.dumps([[error for error in map(precompile._try, launches) if error], sorted(set(compiled))]))
"""


MEMORY = """
used = []
warm_up = triton.JITFunction.run
def run_and_note(self, *args, **kwargs):
    kernel = warm_up(self, *args, **kwargs)
    matrix = "wgmma.mma_async" in kernel.asm.get("ptx", "")
    tensor_memory = getattr(kernel.metadata, "tmem_size", None) or 0
    used.append((name_of(self, kwargs), kernel.metadata.shared, tensor_memory, matrix))
    return kernel
triton.JITFunction.run = run_and_note
head_dims, dtypes, dropouts, rows = json.loads(sys.argv[2])
whole = dict(q_segments=(Segment(0, 0, 512),), k_segments=(Segment(0, 0, 512),))
for d, d_v in head_dims:
    for dtype in (getattr(torch, name) for name in dtypes):
        sizes = ((8, d), (2, d), (2, d_v), (8, d_v))
        q, k, v, dout = (torch.zeros(1, 512, h, width, dtype=dtype) for h, width in sizes)
        lse, lse2 = torch.zeros(1, 8, 512), torch.zeros(1, 8, 512, 2)
        for p in dropouts:
            spec = AttnSpec(softmax_scale=0.1, dropout=Dropout(p, 5) if p else None)
            host.attn_fwd(q, k, v, **whole, spec=spec)
            host.attn_bwd(dout, q, k, v, lse, lse, **whole, spec=spec)
            if not host.takes_duals(dtype, max(d, d_v)):
                continue
            duals = [torch.cat((x, x), -1) for x in (q, k, v, dout)]
            host.attn_jvp(*duals[:3], **whole, spec=spec)
            host.attn_bwd_jvp(duals[3], *duals[:3], lse2, lse2, **whole, spec=spec)
        for s_q, heads in rows:
            q = torch.zeros(1, s_q, heads, d, dtype=dtype)
            k, v = (torch.zeros(1, 1000, 1, width, dtype=dtype) for width in (d, d_v))
            decode.attn_decode(q, KVCache(k, v), AttnSpec(softmax_scale=0.1))
latents = torch.zeros(1, 1000, 1, 576, dtype=torch.bfloat16)
q = torch.zeros(1, 1, 64, 576, dtype=torch.bfloat16)
for lists in (None, torch.zeros(1, 1, 300, dtype=torch.int32)):
    decode.attn_decode(q, KVCache(latents, None, head_dim_v=512, selected=lists), AttnSpec(softmax_scale=0.1))
positions = torch.zeros(1, 4096, dtype=torch.int64)
seen = dict(head_dim_v=1, q_positions=positions[:, :1], k_positions=positions)
for dtype, d in ((torch.bfloat16, 256), (torch.float32, 128), (torch.float32, 256)):
    q, k = torch.zeros(1, 1, 128, d, dtype=dtype), torch.zeros(1, 4096, 1, d, dtype=dtype)
    index_entries(q, torch.zeros(1, 1, 128), KVCache(k, None, **seen), 1.0)
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


ANY_RANKS = """
from megatron_tree.core.kernels.triton import aligned
spec, counts = AttnSpec(softmax_scale=0.1, deterministic="ranks"), []
for (h, h_kv), tokens, own, batch in (
    ((8, 2), 1024, slice(0, 1024), 1), ((4, 1), 1024, slice(128, 301), 1), ((12, 3), 777, slice(5, 6), 2)
):
    q, k = (torch.zeros(batch, tokens, n, 24, dtype=torch.bfloat16) for n in (h, h_kv))
    keys, first = dict(k_segments=(Segment(0, 0, tokens),), spec=spec), own.start
    aligned.attn_fwd(q[:, own], k, k, q_segments=(Segment(0, first, own.stop - first),), **keys)
    lse = torch.zeros(batch, h, tokens)
    aligned.attn_bwd(q, q, k, k, lse, lse, q_segments=(Segment(0, 0, tokens),), **keys, own=(own, own))
    counts.append(len(compiled))
print(counts)
"""


PEERS = """
from megatron_tree.core.kernels.triton import merge_peers, put_state
counts, turns = [], torch.zeros(2, dtype=torch.int32)
for ranks, rows, first in ((2, 16, 0), (8, 1, 1), (3, 700, 33)):
    put_state(torch.zeros(rows, 129), torch.zeros(2, 1 << 20), turns)
    merge_peers(torch.zeros(ranks, dtype=torch.int64), turns, first, rows, 129, 1 << 20)
    counts.append(len(compiled))
print(counts)
"""


def compilations(program, cache, arch="sm90", *arguments):
    """What a program prints that launches on a GPU that is not there and counts compilations."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env.update(PYTHONPATH=str(REPO), TRITON_CACHE_DIR=str(cache))
    command = [sys.executable, "-c", COUNT_COMPILATIONS + program, arch, *map(json.dumps, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_growing_cache_does_not_recompile(tmp_path):
    """Decode variants with and without lengths and of selected slots, the merge, and the index: five compilations,
    whatever the length and the lists."""
    counts = compilations(GROWING_CACHE, tmp_path)
    assert counts == [5] * len(counts), counts


def test_the_same_code_on_any_number_of_ranks(tmp_path):
    """Forward, dq, dk with dv: whatever rows, heads and batch a rank has, so products have one shape and order."""
    assert compilations(ANY_RANKS, tmp_path) == [3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100"])
def test_merges_of_what_other_gpus_hold(arch, tmp_path):
    """A copy and a merge: two compilations, whatever the ranks and rows."""
    assert compilations(PEERS, tmp_path, arch) == [2, 2, 2]


@pytest.mark.slow
def test_every_launch_of_the_benchmark_can_be_made_without_memory(tmp_path):
    """At its real sizes, all candidates of the race among them."""
    errors, kernels = compilations(ALL_LAUNCHES, tmp_path)
    assert not errors
    assert kernels == [*sorted({*TRAINING, "attn_decode_kernel"}), "delta_kernel", "merge_states_kernel"]


@pytest.mark.slow
def test_other_seeds_and_more_pages_do_not_recompile(tmp_path):
    """Forward, dq, dkdv without dropout and with it, whatever seed, probability and first head; the merge, and a decode
    kernel for int8 and one for fp8 (which needs sm89 or later), however many pages there are."""
    counts = compilations(SEEDS_AND_PAGES, tmp_path)
    assert counts == [3, *[6] * 7, 8, 8, 8, 9, 9, 9], counts


def check_memory(used, arch):
    kernels = {*TRAINING, "attn_decode_kernel"}
    assert kernels < {name for name, *_ in used}
    for launch in used:
        name, shared, tensor_memory, _ = launch
        assert (name in kernels) <= shared <= SHARED[arch] and tensor_memory <= TENSOR_MEMORY, launch


@pytest.mark.slow
def test_the_main_kernels_fit(tmp_path):
    """And products of sm_90 are those of its warp groups, but for 32 keys at a time."""
    used = compilations(MEMORY, tmp_path, "sm90", ([(128, 128)], ["bfloat16"], [0.0], [(1, 8)]))
    check_memory(used, "sm90")
    assert all(matrix for name, *_, matrix in used if name in TRAINING - {"attn_bwd_dkdv_kernel with tangents"}), used


def test_every_nvidia_gpu_has_a_row():
    """Consumer GPUs have less shared memory than the data centre's, and Blackwell's there no tensor memory."""
    known = {(8, 0): "sm80", (8, 6): "sm86", (8, 9): "sm86", (9, 0): "sm90", (10, 0): "sm100", (12, 0): "sm86"}
    assert {c: configs.arch_of(c) for c in known} == known


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", SHARED)
def test_every_row_of_the_table_fits(arch, tmp_path):
    """Without dropout and with it; decoding with few queries, many, and many heads of one KV head."""
    options = (HEAD_DIMS, ["bfloat16", "float32"], [0.0, 0.1], [(1, 8), (8, 8), (1, 128)])
    check_memory(compilations(MEMORY, tmp_path, arch, options), arch)
