"""What the machine looks like: levels of links, from the innermost outwards, and where a group's ranks sit in them."""

from __future__ import annotations

import importlib.metadata
import math
import reprlib
from collections.abc import Hashable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path

from ..files import read_yaml, whole_file

TRANSPORTS = ("direct", "builtin")
MAX_COUNT = 10**9
_SHARE = "share/megatron_tree/topology"  # where a wheel puts the files of configs/topology


@dataclass(frozen=True, kw_only=True)
class Level:
    """One kind of link. Two ranks talk over the lowest level that has both in one unit."""

    name: str
    """As it is printed: "nvlink", "infiniband", "ethernet"."""
    size: int
    """How many units of the level below (ranks, at the innermost level) one unit of this level holds; 0 = any number
    (outermost level only)."""
    latency_s: float
    """Seconds from the start of one small message to its arrival."""
    bandwidth: float
    """Bytes/s that one rank can send while it is alone, in one direction."""
    port_bandwidth: float
    """Bytes/s of the port by which one unit of the level below reaches this level; all ranks below share it. At the
    innermost level a unit is a rank, so this equals `bandwidth`."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A machine: its levels, innermost first, and what a rank does with them."""

    name: str
    levels: tuple[Level, ...]
    host_size: int
    """Ranks on one host at most. Less than the innermost level's size where that level spans hosts."""
    overhead_s: float
    """Seconds of a rank's own time that one message (one collective, if builtin) costs on top of latency."""
    shared_overhead_s: float = 0.0
    """Seconds by which one message of *any* rank delays all of them: ranks that share too few cores, as on an emulated
    cluster. 0 where every rank has a core of its own."""
    wake_s: float = 0.0
    """Seconds that a rank needs to go on once its messages are there, per exchange."""
    memory_bandwidth: float
    """Bytes/s at which decode reads the KV cache."""
    flops: float
    """Matrix flop/s that the attention kernels reach in training."""
    transport: str
    """"direct": point-to-point exchanges (gloo); "builtin": the backend's own collectives (nccl)."""

    def __post_init__(self):
        if self.transport not in TRANSPORTS:
            raise ValueError(f"{self._where}: transport={self.transport!r} must be one of {TRANSPORTS}")
        if not self.levels:
            raise ValueError(f"{self._where}: levels is empty: name at least one kind of link")
        _check_count(self._where, "host_size", self.host_size, least=1)
        for name in ("overhead_s", "shared_overhead_s", "wake_s", "memory_bandwidth", "flops"):
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
        """Ranks that one unit of each level holds at most."""
        found, ranks = [], 1
        for level in self.levels:
            ranks = ranks * level.size if level.size else math.inf
            found.append(ranks)
        return tuple(found)


