"""Counts of the processes of a soak, from /proc: memory, file descriptors, threads, ports, shared memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ...emulate.network import listening_ports
from .records import Sample

SHARED_MEMORY = "/dev/shm/"


def sample(pid: int, *, at_s: float, incarnation: int, who: str) -> Sample:
    """A sample of one process. Raises: OSError if it has ended."""
    process = Path(f"/proc/{pid}")
    fields = (line.split() for line in (process / "smaps_rollup").read_text().splitlines()[1:])
    memory = {name.removesuffix(":"): 1024 * int(kilobytes) for name, kilobytes, *_ in fields}
    return Sample(
        at_s=at_s,
        incarnation=incarnation,
        who=who,
        rss=memory["Rss"],
        anonymous=memory["Anonymous"],
        fds=len(os.listdir(process / "fd")),
        threads=len(os.listdir(process / "task")),
        ports=len(listening_ports(str(pid))),
    )


def shared_memory_of(pid: int) -> set[str]:
    """Files of shared memory that a process has open or mapped."""
    found = set()
    with contextlib.suppress(OSError):  # it may end at any moment
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        with open(f"/proc/{pid}/maps") as maps:  # long: line by line, or this process's heap would grow
            found |= {line.split(maxsplit=5)[-1].strip() for line in maps if SHARED_MEMORY in line}
    return {name for name in found if name.startswith(SHARED_MEMORY) and not name.endswith(" (deleted)")}


def children() -> list[str]:
    """Child processes of this one: "child PID (NAME)"."""
    found = []
    for pid in " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split():
        with contextlib.suppress(OSError):
            found.append(f"child {pid} ({Path('/proc', pid, 'comm').read_text().strip()})")
    return found
