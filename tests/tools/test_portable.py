"""launch/portable.sh: the tests and their ranks run with what it names, and it says what has failed."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.ranks import run_distributed

SCRIPT = Path(__file__).parents[2] / "launch" / "portable.sh"
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86 processors")


def _machine(rank=0, world=1):
    """What this process computes with."""
    seen = dict(level=torch.backends.cpu.get_cpu_capability(), threads=torch.get_num_threads())
    seen |= dict(cores=len(os.sched_getaffinity(0)), isa=os.environ.get("ONEDNN_MAX_CPU_ISA"))
    if shutil.which("cc"):
        macros = ["cc", "-march=native", "-dM", "-E", "-x", "c", os.devnull]
        seen["c"] = "__AVX2__" in subprocess.run(macros, capture_output=True, text=True, check=True).stdout
    return seen


def test_ranks_run_as_the_session_does():
    """With as many threads as were asked for, else with one."""
    here, threads = _machine(), int(os.environ.get("TREE_TEST_THREADS") or 1)
    assert run_distributed(_machine, 2) == [here | {"threads": threads}] * 2
    print("seen", json.dumps(here))


def _run(*options):
    command = ["bash", SCRIPT, *options]
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@on_x86
def test_each_environment_takes_effect():
    inner = f"{__file__}::{test_ranks_run_as_the_session_does.__name__}"
    status, output = _run("--on", "default/4", "--on", "none/3/core", "-s", "-n", "0", inner)
    assert status == 0, output
    low, pinned = (json.loads(line.partition("seen ")[2]) for line in output.splitlines() if "seen {" in line)
    assert (low["level"], low["threads"], low["isa"]) == ("DEFAULT", 4, "SSE41") and not low.get("c")
    assert (pinned["threads"], pinned["isa"], pinned["cores"]) == (3, None, 1)
    ends = [line.split()[:2] for line in output.splitlines()[-2:]]
    assert ends == [["default/4", "passed"], ["none/3/core", "passed"]]


def test_a_failure_is_told():
    status, output = _run("--on", "none/1", "-n", "0", "tests/no_such_file.py")
    assert status == 1
    assert output.splitlines()[-1] == "none/1         FAILED  ERROR: file or directory not found: tests/no_such_file.py"
