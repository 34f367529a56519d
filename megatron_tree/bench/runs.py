"""The options of a benchmark of several ranks: machines, cases and settings."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

from ..emulate import Cluster
from ..units import parse_bits_per_second, parse_count, parse_nodes_by_ranks, parse_seconds
from .accelerator import ACCELERATOR, Speed
from .kernel_cases import DTYPES
from .measure import CORES, LocalRanks


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

    @property
    def hosts(self) -> list[int]:
        """The node of each rank."""
        return [rank // self.ranks_per_node for rank in range(self.ranks)]


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
    dilate: float = 1.0
    steps: int = 1
    budget_s: float = 1.0

    def start(self, machines: Machines, lifetime_s: float):
        """A context of ranks: an emulated cluster whose network is `dilate` times slower, or local ranks."""
        if not machines.emulated:
            return contextlib.nullcontext(LocalRanks(machines.ranks))
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
            return "real"
        return f"modelled ({ACCELERATOR.memory_bandwidth / 1e9:g} GB/s of KV, {ACCELERATOR.flops / 1e12:g} TFLOP/s)"

    @property
    def speed(self) -> Speed:
        """The modelled accelerator's speed, divided by `dilate`."""
        return Speed(*(x / self.dilate for x in ACCELERATOR))


def add_arguments(parser, command: str, contenders: Iterable[str], *, modelled: bool = True) -> None:
    """Options shared by `bench decode`, `train` and `step`. modelled: whether compute can be."""
    decode, add = command == "decode", parser.add_argument
    add_machines(parser)
    add("--seq-len", type=parse_count, nargs="+", default=[131072 if decode else 4096], help="of the whole sequence; "
        "one or several")  # fmt: skip
    add("--heads", type=parse_count, default=16)
    add("--kv-heads", type=_numbers, default="8" if decode else "16,4,2", help="one or several")
    add("--head-dim", type=parse_count, default=128)
    add("--batch", type=parse_count, default=1)
    add("--dtype", choices=DTYPES, default="bf16")
    add("--schedules", nargs="+", choices=tuple(contenders), help="(default: all that can run here)")
    if modelled:
        add("--compute", choices=("real", "modelled"), help="modelled: timed steps sleep as long as an accelerator "
            "would compute and reuse the checked step's results (default with more ranks than cores); real: run the "
            "kernels")  # fmt: skip
        add("--dilate", type=float, default=1.0, help="run with all times this much longer, and report them divided "
            "by it")  # fmt: skip
    else:
        parser.set_defaults(compute="real", dilate=1.0)
    add("--steps", type=parse_count, default=20, help="timed steps of each schedule; at least 3, whatever the budget")
    add("--budget", type=float, default=10.0, help="seconds for the timed steps of a schedule")
    add("--out", type=pathlib.Path, default=pathlib.Path(f"bench-results/{command}"))


def add_machines(parser) -> None:
    """Options for where ranks run; `machines_of` reads them."""
    add = parser.add_argument_group("ranks").add_mutually_exclusive_group(required=True).add_argument
    add("--ranks", type=parse_count, metavar="N", help="N processes of this machine, over loopback")
    add("--emulate", type=parse_nodes_by_ranks, nargs="+", metavar="NxM", help="N nodes with M ranks each (Linux, "
        "root); one or several")  # fmt: skip
    add = parser.add_argument
    add("--latency", type=parse_seconds, default="1ms", help="between emulated nodes (default: %(default)s)")
    add("--rate", type=parse_bits_per_second, default="1gbit", help="per node's port (default: %(default)s)")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(parse_count(part) for part in text.split(","))


def settings(args: argparse.Namespace) -> Settings:
    """Settings of a command line. Raises ``ValueError`` for invalid or contradictory values."""
    machines = machines_of(args)
    compute = args.compute or ("modelled" if max(m.ranks for m in machines) > CORES else "real")
    for name in ("dilate", "budget"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name} {getattr(args, name):g}: must be positive")
    if args.dilate != 1 and (compute == "real" or not args.emulate):
        raise ValueError(
            f"--dilate {args.dilate:g} slows down an emulated network and a modelled accelerator: it needs --emulate "
            "and --compute modelled"
        )
    network = bool(args.emulate), args.latency, args.rate
    return Settings(tuple(args.schedules or ()), *network, compute, args.dilate, args.steps, args.budget)


def machines_of(args) -> list[Machines]:
    """The machines of a command line. Raises ``ValueError`` for a single rank."""
    machines = [Machines(*pair) for pair in args.emulate or ()] or [Machines(1, args.ranks, emulated=False)]
    for one in machines:
        if one.ranks < 2:
            raise ValueError(f"{one.label} rank: start at least two, to measure communication")
    return machines


def cases(args: argparse.Namespace) -> list[Case]:
    """The cases of a command line, by machines. Raises ``ValueError`` for sizes that do not divide evenly."""
    machines = machines_of(args)
    for one, s in itertools.product(machines, args.seq_len):
        if s % (2 * one.ranks):
            raise ValueError(f"--seq-len {s}: must be a multiple of 2 x {one.ranks} ranks, for equal shares")
    if uneven := [n for n in args.kv_heads if args.heads % n]:
        raise ValueError(f"--kv-heads {uneven[0]}: must divide --heads {args.heads}")
    rest = (args.head_dim, args.batch, args.dtype)
    return [Case(m, s, args.heads, h_kv, *rest) for m in machines for s in args.seq_len for h_kv in args.kv_heads]
