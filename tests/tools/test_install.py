"""pip installs a wheel and an sdist into new environments, where every command runs; the extras go together."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from megatron_tree import __version__
from megatron_tree.__main__ import COMMANDS

REPO = Path(__file__).resolve().parents[2]
SOURCES = ("megatron_tree", "setup.cfg", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
BUILD = "from setuptools import build_meta; print(build_meta.build_{}('.'))"
EXTRAS = "megatron,deepspeed,hf,figures,serve"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def archive(request, tmp_path_factory):
    """Built of a copy of the checkout."""
    folder = tmp_path_factory.mktemp(request.param)
    for name in SOURCES:
        path = REPO / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder)
    call = [sys.executable, "-c", BUILD.format(request.param)]
    done = subprocess.run(call, cwd=folder, check=True, capture_output=True, text=True, timeout=200)
    return folder / done.stdout.split()[-1]


@pytest.fixture
def fresh(tmp_path):
    """(bin, run) of a new environment; run ends the test with the output of a program that fails."""
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*words):
        done = subprocess.run(list(map(str, words)), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return binaries, run


def test_a_new_environment(archive, fresh, tmp_path):
    """Its packages are those of this environment, by a .pth file, so that only ours is installed."""
    binaries, run = fresh
    run(binaries / "pip", "uninstall", "--yes", "setuptools")  # venv brings an old one
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(binaries / "pip", "install", "--no-deps", "--no-build-isolation", "--force-reinstall", archive)
    command = binaries / "megatron-tree"
    where = run(binaries / "python", "-c", "import megatron_tree; print(megatron_tree.__file__)").strip()
    assert where == str(packages / "megatron_tree" / "__init__.py")
    assert run(command, "--version") == f"megatron_tree {__version__}\n"
    for name in COMMANDS:
        assert run(command, name, "--help").startswith(f"usage: megatron-tree {name}")
    shape = ("--heads", 32, "--kv-heads", 8, "--head-dim", 128)
    assert "dgx_h100" in run(command, "plan", "--topology", "dgx_h100", "--nodes", 2, "--seq-len", "64k", *shape)
    doctor = run(command, "doctor", "--for", "functions", "--cp", 2, *shape)
    assert str(packages) in doctor, doctor
    assert (tmp_path / "venv/share/megatron_tree/constraints.txt").read_text() == (REPO / "constraints.txt").read_text()


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_extras_go_together(python, archive, fresh, tmp_path):
    """pip finds one version of everything that they ask for, also with the versions that are tested together."""
    binaries, run = fresh
    if python != f"{sys.version_info.major}.{sys.version_info.minor}":
        if (interpreter := shutil.which(f"python{python}")) is None:
            pytest.skip(f"Python {python} is not installed")
        run(interpreter, "-m", "venv", "--clear", tmp_path / "venv")
    if archive.suffix != ".whl":
        pytest.skip("an sdist has the requirements of the wheel")
    index = subprocess.run([binaries / "pip", "download", "--no-deps", "--dest", archive.parent, "einops"], timeout=300)
    if index.returncode:
        pytest.skip("no package index can be reached")
    for constraints in ([], ["--constraint", REPO / "constraints.txt"]):
        said = run(
            binaries / "pip", "install", "--dry-run", "--quiet", "--report", "-", *constraints, f"{archive}[{EXTRAS}]"
        )
        assert all(f'"name": "{name}"' in said for name in ("megatron-core", "deepspeed", "transformers", "llguidance"))
