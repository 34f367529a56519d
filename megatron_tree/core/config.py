"""The user's options: `TreeConfig`. Does not import torch."""

from __future__ import annotations

import argparse
import functools
import math
import numbers
import os
from dataclasses import dataclass, fields
from pathlib import Path

from .arguments import suggesting, suggestion
from .files import read_yaml
from .units import parse_bytes, parse_grid

CONFIG_VARIABLE = "MEGATRON_TREE_CONFIG"
SCHEDULES = ("auto", "grid", "cast", "ring")
BACKENDS = ("auto", "triton", "native", "cudnn", "fa3", "fa4", "flashinfer", "flashmla", "aten", "reference")
COMM_DTYPES = ("auto", "fp32")
CHECKS = ("first", "always", "never", "finite")
TRUSTING = ("first", "never")  # of these, with which calls that are alike are checked once
TRANSPORTS = ("auto", "shm", "symm_mem", "direct", "builtin")
DECODE_SCHEDULES = ("auto", "allreduce", "allgather", "butterfly", "scatter", "two_level", "ring")
SELECT_SCHEDULES = ("auto", "allgather", "butterfly", "scatter", "two_level", "counts")
CP_COMM_TYPES = ("tree", "p2p", "all_gather", "a2a", "a2a+tree", "a2a+p2p")  # Megatron's, as far as they are ours
TREE_CP_COMM_TYPES = ("tree", "a2a+tree")  # those that no other core attention implements
WEIGHTS = ("replicated", "sharded")  # of inference: on every rank, or over all
QUERIES = ("split", "repeated", "auto")  # of sharded weights: in ranks that have the same KV heads


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise a ``ValueError`` with the option, its value and the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, choices))}")


def integer(value: object) -> int | None:
    """value as an int if it is an integer, of numpy too; None for anything else, such as True and 4.0."""
    if type(value) is int:
        return value
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None


def integers(values: object, least: int | None = None) -> tuple[int, ...] | None:
    """The integers of a list or tuple; None unless all are integers, of at least `least`."""
    numbers = tuple(map(integer, values)) if isinstance(values, (tuple, list)) else (None,)
    return None if any(n is None or (least is not None and n < least) for n in numbers) else numbers


def check_positive(name: str, value: object, what: str = "integer") -> int | None:
    """A positive integer, or None; ``ValueError`` for anything else."""
    number = integer(value)
    if value is not None and (number is None or number < 1):
        raise ValueError(f"{name}={value!r} must be a positive {what}, or None")
    return number


def check_pair(name: str, grid: object) -> tuple[int, int]:
    """A grid (a, b) as a tuple; ``ValueError`` unless it is two positive integers."""
    pair = integers(grid, 1)
    if pair is None or len(pair) != 2:
        raise ValueError(f"{name}={grid!r} must be a pair (a, b) of positive integers, for instance (2, 4)")
    return pair


def _suggest_fields(cls: type) -> type:
    """The dataclass, which says of an unknown field which one is like it."""
    make = cls.__init__

    @functools.wraps(make)
    def __init__(self, *args, **options):
        with suggesting(options, _NAMES):
            make(self, *args, **options)

    cls.__init__ = __init__
    return cls


