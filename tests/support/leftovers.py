"""What runs of ranks leave in the nodes of an emulated cluster: processes and listening ports."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_tree.tools.emulate.network import enter

LISTEN = "0A"  # in /proc/net/tcp


def leftovers(cluster) -> list[str]:
    """In words; there should be none between two runs."""
    return processes_in(inodes(cluster)) + [
        f"port {port} of node {node} is open"
        for node, namespace in enumerate(cluster.namespaces)
        for port in _inside(namespace, listening_ports)
    ]


def inodes(cluster) -> set[int]:
    """Of the nodes' network namespaces."""
    return {os.fstat(namespace).st_ino for namespace in cluster.namespaces}


def processes_in(namespaces: set[int]) -> list[str]:
    """Processes in network namespaces, given by their inode numbers."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end at any moment
            if os.stat(process / "ns/net").st_ino in namespaces:
                processes.append(f"process {process.name} ({(process / 'comm').read_text().strip()}) is in a node")
    return processes


def listening_ports(process: str = "thread-self") -> list[int]:
    """Listening TCP ports in the network namespace of a process, given by its name in /proc."""
    ports = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == LISTEN:
                ports.add(int(local.rpartition(":")[2], 16))
    return sorted(ports)


def _inside(namespace: int, fn):
    """fn() run in a network namespace by a thread that enters it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: (enter(namespace), fn())[1]).result()
