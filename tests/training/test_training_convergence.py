"""launch/convergence.py: what it runs, how it judges, and that the results in docs/ are what it would say of them."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "docs" / "convergence.json"


@pytest.fixture(scope="module")
def convergence():
    spec = importlib.util.spec_from_file_location("convergence", REPO / "launch" / "convergence.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_runs_differ_in_one_thing(convergence):
    args = convergence.build_parser().parse_args(["--ranks", "8", "--seeds", "5", "6"])
    assert convergence.plan(args) == {
        "cp = 1, seed 5": (1, "--context-parallel-size 1 --seed 5"),
        "cp = 1, seed 6": (1, "--context-parallel-size 1 --seed 6"),
        "cp = 8, tree attention": (8, "--context-parallel-size 8 --cp-comm-type tree --grid 4x2 --seed 5"),
        "cp = 8, ring": (8, "--context-parallel-size 8 --cp-comm-type p2p --seed 5"),
        "cp = 8, KV gather": (8, "--context-parallel-size 8 --cp-comm-type all_gather --seed 5"),
    }


@pytest.mark.parametrize(("off", "within"), [(0.19, True), (-0.19, True), (0.21, False), (-0.21, False)])
def test_the_noise_is_the_spread_of_the_seeds(convergence, off, within):
    curves = {"cp = 1, seed 5": [9.0] * 5 + [2.0] * 10, "cp = 1, seed 6": [9.0] * 5 + [2.2] * 10}
    curves["cp = 4, ring"] = [9.0] * 5 + [2.0 + off] * 10
    verdict = convergence.compare(curves, [5, 6])
    assert verdict["noise"] == pytest.approx(0.2)
    assert verdict["difference"] == {"cp = 4, ring": pytest.approx(abs(off))}
    assert verdict["within_noise"] is within


def test_the_picture(convergence, tmp_path):
    pytest.importorskip("matplotlib")
    curves = {"cp = 1, seed 5": [9.0, 2.0], "cp = 4, ring": [9.0, 2.1]}
    convergence.draw(curves, convergence.compare(curves, [5]), tmp_path / "images" / "c.png")
    assert (tmp_path / "images" / "c.png").read_bytes().startswith(b"\x89PNG")


def test_the_results_in_docs(convergence):
    """The verdict there follows from the curves there, and the text quotes it."""
    record = json.loads(RESULTS.read_text())
    verdict = convergence.compare(record["losses"], record["seeds"])
    assert verdict["within_noise"]
    assert verdict["noise"] == pytest.approx(record["noise"], abs=1e-5)
    assert set(record["losses"]) == set(convergence.plan(convergence.build_parser().parse_args([])))
    assert {len(losses) for losses in record["losses"].values()} == {record["iters"]} == {300}
    text = (REPO / "docs" / "training.md").read_text()
    for label, loss in verdict["final_loss"].items():
        assert f"| {label} | {loss:.4f} |" in text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_look(tmp_path):
    """All runs, two ranks, a few steps; the second time nothing is trained again."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("megatron.core")
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    options = "--seq-length 64 --num-layers 1 --lr-warmup-iters 1 --eval-iters 0 --assert-below-unigram -9"
    command = [sys.executable, "launch/convergence.py", "--iters", "3", "--ranks", "2", "--seeds", "1", "2"]
    command += [f"--docs={tmp_path / 'docs'}", f"--work={tmp_path / 'runs'}", f"--option={options}"]
    path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "step" not in done.stdout
    record = json.loads((tmp_path / "docs" / "convergence.json").read_text())
    first, *others = [losses for label, losses in record["losses"].items() if not label.endswith("seed 2")]
    assert all(losses == pytest.approx(first, rel=1e-5) for losses in others)
