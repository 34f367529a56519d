"""Nothing stays behind an emulated cluster that is killed; launch/emulate.py runs a script of the user's on one."""

import argparse
import functools
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from megatron_tree.core.units import parse_bits_per_second, parse_nodes_by_ranks, parse_seconds
from megatron_tree.tools.emulate import Cluster
from support.emulation import emulated
from support.leftovers import leftovers

REPO = Path(__file__).resolve().parents[2]

PARENT = """\
import os, subprocess, sys, time
from megatron_tree.tools.emulate import Cluster

def work():  # with a child that has left the rank's session
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    time.sleep(600)

with Cluster(nodes=2, ranks_per_node=2, latency_s=1e-3, rate_bits=1e9, lifetime_s=60) as cluster:
    cluster.run(work, timeout_s=60)
"""


def _marked(mark):
    """Processes that were started, by whomever, below the one that got this environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@emulated
@pytest.mark.parametrize("name", ["SIGKILL", *(pytest.param(x, marks=pytest.mark.slow) for x in ("SIGINT", "SIGTERM"))])
def test_nothing_stays_behind(name, tmp_path):
    """Namespaces live as long as a process that was started here: no process, no namespace."""
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "tmp").mkdir()
    mark = f"EMULATE_TEST={uuid.uuid4()}"
    env = {**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": str(tmp_path / "tmp"), **dict([mark.split("=")])}
    command = [sys.executable, tmp_path / "parent.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored in a background job
    with subprocess.Popen(command, env=env, preexec_fn=heed, **pipes) as parent:
        end = time.monotonic() + 60
        while len(_marked(mark)) < 10 and time.monotonic() < end:  # it, the switch, 4 ranks and a child of each
            time.sleep(0.02)
        parent.send_signal(getattr(signal, name))
        _, errors = parent.communicate(timeout=100)
    end = time.monotonic() + 60
    while _marked(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _marked(mark)
    assert not list((tmp_path / "tmp").iterdir())
    assert name != "SIGINT" or "KeyboardInterrupt" in errors


# ---- launch/emulate.py

SCRIPT = """\
import os, sys
from helper import add
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], sys.argv[1:], __name__, add(rank, 1))
print("to stderr", file=sys.stderr)
if "--fail" in sys.argv and rank == 1:
    sys.exit(7)
if "--raise" in sys.argv and rank == 1:
    raise ValueError("told to fail")
if "--wait" in sys.argv or "--fail" in sys.argv:
    import time; time.sleep(600)
"""


def _launch(tmp_path, *arguments):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("def add(a, b):\n    return a + b\n")
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, REPO / "launch" / "emulate.py", *map(str, arguments)]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)


@emulated
def test_launch(tmp_path):
    done = _launch(tmp_path, "--nodes", 2, "--latency", "1ms", "--rate", "1gbit", "--", "script.py", "--option", "x y")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [
        "[0] rank 0 of 2 ['--option', 'x y'] __main__ 1",
        "[0] to stderr",
        "[1] rank 1 of 2 ['--option', 'x y'] __main__ 2",
        "[1] to stderr",
    ]


@emulated
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--", "script.py", "--fail"], 7, ""),
        (["--", "-m", "script", "--raise"], 1, r"\[1\] ValueError: told to fail"),
        (["--timeout", "2s", "--", "script.py", "--wait"], 1, r"ranks \[0, 1\] had not finished after timeout_s=2"),
    ],
    ids=["status", "module", "timeout"],
)
def test_launch_fails(tmp_path, arguments, status, said):
    done = _launch(tmp_path, *arguments)
    assert done.returncode == status, done.stderr
    assert re.search(said, done.stdout + done.stderr)
    assert "Traceback" not in done.stderr


def test_units():
    times = ("200us", "1ms", "1.5 s", "0", "2min")
    assert [parse_seconds(text) for text in times] == pytest.approx([2e-4, 1e-3, 1.5, 0, 120])
    rates = ("100mbit", "1 Gbit/s", "2.5gbit", "800 kbit")
    assert [parse_bits_per_second(text) for text in rates] == [1e8, 1e9, 2.5e9, 8e5]
    assert parse_nodes_by_ranks("4x2") == (4, 2)
    wrong = (
        (parse_seconds, "1"),
        (parse_seconds, "-1ms"),
        (parse_bits_per_second, "0gbit"),
        (parse_nodes_by_ranks, "4x0"),
    )
    for parse, text in wrong:
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not"):
            parse(text)


LISTENER = """\
import os, socket, time
with socket.socket() as listener:
    if os.environ["RANK"] == "1":
        listener.bind(("10.77.0.2", 7123))
        listener.listen()
    print("ready", flush=True)
    time.sleep(60)
"""


@emulated
def test_the_caller_watches_the_ranks_and_sees_what_is_left(tmp_path):
    script = tmp_path / "listener.py"
    script.write_text(LISTENER)
    said = []
    with Cluster(nodes=2, latency_s=1e-3, rate_bits=1e9, lifetime_s=60) as cluster:
        assert leftovers(cluster) == []
        with cluster.start_script([str(script)], on_line=lambda rank, line: said.append(rank)) as ranks:
            while sorted(said) != [0, 1]:
                ranks.watch(0.5)
            left = leftovers(cluster)
            pids = [rank.pid for rank in ranks.ranks]
            assert "port 7123 of node 1 is open" in left and len(left) == 3
            assert all(any(f"process {pid} (" in line for line in left) for pid in pids)
            os.kill(pids[1], signal.SIGKILL)
            while len(ranks.unfinished()) > 1:
                ranks.watch(0.5)
            assert [rank.number for rank in ranks.failed()] == [1] and ranks.failed()[0].ended is not None
            assert [rank.number for rank in ranks.unfinished()] == [0]
        assert leftovers(cluster) == []
        with pytest.raises(ValueError, match="no such script"):
            cluster.run_script([str(tmp_path / "none.py")], on_line=print, timeout_s=1)