@_suggest_fields
@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """How tree attention is computed. The defaults suit most users; the result does not depend on these options."""

    schedule: str = "auto"
    """Training and prefill: "grid" (gathers and tree reductions on an a x b grid), "cast" (each rank is sent only the
    keys that its queries can see, as under a sliding window), "ring" (KV passed around a ring, the baseline), or "auto"
    (what the planner chooses: the fastest: a grid, under a window the cast, or the ring)."""

    grid: tuple[int, int] | None = None
    """(a, b) with a * b = ranks: queries are gathered over a ranks, KV over b. (p, 1) is pure Tree Attention,
    (1, p) a KV gather. None: the planner chooses."""

    grid_backward: tuple[int, int] | None = None
    """The backward's grid. None: same as `grid`; if both are None the planner chooses."""

    head_chunks: int | None = None
    """Number of chunks of KV heads that are gathered, computed and reduced one after another, so that communication
    overlaps compute and buffers stay small; it must divide the number of KV heads. None: the planner chooses."""

    ulysses_size: int | None = None
    """Before and after attention, all-to-alls split the heads over this many ranks; the grid (or the ring) joins the
    ranks that then hold the same heads, and `grid` covers ranks / ulysses_size ranks. It must divide the number of
    ranks and be at most the number of query heads. 1: heads are not exchanged. None: the planner chooses, but does not
    exchange heads by itself with a named grid, with the ring, or with return_lse."""

    topology: str | None = None
    """The topology that the planner assumes: a name (`megatron-tree plan --help` lists them), or the path of a YAML
    file, for instance of `megatron-tree calibrate`. None: the backend's default, dgx_h100 (NCCL) or ethernet (gloo);
    with `tune`, latencies and bandwidths are those that the group's first call measures, unless `deterministic`."""

    tune: bool = True
    """Where "auto" chooses, a kind of call of training or (over messages, on CPUs) of decoding tries the plans that are
    best on networks up to ten times as fast or slow as assumed, once, aside. All ranks take what was fastest on the
    slowest rank, and say so once (docs/planner.md). Plans are exact, but each rounds differently. Off with
    `deterministic`, and where a schedule, a grid, ulysses_size or head_chunks is named."""

    memory_budget: int | None = None
    """Limit in bytes of a rank's communication buffers; schedules that need more are excluded. None: no limit."""

    transport: str = "auto"
    """How messages are sent: "direct" (point-to-point; gloo on CPU), "builtin" (the backend's collectives), "shm" (as
    direct, but the collectives of decoding go through memory that the CPU ranks of one host share), "symm_mem" (as
    builtin, but decoding's partial results are read in the memory of the host's other GPUs, over NVLink), or "auto":
    "shm" or "symm_mem" where it can be had, else direct on CPUs and builtin elsewhere."""

    backend: str = "auto"
    """Kernels: "triton" (ours, for GPUs), "native" (ours in C, decodes on CPUs), libraries on NVIDIA GPUs: "cudnn" (no
    decoding), "fa3", "fa4", "flashinfer" and "flashmla" (decoding only), "aten" (torch's flash kernels), "reference"
    (the formulas in plain torch); "auto" logs what it chose and why."""

    comm_dtype: str = "auto"
    """Dtype in which partial outputs and gradients are sent: "auto" (the inputs' dtype; lse always fp32) or "fp32"."""

    timeout_s: float = 600.0
    """Time limit of one collective in seconds; a `CommError` is raised after it. With NCCL torch keeps it, from the
    moment when the collective is queued, and ends the process (docs/reliability.md)."""

    check: str = "first"
    """When ranks compare the call's signature before they send data: at its "first" use, "always", or "never". "finite"
    implies "always"; in addition each rank searches q, k, v and sinks, and in the backward dout, for NaN and infinity.
    If it finds one, every rank raises a ``ValueError`` with rank, tensor and index. Padding is ignored. For debugging:
    it reads every tensor once more and synchronizes the device."""

    deterministic: bool | str = False
    """True: the same inputs give the same bits in every run, and a row of a decode batch gives the same bits alone and
    in a batch, provided that the schedule is the same (name one: "auto" may depend on the batch), and on a CPU the
    number of threads and the vector instructions (aten and reference leave sums to torch and MKL). What can't guarantee
    this is refused, and excluded by "auto": libraries and aten's CUDA kernels, whose backward sums in any order and
    whose decode splits by batch size; the decode schedule "allreduce", whose summation order is up to the backend.
    Decoding is slower: Triton's kernels split the keys every 1024 whatever the batch size, the others attend row by
    row. "ranks": results and gradients have the same bits on any number of ranks, too, in any layout, batch and plan,
    on the backends "reference" and "triton" (docs/reliability.md). In training and prefill sums are cut by positions,
    and ranks merge no partial states: keys and values are gathered (a grid of one row), heads exchanged, or both.
    Gradients of keys and decoding add up integers; a NaN in a query makes all dk and dv of its document and KV head
    NaN. What can't is refused."""

    def __post_init__(self):
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if not (isinstance(self.timeout_s, (int, float)) and self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise ValueError(f"timeout_s={self.timeout_s!r} must be a positive number of seconds")
        if self.topology is not None and not isinstance(self.topology, str):
            raise ValueError(f"topology={self.topology!r} must be a name or the path of a YAML file, or None")
        for name in ("grid", "grid_backward"):
            if (grid := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_pair(name, grid))
        for name, what in (
            ("head_chunks", "integer that divides the KV heads"),
            ("ulysses_size", "integer that divides the ranks"),
            ("memory_budget", "number of bytes"),
        ):
            object.__setattr__(self, name, check_positive(name, getattr(self, name), what))
        for name in _WITHOUT_MEANING.get(self.schedule, ()):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name}={value!r} has no meaning with schedule={self.schedule!r}: leave one of the two out"
                )
        if self.deterministic == "ranks":
            self._check_ranks()

    def _check_ranks(self) -> None:
        """Raise ``ValueError`` for what gives other bits on other numbers of ranks."""
        refused = {
            "schedule": self.schedule in ("cast", "ring"),
            "backend": self.backend not in ("auto", "reference", "triton"),
        }
        refused |= {name: (getattr(self, name) or (1, 1))[0] > 1 for name in ("grid", "grid_backward")}
        if wrong := next((name for name, refuses in refused.items() if refuses), None):
            raise ValueError(
                f"{wrong}={getattr(self, wrong)!r} gives other bits on another number of ranks, which "
                f"deterministic='ranks' rules out: choose {_SAME_BITS[wrong]}, or leave {wrong} out"
            )


