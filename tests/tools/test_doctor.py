"""`megatron-tree doctor`: its text and its exit status."""

import importlib.metadata
import shlex

import pytest
import torch

from megatron_tree.tools.doctor import findings
from megatron_tree.tools.doctor.command import EXAMPLES, main
from megatron_tree.tools.doctor.findings import missing

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
        "nothing that is needed is missing",
    ]
    assert lines(out, "torch ")[0].startswith(torch.__version__)
    (kernel,) = lines(out, "32 heads, 32 KV heads, head_dim 128, bf16")
    assert kernel.startswith("triton" if torch.cuda.is_available() else "aten")


def test_megatron(capsys):
    pytest.importorskip("megatron.core")
    status, out, _ = run(capsys, "--cp", 4, "--tp", 2, "--heads", 16, "--kv-heads", 4)
    assert status == 0
    assert "docs/megatron-lm.md" in lines(out, "cp_comm_type 'tree'")[0]
    assert lines(out, "8 heads, 2 KV heads, head_dim 128, bf16"), "a rank's own heads"
    assert "install()" in lines(out, "a list in cp_comm_type")[0]


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
        ("megatron", "megatron-core", "pip install '.[megatron]'"),
        ("deepspeed", "transformers", "pip install '.[hf]'"),
    ],
)
def test_missing_packages(without, purpose, package, way):
    without([package])
    (lacking,) = missing([findings.packages(purpose)])
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
    monkeypatch.setattr(findings.shutil, "which", lambda name: None)
    states = {}
    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        (row,) = [f for f in findings.devices().findings if f.what == "C++ compiler"]
        states[gpu] = row.state
    assert states == {False: "note", True: "missing"}


def test_heads_that_can_not_be_shared(capsys):
    status, out, err = run(capsys, *FUNCTIONS, "--heads", 30, "--kv-heads", 8)
    assert (status, out) == (2, "") and "--kv-heads 8 must divide --heads 30" in err


def test_every_example_runs(capsys):
    pytest.importorskip("megatron.core")
    pytest.importorskip("deepspeed")
    for line in EXAMPLES.splitlines():
        if line.startswith("  megatron-tree doctor"):
            assert run(capsys, *shlex.split(line)[2:])[0] == 0, line


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The folder of a tiny model."""
    pytest.importorskip("transformers")
    from support.hf_models import tiny_model

    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(folder)
    return folder


def test_a_step_that_is_right(llama, capsys):
    status, out, err = run(capsys, "--compare", llama, "--ranks", 2, "--tokens", 50)
    assert status == 0, err
    assert out.startswith("a step of LlamaForCausalLM, 50 tokens, fp32, on 1 rank and on 2\n")
    assert lines(out, "values") == ["the same"] and lines(out, "bits") and lines(out, "loss")


def test_a_step_whose_attention_sees_a_shard_only(llama, capsys, monkeypatch):
    from megatron_tree.integrations.transformers.train import train_on_shards as module

    attend = module.tree_attn_func
    monkeypatch.setattr(module, "tree_attn_func", lambda *qkv, **options: attend(*qkv, **options | {"cp_group": None}))
    status, out, _ = run(capsys, "--compare", llama, "--tokens", 64)
    assert status == 1
    (found,) = lines(out, "values")
    assert found.startswith("output of model.layers.0.self_attn.o_proj differs by "), out
    assert f"{found.partition(' differs')[0]} differs" in lines(out, "bits")[0]


def test_steps_that_cannot_be_compared(llama, capsys, tmp_path):
    def refused(text, *options):
        status, out, err = run(capsys, *options)
        assert (status, out) == (2, "") and text in err and err.count("\n") == 1, err

    refused("--ranks 3 needs --compare MODEL", "--ranks", 3)
    refused("model '/nowhere' is neither 'smollm2' nor a folder", "--compare", "/nowhere")
    refused("--ranks 1: start at least two", "--compare", llama, "--ranks", 1)
    refused("--tokens 1 must be at least 2 and at most 256", "--compare", llama, "--tokens", 1)
    refused("--tokens 1024 must be at least 2 and at most 256", "--compare", llama, "--tokens", "1k")
    refused("No such file or directory", "--compare", llama, "--text", tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    refused("latin.txt' is not a text in UTF-8", "--compare", llama, "--text", tmp_path / "latin.txt")
