"""The benchmark refuses speeds of wrong results, and writes its files."""

import contextlib
import csv
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_tree import kernels
from megatron_tree.bench import command as bench
from megatron_tree.bench import contenders
from megatron_tree.bench import kernels as bench_kernels
from megatron_tree.bench.kernel_cases import Case, Timing, inputs, truth_of, verify
from megatron_tree.bench.kernel_record import Record
from megatron_tree.bench.results import WrongResult, results_kept
from megatron_tree.bench.supervised import NotHere, Task, run_tasks
from megatron_tree.kernels import fastest

REPO = Path(__file__).resolve().parents[2]


OPTIONS = ["kernels", "--device", "cpu", "--dtype", "fp32", "--in-process"]


@pytest.fixture
def small(monkeypatch):
    """Sets the cases of the stages "beside" and "decode"; no time is taken."""
    monkeypatch.setattr(bench_kernels, "_interpreting", lambda: False)
    monkeypatch.setattr(contenders, "clock", lambda call, device: call() is None or 1e-3)

    def use(*cases):
        for name, decodes in (("CPU_CASES", False), ("CPU_DECODING", True)):
            monkeypatch.setattr(bench_kernels, name, [c for c in cases if (c.kind == "decode") is decodes])

    return use


def test_cpu_bench_checks_times_and_writes(tmp_path, small, capsys):
    small(*(Case(kind, 1, 128, 2, 1, 16) for kind in ("fwd", "bwd", "decode")))
    assert bench.main([*OPTIONS, "--only", "beside", "decode", "--out", str(tmp_path)]) == 0
    assert "ours, aten" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert {r["kind"] for r in rows} == {"fwd", "bwd", "decode"}
    assert {r["name"] for r in rows} >= {"ours, aten", "torch flash", "device copy", "matrix product"}
    told = json.loads((tmp_path / "results.json").read_text())
    assert told["dtype"] == "fp32" and told["command"].startswith("megatron-tree bench kernels --device cpu")
    assert [case["status"] for case in told["cases"]] == ["done"] * 3
    assert (tmp_path / "results.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("kind", "which"), [("fwd", 0), ("bwd", 0), ("bwd", 1), ("bwd", 2)])
def test_late_rows_that_were_forgotten_are_noticed(kind, which):
    """They are small beside the first rows of a causal mask: the worst row counts, of the last KV head as well."""
    case = Case(kind, 1, 1024, 4, 2, 32)
    given = inputs(case, torch.device("cpu"), torch.bfloat16)
    truth = truth_of(case, given)
    result = [x.clone() for x in contenders.ours(case, ["reference"], given)["ours, reference"]()]
    verify(case, "ours", tuple(result), truth, torch.bfloat16)
    result[which][:, 1000:, -1] = 0
    with pytest.raises(WrongResult, match="off by"):
        verify(case, "ours", tuple(result), truth, torch.bfloat16)


@pytest.mark.parametrize(("kind", "cache"), [("fwd", ""), ("bwd", ""), ("decode", ""), ("decode", "paged int8")])
def test_no_speed_for_a_result_that_is_wrong_at_the_size_timed(tmp_path, monkeypatch, small, capsys, kind, cache):
    """The case fails and is told of; the others go on, and the exit status says it."""
    case = Case(kind, 2, 320, 4, 2, 32, cache)
    small(case, *(Case(other, 1, 64, 2, 1, 16) for other in ("fwd", "bwd")))
    options = [*OPTIONS, "--only", "beside", "decode"]
    assert bench.main([*options, "--out", str(tmp_path / "right")]) == 0
    right = getattr(kernels, f"attn_{kind}")

    def wrong(x, *args, **kwargs):
        result, factor = right(x, *args, **kwargs), 1.0 if x.dtype == torch.float64 or x.shape[1] == 64 else 1.01
        return result * factor if kind == "decode" else (result[0] * factor, *result[1:])

    monkeypatch.setattr(kernels, f"attn_{kind}", wrong)
    capsys.readouterr()
    assert bench.main([*options, "--out", str(tmp_path / "wrong")]) == 1
    said = capsys.readouterr()
    assert "is wrong" in said.out and "1 of 3 cases failed" in said.err
    told = json.loads((tmp_path / "wrong" / "results.json").read_text())
    assert sorted(x["status"] for x in told["cases"]) == ["done", "done", "failed"]
    assert not any(row["name"].startswith("ours") for row in told["rows"] if row["case"] == case.label)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the message is for machines without one")
def test_without_a_gpu_it_says_so(capsys):
    assert bench.main(["kernels", "--device", "cuda"]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err


def _emits(value, emit):
    emit(Timing("case", "fwd", "name", None, value, "unit"))


def _dies(emit):
    _emits(1.0, emit)
    os._exit(7)


def _hangs(emit):
    _emits(3.0, emit)
    time.sleep(1000)


def _is_wrong(emit):
    raise WrongResult("off by 2")


def _cannot(emit):
    raise NotHere("no GPU")


def test_a_case_that_dies_or_hangs_costs_only_itself():
    """Its process is replaced or killed, what it had found is kept, and what no longer fits is not begun."""
    tasks = [
        Task("s", "dies", _dies, 1.0),
        Task("s", "wrong", _is_wrong, 1.0),
        Task("s", "not here", _cannot, 1.0),
        Task("s", "right", functools.partial(_emits, 2.0), 5.0),
        Task("s", "hangs", _hangs, 0.25),
        Task("s", "long", _dies, 1000.0),
    ]
    rows, outcomes = [], []
    run_tasks(tasks, end=time.monotonic() + 250, emit=rows.append, ended=outcomes.append)
    assert [row.rate for row in rows] == [1.0, 2.0, 3.0]
    assert [(x.label, x.status) for x in outcomes] == [
        ("dies", "failed"),
        ("wrong", "failed"),
        ("not here", "not run"),
        ("right", "done"),
        ("hangs", "failed"),
        ("long", "not run"),
    ]
    said = " | ".join(x.said for x in outcomes)
    assert "exit code 7 | WrongResult: off by 2 | no GPU |  | stopped after 2 s | needs about 1000 s" in said


@pytest.mark.parametrize("usable", [True, False])
def test_a_contender_that_leaves_the_gpu_unusable_ends_its_case(usable, monkeypatch, small, capsys):
    """Others would fail by no fault of theirs. An error may have no text."""
    right, rows = kernels.attn_fwd, []

    def wrong(q, *args, **kwargs):
        if q.dtype == torch.float64:
            return right(q, *args, **kwargs)
        raise RuntimeError

    monkeypatch.setattr(kernels, "attn_fwd", wrong)
    monkeypatch.setattr(contenders, "device_works", lambda: usable)
    where = dict(device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(
        WrongResult, match="aten: RuntimeError" if usable else "aten left the GPU unusable: RuntimeError"
    ):
        contenders.time_case(Case("fwd", 1, 64, 2, 1, 16), ("aten", "torch"), rows.append, **where)
    assert [row.name for row in rows] == ["torch flash", "matrix product"] * usable


@pytest.mark.parametrize("usable", [True, False])
def test_a_tile_that_leaves_the_gpu_unusable_ends_the_race(usable, monkeypatch, capsys):
    race = pytest.importorskip("megatron_tree.bench.race", exc_type=ImportError)
    tried, tiles = [], race.CANDIDATES["fwd"][:2]

    def fails():
        tried.append(race.configs.tiles("fwd"))
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(race, "ours", lambda *_: {"ours": fails})
    monkeypatch.setattr(race, "device_works", lambda: usable)
    expected = contextlib.nullcontext() if usable else pytest.raises(RuntimeError, match="illegal.* were not timed")
    where = dict(device=torch.device("cpu"), dtype=torch.float32)
    with expected:
        race.race(Case("fwd", 1, 64, 2, 1, 16), "fwd", tiles, pytest.fail, **where)
    assert tried == (tiles if usable else tiles[:1]) and "an illegal memory access" in capsys.readouterr().out


def test_files_are_whole_after_each_result(tmp_path, capsys):
    record = Record(tmp_path, {"device": "x"})
    for number in range(2):
        record.row(Timing(f"{number}", "fwd", "ours", 1.0, 2.0, "TFLOP/s"))
        assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == number + 1
        assert len(list(csv.DictReader((tmp_path / "results.csv").open()))) == number + 1
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "results.csv"}


def test_a_gpu_s_table_of_the_fastest_backends(tmp_path, monkeypatch, capsys):
    """By forward and backward together; what was timed only forward, and others' functions, don't count."""
    monkeypatch.setattr(fastest, "table", lambda: {"GPU Y": {"64": "aten"}})
    record = Record(tmp_path, {"device": "GPU X", "cuda": "13.0"})
    times = {"triton": (2.0, 5.0), "cudnn": (1.0, 7.0), "aten": (3.0, 6.0)}
    for name, (forward, backward) in times.items():
        record.row(Timing("fwd b1 s9 h2/1 d128", "fwd", f"ours, {name}", forward, 1.0, "TFLOP/s"))
        record.row(Timing("bwd b1 s9 h2/1 d128", "bwd", f"ours, {name}", backward, 1.0, "TFLOP/s"))
    record.row(Timing("fwd b1 s9 h2/1 d128", "fwd", "ours, fa3", 0.5, 1.0, "TFLOP/s"))
    record.row(Timing("bwd b1 s9 h2/1 d128", "bwd", "torch flash", 0.5, 1.0, "TFLOP/s"))
    record.row(Timing("fwd b1 s9 h2/1 d256", "fwd", "ours, triton", 0.5, 1.0, "TFLOP/s"))
    record.finish()
    assert json.loads((tmp_path / "fastest.json").read_text()) == {"GPU Y": {"64": "aten"}, "GPU X": {"128": "triton"}}


def gpu_script(*options, hidden=(), tmp_path, **environment):
    """Runs launch/gpu.py where the modules `hidden` can't be imported."""
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=set(hidden)))
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, str(REPO / "launch" / "gpu.py"), *options]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, text=True)


