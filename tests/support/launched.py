"""megatron-tree serve in processes of its own, as users start it."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

REPO = Path(__file__).parents[2]
KEY = "a-key-for-tests"


@contextlib.contextmanager
def launched(*arguments, launcher=True, wait=True, **options):
    """(process, its lines so far, event set at the end of its output) of a server that listens; ended if need be.

    launcher: two ranks, or else the arguments say how many. wait: until it listens. options: of `Popen`.
    """
    env = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{REPO}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "MEGATRON_TREE_API_KEY": KEY,
        "STOP_SECONDS": "40",
        "VIRTUAL_ENV": str(Path(sys.executable).parents[1]),
    }
    script = ["bash", REPO / "launch" / "deepspeed_local.sh", "-n", 2]
    command = script if launcher else [sys.executable, "-m", "megatron_tree"]
    command += ["serve", *arguments]
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([str(part) for part in command], env=env, **options)
    lines, serving, over = [], threading.Event(), threading.Event()

    def read():
        for line in process.stdout:
            lines.append(line)
            if line.startswith("serving "):
                serving.set()
        over.set()
        serving.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        assert not wait or serving.wait(500), "".join(lines)
        yield process, lines, over
    finally:
        process.terminate()
        process.wait(200)
        assert over.wait(60), "a process is left"


def process_of(pid, rank):
    """The process below pid that is this rank of serve.py."""
    import psutil

    (found,) = [
        child
        for child in psutil.Process(pid).children(recursive=True)
        if child.environ().get("RANK") == str(rank) and "serve" in child.cmdline()
    ]
    return found
