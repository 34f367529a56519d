"""The compiled kernels in the fast tests: a selection for each GPU, in a process of its own. `make ptx` runs all.

Training takes half of the time, so each GPU trains in one of the two halves of precision.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TRAINING = "tests/kernels/test_triton_low_precision.py::test_training"


@pytest.mark.without_ptx
@pytest.mark.parametrize(("arch", "left_out"), [("sm_80", "128-bf16"), ("sm_90", "window-fp16")])
def test_compiled_kernels(arch, left_out):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--ptx", arch, "-o", "cache_dir=.pytest_cache/ptx"]
    env = {name: x for name, x in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_INTERPRET"))}
    done = subprocess.run(
        [*command, "@tests/ptx/fast.txt", "--deselect", f"{TRAINING}[{left_out}]"],
        cwd=REPO,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
