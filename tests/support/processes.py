"""Whether processes have ended, how much memory this one has, and a port for new ones."""

import socket
import time
from pathlib import Path


def left(pids, seconds=30.0):
    """Those that are still there after this time at most; zombies that nobody has reaped yet don't count."""
    end = time.monotonic() + seconds
    while True:
        alive = [pid for pid in pids if _runs(pid)]
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.05)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def own_bytes():
    """Memory of this process that no file backs. Read from the page tables: the counts in /proc/self/status, of every
    CPU its own, are off by megabytes where a process has run on many CPUs."""
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous:")) * 1024


def free_port():
    """A TCP port of 127.0.0.1 that nobody has, now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
