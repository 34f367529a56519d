"""Triton's own launchers take what the kernels are launched with: on a stand-in for the CUDA driver, nothing runs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

REPO = Path(__file__).resolve().parents[2]
PROGRAM = """
import ctypes, json, torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from megatron_tree.bench import race
from megatron_tree.bench.kernel_cases import KernelCase, inputs, ours
from megatron_tree.bench.low_precision import *
from megatron_tree.kernels import backends
from megatron_tree.kernels.triton import host


class Driver(CudaDriver):
    def __init__(self):
        super().__init__()
        self.get_current_device, self.get_current_stream = lambda: 0, lambda device=None: 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


triton.runtime.driver.set_active(Driver())
host.DEVICES = backends.ACCELERATORS = ("cpu",)
host._arch_of, host._multiprocessors_of = lambda index: "sm90", lambda index: 132
library = ctypes.CDLL("libcuda.so.1")
found, dtype = {}, torch.bfloat16


def count(name, call):
    before = [ctypes.c_long.in_dll(library, what).value for what in ("launches", "descriptors")]
    call()
    after = [ctypes.c_long.in_dll(library, what).value for what in ("launches", "descriptors")]
    found[name] = [b - a for a, b in zip(before, after)]


for name in ("64", "dropout", "alibi"):
    count(name, lambda: run_training(TRAINING[name], training_inputs(TRAINING[name], dtype, "cpu"), "triton"))
for name in ("plain", "int8", "window"):
    count(name, lambda: run_decoding(DECODING[name], decoding_inputs(DECODING[name], dtype, "cpu"), "triton"))
for kernel, tiles in (("fwd", "128x128 w8 s2 boxes"), ("dkdv", "64x128 w8 s2 with dq")):
    (tiles,) = (x for x in race.CANDIDATES[kernel] if x.label == tiles)
    for heads in ((2, 1), (2, 2)):
        given = inputs(KernelCase("bwd", 1, 256, *heads, 128), "cpu", dtype)
        with race.pinned(kernel, tiles):
            call = ours(KernelCase("bwd", 1, 256, *heads, 128), "triton", given)
            count(f"{kernel} {heads}", call)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_launchers_take_the_arguments(tmp_path):
    """Tuples of strides, descriptors, None: as on a GPU, for forward, delta, dq, dk and dv, decode and merge."""
    source, library = REPO / "tests" / "support" / "libcuda.c", tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", "-o", library, source], check=True)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(REPO), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    env |= {"TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {
        (4, 0): ("64", "dropout", "alibi"),
        (2, 0): ("plain", "int8", "window"),
        (4, 2): ("fwd (2, 1)", "fwd (2, 2)"),
        (3, 1): ("dkdv (2, 1)", "dkdv (2, 2)"),
    }  # launches and descriptors of each
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {name: list(counts) for counts, names in expected.items() for name in names}
