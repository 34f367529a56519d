"""The compiled kernels in the fast tests: a selection for each GPU, in a process of its own. `make ptx` runs all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.without_ptx
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_compiled_kernels(arch):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--ptx", arch, "-o", "cache_dir=.pytest_cache/ptx"]
    env = {name: x for name, x in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_INTERPRET"))}
    done = subprocess.run(
        [*command, "@tests/ptx/fast.txt"], cwd=REPO, env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
