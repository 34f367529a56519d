"""The options of a benchmark of several ranks: machines, cases, settings, and the sweeps of docs/benchmarks.md."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

from ..config import BACKENDS
from ..emulate import Cluster
from ..units import parse_bits_per_second, parse_count, parse_nodes_by_ranks, parse_seconds
from .accelerator import Speed
from .kernel_cases import DTYPES
from .ranks import CORES, LocalRanks


class Machines(NamedTuple):
    """Where ranks run: an emulated cluster, or processes of this machine (one node, no network)."""

    nodes: int
    ranks_per_node: int
    emulated: bool = True

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def label(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}" if self.emulated else f"{self.ranks} local"


class Case(NamedTuple):
    """One set of inputs, the same for every schedule."""

    machines: Machines
    seq_len: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    batch: int
    dtype: str

    @property
    def label(self) -> str:
        heads = f"{self.num_heads}/{self.num_heads_kv} heads x {self.head_dim}"
        return f"{self.machines.label} ranks, {self.seq_len} tokens, batch {self.batch}, {heads}, {self.dtype}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of one rank's share of keys and values."""
        tokens = self.batch * self.seq_len // self.machines.ranks
        return 2 * tokens * self.num_heads_kv * self.head_dim * DTYPES[self.dtype].itemsize


class Settings(NamedTuple):
    """How all cases of one command are run. Times and rates are as the user specified them, before `dilate`."""

    schedules: tuple[str, ...]
    """Empty: all that can run."""
    emulated: bool
    latency_s: float
    rate_bits: float
    compute: str = "real"
    speed: Speed = Speed(None, None)
    dilate: float = 1.0
    steps: int = 1
    budget_s: float = 1.0
    backend: str = "auto"

    def start(self, machines: Machines, lifetime_s: float):
        """A context of ranks: an emulated cluster whose network is `dilate` times slower, or local ranks."""
        if not machines.emulated:
            return LocalRanks(machines.ranks)
        return Cluster(
            nodes=machines.nodes,
            ranks_per_node=machines.ranks_per_node,
            latency_s=self.latency_s * self.dilate,
            rate_bits=self.rate_bits / self.dilate,
            lifetime_s=lifetime_s,
        )

    @property
    def network_text(self) -> str:
        """The network in words."""
        if not self.emulated:
            return "loopback of this machine"
        slow = f"; run {self.dilate:g} times slower, times divided by {self.dilate:g}" if self.dilate != 1 else ""
        return f"emulated, {self.latency_s * 1e3:g} ms and {self.rate_bits / 1e6:g} Mbit/s between nodes{slow}"

    @property
    def compute_text(self) -> str:
        """Whether kernels ran in the timed steps, in words."""
        if self.compute == "real":
            return f"real (backend {self.backend})"
        return (
            f"modelled (timed steps sleep for KV bytes / {self.speed.memory_bandwidth / 1e9:g} GB/s or flops / "
            f"{self.speed.flops / 1e12:g} TFLOP/s and return the checked step's results)"
        )

    @property
    def emulated_speed(self) -> Speed:
        """The modelled accelerator's speed, divided by `dilate`."""
        return Speed(*(x / self.dilate for x in self.speed))


def add_arguments(parser, command: str, contenders: Iterable[str], lengths: tuple[int, ...]) -> None:
    """Options shared by `bench decode` and `bench train`; `lengths`: of --sweep seq-len."""
    decode, add = command == "decode", parser.add_argument
    add_machines(parser)
    add("--sweep", nargs="+", choices=SWEEPS, default=(), help="seq-len: "
        f"{' '.join(f'{s // 1024}k' for s in lengths)} tokens on NxM and on a flat network of N*M nodes; "
        "ranks: N*M of them, half as many, ... 2")  # fmt: skip
    add("--seq-len", type=parse_count, nargs="+", default=[131072 if decode else 4096], help="of the whole sequence")
    add("--heads", type=parse_count, default=16)
    add("--kv-heads", type=_numbers, default="8" if decode else "16,4,2", help="one or several")
    add("--head-dim", type=parse_count, default=128)
    add("--batch", type=parse_count, default=1)
    add("--dtype", choices=DTYPES, default="bf16")
    add("--schedules", nargs="+", choices=tuple(contenders), help="(default: all that can run here)")
    add("--compute", choices=("real", "modelled"), help="modelled: timed steps sleep as long as an accelerator would "
        "compute and reuse the checked step's results (default with more ranks than cores); real: run the kernels",
        )  # fmt: skip
    add("--memory-bandwidth", type=float, default=7e9, help="of the modelled accelerator, bytes/s")
    add("--flops", type=float, default=1e12, help="of the modelled accelerator's kernels")
    add("--dilate", type=float, default=1.0, help="run with all times this much longer, and report them divided by it")
    add("--backend", choices=BACKENDS, default="auto", help="kernels of the checked and of real steps")
    add("--steps", type=parse_count, default=20, help="timed steps of each schedule; at least 3, whatever the budget")
    add("--budget", type=float, default=10.0, help="seconds for the timed steps of a schedule")
    add("--out", type=pathlib.Path, default=pathlib.Path(f"bench-results/{command}"))


