"""`bench step` on real ranks: no speed of a wrong gradient, rivals that are left out, files."""

import csv
import json

import pytest

pytest.importorskip("transformers")

from megatron_tree.tools.bench import command as bench
from megatron_tree.tools.bench import step as bench_step

SMALL = ["--ranks", 2, "--heads", 4, "--kv-heads", 2, "--head-dim", 16, "--layers", 1]


def step(out, *options):
    """Exit status, and rows by (contender, part)."""
    status = bench.main([str(x) for x in ("step", *SMALL, "--steps", 3, "--budget", 0.1, "--out", out, *options)])
    rows = csv.DictReader((out / "results.csv").open()) if status == 0 else []
    return status, {(r["schedule"], r["part"]): r for r in rows}


@pytest.fixture
def without_deepspeed(monkeypatch):
    monkeypatch.setattr(bench_step, "ULYSSES", "deepspeed_that_is_not_here")


@pytest.mark.usefixtures("without_deepspeed")
def test_step(tmp_path, capfd):
    status, _ = step(tmp_path, "--seq-len", 64, "--schedules", "auto", "torch_gather", "--profile")
    assert status == 2 and "--profile needs one contender" in capfd.readouterr().err
    status, _ = step(tmp_path, "--seq-len", 64, "--schedules", "deepspeed")
    assert status == 2 and "No module named 'deepspeed_that_is_not_here'" in capfd.readouterr().err
    status, rows = step(tmp_path, "--seq-len", 64, "--schedules", "auto", "torch_gather")
    said = capfd.readouterr()
    assert status == 0, said.err
    assert said.out.index("losses and gradients of all steps agree") < said.out.index("auto forward")
    assert "auto / best rival (torch_gather)" in said.out
    parts = ("batch", "forward", "backward", "optimizer", "total")
    assert list(rows) == [(name, part) for name in ("auto", "torch_gather") for part in parts]
    for (_, part), row in rows.items():
        assert float(row["ms"]) > 0 and int(row["steps"]) == 3
        if part == "total":
            assert float(row["error"]) <= 1 and float(row["cpu_ms"]) > 0
    assert float(rows["auto", "total"]["ratio"]) == 1.0 and int(rows["auto", "forward"]["sent_bytes"]) > 0
    assert json.loads((tmp_path / "results.json").read_text())["complete"]
    assert (tmp_path / "results.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("without_deepspeed")
@pytest.mark.parametrize("right_steps", [0, 3])
def test_no_speed_of_a_wrong_gradient(right_steps, tmp_path, monkeypatch, capfd):
    """In the checked step, or in a timed one."""
    right, calls = bench_step.TRAIN["torch_gather"], []

    def wrong(*call):
        calls.append(1)
        return right(*call) * (1.05 if len(calls) > right_steps else 1.0)

    monkeypatch.setitem(bench_step.TRAIN, "torch_gather", wrong)
    status, _ = step(tmp_path / "out", "--seq-len", 64, "--schedules", "auto", "torch_gather")
    said = capfd.readouterr()
    assert status == 1 and "torch_gather is wrong on 2 local ranks, 64 tokens" in said.err
    assert " ms" not in said.out and not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("options", "wrapper"), [((14, 14), "average"), ((14, 7), "fsdp2"), ((4, 2), "fsdp2")])
def test_all_contenders(options, wrapper, tmp_path, capfd):
    """DeepSpeed's Ulysses with heads padded, too."""
    pytest.importorskip("deepspeed")
    heads = ("--heads", options[0], "--kv-heads", options[1], "--layers", 2, "--ranks", 4)
    status, rows = step(tmp_path, *heads, "--seq-len", 128, "--wrapper", wrapper)
    assert status == 0, capfd.readouterr().err
    assert {name for name, _ in rows} == {*bench_step.OURS, *bench_step.RIVALS}
