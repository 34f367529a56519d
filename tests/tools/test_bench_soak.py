"""`bench soak`: its checks fail on every kind of bad record, and the command itself runs, stops and cleans up."""

import contextlib
import copy
import csv
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from megatron_tree.bench import __main__ as bench
from megatron_tree.bench.soak import checks, report
from megatron_tree.bench.soak.records import Answer, Incarnation, Kill, Record, Sample, Survivor
from support.emulation import emulated

REPO = Path(__file__).parents[2]
STEPS, SAVED = 300, 20
MB = 2**20
NAMED = "CommError: rank 2 did not respond within 10 s: all_gather among ranks [0, 1, 2, 3] failed"


def _answer(number):
    return Answer(number, [[5, number]], [[-0.5, -1.0]])


def good_record():
    """What a soak of two rounds of each kind would have written: four kills, a hundred seconds between them."""
    record = Record(limit_s=10.0, save_interval=SAVED)
    record.losses = {str(step): 5.0 / step for step in range(1, STEPS + 1)} | {"valid": 0.5}
    record.answers = {number: _answer(number) for number in range(8)}
    last = {"train": (0, 0), "generate": (0, 0)}
    for n in range(8):
        work = ("train", "generate")[n % 2]
        first, round = last[work]
        kill, end = None, (STEPS, 8)[n % 2]
        if n < 4:
            survivors = [Survivor(r, 0.8, 1, NAMED) for r in (0, 1, 3)]
            kill = Kill(100.0 * n + 95, 2, "SIGSTOP" if n == 3 else "SIGKILL", "training.step.train_step", survivors)
            end = (155, 5)[n % 2]
        record.incarnations.append(
            Incarnation(
                n, work, round, 100.0 * n, 100.0 * n + 4, 100.0 * n + 98, first, first, end, not kill, kill, "", []
            )
        )
        last[work] = ((140, 5)[n % 2], 0) if kill else (0, round + 1)
        for i in range(48):
            at_s = 100.0 * n + 2 * i
            for who in ("parent", "0", "1", "2", "3"):
                wobble = (i % 3) * 0.2 * MB
                record.samples.append(Sample(at_s, n, who, 400 * MB + int(wobble), 300 * MB, 30, 55, 36))
        if work == "train":
            done = [str(step) for step in range(first + 1, end + 1)] + ["valid"] * (not kill)
            record.seen_losses += [(n, step, record.losses[step]) for step in done]
        elif not kill:
            record.seen_answers += [(round, _answer(number)) for number in range(8)]
    return record


GOOD = good_record()


def _sample(record, wanted, **changes):
    """Change the samples that `wanted(sample)` picks; a value may be a function of the sample."""
    record.samples = [
        s._replace(**{f: v(s) if callable(v) else v for f, v in changes.items()}) if wanted(s) else s
        for s in record.samples
    ]


def _kill(record, number, **changes):
    """Change the first survivor of an incarnation's kill."""
    x = record.incarnations[number]
    first, *rest = x.kill.survivors
    kill = x.kill._replace(survivors=[first._replace(**changes), *rest])
    record.incarnations[number] = x._replace(kill=kill)


def _incarnation(record, number, **changes):
    record.incarnations[number] = record.incarnations[number]._replace(**changes)


def _loss(record, factor):
    number, step, loss = record.seen_losses[77]
    record.seen_losses[77] = number, step, loss * factor


def _no_kill(record):
    record.incarnations = [x._replace(kill=None) for x in record.incarnations]


def _rank_0(number):
    return lambda s: s.who == "0" and s.incarnation == number


def _second_half(s):
    return s.at_s % 100 > 60