def add_machines(parser) -> None:
    """Options for where ranks run; `machines_of` reads them."""
    add = parser.add_argument_group("ranks").add_mutually_exclusive_group(required=True).add_argument
    add("--ranks", type=parse_count, metavar="N", help="N processes of this machine, over loopback")
    add("--emulate", type=parse_nodes_by_ranks, metavar="NxM", help="N nodes with M ranks each (Linux, root)")
    add = parser.add_argument
    add("--latency", type=parse_seconds, default="1ms", help="between emulated nodes (default: %(default)s)")
    add("--rate", type=parse_bits_per_second, default="1gbit", help="per node's port (default: %(default)s)")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(parse_count(part) for part in text.split(","))


def settings(args: argparse.Namespace) -> Settings:
    """Settings of a command line. Raises ``ValueError`` for invalid or contradictory values."""
    machines = machines_of(args)
    compute = args.compute or ("modelled" if machines.ranks > CORES else "real")
    for name in ("memory_bandwidth", "flops", "dilate", "budget"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name):g}: must be positive")
    if args.dilate != 1 and (compute == "real" or not machines.emulated):
        raise ValueError(
            f"--dilate {args.dilate:g} slows down an emulated network and a modelled accelerator: it needs --emulate "
            "and --compute modelled"
        )
    if args.sweep and not machines.emulated:
        raise ValueError(f"--sweep {' '.join(args.sweep)} compares networks: it needs --emulate, for instance 4x4")
    return Settings(
        tuple(args.schedules or ()), machines.emulated, args.latency, args.rate, compute,
        Speed(args.memory_bandwidth, args.flops), args.dilate, args.steps, args.budget, args.backend,
    )  # fmt: skip


def machines_of(args) -> Machines:
    """The machines of a command line. Raises ``ValueError`` for a single rank."""
    machines = Machines(*args.emulate) if args.emulate else Machines(1, args.ranks, emulated=False)
    if machines.ranks < 2:
        raise ValueError(f"{machines.label} rank: start at least two, to measure communication")
    return machines


def cases(args: argparse.Namespace, lengths: tuple[int, ...]) -> list[Case]:
    """The cases of a command line, without repetitions, ordered by machines; `lengths`: of --sweep seq-len."""
    machines = machines_of(args)
    wanted = [(machines, s) for s in args.seq_len] if not args.sweep else []
    for sweep in args.sweep:
        wanted += SWEEPS[sweep](machines, lengths, args.seq_len)
    for ranks, s in {(m.ranks, s) for m, s in wanted}:
        if s % (2 * ranks):
            raise ValueError(f"--seq-len {s}: must be a multiple of 2 x {ranks} ranks, for equal shares")
    if uneven := [n for n in args.kv_heads if args.heads % n]:
        raise ValueError(f"--kv-heads {uneven[0]}: must divide --heads {args.heads}")
    wanted = sorted(dict.fromkeys(wanted), key=lambda run: (run[0].ranks_per_node, run))
    rest = (args.head_dim, args.batch, args.dtype)
    return [Case(m, s, args.heads, h_kv, *rest) for m, s in wanted for h_kv in args.kv_heads]


def _smaller(machines: Machines) -> list[Machines]:
    """These machines, halved again and again at the larger factor, down to two ranks: 4x4, 2x4, 2x2, 2x1."""
    n, m = machines.nodes, machines.ranks_per_node
    found = [machines]
    while n >= max(m, 4) or (m > 1 and n * m > 3):
        n, m = (n // 2, m) if n >= max(m, 4) else (n, m // 2)
        found.append(Machines(n, m))
    return found


def _both(machines: Machines) -> tuple[Machines, Machines]:
    """These, and a flat network of as many ranks."""
    return machines, Machines(machines.ranks, 1)


SWEEPS = {
    "seq-len": lambda machines, lengths, _: [(m, s) for m in _both(machines) for s in lengths],
    "ranks": lambda machines, _, lengths: [(m, s) for top in _both(machines) for m in _smaller(top) for s in lengths],
}
