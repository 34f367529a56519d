"""The soak test, tests/soak: its checks fail on every kind of bad record; the command runs and cleans up."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from support.emulation import emulated
from tests.soak import checks
from tests.soak.soak import Fault, Incarnation, Result, Sample, Survivor
from tests.soak.work import Generation, Training

REPO = Path(__file__).parents[2]
STEPS = 300
NAMED = "CommError: rank 2 did not respond within 10 s: all_gather among ranks [0, 1, 2, 3] failed"


def _work(kind, total):
    difference = functools.partial(kind.difference, None)
    return SimpleNamespace(name=kind.name, allowed=kind.allowed, once=kind.once, total=total, difference=difference)


def _answer(number):
    return [[(5, -0.5), (number, -1.0)]]


def _good():
    """What a soak with two losses and two pauses in each kind of work would have recorded."""
    soak = SimpleNamespace(limit_s=10.0, results=[], incarnations=[], faults=[], samples=[], left=[])
    soak.works = {"train": _work(Training, STEPS), "generate": _work(Generation, 8)}
    survivors = [Survivor(rank, 0.8, 1, NAMED) for rank in (0, 1, 3)]
    losses = [(step, 5.0 / step) for step in range(1, STEPS + 1)] + [("valid", 0.5)]
    answers = [(number, _answer(number)) for number in range(8)]
    for n, (work, round, first, last) in enumerate(
        [("train", 0, 0, STEPS), ("generate", 0, 0, 8), ("train", 1, 0, 155), ("generate", 1, 0, 5)]
        + [("train", 1, 140, STEPS), ("generate", 1, 5, 8)]
    ):
        resumed = first if work == "train" else None
        soak.incarnations.append(Incarnation(n, work, round, 100.0 * n, 100.0 * n + 98, first, resumed, last, "", []))
        done = losses[first : last + (last == STEPS)] if work == "train" else answers * (last == 8)
        soak.results += [Result(work, round, n, *x) for x in done]
        if n in (2, 3):
            soak.faults.append(Fault(100.0 * n + 97, n, ("kill", "stop")[n % 2], 2, survivors))
        elif n > 3:
            soak.faults.append(Fault(100.0 * n + 50, n, "pause", 1, []))
        for i in range(40):
            soak.samples += [Sample(100.0 * n + 2 * i, n, r, 300_000_000 + i % 3, 30, 55, 36) for r in range(4)]
    return soak


def _change(name, index, **values):
    def spoil(soak):
        found = getattr(soak, name)
        found[index] = found[index]._replace(**values)

    return spoil


def _survivor(index, **values):
    return lambda soak: soak.faults[index].survivors.append(soak.faults[index].survivors[0]._replace(**values))


def _rising(field, by):
    def spoil(soak):
        for i, s in enumerate(soak.samples):
            if (s.incarnation, s.rank) == (4, 0) and s.at_s > 450:
                soak.samples[i] = s._replace(**{field: getattr(s, field) + by})

    return spoil


LOSS, ANSWER = STEPS + 1 + 8 + 77, -3  # of a disturbed round
BAD = {
    "a wrong loss": (_change("results", LOSS, value=5.0 / 78 * (1 + 2e-6)), "train: wrong results"),
    "a step never done": (lambda s: s.results.pop(LOSS), "train: lost results"),
    "a lost answer": (lambda s: s.results.pop(ANSWER), "generate: lost results"),
    "a doubled answer": (lambda s: s.results.append(s.results[ANSWER]), "generate: doubled results"),
    "another token": (_change("results", ANSWER, value=_answer(9)), "generate: wrong results"),
    "another logprob": (_change("results", ANSWER, value=[[(5, -0.5), (5, -1.001)]]), "generate: wrong results"),
    "no finished round": (_change("incarnations", 5, last=7), "generate: no finished round"),
    "no fault": (lambda s: s.faults.clear(), "faults: none"),
    "a survivor that hangs": (_survivor(1, seconds=None), "survivors: never ended"),
    "a slow survivor": (_survivor(1, seconds=15.1), "survivors: seconds to the end of the slowest"),
    "a survivor with status 0": (_survivor(0, status=0), "survivors: ended as if nothing had happened"),
    "a survivor that names nobody": (
        _survivor(0, said="RuntimeError: Connection closed by peer"),
        "survivors: did not name the lost rank, and it alone",
    ),
    "a failure by itself": (_change("incarnations", 4, failed="rank 1"), "restarts: failures without a lost rank"),
    "an older checkpoint": (_change("incarnations", 4, resumed=120), "restarts: not from the newest good files"),
    "a checkpoint lost": (_change("incarnations", 4, expected=120), "restarts: not from the newest good files"),
    "a leak": (_rising("memory", 4_000_000), "growth of memory"),
    "rising descriptors": (_rising("fds", 1), "growth of fds"),
    "nothing measured": (lambda s: s.samples.clear(), "growth of memory"),
    "a process left": (_change("incarnations", 3, left=["process 77 is in a node"]), "left behind"),
}  # fmt: skip


def test_a_good_record_passes():
    found = checks.judge(_good())
    assert [c.name for c in found if not c.ok] == []


def test_a_bad_record_fails():
    for fault, (spoil, name) in BAD.items():
        soak = _good()
        spoil(soak)
        assert name in [c.name for c in checks.judge(soak) if not c.ok], fault


@pytest.mark.parametrize(
    ("said", "blamed"),
    [
        (NAMED, {2}),
        ("CommError: rank 3 failed: RuntimeError: out of memory, in decode, call 5 of its group", set()),
        ("CommError: ranks [1, 3] did not respond within 10 s", {1, 3}),
        ("CommError: all_gather among ranks [0, 1] failed on rank 1 (time limit 10 s): closed", set()),
    ],
)
def test_whom_an_error_names(said, blamed):
    assert checks.accused(said) == blamed


@contextlib.contextmanager
def _start(folder, *options):
    """The soak, under way; what a test that fails leaves of it is stopped."""
    command = [sys.executable, "-m", "tests.soak", "--nodes", "2x1", "--out", str(folder / "out.json"), *options]
    env = os.environ | {"TMPDIR": str(folder)}
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored in a background job
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with subprocess.Popen(command, cwd=REPO, env=env, preexec_fn=heed, **pipe) as running:
        try:
            yield running
        finally:
            running.terminate()


@pytest.mark.slow
@emulated
def test_a_minute(tmp_path):
    with _start(tmp_path, "--minutes", "1", "--every", "8", "--steps", "60", "--requests", "10") as running:
        said = running.communicate(timeout=1000)[0]
    assert running.returncode == 0, said
    told = json.loads((tmp_path / "out.json").read_text())
    assert {fault["kind"] for fault in told["faults"]} >= {"kill", "stop"}, said
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