BAD = {
    "a wrong loss": (lambda r: _loss(r, 1 + 2e-6), "losses: largest relative difference"),
    "a loss that is nan": (lambda r: _loss(r, float("nan")), "losses: largest relative difference"),
    "a step never done": (
        lambda r: setattr(r, "seen_losses", [x for x in r.seen_losses if x[1] != "200"]),
        "losses: steps never done",
    ),
    "a step too many": (lambda r: r.seen_losses.append((7, "301", 1.0)), "losses: largest relative difference"),
    "a lost answer": (lambda r: r.seen_answers.pop(3), "answers: lost"),
    "a doubled answer": (lambda r: r.seen_answers.append(r.seen_answers[3]), "answers: doubled"),
    "an answer to nothing": (lambda r: r.seen_answers.append((0, _answer(99))), "answers: other tokens"),
    "another token": (
        lambda r: r.seen_answers.__setitem__(3, (0, Answer(3, [[5, 4]], [[-0.5, -1.0]]))),
        "answers: other tokens",
    ),
    "another logprob": (
        lambda r: r.seen_answers.__setitem__(3, (0, Answer(3, [[5, 3]], [[-0.5, -1.001]]))),
        "answers: largest difference of a logprob",
    ),
    "no finished round": (lambda r: r.seen_answers.clear(), "answers: rounds never finished"),
    "no loss of a rank": (_no_kill, "kills: none"),
    "a survivor that hangs": (lambda r: _kill(r, 1, seconds=None), "survivors: never ended"),
    "a slow survivor": (lambda r: _kill(r, 3, seconds=12.1), "survivors: seconds to the end of the slowest"),
    "a survivor with status 0": (lambda r: _kill(r, 0, status=0), "survivors: ended as if nothing had happened"),
    "a survivor that names nobody": (
        lambda r: _kill(r, 0, said="RuntimeError: Connection closed by peer [10.77.0.1]:56728"),
        "survivors: without its name",
    ),
    "a survivor that blames another": (
        lambda r: _kill(r, 0, said="CommError: ranks [1, 2] did not respond"),
        "survivors: without its name",
    ),
    "a failure by itself": (
        lambda r: _incarnation(r, 6, failed="rank 1 ended with 1"),
        "restarts: failures without a lost rank",
    ),
    "an older checkpoint": (lambda r: _incarnation(r, 2, first=120), "restarts: not from the newest checkpoint"),
    "a checkpoint lost": (
        lambda r: _incarnation(r, 2, first=120, expected_first=120),
        "restarts: not from the newest checkpoint",
    ),
    "an answer lost on the disk": (
        lambda r: _incarnation(r, 3, first=4, expected_first=4),
        "restarts: not from the newest checkpoint",
    ),
    "a leak": (
        lambda r: _sample(r, _rank_0(4), anonymous=lambda s: int((300 + (s.at_s - 400) * 0.05) * MB)),
        "memory: growth inside an incarnation, anonymous",
    ),
    "a leak over incarnations": (
        lambda r: _sample(r, lambda s: s.who != "parent", rss=lambda s: (400 + s.incarnation) * MB),
        "memory: growth over incarnations of train, rss",
    ),
    "a leak in the parent": (
        lambda r: _sample(r, lambda s: s.who == "parent", rss=lambda s: int((400 + s.at_s * 0.04) * MB)),
        "memory: growth of the parent, rss",
    ),
    "rising descriptors": (
        lambda r: _sample(r, lambda s: _rank_0(5)(s) and _second_half(s), fds=31),
        "rising numbers of fds",
    ),
    "rising threads of the parent": (
        lambda r: _sample(r, lambda s: s.who == "parent" and s.incarnation == 7, threads=56),
        "rising numbers of threads",
    ),
    "rising ports": (
        lambda r: _sample(r, lambda s: _rank_0(0)(s) and _second_half(s), ports=37),
        "rising numbers of ports",
    ),
    "a process left": (
        lambda r: _incarnation(r, 3, left=["process 77 (python) is in a node"]),
        "left behind by an incarnation",
    ),
    "a namespace left": (lambda r: r.left.append("process 78 (switch) is in a node"), "left behind at the end"),
}  # fmt: skip


def test_a_good_record_passes():
    found = checks.judge(GOOD)
    assert [c.name for c in found if not c.ok] == []
    # none of the rules that bad records break is missing
    assert {name for _, name in BAD.values()} - {"kills: none"} <= {c.name for c in found}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_record_fails(fault):
    spoil, name = BAD[fault]
    record = copy.deepcopy(GOOD)
    spoil(record)
    assert name in [c.name for c in checks.judge(record) if not c.ok]


