"""What the kernel tells about the processes of a soak: memory, descriptors, threads, shared memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ...emulate.network import listening_ports
from .records import Sample

SHARED_MEMORY = "/dev/shm/"


def look(pid: int, *, at_s: float, incarnation: int, who: str) -> Sample:
    """A sample of one process. Raises: OSError if it is gone."""
    process = Path(f"/proc/{pid}")
    kilobytes = {"Rss": 0, "Anonymous": 0, "Pss_Anon": 0}
    for line in (process / "smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        if name[:-1] in kilobytes:
            kilobytes[name[:-1]] = int(value)
    return Sample(
        at_s=at_s,
        incarnation=incarnation,
        who=who,
        rss=1024 * kilobytes["Rss"],
        anonymous=1024 * kilobytes["Anonymous"],
        pss=1024 * kilobytes["Pss_Anon"],
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
    """Processes of this one: "child PID (NAME)"."""
    me, found = str(os.getpid()), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, _, rest = (process / "stat").read_text().partition("(")[2].rpartition(")")
            if rest.split()[1] == me:
                found.append(f"child {process.name} ({name})")
    return found
