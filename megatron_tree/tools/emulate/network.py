"""The network of an emulated cluster: compiles and starts switch.c, and reads its counters from /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from ...core.compiled import NotCompiled, compiled

_SOURCE = Path(__file__).with_name("switch.c")
_STOP_S = 10.0
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


class Unavailable(RuntimeError):
    """This machine can't emulate a cluster; the message says what is missing."""


def network_bytes() -> dict[str, int]:
    """Bytes that the calling rank's node has sent so far: {"network": to other nodes, "loopback": inside the node}.

    Payload and TCP/IP headers as counted by the kernel; a large send counts about one header, not one per packet.
    Raises: RuntimeError outside an emulated node.
    """
    sent = {}
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        sent[name.strip()] = int(counters.split()[8])
    if set(sent) != {"lo", "eth0"}:
        raise RuntimeError(f"network_bytes: this process is not in an emulated node: its interfaces are {sorted(sent)}")
    return {"network": sent["eth0"], "loopback": sent["lo"]}


def require() -> None:
    """Raise `Unavailable` unless this process may create network namespaces and TUN devices."""
    if sys.platform != "linux":
        raise Unavailable(f"an emulated cluster needs Linux's network namespaces; this is {sys.platform}")
    if os.geteuid() != 0:
        raise Unavailable("an emulated cluster needs root, for network namespaces and TUN devices: run it with sudo")
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise Unavailable(
            "an emulated cluster needs /dev/net/tun: load the kernel module tun (modprobe tun), or give the container "
            "the device (docker run --cap-add NET_ADMIN --cap-add SYS_ADMIN --device /dev/net/tun)"
        )


def build_switch() -> Path:
    """Path of the compiled switch.c. Raises: Unavailable if there is no C compiler, or if it fails."""
    try:
        return compiled(_SOURCE, "-O2")
    except NotCompiled as error:
        raise Unavailable(f"an emulated cluster needs its switch: {error}") from error


class EmulatedNetwork:
    """The running switch and its namespaces. `close` ends every process in them."""

    def __init__(self, *, nodes: int, latency_s: float, rate_bits: float, lifetime_s: float):
        require()
        arguments = (nodes, f"{rate_bits:.0f}", f"{latency_s * 1e9:.0f}", f"{lifetime_s:.3f}", os.getpid())
        self._errors = os.fdopen(os.memfd_create("errors of the switch"), "w+b")
        self._switch = subprocess.Popen(
            [build_switch(), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C must not reach it: `close` ends it
        )
        self.namespaces: list[int] = []
        try:
            _, *words = self._switch.stdout.readline().decode().split() or [""]
            if not words:
                raise Unavailable(f"the emulated network can't be made: {self.why_ended()}")
            for number in words:
                self.namespaces.append(os.open(f"/proc/{self._switch.pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            self.close()
            raise

    @property
    def running(self) -> bool:
        return self._switch.poll() is None

    def why_ended(self) -> str:
        """The last output of the switch, which has ended."""
        status = self._switch.wait(_STOP_S)
        self._errors.seek(0)
        return self._errors.read().decode().strip() or f"the switch ended with status {status}"

    def close(self) -> None:
        """Kill all processes in the nodes and take the network down."""
        self._switch.terminate()
        try:
            self._switch.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._switch.kill()
            self._switch.wait()
        self._switch.stdout.close()
        self._errors.close()
        for namespace in self.namespaces:
            with contextlib.suppress(OSError):
                os.close(namespace)
        self.namespaces.clear()


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent process ends."""
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def enter(namespace: int) -> None:
    """Move this process into a network namespace, given as a file descriptor."""
    libc = _libc()
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "can't enter the node's network namespace")


def _libc():
    return ctypes.CDLL(None, use_errno=True)
