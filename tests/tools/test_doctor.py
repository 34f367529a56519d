"""`megatron-tree doctor`: its text, its exit status, and that its fusions are what Megatron takes."""

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys

import pytest
import torch

from megatron_tree.doctor import machine
from megatron_tree.doctor.command import EXAMPLES, main
from megatron_tree.doctor.findings import missing
from megatron_tree.integrations.megatron import fusions as megatron_fusions

FUNCTIONS = ["--for", "functions"]


def run(capsys, *options):
    """(exit status, what it printed, what it complained of)."""
    status = main([str(option) for option in options])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def lines(text, start):
    """What a line of the table says after its first cell."""
    return [line[3:].removeprefix(start).strip() for line in text.splitlines() if line[3:].startswith(start)]


@pytest.fixture
def without(monkeypatch):
    """Make distributions look as if they were not installed."""
    version = importlib.metadata.version
    hidden = set()

    def found(name):
        if name in hidden:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", found)
    return hidden.update


def test_all_is_well_without_frameworks(capsys, without):
    without(["megatron-core", "deepspeed", "transformers"])
    status, out, _ = run(capsys, *FUNCTIONS)
    assert status == 0
    assert [line for line in out.splitlines() if line and not line.startswith((" ", "-", "!"))] == [
        "packages",
        "machine",
        "network",
        "attention kernels",
        "plan",
        "nothing that is needed is missing",
    ]
    assert lines(out, "torch ")[0].startswith(torch.__version__)
    (kernel,) = lines(out, "32 heads, 32 KV heads, head_dim 128, bf16")
    assert kernel.startswith("triton" if torch.cuda.is_available() else "aten")
    (forward,) = lines(out, "forward")
    assert forward.startswith(("grid ", "heads over ")) and "predicted" in forward
    assert lines(out, "why")[0].startswith("forward on ")


def test_megatron(capsys):
    pytest.importorskip("megatron.core")
    status, out, _ = run(capsys, "--cp", 4, "--tp", 2, "--heads", 16, "--kv-heads", 4)
    assert status == 0
    assert "docs/megatron-lm.md" in lines(out, "cp_comm_type 'tree'")[0]
    assert lines(out, "8 heads, 2 KV heads, head_dim 128, bf16"), "a rank's own heads"
    assert "install()" in lines(out, "a list in cp_comm_type")[0]
    assert "gradient_accumulation_fusion=" in lines(out, "weight gradients added up")[0]


def test_megatron_patched_and_too_old(capsys, monkeypatch):
    spec_utils = pytest.importorskip("megatron.core.transformer.spec_utils")
    monkeypatch.setattr(spec_utils, "CORE_ATTENTION_OF_CP_COMM_TYPE", {}, raising=False)
    assert lines(run(capsys)[1], "cp_comm_type 'tree'")[0].startswith("works as it is")
    monkeypatch.setattr("megatron.core.package_info.MINOR", 5)
    status, out, _ = run(capsys)
    assert status == 1 and "too old: 0.16 or newer is needed" in out


@pytest.mark.parametrize(
    ("purpose", "package", "way"),
    [
        ("megatron", "megatron-core", "pip install 'megatron_tree[megatron]'"),
        ("deepspeed", "transformers", "pip install 'megatron_tree[hf]'"),
    ],
)
def test_missing_packages(without, purpose, package, way):
    without([package])
    (lacking,) = missing([machine.packages(purpose)])
    assert lacking.what == package and way in lacking.note


