"""`bench kernels`: no speed of a wrong result, whole files after each one, and a harness that outlives its cases."""

import csv
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_tree.core import kernels
from megatron_tree.tools.bench import command as bench
from megatron_tree.tools.bench import kernels as bench_kernels
from megatron_tree.tools.bench import local, options, rivals, step, tasks, train
from megatron_tree.tools.bench.results import Curve, Panel, Results
from megatron_tree.tools.bench.tasks import NotHere, Task, run_tasks
from megatron_tree.tools.calibrate import kernel_cases
from megatron_tree.tools.calibrate.kernel_cases import KernelCase, KernelTiming, WrongResult, inputs, truth_of, verify

REPO = Path(__file__).resolve().parents[2]
OPTIONS = ["kernels", "--device", "cpu", "--dtype", "fp32", "--only", "beside", "decode"]


def test_options_name_what_the_benchmarks_have():
    """The command line is read before torch is imported, and so has lists of its own."""
    assert (*train.TRAINING, *rivals.TRAIN, *rivals.JVP) == options.TRAIN
    assert (*step.OURS, *step.RIVALS) == options.STEP
    assert tuple(kernel_cases.DTYPES) == options.DTYPES
    parser = options.build_parser()
    for wrapper in step.WRAPPERS:
        assert parser.parse_args(["step", "--ranks", "2", "--wrapper", wrapper]).wrapper == wrapper


class InThisProcess:
    """Instead of `tasks.Worker`: cases see what a test has replaced."""

    gone = False

    def run(self, task, limit_s, emit):
        return tasks.run_task(task, emit)

    def close(self):
        pass


@pytest.fixture
def small(monkeypatch):
    """Sets the cases of the stages "beside" and "decode"; no time is taken."""
    monkeypatch.setattr(bench_kernels, "_interpreting", lambda: False)
    monkeypatch.setattr(kernel_cases, "clock", lambda call, device: call() is None or 1e-3)
    monkeypatch.setattr(tasks, "Worker", InThisProcess)

    def use(*cases):
        both = tuple([c for c in cases if (c.kind == "decode") is decodes] for decodes in (False, True))
        monkeypatch.setitem(bench_kernels.CASES, "cpu", both)

    return use


