"""The contenders that others wrote: checked like ours, timed beside ours, left out where they can't run."""

import csv
import sys

import pytest

from megatron_tree.bench import command as bench
from megatron_tree.bench import rivals
from support.assumed_links import assume_links

HEADS, HEADS_KV, D = 4, 2, 16
SMALL = ["--heads", str(HEADS), "--kv-heads", str(HEADS_KV), "--head-dim", str(D), "--dtype", "fp32"]


@pytest.fixture(autouse=True)
def assumed_links(monkeypatch):
    assume_links(monkeypatch, "host")


def benchmark(command, *options, out):
    """Exit status and, where files were written, rows by (schedule, part)."""
    status = bench.main([command, *SMALL, "--steps", "3", "--budget", "0.1", "--out", str(out), *options])
    rows = csv.DictReader((out / "results.csv").open()) if status == 0 else ()
    return status, {(r["schedule"], r["part"]): r for r in rows}


@pytest.mark.skipif(rivals.no_torch_ring() is not None, reason=str(rivals.no_torch_ring()))
def test_torch_context_parallelism_beside_ours(tmp_path, capfd, monkeypatch):
    """And no speed beside a rival that is wrong."""
    options = ("--ranks", "3", "--seq-len", "192", "--compute", "real", "--schedules", "auto", "torch_ring")
    status, rows = benchmark("train", *options, "torch_gather", out=tmp_path / "right")
    assert status == 0, capfd.readouterr().err
    for name in ("torch_ring", "torch_gather"):
        total = rows[name, "total"]
        assert float(total["error"]) <= 1 and float(total["cpu_ms"]) > 0 and int(total["steps"]) == 3
        assert float(rows[name, "forward"]["ms"]) > 0 and float(rows[name, "backward"]["ms"]) > 0
        assert total["sent_bytes"] == total["predicted_ms"] == "" and rows["auto", "total"]["sent_bytes"]
    right = rivals._flash
    monkeypatch.setattr(rivals, "_flash", lambda q, k, v, *rest: right(q * 1.01, k, v, *rest))
    capfd.readouterr()
    status, _ = benchmark("train", *options, out=tmp_path / "wrong")
    said = capfd.readouterr()
    assert status == 1 and "torch_ring is wrong" in said.err
    assert " ms" not in said.out.split("torch")[1] and not (tmp_path / "wrong").exists()


def test_a_rival_that_is_missing(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(rivals, "_NEEDED", ("no_such_function",))
    monkeypatch.setitem(sys.modules, "ring_attention_pytorch.tree_attn_decoding", None)
    rivals._template.cache_clear()
    options = ("--ranks", "2", "--seq-len", "64", "--compute", "real")
    status, rows = benchmark("train", *options, out=tmp_path / "train")
    said = capfd.readouterr()
    assert status == 0, said.err
    assert "torch_ring is left out: torch " in said.out and "no_such_function" in said.out
    assert {"ring", "auto", "ulysses"} < {name for name, _ in rows} and ("torch_ring", "total") not in rows
    assert benchmark("decode", *options, "--schedules", "tree_attn_decode", out=tmp_path / "named")[0] == 1
    assert "pip install ring-attention-pytorch" in capfd.readouterr().err


@pytest.mark.skipif(rivals.DECODE["tree_attn_decode"].missing() is not None, reason="needs ring-attention-pytorch")
def test_tree_attn_decode_beside_ours(tmp_path, capfd):
    options = ("--ranks", "3", "--seq-len", "192", "--compute", "real", "--schedules", "auto", "tree_attn_decode")
    status, rows = benchmark("decode", *options, out=tmp_path)
    assert status == 0, capfd.readouterr().err
    rival = rows["tree_attn_decode", "decode"]
    assert float(rival["error"]) <= 1 and float(rival["ms"]) > 0 and float(rival["cpu_ms"]) > 0
