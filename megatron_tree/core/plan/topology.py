"""A machine as levels of links, innermost first, and the positions of a group's ranks in it."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Hashable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path

from ..arguments import suggestion
from ..files import read_yaml, whole_file

TRANSPORTS = ("direct", "builtin", "shm", "symm_mem")
MAX_COUNT = 10**9
TOPOLOGIES = Path(__file__).with_name("topologies")
_DEFAULTS = {"gloo": "ethernet", "nccl": "dgx_h100"}  # backend -> file


@dataclass(frozen=True, kw_only=True)
class Level:
    """One kind of link. Two ranks communicate over the lowest level with both in one unit."""

    name: str
    """Printed in plans, such as "nvlink", "infiniband", "ethernet"."""
    size: int
    """Units of the level below (at the innermost level: ranks) in one unit of this level; 0 = any number (outermost
    level only)."""
    latency_s: float
    """Seconds from the start of one small message to its arrival."""
    bandwidth: float
    """Bytes/s that one rank alone can send in one direction."""
    port_bandwidth: float
    """Bytes/s of the port from one unit of the level below to this level; all ranks of that unit share it. At the
    innermost level a unit is a rank, so this equals `bandwidth`."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A machine: its levels of links, innermost first, and the speed of a rank."""

    name: str
    levels: tuple[Level, ...]
    host_size: int
    """Largest number of ranks on one host. Smaller than the innermost level's size where that level spans hosts."""
    overhead_s: float
    """Seconds of a rank's CPU time per message (per collective, if builtin), in addition to latency."""
    chunk_s: float = 0.0
    """Seconds of a rank for each head chunk of a pass, or step of a ring, beside its share of compute and messages:
    kernel calls and, on a CPU, Python. On a GPU the launches alone, since its host runs ahead."""
    byte_s: float = 0.0
    """Seconds of compute that a rank loses for each byte that it sends while it computes: what copies messages on a CPU
    takes from the cores that compute. 0 on GPUs."""
    shared_overhead_s: float = 0.0
    """Seconds by which one message of *any* rank delays all ranks, where ranks share too few cores, as on an emulated
    cluster. 0 where every rank has its own core."""
    wake_s: float = 0.0
    """Seconds per exchange until a rank resumes after its messages have arrived."""
    memory_bandwidth: float
    """Bytes/s at which decode kernels read the KV cache."""
    flops: float
    """Matrix flop/s of the attention kernels in training."""
    transport: str
    """"direct": point-to-point exchanges (gloo); "builtin": the backend's own collectives (nccl); "shm": as direct, but
    the gathers and sums of decoding go through memory that the ranks, all on one host, share; "symm_mem": as builtin,
    but partial results of decoding are read in the memory of the other ranks."""

    def __post_init__(self):
        if self.transport not in TRANSPORTS:
            raise ValueError(f"{self._where}: transport={self.transport!r} must be one of {TRANSPORTS}")
        if not self.levels:
            raise ValueError(f"{self._where}: levels is empty: name at least one kind of link")
        _check_count(self._where, "host_size", self.host_size, least=1)
        for name in ("overhead_s", "chunk_s", "byte_s", "shared_overhead_s", "wake_s", "memory_bandwidth", "flops"):
            _check_number(self._where, name, getattr(self, name), zero=name.endswith("_s"))
        for i, level in enumerate(self.levels):
            where = f"{self._where}, level {level.name!r}"
            _check_count(where, "size", level.size, least=0 if i == len(self.levels) - 1 else 1)
            for name in ("latency_s", "bandwidth", "port_bandwidth"):
                _check_number(where, name, getattr(level, name), zero=name == "latency_s")
            if i == 0 and level.port_bandwidth != level.bandwidth:
                raise ValueError(
                    f"{where}: port_bandwidth={level.port_bandwidth:g} must equal bandwidth={level.bandwidth:g} at the "
                    f"innermost level, where a port belongs to one rank"
                )

    @property
    def _where(self) -> str:
        return f"topology {self.name!r}"

    @cached_property
    def capacities(self) -> tuple[float, ...]:
        """Largest number of ranks in one unit of each level."""
        capacities, ranks = [], 1
        for level in self.levels:
            ranks = ranks * level.size if level.size else math.inf
            capacities.append(ranks)
        return tuple(capacities)