def test_a_long_soak_without_a_long_incarnation_is_not_judged_well():
    record = copy.deepcopy(GOOD)
    record.incarnations = [x._replace(ready_s=None) for x in record.incarnations]
    assert "memory: growth inside an incarnation, rss" in [c.name for c in checks.judge(record) if not c.ok]


@pytest.mark.parametrize(
    ("said", "blamed"),
    [
        (NAMED, {2}),
        ("CommError: rank 3 failed: RuntimeError: out of memory, in decode, call 5 of its group", set()),
        ("CommError: ranks [3] did not call tree_attn_func within 10 s", {3}),
        ("CommError: the store can't be reached (timeout): rank 0, whose process hosts it, does not respond", {0}),
        ("CommError: ranks [1, 3] did not respond within 10 s", {1, 3}),
        ("CommError: all_gather among ranks [0, 1] failed on rank 1 (time limit 10 s): closed", set()),
    ],
)
def test_whom_an_error_names(said, blamed):
    assert checks.accused(said) == blamed


def test_the_report(tmp_path, capsys):
    report.write(tmp_path, GOOD, checks.judge(GOOD), {"command": "soak"})
    told = json.loads((tmp_path / "results.json").read_text())
    assert all(c["ok"] for c in told["checks"]) and len(told["kills"]) == 4 and len(told["rows"]) == 8
    assert told["kills"][0]["survivors"][0]["accused"] == [2]
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [r["end"] for r in rows][2:5] == ["SIGKILL of rank 2", "SIGSTOP of rank 2", "finished"]
    assert rows[0]["named"] == rows[0]["survivors"] == "3" and float(rows[0]["slowest_s"]) == 0.8
    assert (tmp_path / "results.png").read_bytes()[:4] == b"\x89PNG"
    shown = report.table(checks.judge(GOOD))
    assert "WRONG" not in shown and "0.067" in shown  # 0.8 of 12 s


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minutes", "0"], "--minutes 0: must be more than 0"),
        (["--nodes", "1x1"], "--nodes 1x1: at least two ranks"),
    ],
)
@emulated
def test_bad_options(tmp_path, capfd, options, message):
    assert bench.main(["soak", "--out", str(tmp_path / "out"), *options]) == 1
    assert message in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


@contextlib.contextmanager
def _start(out, *options):
    """The soak, under way; what a test that fails leaves of it is stopped."""
    command = [sys.executable, "-m", "megatron_tree.bench", "soak", "--out", out, *options]
    env = os.environ | {"PYTHONPATH": f"{REPO}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored in a background job
    with subprocess.Popen([str(x) for x in command], cwd=out.parent, env=env, preexec_fn=heed, **pipe) as running:
        try:
            yield running
        finally:
            running.terminate()


@pytest.mark.slow
@emulated
def test_a_minute(tmp_path):
    out = tmp_path / "out"
    options = ["--minutes", 1, "--kill-every", 10, "--steps", 60, "--requests", 10]
    with _start(out, *options, "--nodes", "2x1") as running:
        said = running.communicate(timeout=400)[0]
    assert running.returncode in (0, 1), said
    told = json.loads((out / "results.json").read_text())
    failed = {c["name"] for c in told["checks"] if not c["ok"]}
    assert len(told["kills"]) >= 2 and (running.returncode == 1) == bool(failed), said
    assert not failed, said
    assert sorted(p.name for p in out.iterdir()) == ["results.csv", "results.json", "results.png"]


@pytest.mark.slow
@emulated
def test_it_can_be_stopped(tmp_path):
    out = tmp_path / "out"
    with _start(out, "--only", "train", "--steps", 5000) as running:
        end = time.monotonic() + 120
        while not list(out.glob("soak-*/train-0/log-0/train.jsonl")) and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(1)
        running.send_signal(signal.SIGINT)
        said = running.communicate(timeout=30)[0]
    assert running.returncode == 130, said
    assert not out.exists()
    mark = f"--out {out}"
    assert not [p for p in Path("/proc").glob("[0-9]*") if mark in _command_of(p)]


def _command_of(process):
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