def _check_count(where: str, name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_COUNT:
        raise ValueError(f"{where}: {name}={reprlib.repr(value)} must be an integer from {least} to {MAX_COUNT:,}")


def _check_number(where: str, name: str, value: object, *, zero: bool) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{where}: {name}={value!r} must be a {'finite' if zero else 'positive'} number")


@dataclass(frozen=True)
class Placement:
    """Where the ranks of one group sit; made by `place`."""

    order: tuple[int, ...]
    """Position -> group rank: the ranks sorted so that every unit of every level is contiguous."""
    block: int
    """Positions per unit just below the outermost level that the group spans; 1 when these units differ in size, and
    when there is only one."""
    units: tuple[tuple[int, ...], ...] = field(repr=False)
    """By group rank: the number of its unit at each level, innermost first."""

    def level(self, r1: int, r2: int) -> int:
        """Index of the lowest level that has two group ranks in one unit."""
        return next(i for i, (x, y) in enumerate(zip(self.units[r1], self.units[r2])) if x == y)

    @cached_property
    def top(self) -> int:
        """Index of the outermost level that the group spans."""
        first = self.units[0]
        return next(i for i, unit in enumerate(first) if all(other[i] == unit for other in self.units))

    @cached_property
    def _hash(self) -> int:
        return hash((self.order, self.block, self.units))

    def __hash__(self) -> int:  # a key of the plans' cache, looked up in every decode step
        return self._hash


def place(topology: Topology, hosts: Sequence[Hashable]) -> Placement:
    """Where the ranks of a group sit, from the host of each.

    Args:
        topology: its sizes say how hosts fill the levels. Hosts are taken in the order of their first rank; ranks of
            one host stay together, also where there are more of them than `host_size`.
        hosts: one id per group rank; equal ids are one host.

    Raises: ValueError if the topology has no link between hosts, or holds fewer units than there are.
    """
    numbers = {host: n for n, host in enumerate(dict.fromkeys(hosts))}
    capacities, size = topology.capacities, topology.host_size
    at = next((i for i, ranks in enumerate(capacities) if ranks >= size), len(capacities) - 1)
    hosts_per_unit = max(1, capacities[at] // size) if math.isfinite(capacities[at]) else math.inf
    if len(numbers) > 1 and hosts_per_unit == 1 and at == len(capacities) - 1:
        raise ValueError(
            f"topology {topology.name!r} describes a single host, but the group's ranks are on {len(numbers)} hosts: "
            f"name one that joins hosts ({', '.join(known_topologies())}), or measure one with "
            f"python -m megatron_tree.calibrate"
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


def _folder() -> Path | None:
    """Where topologies are kept: configs/topology of a checkout, else what a wheel put under share/."""
    root = Path(__file__).resolve().parents[2]
    folders = [root / "configs" / "topology", root / _SHARE]
    try:
        files = importlib.metadata.files("megatron_tree") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    folders += [Path(f.locate()).parent for f in files if f.match(f"{_SHARE}/*.yaml")]
    return next((folder for folder in folders if folder.is_dir()), None)


def known_topologies() -> list[str]:
    """Names that `load_topology` takes: the files of configs/topology."""
    folder = _folder()
    return sorted(path.stem for path in folder.glob("*.yaml")) if folder else []


def load_topology(name_or_path: str | Path) -> Topology:
    """The topology of a name in configs/topology, or of a YAML file. Raises ValueError that names what is wrong."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if str(name_or_path) not in known_topologies():
            raise ValueError(
                f"topology {str(name_or_path)!r} is unknown: name one of {', '.join(known_topologies())}, or the path "
                f"of a .yaml file"
            )
        path = _folder() / f"{name_or_path}.yaml"
    try:
        content = read_yaml(path)
    except ModuleNotFoundError:
        raise ValueError(f"topology file {path}: reading it needs pyyaml; install megatron_tree[launch]") from None
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
    """The fields of `kind` from a mapping; numbers may be written as 1e9, which YAML takes for text."""
    if not isinstance(content, dict):
        raise ValueError(f"a {kind.__name__.lower()} must be a mapping of {', '.join(f.name for f in fields(kind))}")
    names = {f.name: f.type for f in fields(kind)}
    needed = {f.name for f in fields(kind) if f.default is MISSING}
    missing, unknown = sorted(needed - content.keys()), sorted(map(str, content.keys() - names.keys()))
    if missing or unknown:
        raise ValueError(f"a {kind.__name__.lower()} lacks {missing} and has unknown entries {unknown}")
    found = {}
    for name, value in content.items():
        if names[name] == "float":
            try:
                value = float("no switch" if isinstance(value, bool) else value)
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"{name}={reprlib.repr(value)} must be a number") from None
        if names[name] == "str" and not isinstance(value, str):
            raise ValueError(f"{name}={reprlib.repr(value)} must be a text")
        found[name] = value
    return found


def save_topology(topology: Topology, path: str | Path) -> None:
    """Write a topology as YAML that `load_topology` reads back to an equal one."""
    import yaml

    content = {**asdict(topology), "levels": [asdict(level) for level in topology.levels]}
    with whole_file(Path(path)) as part:
        part.write_text(yaml.safe_dump(content, sort_keys=False))


_DEFAULTS = {
    "gloo": Topology(
        name="ethernet",
        transport="direct",
        host_size=8,
        overhead_s=30e-6,
        memory_bandwidth=20e9,
        flops=1e12,
        levels=(
            Level(name="loopback", size=8, latency_s=30e-6, bandwidth=3e9, port_bandwidth=3e9),
            Level(name="ethernet", size=0, latency_s=60e-6, bandwidth=1.17e9, port_bandwidth=1.17e9),
        ),
    ),
    "nccl": Topology(
        name="dgx_h100",
        transport="builtin",
        host_size=8,
        overhead_s=10e-6,
        memory_bandwidth=2.7e12,
        flops=480e12,
        levels=(
            Level(name="nvlink", size=8, latency_s=1e-6, bandwidth=450e9, port_bandwidth=450e9),
            Level(name="infiniband", size=0, latency_s=5e-6, bandwidth=50e9, port_bandwidth=400e9),
        ),
    ),
}


def default_topology(backend: str) -> Topology:
    """What is assumed for a communication backend when the user names no topology: configs/topology holds the same
    figures, with their sources. Raises ValueError for a backend without a default."""
    if backend not in _DEFAULTS:
        raise ValueError(
            f"no topology is assumed for backend {backend!r}, only for {', '.join(_DEFAULTS)}: name one with "
            f"TreeConfig(topology=...)"
        )
    return _DEFAULTS[backend]