HIDE = """
import sys
class Hidden:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {hidden}:
            raise ModuleNotFoundError(name)
import importlib.util
_find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name in {hidden} else _find(name, *args)
sys.meta_path.insert(0, Hidden())
"""


def test_it_says_first_what_is_missing(tmp_path):
    done = gpu_script(hidden=["triton", "torch", "matplotlib"], tmp_path=tmp_path)
    missing = [line.split()[1] for line in done.stdout.splitlines() if "MISSING" in line]
    assert missing[:2] == ["torch", "triton"] and "matplotlib" in missing
    assert done.returncode == 1 and "make gpu PYTHON=" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_whole_order_without_a_gpu_and_without_other_packages(tmp_path):
    """A rehearsal of `make gpu`: Triton's interpreter, two ranks, and no package but those that are needed."""
    hidden = ["tqdm", "matplotlib", "PIL", "transformers", "megatron", "deepspeed", "pytest", "yaml", "psutil"]
    options = ["--device", "cpu", "--dtype", "fp16", "--tiny", "--budget", "280", "--out", str(tmp_path / "out")]
    done = gpu_script(*options, hidden=hidden, tmp_path=tmp_path, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {case["stage"] for case in told["cases"] if case["status"] == "done"} == {
        *("smoke", "beside", "race", "decode", "ranks", "offsets")
    }
    assert [case["stage"] for case in told["cases"] if case["status"] != "done"] == ["graph", "graph"]
    assert list(dict.fromkeys(case["stage"] for case in told["cases"])) == list(bench_kernels.STAGES)[:-1]
    assert {row["kind"] for row in told["rows"]} >= {"smoke", "fwd", "bwd", "race", "decode", "ranks", "offsets"}


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, OSError])
def test_what_is_kept_of_a_run(tmp_path, capsys, error):
    """Ctrl-C keeps the cases that are done; what else ends a run leaves no results that look whole."""

    def plots(rows):
        return {"plot.png": lambda path: path.write_text(f"{len(rows)} rows")}

    expected = contextlib.nullcontext() if error is None else pytest.raises(error)
    with expected, results_kept(tmp_path, {}, plots) as rows:
        rows.append(Timing("8k", "decode", "tree", 1.0, 2.0, "GB/s"))
        if error is not None:
            raise error
        rows.append(Timing("16k", "decode", "tree", 2.0, 2.0, "GB/s"))
    if error is OSError:
        assert not list(tmp_path.iterdir())
        return
    kept = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["case"] for row in kept] == (["8k", "16k"] if error is None else ["8k"])
    assert (tmp_path / "plot.png").read_text() == f"{len(kept)} rows"
    assert ("interrupted" in capsys.readouterr().err) == (error is not None)
