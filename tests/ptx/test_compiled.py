"""The compiled kernels in the fast tests: some for each GPU, in a process of its own. `make ptx` runs all on both."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
KERNELS = "tests/kernels/test_triton_low_precision.py::test_"
SELECTED = {
    "sm_80": [f"{KERNELS}training[window-fp16]", f"{KERNELS}decoding[plain-bf16]", f"{KERNELS}decoding[int8-bf16]"],
    "sm_90": [
        f"{KERNELS}training[128-bf16]",
        f"{KERNELS}training[tangents-bf16]",
        f"{KERNELS}decoding[fp8-bf16]",
        f"{KERNELS}decoding[mla-bf16]",
        "tests/ptx/test_faults.py::test_a_fault_of_every_kind_is_noticed",
        "tests/ptx/test_faults.py::test_what_lies_outside_of_a_tensor_is_not_read",
        "tests/ptx/test_boxes.py::test_faults[2]",
    ],
}


@pytest.mark.without_ptx
@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_compiled_kernels(arch):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--ptx", arch, "-o", "cache_dir=.pytest_cache/ptx"]
    env = {name: x for name, x in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_INTERPRET"))}
    pipes = dict(capture_output=True, text=True, timeout=280)
    done = subprocess.run([*command, *SELECTED[arch]], cwd=REPO, env=env, **pipes)
    said = done.stdout[-6000:] + done.stderr[-2000:]
    assert done.returncode == 0 and " passed" in said and " skipped" not in said, said