CHOICES = {
    "schedule": SCHEDULES,
    "backend": BACKENDS,
    "comm_dtype": COMM_DTYPES,
    "check": CHECKS,
    "transport": TRANSPORTS,
    "deterministic": (False, True, "ranks"),
    "tune": (False, True),
}
_SAME_BITS = {"schedule": "'grid'", "backend": "'reference' or 'triton'"} | dict.fromkeys(
    ("grid", "grid_backward"), "one row, (1, n)"
)
_WITHOUT_MEANING = {"ring": ("grid", "grid_backward", "head_chunks"), "cast": ("grid", "grid_backward")}


def default_config() -> TreeConfig:
    """The TreeConfig of calls and layers that are given none: that of the file in $MEGATRON_TREE_CONFIG, else the
    defaults. Raises: ValueError as `read_config`."""
    path = os.environ.get(CONFIG_VARIABLE)
    return read_config(path) if path else _DEFAULT


@functools.lru_cache
def read_config(path: str) -> TreeConfig:
    """The TreeConfig of a YAML file, whose keys are the fields of TreeConfig; a file is read once.

    A grid may be written 2x4 or [2, 4], memory_budget as bytes or 2GB; a relative `topology` that lies beside the file
    is found there.
    Raises: ValueError with the file, the key, and what there is to choose.
    """
    what = f"{CONFIG_VARIABLE}={path!r}"
    try:
        options = read_yaml(path) or {}
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error.__cause__
    if not isinstance(options, dict):
        raise ValueError(f"{what} must contain options of TreeConfig, one `name: value` per line")
    if unknown := [key for key in options if key not in _NAMES]:
        raise ValueError(
            f"{what}: unknown key {unknown[0]!r}: choose from {', '.join(_NAMES)}{suggestion(options, _NAMES)}"
        )
    try:
        for name, parse in (("grid", parse_grid), ("grid_backward", parse_grid), ("memory_budget", parse_bytes)):
            if isinstance(options.get(name), str):
                options[name] = parse(options[name])
        beside = Path(path).parent / str(options.get("topology"))
        return TreeConfig(**options | ({"topology": str(beside)} if beside.is_file() else {}))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{what}: {name}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


_NAMES = [field.name for field in fields(TreeConfig)]
_DEFAULT = TreeConfig()