def test_cpu_bench_checks_times_and_writes(tmp_path, small, capsys):
    small(*(KernelCase(kind, 1, 128, 2, 1, 16) for kind in ("fwd", "bwd", "decode")))
    assert bench.main([*OPTIONS, "--out", str(tmp_path)]) == 0
    assert "ours, aten" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert {r["kind"] for r in rows} == {"fwd", "bwd", "decode"}
    assert {r["name"] for r in rows} >= {"ours, aten", "torch flash", "device copy", "matrix product"}
    told = json.loads((tmp_path / "results.json").read_text())
    assert told["dtype"] == "fp32" and told["complete"]
    assert [case["status"] for case in told["cases"]] == ["done"] * 3
    assert (tmp_path / "results.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("kind", "which"), [("fwd", 0), ("bwd", 1)])
def test_late_rows_that_were_forgotten_are_noticed(kind, which):
    """They are small beside the first rows of a causal mask: the worst row counts, of the last KV head as well."""
    case = KernelCase(kind, 1, 512, 4, 2, 32)
    given = inputs(case, torch.device("cpu"), torch.bfloat16)
    truth = truth_of(case, given)
    result = [x.clone() for x in kernel_cases.ours(case, "reference", given)()]
    verify(case, "ours", tuple(result), truth, torch.bfloat16)
    result[which][:, 500:, -1] = 0
    with pytest.raises(WrongResult, match="off by"):
        verify(case, "ours", tuple(result), truth, torch.bfloat16)


@pytest.mark.parametrize(("kind", "cache"), [("fwd", ""), ("bwd", ""), ("decode", "paged int8")])
def test_no_speed_for_a_result_that_is_wrong_at_the_size_timed(tmp_path, monkeypatch, small, capsys, kind, cache):
    """The case fails and is told of; the others go on, and the exit status says it."""
    case = KernelCase(kind, 2, 320, 4, 2, 32, cache)
    small(case, *(KernelCase(other, 1, 64, 2, 1, 16) for other in ("fwd", "bwd")))
    right = getattr(kernels, f"attn_{kind}")

    def wrong(x, *args, **kwargs):
        result, factor = right(x, *args, **kwargs), 1.0 if x.dtype == torch.float64 or x.shape[1] == 64 else 1.01
        return result * factor if kind == "decode" else (result[0] * factor, *result[1:])

    monkeypatch.setattr(kernels, f"attn_{kind}", wrong)
    assert bench.main([*OPTIONS, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "is wrong" in said.out and "1 of 3 cases failed" in said.err
    told = json.loads((tmp_path / "results.json").read_text())
    assert sorted(x["status"] for x in told["cases"]) == ["done", "done", "failed"]
    assert not any(row["name"].startswith("ours") for row in told["rows"] if row["case"] == case.label)


def test_local_decoding_is_checked_before_it_is_timed(tmp_path, monkeypatch, capsys):
    """Every form of a cache, on one thread and two; a kernel that is wrong in one case stops the run there."""
    shapes = ("4/2x16,128,fp32", "4/2x16,64,bf16,paged", "4/2x16,64,int8", "4/1x80,64,fp32,latent")
    given = ["local", "--threads", "1", "2", "--budget", "0.01", "--out", str(tmp_path), "--cases", *shapes]
    assert bench.main(given) == 0
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [(r["dtype"], r["threads"]) for r in rows] == list(itertools.product(("fp32", "bf16", "int8", "fp32"), "12"))
    assert (tmp_path / "results.png").read_bytes()[:4] == b"\x89PNG"
    right = kernels.attn_decode

    def wrong(q, cache, spec, backend):
        return right(q, cache, spec, backend) * (1.1 if backend == "native" and q.dtype == torch.bfloat16 else 1)

    monkeypatch.setattr(kernels, "attn_decode", wrong)
    capsys.readouterr()
    assert bench.main(given) == 1
    said = capsys.readouterr()
    assert "ours, native is wrong: decode b1 s64 h4/2 d16 paged" in said.err and "bf16" not in said.out


def test_local_reading_reads_every_word(monkeypatch, tmp_path, capsys):
    """A plain loop that left something out would be too fast to compare with."""
    monkeypatch.setattr(local, "_read", lambda *given: 1)
    assert bench.main(["local", "--cases", "4/2x16,128,fp32", "--out", str(tmp_path)]) == 1
    assert "the plain loop does not read all of decode b1 s128 h4/2 d16, fp32" in capsys.readouterr().err


def _emits(value, emit):
    emit(KernelTiming("case", "fwd", "name", None, value, "unit"))


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
    monkeypatch.setattr(kernel_cases, "device_works", lambda: usable)
    where = dict(device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(
        WrongResult, match="aten: RuntimeError" if usable else "aten left the GPU unusable: RuntimeError"
    ):
        kernel_cases.time_case(KernelCase("fwd", 1, 64, 2, 1, 16), ("aten", "torch"), rows.append, **where)
    assert [row.name for row in rows] == ["torch flash", "matrix product"] * usable


def test_files_are_whole_after_each_result(tmp_path, capsys):
    results = Results(tmp_path, {"device": "x"})
    for number in range(2):
        results.add(KernelTiming(f"{number}", "fwd", "ours", 1.0, 2.0, "TFLOP/s"), compiled=str(number))
        told = json.loads((tmp_path / "results.json").read_text())
        assert len(told["rows"]) == number + 1 and told["compiled"] == str(number) and not told["complete"]
        assert len(list(csv.DictReader((tmp_path / "results.csv").open()))) == number + 1
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "results.csv"}
    results.finish({"plot.png": [[Panel("", "", [Curve("a", [1], [1])])]]}, "a title")
    assert json.loads((tmp_path / "results.json").read_text())["complete"] and (tmp_path / "plot.png").exists()


def test_the_fastest_backends_by_head_dim():
    """By forward and backward together; what was timed only forward, and others' functions, don't count."""
    times = {
        "ours, triton": (2.0, 5.0), "ours, cudnn": (1.0, 7.0), "ours, fa3": (0.5, None), "torch flash": (0.5, 0.5),
    }  # fmt: skip
    rows = [
        KernelTiming(f"{kind} b1 s9 h2/1 d128", kind, name, ms, 1.0, "TFLOP/s")
        for name, both in times.items()
        for kind, ms in zip(("fwd", "bwd"), both)
        if ms
    ]
    rows.append(KernelTiming("fwd b1 s9 h2/1 d256", "fwd", "ours, triton", 0.5, 1.0, "TFLOP/s"))
    assert kernel_cases.fastest_backends(rows) == {"128": "triton"}


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
    """`--rehearse`: Triton's interpreter, two ranks, and no package but those that are needed."""
    hidden = ["tqdm", "matplotlib", "transformers", "megatron", "deepspeed", "pytest", "psutil"]
    asked = ["--rehearse", "--budget", "900", "--out", str(tmp_path / "out")]
    done = gpu_script(*asked, hidden=hidden, tmp_path=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [case["label"] for case in told["cases"] if case["status"] != "done"] == ["tests over NCCL"]
    stages = [*dict.fromkeys(case["stage"] for case in told["cases"]), "verdict"]
    assert stages == list(options.STAGES) == list(bench_kernels.ENDS)
    kinds = {"machine", "correct", "fwd", "bwd", "race", "decode", "launch", "step", "ranks", "offsets"}
    assert {row["kind"] for row in told["rows"]} >= kinds
    assert (tmp_path / "out" / "verdict.md").read_text().count("not measured") == 5
