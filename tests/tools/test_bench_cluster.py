"""`bench decode` and `train` on real ranks: no speed of a wrong result, bytes as computed, files."""

import csv
import json
import os
import time

import pytest
import torch

from megatron_tree.core import kernels
from megatron_tree.core.attention import autograd
from megatron_tree.core.comm.shared import SharedMemory
from megatron_tree.core.kernels import reference
from megatron_tree.core.layout import Segment
from megatron_tree.core.spec import AttnSpec
from megatron_tree.tools.bench import command as bench
from megatron_tree.tools.bench import decode, rivals, train
from megatron_tree.tools.bench.results import Measurement, draw, plots
from megatron_tree.tools.bench.timing import (
    Accelerator,
    Meeting,
    PeakMemory,
    Speed,
    UnseenInput,
    visible_pairs,
)
from megatron_tree.tools.emulate.forked import LocalRanks
from support.assumed_links import assume_links
from support.emulation import emulated

HEADS, HEADS_KV, D = 4, 2, 16
SMALL = ["--heads", str(HEADS), "--head-dim", str(D), "--dtype", "fp32", "--steps", "3", "--budget", "0.1"]


@pytest.fixture
def assumed_links(monkeypatch):
    assume_links(monkeypatch, "host")


def benchmark(command, *options, kv_heads=str(HEADS_KV), out):
    """Exit status and, where files were written, rows by (KV heads, schedule, part)."""
    status = bench.main([command, *SMALL, "--kv-heads", kv_heads, "--out", str(out), *options])
    found = {}
    if status == 0:
        for r in csv.DictReader((out / "results.csv").open()):
            found[int(r["num_heads_kv"]), r["schedule"], r["part"]] = r
    return status, found