def _check_count(where: str, name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_COUNT:
        raise ValueError(f"{where}: {name}={reprlib.repr(value)} must be an integer from {least} to {MAX_COUNT:,}")


def _check_number(where: str, name: str, value: object, *, zero: bool) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{where}: {name}={value!r} must be a {'finite' if zero else 'positive'} number")


@dataclass(frozen=True)
class Placement:
    """The positions of a group's ranks in a topology; made by `place`."""

    order: tuple[int, ...]
    """Position -> group rank: the ranks sorted so that every unit of every level is contiguous."""
    block: int
    """Positions per unit just below the outermost level that the group spans; 1 if these units differ in size, or if
    there is only one."""
    units: tuple[tuple[int, ...], ...] = field(repr=False)
    """By group rank: the number of its unit at each level, innermost first."""

    def level(self, r1: int, r2: int) -> int:
        """Index of the lowest level with both group ranks in one unit."""
        return next(i for i, (x, y) in enumerate(zip(self.units[r1], self.units[r2])) if x == y)

    @cached_property
    def top(self) -> int:
        """Index of the outermost level that the group spans."""
        first = self.units[0]
        return next(i for i, unit in enumerate(first) if all(other[i] == unit for other in self.units))

    @cached_property
    def _hash(self) -> int:
        return hash((self.order, self.block, self.units))

    def __hash__(self) -> int:  # a cache key, looked up in every decode step
        return self._hash


def place(topology: Topology, hosts: Sequence[Hashable]) -> Placement:
    """The positions of a group's ranks in a topology.

    Args:
        topology: its sizes say how hosts fill the levels. Hosts are taken in the order of their first rank; ranks of
            one host stay together, even if there are more of them than `host_size`.
        hosts: one id per group rank; equal ids are one host.

    Raises: ValueError if the topology has no link between hosts, or too few units for them.
    """
    numbers = {host: n for n, host in enumerate(dict.fromkeys(hosts))}
    capacities, size = topology.capacities, topology.host_size
    at = next((i for i, ranks in enumerate(capacities) if ranks >= size), len(capacities) - 1)
    hosts_per_unit = max(1, capacities[at] // size) if math.isfinite(capacities[at]) else math.inf
    if len(numbers) > 1 and hosts_per_unit == 1 and at == len(capacities) - 1:
        raise ValueError(
            f"topology {topology.name!r} describes a single host, but the group's ranks are on {len(numbers)} hosts: "
            f"name one that joins hosts ({', '.join(known_topologies())}), or measure one with "
            f"megatron-tree calibrate"
        )
    seen = [0] * len(numbers)
    units = []
    for host in hosts:
        number = numbers[host]
        local, seen[number] = seen[number], seen[number] + 1
        unit = int(number // hosts_per_unit)
        coordinates = [(number, local // int(ranks)) for ranks in capacities[:at]] + [unit]
        for level in topology.levels[at + 1 :]:
            unit = unit // level.size if level.size else 0
            coordinates.append(unit)
        if unit:
            raise ValueError(
                f"topology {topology.name!r} has no room for {len(numbers)} hosts: raise the size of its level "
                f"{topology.levels[-1].name!r} from {topology.levels[-1].size}, or set it to 0 (any number)"
            )
        units.append(coordinates)
    order = tuple(sorted(range(len(units)), key=lambda r: (units[r][::-1], r)))
    names = [dict() for _ in capacities]
    numbered = tuple(tuple(n.setdefault(u, len(n)) for n, u in zip(names, row)) for row in units)
    placed = Placement(order, 1, numbered)
    if placed.top == 0:
        return placed
    sizes = {}
    for row in numbered:
        sizes[row[placed.top - 1]] = sizes.get(row[placed.top - 1], 0) + 1
    block = next(iter(sizes.values())) if len(set(sizes.values())) == 1 else 1
    return Placement(order, block, numbered)


def known_topologies() -> list[str]:
    """Names for `load_topology`: the files in `TOPOLOGIES`, to copy and edit."""
    return sorted(path.stem for path in TOPOLOGIES.glob("*.yaml"))


def load_topology(name_or_path: str | Path) -> Topology:
    """Load one of `known_topologies`, or a YAML file. Raises ValueError with the faulty entry."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        path = TOPOLOGIES / f"{name_or_path}.yaml"
        if str(name_or_path) not in known_topologies():
            raise ValueError(
                f"topology {str(name_or_path)!r} is unknown: name one of {', '.join(known_topologies())}, or the path "
                f"of a .yaml file"
            )
    try:
        content = read_yaml(path)
    except ValueError as error:
        raise ValueError(f"topology file {error}") from None
    try:
        content = _take(content, Topology)
        levels = content["levels"]
        if not isinstance(levels, list):
            raise ValueError(f"levels={reprlib.repr(levels)} must be a list, innermost level first")
        return Topology(**{**content, "levels": tuple(Level(**_take(level, Level)) for level in levels)})
    except ValueError as error:
        raise ValueError(f"topology file {path}: {error}") from None


def _take(content: object, kind: type) -> dict:
    """The fields of `kind` from a mapping; numbers may be written as 1e9, which YAML reads as text."""
    if not isinstance(content, dict):
        raise ValueError(f"a {kind.__name__.lower()} must be a mapping of {', '.join(f.name for f in fields(kind))}")
    names = {f.name: f.type for f in fields(kind)}
    needed = {f.name for f in fields(kind) if f.default is MISSING}
    missing, unknown = sorted(needed - content.keys()), sorted(map(str, content.keys() - names.keys()))
    if missing or unknown:
        faults = [f"lacks {missing}"] * bool(missing) + [f"has unknown entries {unknown}"] * bool(unknown)
        hint = suggestion(content, names)
        raise ValueError(f"a {kind.__name__.lower()} {' and '.join(faults)}{hint}")
    taken = {}
    for name, value in content.items():
        if names[name] == "float":
            try:
                value = float("no switch" if isinstance(value, bool) else value)
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"{name}={reprlib.repr(value)} must be a number") from None
        if names[name] == "str" and not isinstance(value, str):
            raise ValueError(f"{name}={reprlib.repr(value)} must be a text")
        taken[name] = value
    return taken


def save_topology(topology: Topology, path: str | Path) -> None:
    """Write a topology as YAML; `load_topology` reads it back to an equal one."""
    import yaml

    content = {**asdict(topology), "levels": [asdict(level) for level in topology.levels]}
    with whole_file(Path(path)) as part:
        part.write_text(yaml.safe_dump(content, sort_keys=False))


@lru_cache
def default_topology(backend: str) -> Topology:
    """The topology assumed for a communication backend when the user names none. Raises ValueError for a backend
    without a default."""
    if backend not in _DEFAULTS:
        raise ValueError(
            f"no topology is assumed for backend {backend!r}, only for {', '.join(_DEFAULTS)}: name one with "
            f"TreeConfig(topology=...)"
        )
    return load_topology(_DEFAULTS[backend])