def test_interfaces_that_do_not_exist(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere0")
    status, out, _ = run(capsys, *FUNCTIONS)
    assert status == 1
    assert "no such interface: nowhere0; ranks would hang" in out
    assert run(capsys, *FUNCTIONS, "--cp", 1)[0] == 0, "one rank needs no network"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert run(capsys, *FUNCTIONS)[0] == 0


def test_a_compiler_is_needed_with_a_gpu(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    states = {}
    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        (row,) = [f for f in machine.devices().findings if f.what == "C++ compiler"]
        states[gpu] = row.state
    assert states == {False: "note", True: "missing"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", 30, "--kv-heads", 8], "--kv-heads 8 must divide --heads 30"),
        (["--cp", 3], "--seq-len 131072 must be a multiple of 2 x --cp 3"),
        (["--cp-comm-type", "a2a+tree"], "needs --hierarchical-context-parallel-sizes U R with U x R = --cp 8"),
        (["--topology", "nowhere"], "nowhere"),
    ],
)
def test_options_that_contradict_one_another(capsys, options, message):
    status, out, err = run(capsys, *FUNCTIONS, *options)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("options", "all_to_all", "heads", "schedule"),
    [
        ("a2a+tree --hierarchical-context-parallel-sizes 2 4", "2 ranks", 16, "heads over 2 ranks, grid"),
        ("a2a+p2p --hierarchical-context-parallel-sizes 4 2", "4 ranks", 8, "heads over 4 ranks, ring of 2"),
        ("a2a", "8 ranks", 4, "heads over 8 ranks"),
        ("all_gather", None, 32, "grid 1x8"),
        ("p2p", None, 32, "ring"),
    ],
)
def test_every_cp_comm_type(capsys, options, all_to_all, heads, schedule):
    call = [*FUNCTIONS, "--json", "--topology", "ethernet", "--cp-comm-type", *options.split()]
    status, out, _ = run(capsys, *call)
    report = json.loads(out)
    assert (status, report["ok"], report["missing"]) == (0, True, [])
    rows = {row["what"]: row["value"] for row in report["sections"]["plan"]}
    assert (rows["topology"], rows.get("all-to-all")) == ("ethernet", all_to_all)
    assert rows["forward"].startswith(schedule)
    assert report["sections"]["attention kernels"][0]["what"].startswith(f"{heads} heads")


def test_every_example_runs(capsys):
    pytest.importorskip("megatron.core")
    pytest.importorskip("deepspeed")
    for line in EXAMPLES.splitlines():
        if line.startswith("  megatron-tree doctor"):
            status, out, _ = run(capsys, *shlex.split(line)[2:])
            assert status == 0, line
            assert "--for deepspeed" not in line or (lines(out, "decode") and not lines(out, "backward"))


# --- fused kernels ---

NVIDIAS = {
    "amp_C.py": "multi_tensor_l2norm = multi_tensor_scale = None",
    "fused_weight_gradient_mlp_cuda.py": "",
    "apex/__init__.py": "",
    "apex/optimizers/__init__.py": "class FusedAdam: pass\nclass FusedSGD: pass",
    "apex/optimizers/fused_adam.py": "",
    "apex/multi_tensor_apply/__init__.py": "multi_tensor_applier = None",
}
ANOTHER = {"apex/__init__.py": "raise RuntimeError('this apex must not be imported')"}


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine_with(monkeypatch, tmp_path):
    """Pretend to have a GPU, and these files on the path."""

    def make(files):
        write(tmp_path, files)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(megatron_fusions, "_gpu", lambda: True)

    return make


def test_transformer_engine(machine_with):
    machine_with({"transformer_engine/__init__.py": "raise RuntimeError('not to be imported')"})
    by = {fusion.name: fusion.by for fusion in megatron_fusions.fusions() if fusion.used}
    assert by["FusedAdam"] == by["rotary embedding"] == "TransformerEngine"
    options = megatron_fusions.fusion_options()
    assert options["apply_rope_fusion"] is True
    assert options["gradient_accumulation_fusion"] is False, "Megatron's own layers ask for Apex's module"


def test_another_package_of_that_name(machine_with, capsys):
    pytest.importorskip("megatron.core")
    machine_with(ANOTHER)
    assert not any(fusion.used for fusion in megatron_fusions.fusions() if "Apex" in fusion.by)
    status, out, _ = run(capsys)
    assert status == 1
    assert "pip uninstall apex" in out.split("missing (")[1]
    assert "APEX_CUDA_EXT=1" in out, "the way to the real one"


MEGATRONS_CHOICE = """
import json
from megatron.core import optimizer
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers
print(json.dumps({
    "FusedAdam": not optimizer.USING_PYTORCH_OPTIMIZER,
    "gradient norm and clipping of all tensors at once": clip_grads.multi_tensor_applier is None,
    "weight gradients added up in the matrix product": layers._grad_accum_fusion_available,
}))
"""


@pytest.mark.slow  # Megatron is imported in a process of its own
@pytest.mark.parametrize("files", [{}, NVIDIAS], ids=["nothing", "apex"])
def test_megatron_chooses_the_same(machine_with, tmp_path, files):
    """The stand-in for Apex has no kernels, but Megatron chooses by what can be imported."""
    pytest.importorskip("megatron.core")
    machine_with(files)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", MEGATRONS_CHOICE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    megatrons = json.loads(done.stdout.splitlines()[-1])
    ours = {fusion.name: fusion.used for fusion in megatron_fusions.fusions() if fusion.name in megatrons}
    assert ours == megatrons
    assert set(ours.values()) == {bool(files)}