def check_decode(rows, p, tokens, schedules=decode.OURS, shared=False):
    """Payload of every schedule: docs/design.md, section 3. shared: a rank writes once into memory that all share."""
    state, shard = HEADS * (D + 1) * 4, 2 * tokens // p * HEADS_KV * D * 4
    lengths = 32 * p  # shards may differ in length, so a ring sends theirs ahead
    expected = {
        "ring": (p - 1) * shard,
        "allreduce": 2 * (p - 1) * (HEADS * 4 + state) // p,
        "allgather": (p - 1) * state,
        "scatter": 2 * (p - 1) * state // p,
    }
    for schedule in expected.keys() & set(schedules):
        row, read = rows[HEADS_KV, schedule, "decode"], expected[schedule]
        sent = {"allgather": state, "scatter": state + state // p}.get(schedule, read) if shared else read
        assert 0 <= int(row["sent_bytes"]) - sent <= (lengths if schedule == "ring" else 0), schedule
        assert abs(int(row["predicted_sent_bytes"]) - read) <= lengths, schedule
    for schedule in schedules:
        row = rows[HEADS_KV, schedule, "decode"]
        assert float(row["error"]) <= 1 and int(row["steps"]) == 3 and float(row["ms"]) > 0
        assert int(row["held_bytes"]) == shard and int(row["memory_bytes"]) >= 0


@pytest.mark.usefixtures("assumed_links")
def test_decode_on_local_ranks(tmp_path, capfd):
    status, rows = benchmark("decode", "--ranks", "4", "--seq-len", "256", "--compute", "modelled", out=tmp_path)
    said = capfd.readouterr()
    assert status == 0, said.err
    assert said.out.index("checked on all ranks") < said.out.index("ring  ") and "modelled" in said.out
    check_decode(rows, 4, 256, shared=True)
    assert int(rows[HEADS_KV, "butterfly", "decode"]["sent_bytes"]) == 2 * HEADS * (D + 1) * 4
    table = list(csv.reader((tmp_path / "results.csv").open()))
    assert {"machines", "schedule", "ms", "ratio", "predicted_ms"} < set(table[0]) < set(Measurement._fields)
    about = json.loads((tmp_path / "results.json").read_text())
    assert "modelled" in about["compute"] and len(about["rows"]) == len(table) - 1
    assert (tmp_path / "results.png").read_bytes()[:4] == b"\x89PNG"


def test_decode_with_real_kernels_on_calibrated_links(tmp_path, capfd):
    options = ("--ranks", "2", "--seq-len", "128", "--compute", "real", "--schedules", "ring", "auto")
    status, rows = benchmark("decode", *options, out=tmp_path)
    said = capfd.readouterr()
    assert status == 0, said.err
    assert "compute: real" in said.out
    assert float(rows[HEADS_KV, "local attention alone", "limit"]["ms"]) > 0
    auto, ring = (rows[HEADS_KV, name, "decode"] for name in ("auto", "ring"))
    assert float(ring["ratio"]) == pytest.approx(float(ring["ms"]) / float(auto["ms"]), rel=1e-4)
    assert float(auto["predicted_ms"]) > 0 and float(auto["cpu_ms"]) > 0


@pytest.mark.usefixtures("assumed_links")
@pytest.mark.parametrize(
    ("right_steps", "message"), [(0, "allgather is wrong"), (2, "another result than the checked one")]
)
def test_no_speed_of_a_wrong_merge(right_steps, message, tmp_path, monkeypatch, capfd):
    """In the checked step, or by a little in a timed one."""
    right, calls, error = SharedMemory.merge_rows, [], 1e-6 if right_steps else 1e-3

    def wrong(memory, *call):
        calls.append(1)
        return right(memory, *call) * (1 + error * (len(calls) > right_steps))

    monkeypatch.setattr(SharedMemory, "merge_rows", wrong)
    options = ("--ranks", "2", "--seq-len", "128", "--schedules", "allgather")
    status, _ = benchmark("decode", *options, out=tmp_path / "out")
    said = capfd.readouterr()
    assert status == 1 and message in said.err
    assert " ms" not in said.out.split("torch")[1] and not (tmp_path / "out").exists()


@pytest.mark.usefixtures("assumed_links")
def test_train_on_local_ranks(tmp_path, capfd):
    p, tokens = 2, 128
    status, rows = benchmark("train", "--ranks", str(p), "--seq-len", str(tokens), kv_heads="4,2", out=tmp_path)
    said = capfd.readouterr()
    assert status == 0, said.err
    for h_kv in (4, 2):
        q, kv = (tokens // p * h * D * 4 for h in (HEADS, h_kv))
        lse = tokens // p * HEADS * 4
        for schedule, forward, backward in (
            ("ring", 2 * kv, 2 * kv + 2 * 2 * kv),
            ("kv_gather", 2 * kv, 2 * kv + 2 * kv),
            ("pure_tree", 2 * q + lse, 2 * q + 2 * lse + q),
            ("ulysses", (2 * q + 2 * kv) // 2, (2 * q + 2 * kv + lse) // 2),
        ):
            found = [int(rows[h_kv, schedule, part]["sent_bytes"]) for part in ("forward", "backward", "total")]
            assert found == [(p - 1) * forward, (p - 1) * backward, (p - 1) * (forward + backward)], schedule
            total = rows[h_kv, schedule, "total"]
            assert int(total["predicted_sent_bytes"]) == found[2] and float(total["error"]) <= 1
        predicted = {name: float(rows[h_kv, name, "total"]["predicted_ms"]) for name in train.PINS}
        assert predicted["auto"] <= 1.011 * min(predicted.values())


@pytest.mark.usefixtures("assumed_links")
def test_no_speed_of_a_wrong_gradient(tmp_path, monkeypatch, capfd):
    right = autograd.kernels.attn_delta
    monkeypatch.setattr(kernels, "attn_delta", lambda *args: right(*args) * 1.1)
    status, _ = benchmark("train", "--ranks", "2", "--seq-len", "128", "--schedules", "auto", out=tmp_path / "out")
    assert status == 1 and "auto is wrong" in capfd.readouterr().err


@pytest.mark.usefixtures("assumed_links")
@pytest.mark.skipif(rivals.no_torch_ring() is not None, reason=str(rivals.no_torch_ring()))
def test_torch_context_parallelism_beside_ours(tmp_path, capfd, monkeypatch):
    """And no speed beside a rival that is wrong, or whose kernels would have to be modelled."""
    modelled = ("--ranks", "2", "--compute", "modelled", "--schedules", "torch_ring")
    assert benchmark("train", *modelled, out=tmp_path / "modelled")[0] == 2
    assert "--schedules torch_ring: only our own kernels can be modelled" in capfd.readouterr().err
    options = ("--ranks", "3", "--seq-len", "192", "--compute", "real", "--schedules", "auto", "torch_ring")
    status, rows = benchmark("train", *options, "torch_gather", out=tmp_path / "right")
    assert status == 0, capfd.readouterr().err
    for name in ("torch_ring", "torch_gather"):
        total = rows[HEADS_KV, name, "total"]
        assert float(total["error"]) <= 1 and float(total["cpu_ms"]) > 0 and int(total["steps"]) == 3
        assert float(rows[HEADS_KV, name, "forward"]["ms"]) > 0 and float(rows[HEADS_KV, name, "backward"]["ms"]) > 0
        assert total["sent_bytes"] == total["predicted_ms"] == "" and rows[HEADS_KV, "auto", "total"]["sent_bytes"]
    right = rivals._flash
    monkeypatch.setattr(rivals, "_flash", lambda q, k, v, *rest: right(q * 1.01, k, v, *rest))
    capfd.readouterr()
    status, _ = benchmark("train", *options, out=tmp_path / "wrong")
    said = capfd.readouterr()
    assert status == 1 and "torch_ring is wrong" in said.err
    assert " ms" not in said.out.split("torch")[1] and not (tmp_path / "wrong").exists()


@pytest.mark.usefixtures("assumed_links")
def test_tangents_beside_an_all_gather(tmp_path, capfd, monkeypatch):
    """And no speed of a wrong tangent, and no rival of another pass."""
    p, tokens = 2, 128
    options = ("--pass", "jvp", "--ranks", str(p), "--seq-len", str(tokens))
    status, rows = benchmark("train", *options, "--compute", "real", out=tmp_path / "real")
    said = capfd.readouterr()
    assert status == 0, said.err
    q, kv, one = (tokens // p * n * 4 for n in (HEADS * D, 2 * HEADS_KV * D, HEADS))
    for schedule, sent in (("ring", 2 * kv), ("kv_gather", 2 * kv), ("pure_tree", 4 * q + 2 * one)):
        row = rows[HEADS_KV, schedule, "jvp"]
        assert int(row["sent_bytes"]) == int(row["predicted_sent_bytes"]) == (p - 1) * sent, schedule
    assert {name for _, name, _ in rows} == {*train.PINS, "all_gather", "local attention alone"}
    for name in (*train.PINS, "all_gather"):
        row = rows[HEADS_KV, name, "jvp"]
        assert float(row["error"]) <= 1 and float(row["ms"]) > 0 and int(row["steps"]) == 3
        assert int(row["held_bytes"]) == 2 * (q + kv)
    assert json.loads((tmp_path / "real" / "results.json").read_text())["command"] == "train --pass jvp"
    assert benchmark("train", *options, "--compute", "modelled", out=tmp_path / "modelled")[0] == 0
    assert benchmark("train", *options, "--schedules", "torch_ring", out=tmp_path / "none")[0] == 2
    assert "--schedules torch_ring: no contender in this pass: choose from" in capfd.readouterr().err
    right = reference.swapped
    monkeypatch.setattr(reference, "swapped", lambda x: right(x) * 1.01)
    assert benchmark("train", *options, "--schedules", "auto", out=tmp_path / "wrong")[0] == 1
    said = capfd.readouterr()
    assert "auto is wrong" in said.err and " ms" not in said.out.split("torch")[1] and not (tmp_path / "wrong").exists()


@pytest.mark.usefixtures("assumed_links")
def test_a_forward_without_gradients_beside_torchs(tmp_path, capfd, monkeypatch):
    """By the measured plan, and no speed of a wrong output."""
    p, tokens = 2, 128
    options = ("--pass", "no-grad", "--ranks", str(p), "--seq-len", str(tokens), "--compute", "real")
    status, rows = benchmark("train", *options, "--schedules", "auto", "ring", "torch_ring", out=tmp_path / "real")
    said = capfd.readouterr()
    assert status == 0, said.err
    kv = tokens // p * 2 * HEADS_KV * D * 4
    ring = rows[HEADS_KV, "ring", "forward"]
    assert int(ring["sent_bytes"]) == int(ring["predicted_sent_bytes"]) == (p - 1) * kv
    for name in ("auto", "ring", "torch_ring"):
        row = rows[HEADS_KV, name, "forward"]
        assert float(row["error"]) <= 1 and float(row["ms"]) > 0
    assert not rows[HEADS_KV, "auto", "forward"]["predicted_sent_bytes"]
    assert json.loads((tmp_path / "real" / "results.json").read_text())["command"] == "train --pass no-grad"
    right = rivals._flash
    monkeypatch.setattr(rivals, "_flash", lambda q, k, v, *rest: right(q * 1.01, k, v, *rest))
    assert benchmark("train", *options, "--schedules", "torch_ring", out=tmp_path / "wrong")[0] == 1
    assert "torch_ring is wrong" in capfd.readouterr().err and not (tmp_path / "wrong").exists()


@emulated
def test_an_emulated_cluster(tmp_path, capfd, monkeypatch):
    assume_links(monkeypatch, "host", "network", host_size=2)
    options = ("--emulate", "2x2", "--rate", "100mbit", "--seq-len", "512", "--dilate", "2")
    schedules = ("ring", "allreduce", "auto")
    status, _ = benchmark("decode", *options, "--schedules", *schedules, out=tmp_path)
    said = capfd.readouterr()
    assert status == 0, said.err
    assert "2 times slower" in said.out
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert {(r["machines"], r["dilate"]) for r in rows} == {("2x2", "2")}
    by_name = {r["schedule"]: r for r in rows}
    check_decode({(HEADS_KV, s, "decode"): r for s, r in by_name.items()}, 4, 512, schedules)
    ring, auto = by_name["ring"], by_name["auto"]
    assert int(ring["node_bytes"]) >= int(ring["predicted_node_bytes"]) > 0.9 * int(ring["sent_bytes"])
    assert int(auto["sent_bytes"]) == int(auto["predicted_sent_bytes"])  # the plan that ran is the one reported
    assert {"local attention alone", "local + log2(p) steps", "ring at line rate"} < by_name.keys()


def test_the_accelerator_sleeps_and_replays():
    accelerator = Accelerator(Speed(memory_bandwidth=1e6, flops=1e12))
    q, k, v = (torch.randn(1, n, 2, 8) for n in (1, 64, 64))
    spec, cache = AttnSpec(softmax_scale=1.0), kernels.KVCache(k, v)
    before = kernels.Backend.attn_decode
    with accelerator.recording():
        first = kernels.attn_decode(q, cache, spec)
    with accelerator.replaying():
        start = time.monotonic()
        again = kernels.attn_decode(q, cache._replace(k=k.clone()), spec)
        assert time.monotonic() - start >= 2 * k.nbytes / 1e6
        again.zero_()  # a copy: the record stays
        assert torch.equal(kernels.attn_decode(q, cache, spec), first)
        with pytest.raises(UnseenInput):
            kernels.attn_decode(q, cache._replace(k=k + 1), spec)
    assert kernels.Backend.attn_decode is before
    assert visible_pairs((Segment(0, 6, 2),), (Segment(0, 0, 6),), spec) == 12


def _meet_and_measure(meeting):
    rank = int(os.environ["RANK"])
    met = [meeting.most(rank, float(rank), float(-rank))[0] for _ in range(20)]
    with PeakMemory() as peak:
        for _ in range(10):
            torch.ones(8 << 20)
    return met, peak.bytes


def test_ranks_meet_and_tell_their_memory():
    for met, peak in LocalRanks(2).run(_meet_and_measure, Meeting(2), timeout_s=60):
        # 32 MiB at a time, 320 in all. Kernels count roughly, and may count late what was freed.
        assert met == [1.0] * 20 and (peak is None or 10e6 < peak < 200e6)


def test_plots_over_lengths_and_over_ranks(tmp_path):
    rows = [
        Measurement(
            m, p, s, num_heads=4, num_heads_kv=2, head_dim=8, part=part, schedule=name, ms=1.0 + p, predicted_ms=2.0,
            sent_bytes=10 * p, held_bytes=10, memory_bytes=4,
        )
        for m, p in (("2x1", 2), ("4x1", 4), ("2x2", 4))
        for s in (1024, 2048)
        for name, part in (("auto", "decode"), ("a rival", "decode"), ("a bound", "limit"))
    ]  # fmt: skip
    drawn = plots(rows)
    assert set(drawn) == {"seq-len.png", "ranks.png"}
    for name, panels in drawn.items():
        draw(tmp_path / name, panels, "a title")
        assert 1000 < (tmp_path / name).stat().st_size < 100_000
