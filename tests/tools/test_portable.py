"""launch/portable.sh: the tests and their ranks compute as an older processor does."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.ranks import run_distributed

SCRIPT = Path(__file__).parents[2] / "launch" / "portable.sh"


def _machine(rank=0, world=1):
    """What this process computes with."""
    seen = dict(level=torch.backends.cpu.get_cpu_capability(), threads=torch.get_num_threads())
    seen["isa"] = os.environ.get("ONEDNN_MAX_CPU_ISA")
    if shutil.which("cc"):
        macros = ["cc", "-march=native", "-dM", "-E", "-x", "c", os.devnull]
        seen["c"] = "__AVX2__" in subprocess.run(macros, capture_output=True, text=True, check=True).stdout
    return seen


def test_ranks_run_as_the_session_does():
    """With as many threads as were asked for, else with one."""
    here, threads = _machine(), int(os.environ.get("TREE_TEST_THREADS") or 1)
    assert run_distributed(_machine, 2) == [here | {"threads": threads}] * 2
    print("seen", json.dumps(here))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86 processors")
def test_every_setting_takes_effect():
    inner = f"{__file__}::{test_ranks_run_as_the_session_does.__name__}"
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    command = ["bash", SCRIPT, "-s", "-n", "0", inner]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(re.search("seen (.*)", done.stdout)[1])
    assert (seen["level"], seen["threads"], seen["isa"]) == ("DEFAULT", 4, "SSE41") and not seen.get("c")
