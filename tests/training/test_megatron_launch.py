"""megatron-tree train as launchers start it: exit codes, SIGTERM."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("psutil")
pytest.importorskip("matplotlib")

import psutil

from megatron_tree.tools.training.command import train
from support.training_runs import TINY, losses, write_text

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path):
    """Starts the command on two ranks; what it prints goes to FOLDER/output.txt. At the end nothing of it is left."""
    started, text = [], write_text(tmp_path / "text")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "VIRTUAL_ENV": sys.prefix, "PATH": path}
    variables |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "STOP_SECONDS": "100"}

    def start(options):
        words = ["bash", ROOT / "launch" / "deepspeed_local.sh", "-n", "2", "train", *TINY.split(), *options.split()]
        words += ["--data-path", text, "--output-dir", tmp_path]
        with open(tmp_path / "output.txt", "w") as output:
            pipes = {"stdout": output, "stderr": output}
            started.append(subprocess.Popen(list(map(str, words)), env=os.environ | variables, cwd=tmp_path, **pipes))
        return started[-1]

    yield start
    for run in started:
        run.kill()
    left = processes_with(str(tmp_path))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def processes_with(argument):
    return [p.pid for p in psutil.process_iter(["cmdline"]) if argument in (p.info["cmdline"] or [])]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--assert-below-unigram 9", 1, "is not 9.0 below the unigram model's"),
        ("--seq-length 100000", 1, "tokens of text don't fill one sample of --seq-length 100000"),
        ("--context-parallel-size 2 --seq-length 62", 2, "--seq-length 62 must be a multiple of"),
    ],
)
def test_failures_end_the_run(run, tmp_path, options, code, said):
    assert run(options).wait(800) == code
    output = (tmp_path / "output.txt").read_text()
    assert said in output and "Traceback" not in output
    assert code == 1 or output.count(said) == 1, "one rank says it"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sigterm_to_the_launch_script_leaves_a_checkpoint(run, tmp_path):
    """launch/deepspeed_local.sh ends with 143, as after any SIGTERM, but waits for the ranks to save."""
    launcher = run(f"--context-parallel-size 2 --train-iters 100000 --save {tmp_path / 'c'}")
    deadline = time.monotonic() + 500
    while not (tmp_path / "train.jsonl").exists() or len(losses(tmp_path)) < 3:
        assert launcher.poll() is None and time.monotonic() < deadline, (tmp_path / "output.txt").read_text()
        time.sleep(0.1)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(500) == 143
    done = max(losses(tmp_path))
    assert f"stopped by a signal after step {done} of 100000" in (tmp_path / "output.txt").read_text()
    assert (tmp_path / "c" / "latest_checkpointed_iteration.txt").read_text() == f"{done}\n"


def test_without_a_launcher_it_says_how_to_start(monkeypatch, capsys):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert train([]) == 2
    assert "WORLD_SIZE, MASTER_PORT not set: start this program with a launcher" in capsys.readouterr().err
