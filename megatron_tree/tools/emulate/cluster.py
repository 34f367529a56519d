"""An emulated cluster: nodes connected by a network, and functions or scripts that run on ranks in them."""

from __future__ import annotations

import contextlib
import itertools
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .forked import ForkedProcess, Rank, Ranks
from .network import EmulatedNetwork, enter

_MASTER_ADDR = "10.77.0.1"  # the first node's address (switch.c)
_FIRST_PORT = 29500
_NUM_PORTS = 1000  # an earlier run's port may still be in TIME_WAIT
_MAX_NODES = 250
_SWITCH_OUTLIVES_S = 5.0  # this process enforces the lifetime; the switch does so only if this process is stuck


class Cluster(ForkedProcess):
    """Nodes on this machine, connected by a network of a given rate and latency. A context manager.

    Args:
        nodes: number of nodes; each is a network namespace with one port to a switch.
        ranks_per_node: ranks on each; they reach each other over the node's loopback interface.
        latency_s: seconds from one node's port to another's, one way.
        rate_bits: bits per second of each node's port, in each direction, shared by its ranks.
        lifetime_s: after this many seconds the cluster and all its processes are ended in any case.

    Enter it and call `run` on the main thread, before this process uses torch's collectives or thread pools: ranks are
    forked from this process, so that torch is imported once. No process, namespace or file outlives the cluster, even
    if this process is killed.

    Raises: Unavailable on entering if root, /dev/net/tun or a C compiler is missing. ValueError for invalid arguments.
    """

    def __init__(
        self, *, nodes: int, ranks_per_node: int = 1, latency_s: float, rate_bits: float, lifetime_s: float = 600.0
    ):
        if not 1 <= nodes <= _MAX_NODES:
            raise ValueError(f"nodes={nodes}: an emulated cluster has 1 to {_MAX_NODES}")
        if ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={ranks_per_node}: must be at least 1")
        if latency_s < 0:
            raise ValueError(f"latency_s={latency_s}: must not be negative")
        if rate_bits < 1:
            raise ValueError(f"rate_bits={rate_bits}: must be at least 1 bit per second")
        if lifetime_s <= 0:
            raise ValueError(f"lifetime_s={lifetime_s}: must be positive")
        self.nodes, self.ranks_per_node = nodes, ranks_per_node
        self.latency_s, self.rate_bits, self.lifetime_s = latency_s, rate_bits, lifetime_s
        self._network: EmulatedNetwork | None = None
        self._runs = itertools.count()

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def __enter__(self) -> Cluster:
        self._network = EmulatedNetwork(
            nodes=self.nodes,
            latency_s=self.latency_s,
            rate_bits=self.rate_bits,
            lifetime_s=self.lifetime_s + _SWITCH_OUTLIVES_S,
        )
        self._end = time.monotonic() + self.lifetime_s
        return self

    def __exit__(self, *_) -> None:
        network, self._network = self._network, None
        network.close()

    def run_script(self, argv: list[str], *, on_line: Callable[[int, str], None], timeout_s: float) -> int:
        """Run a Python script on every rank, as launchers do; returns the first failing exit status, or 0.

        argv: a script and its arguments, or "-m", a module and its arguments. on_line(rank, line) receives the output.
        Raises: ValueError if there is no such script. RuntimeError if a rank takes longer than timeout_s seconds.
        """
        with self.start_script(argv, on_line=on_line) as ranks:
            self._wait(ranks, timeout_s)
            failed = ranks.failed()
            return 0 if not failed else failed[0].status if failed[0].status > 0 else 128 - failed[0].status

    @contextlib.contextmanager
    def start_script(self, argv: list[str], *, on_line: Callable[[int, str], None]) -> Iterator[Ranks]:
        """Like `run_script`, but the caller watches the ranks (`Ranks.watch`), even after some of them have failed.

        All ranks are ended when the block ends. Raises: ValueError if there is no such script.
        """
        if not argv or argv == ["-m"]:
            raise ValueError("no script given: name a Python file, or -m and a module, after --")
        if argv[0] != "-m" and not Path(argv[0]).is_file():
            raise ValueError(f"no such script: {argv[0]}")
        with Ranks(on_line) as ranks:
            self._start(ranks, lambda number: _run_as_main(argv))
            yield ranks

    @property
    def namespaces(self) -> list[int]:
        """File descriptors of the nodes' network namespaces."""
        self._check()
        return self._network.namespaces

    def _time_limit(self, timeout_s: float) -> tuple[float, str]:
        left = self._end - time.monotonic()
        if left < 0:
            raise RuntimeError(f"the cluster is past its lifetime_s={self.lifetime_s:g}: make it longer")
        if left < timeout_s:
            return left, f"the cluster's lifetime_s={self.lifetime_s:g}: make it longer"
        return super()._time_limit(timeout_s)

    def _port(self) -> int:
        return _FIRST_PORT + next(self._runs) % _NUM_PORTS

    def _check(self) -> None:
        if self._network is None:
            raise RuntimeError("the cluster does not exist: use it inside `with Cluster(...) as cluster:`")
        if not self._network.running:
            raise RuntimeError(f"the emulated network has ended: {self._network.why_ended()}")

    def _take_place(self, number: int) -> dict:
        node, local = divmod(number, self.ranks_per_node)
        enter(self._network.namespaces[node])
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(node + local) % len(cores)]})  # spreads the nodes' first ranks over the cores
        return dict(
            LOCAL_RANK=local,
            LOCAL_WORLD_SIZE=self.ranks_per_node,
            MASTER_ADDR=_MASTER_ADDR,
            GLOO_SOCKET_IFNAME="eth0",
        )

    def _describe(self, rank: Rank) -> str:
        return f"node {rank.number // self.ranks_per_node}, {super()._describe(rank)}"


def _run_as_main(argv: list[str]) -> int:
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")
    return 0
