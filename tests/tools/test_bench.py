"""The benchmark refuses speeds of wrong results, and writes its files."""

import contextlib
import csv
import json

import pytest
import torch

from megatron_tree import kernels
from megatron_tree.bench import __main__ as bench
from megatron_tree.bench import kernels as bench_kernels
from megatron_tree.bench.kernels import Timing
from megatron_tree.bench.results import WrongResult, results_kept


def test_cpu_bench_checks_times_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        bench_kernels, "CPU_CASES", [bench_kernels.Case(k, 1, 128, 2, 1, 16) for k in ("fwd", "bwd", "decode")]
    )
    monkeypatch.setattr(bench_kernels, "clock", lambda call, device: call() is None or 1e-3)
    assert bench.main(["kernels", "--device", "cpu", "--dtype", "fp32", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.index("compared with float64") < printed.index("TFLOP/s")
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert {r["kind"] for r in rows} == {"fwd", "bwd", "decode"}
    assert {r["name"] for r in rows} >= {"ours, aten", "torch flash", "device copy", "matrix product"}
    told = json.loads((tmp_path / "results.json").read_text())
    assert told["dtype"] == "fp32" and told["command"].startswith("python -m megatron_tree.bench kernels --device cpu")
    assert (tmp_path / "results.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("kind", "which"), [("fwd", 0), ("bwd", 0), ("bwd", 1), ("bwd", 2)])
def test_late_rows_that_were_forgotten_are_noticed(kind, which):
    """They are small beside the first rows of a causal mask: the worst row counts, of the last KV head as well."""
    case = bench_kernels.Case(kind, 1, 1024, 4, 2, 32)
    given = bench_kernels.inputs(case, torch.device("cpu"), torch.bfloat16)
    truth = bench_kernels.truth_of(case, given)
    calls = bench_kernels.contenders(case, ["reference"], given)
    result = [x.clone() for x in calls["ours, reference"]()]
    bench_kernels.verify(case, "ours", tuple(result), truth, torch.bfloat16)
    result[which][:, 1000:, -1] = 0
    with pytest.raises(WrongResult, match="off by"):
        bench_kernels.verify(case, "ours", tuple(result), truth, torch.bfloat16)


@pytest.mark.parametrize(("kind", "cache"), [("fwd", ""), ("bwd", ""), ("decode", ""), ("decode", "paged int8")])
def test_no_speed_for_a_result_that_is_wrong_at_the_size_timed(tmp_path, monkeypatch, capsys, kind, cache):
    monkeypatch.setattr(bench_kernels, "CPU_CASES", [bench_kernels.Case(kind, 2, 320, 4, 2, 32, cache)])
    monkeypatch.setattr(bench_kernels, "clock", lambda call, device: 1e-3)
    options = ["kernels", "--device", "cpu", "--dtype", "fp32"]
    assert bench.main([*options, "--out", str(tmp_path / "right")]) == 0
    right = getattr(kernels, f"attn_{kind}")

    def wrong(x, *args, **kwargs):
        result, factor = right(x, *args, **kwargs), 1.0 if x.dtype == torch.float64 else 1.01  # the truth stays
        return result * factor if kind == "decode" else (result[0] * factor, *result[1:])

    monkeypatch.setattr(kernels, f"attn_{kind}", wrong)
    capsys.readouterr()
    assert bench.main([*options, "--out", str(tmp_path / "wrong")]) == 1
    said = capsys.readouterr()
    assert "is wrong" in said.err and "ours / this" not in said.out and not (tmp_path / "wrong").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the message is for machines without one")
@pytest.mark.parametrize("option", [["--device", "cuda"], ["--race"]])
def test_without_a_gpu_it_says_so(option, capsys):
    assert bench.main(["kernels", *option]) == 1
    assert "GPU" in capsys.readouterr().err


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
