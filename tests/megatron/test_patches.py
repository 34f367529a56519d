"""Other releases of Megatron-core: `--spec`, install() and patches/megatron-lm, two real ranks against one."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron_tree.integrations import megatron as tree
from megatron_tree.integrations.megatron import compat
from support.megatron_release import compare
from support.ranks import WORKER_ENV, run_distributed

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="patches are applied with git")

REPO = Path(__file__).resolve().parents[2]
APPLY = REPO / "patches" / "apply.sh"
PATCHES = sorted((REPO / "patches" / "megatron-lm").glob("*.patch"))
CHECKOUT = os.environ.get("MEGATRON_LM")
RELEASES = ["0.16.0", "0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.0", "0.19.2"]
WORLD = 2


def apply(folder, *options, cwd=None):
    command = ["bash", APPLY, "--megatron", folder, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=cwd)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*.py"))}


def changed(before, folder):
    after = contents(folder)
    assert after.keys() == before.keys()
    return sorted(path.name for path in after if after[path] != before[path])


def run_ranks(way, folder, store):
    """What both ranks of megatron_release.py print, with the megatron-core of `folder`."""
    paths = [str(folder), str(REPO), str(REPO / "tests")]
    env = {**os.environ, **WORKER_ENV, "PYTHONPATH": os.pathsep.join(paths)}
    program = [sys.executable, "-W", "ignore", str(REPO / "tests" / "support" / "megatron_release.py"), way]
    ranks = [
        subprocess.Popen(
            [*program, str(rank), str(WORLD), str(store)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        texts = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, texts, strict=True):
        assert rank.returncode == 0, text[-4000:]
    return [re.findall(r"^equal (\w+)$", text, flags=re.MULTILINE) for text in texts]


@pytest.fixture(scope="module")
def installed_copy(tmp_path_factory):
    """A copy of the installed megatron/core."""
    folder = tmp_path_factory.mktemp("megatron")
    source = Path(importlib.util.find_spec("megatron.core").origin).parent
    shutil.copytree(source, folder / "megatron" / "core")  # with its bytecode, or every rank compiles all of it
    return folder


def test_the_names_in_the_patches_exist():
    assert [path.stem for path in PATCHES] == sorted({release.rsplit(".", 1)[0] for release in RELEASES})
    for path in PATCHES:
        (table,) = re.findall(r"^\+CORE_ATTENTION_OF_CP_COMM_TYPE = (\{.*?\n\+\})", path.read_text(), re.DOTALL | re.M)
        table = ast.literal_eval(table.replace("\n+", "\n"))
        assert tuple(table) == compat.TREE_CP_COMM_TYPES
        for name in table.values():
            module, _, function = name.partition(":")
            assert module == tree.__name__
            assert callable(getattr(tree, function))


def test_the_patch_is_applied_and_reverted(installed_copy):
    before = contents(installed_copy)
    for said in ("patched", "nothing to do"):
        done = apply(installed_copy)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(said)
    assert {"attention.py", "multi_latent_attention.py", "spec_utils.py"} < set(changed(before, installed_copy))
    assert apply(installed_copy, "--check").returncode == 0
    assert apply(installed_copy, "--check", "--revert").returncode == 1
    assert apply(installed_copy, "--revert").stdout.startswith("took the patch out")
    assert changed(before, installed_copy) == []
    assert apply(installed_copy, "--revert").stdout.startswith("nothing to do")
    assert apply(installed_copy, "--check").returncode == 1


@pytest.mark.slow
def test_patched_megatron_needs_no_install(installed_copy, tmp_path):
    assert apply(installed_copy).returncode == 0
    assert run_ranks("patch", installed_copy, tmp_path / "store") == [["gqa", "mla"]] * WORLD
    assert apply(installed_copy, "--revert").returncode == 0


def test_spec_from_the_command_line():
    """`--spec megatron_tree.integrations.megatron get_gpt_layer_tree_spec`, as pretrain_gpt.py reads it."""
    assert run_distributed(compare, WORLD, "spec", fresh=True) == [["gqa", "mla", "gdn", "mamba"]] * WORLD


def test_inside_another_repository(installed_copy, tmp_path):
    """git would leave out silently what lies below the root of another repository."""
    folder = tmp_path / "project" / "site-packages"
    shutil.copytree(installed_copy, folder)
    subprocess.run(["git", "init", "-q", tmp_path / "project"], check=True)
    before = contents(folder)
    assert apply("site-packages", cwd=tmp_path / "project").returncode == 0
    assert "attention.py" in changed(before, folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--megatron", "nowhere"], "nowhere holds no megatron/core/package_info.py"),
        (["--megatron", "."], "is Megatron-core 0.15.1: there are patches for 0.16 0.17 0.18 0.19."),
    ],
)
def test_wrong_calls(options, message, tmp_path):
    info = tmp_path / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR = 0\nMINOR = 15\nPATCH = 1\n")
    done = subprocess.run(["bash", APPLY, *options], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert message in done.stderr


def test_other_sources_are_refused_and_left_alone(installed_copy, tmp_path):
    shutil.copytree(installed_copy, tmp_path / "m")
    attention = tmp_path / "m" / "megatron" / "core" / "transformer" / "attention.py"
    attention.write_text(attention.read_text().replace("self.core_attention = ", "self.other = "))
    before = contents(tmp_path / "m")
    done = apply(tmp_path / "m")
    assert done.returncode == 1
    assert "are not those of release" in done.stderr
    assert "attention.py" in done.stderr, "git says where"
    assert changed(before, tmp_path / "m") == []


def _download(release, folder):
    """Unpack a release's wheel: newer ones ask for Python 3.12, but their sources run on 3.11."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--python-version", "3.12"]
    command += ["--only-binary", ":all:", f"megatron-core=={release}", "--dest", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"megatron-core {release} can't be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    zipfile.ZipFile(wheels[0]).extractall(folder / "unpacked")
    return folder / "unpacked"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("release", RELEASES)
def test_release(release, tmp_path):
    """Losses and gradients of one rank, also with recurrent layers; the patch comes out without a trace."""
    folder = _download(release, tmp_path)
    minor = int(release.split(".")[1])
    for way, more in (("spec", []), ("install", ["dsa"])):
        assert run_ranks(way, folder, tmp_path / way) == [["gqa", "mla", "gdn", "mamba", *more]] * WORLD, way
    before = contents(folder)
    done = apply(folder)
    assert done.returncode == 0, done.stderr
    assert run_ranks("patch", folder, tmp_path / "patch") == [["gqa", "mla"] + ["gdn"] * (minor >= 19)] * WORLD
    assert apply(folder, "--revert").returncode == 0
    assert changed(before, folder) == []


@pytest.mark.slow
@pytest.mark.skipif(CHECKOUT is None, reason="set MEGATRON_LM to a checkout of Megatron-LM")
def test_checkout(tmp_path):
    """Of a branch that is newer than all releases: attention, without a patch."""
    for way, more in (("spec", []), ("install", ["dsa"])):
        kinds = run_ranks(way, CHECKOUT, tmp_path / way)[0]
        assert [kind for kind in kinds if kind not in ("gdn", "mamba")] == ["gqa", "mla", *more], way
