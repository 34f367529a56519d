"""What a user can choose (`TreeConfig`) and what one attention call is (`AttnSpec`). No torch needed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

SCHEDULES = ("auto", "grid", "ring")
BACKENDS = ("auto", "triton", "aten", "reference")
COMM_DTYPES = ("auto", "fp32")
CHECKS = ("first", "always", "never", "finite")
TRANSPORTS = ("auto", "direct", "builtin")
DECODE_SCHEDULES = ("auto", "allreduce", "allgather", "butterfly", "scatter", "two_level", "ring")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise a ``ValueError`` that names the option, the value seen and the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, choices))}")


@dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """How tree attention is carried out. The defaults suit most users; the result does not depend on it."""

    schedule: str = "auto"
    """Training and prefill: "grid" (gathers and tree reductions on an a x b grid), "ring" (KV passed round, the
    baseline), or "auto" (the grid that the planner chooses)."""

    grid: tuple[int, int] | None = None
    """(a, b) with a * b = ranks: queries are gathered over a ranks, KV over b. (p, 1) is pure Tree Attention,
    (1, p) a KV gather. None: the planner chooses."""

    grid_backward: tuple[int, int] | None = None
    """The backward's grid, where it shall differ. None: `grid`, and if that is None, too, the planner chooses."""

    head_groups: int | None = None
    """Groups of KV heads that are gathered, computed and reduced one after another, so that communication overlaps
    compute and buffers stay small; it must divide the KV heads. None: the planner chooses."""

    ulysses_size: int = 1
    """Ulysses x tree: heads are split over this many neighbouring ranks by all-to-alls before and after, and the tree
    (or the ring) joins ranks with the same heads. It must divide the ranks and the query heads, and divide the KV heads
    or be a multiple of them. `grid` then is that of ranks / ulysses_size."""

    topology: str | None = None
    """The network that the planner reckons with: a name in configs/topology, or the path of a YAML file, for instance
    one that `python -m megatron_tree.calibrate` wrote. None: a usual one of the backend's kind."""

    memory_budget: int | None = None
    """Bytes of communication buffers that the planner may spend on a rank; what needs more is not considered."""

    transport: str = "auto"
    """How messages travel: "direct" (point-to-point, gloo on CPU), "builtin" (the backend's collectives); "auto"."""

    backend: str = "auto"
    """Kernels: "triton" (ours, for GPUs), "aten" (torch's flash kernels), "reference" (the formulas in plain torch);
    "auto" logs what it chose and why."""

    comm_dtype: str = "auto"
    """What partial outputs and gradients travel in: "auto" (the inputs' dtype; lse always fp32) or "fp32"."""

    timeout_s: float = 600.0
    """Seconds that one collective may take before it becomes a `CommError`."""

    check: str = "first"
    """When ranks compare the call's signature before any payload: at its "first" use, "always", or "never". "finite" is
    "always", and each rank looks for NaN and infinities in q, k, v and sinks, and in the backward in dout (with
    ulysses_size in that of its heads): one found, every rank raises a ``ValueError`` that names rank, tensor and place.
    Padding may hold anything. It is for hunting a fault: every tensor is read once more, an accelerator waited for."""

    deterministic: bool = False
    """The same inputs give the same bits in every run, and a row of a decode batch the same bits alone and among others
    as long as the schedule is the same (name one: "auto" may choose by the batch). What can't promise that is refused,
    and left out by "auto": aten's kernels on CUDA, whose backward adds up in any order and whose decode is split by the
    batch; the decode schedule "allreduce", whose order of summing is the backend's. Decoding costs more: Triton's
    kernels split the keys every 1024 whatever the batch, the others attend row by row."""

    def __post_init__(self):
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("backend", self.backend, BACKENDS)
        check_choice("comm_dtype", self.comm_dtype, COMM_DTYPES)
        check_choice("check", self.check, CHECKS)
        check_choice("transport", self.transport, TRANSPORTS)
        check_choice("deterministic", self.deterministic, (False, True))
        if not (isinstance(self.timeout_s, (int, float)) and self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise ValueError(f"timeout_s={self.timeout_s!r} must be a positive number of seconds")
        for name in ("grid", "grid_backward"):
            object.__setattr__(self, name, self._checked_grid(name, getattr(self, name)))
        groups = self.head_groups
        if groups is not None and (not isinstance(groups, int) or isinstance(groups, bool) or groups < 1):
            raise ValueError(f"head_groups={groups!r} must be a positive integer that divides the KV heads, or None")
        if groups is not None and self.schedule == "ring":
            raise ValueError(f"head_groups={groups} has no meaning with schedule='ring': leave one of the two out")
        size = self.ulysses_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"ulysses_size={size!r} must be a positive integer that divides the ranks and the heads")
        budget = self.memory_budget
        if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
            raise ValueError(f"memory_budget={budget!r} must be a positive number of bytes, or None")
        if self.topology is not None and not isinstance(self.topology, str):
            raise ValueError(f"topology={self.topology!r} must be a name or the path of a YAML file, or None")

    def _checked_grid(self, name: str, grid) -> tuple[int, int] | None:
        if grid is None:
            return None
        ok = isinstance(grid, (tuple, list)) and len(grid) == 2
        if not ok or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in grid):
            raise ValueError(f"{name}={grid!r} must be a pair (a, b) of positive integers, for instance (2, 4)")
        if self.schedule == "ring":
            raise ValueError(f"{name}={grid!r} has no meaning with schedule='ring': leave one of the two out")
        return tuple(grid)


class Dropout(NamedTuple):
    """Attention dropout whose mask is a function of (seed, sequence, head, query position, key position) alone.

    So every rank, block and backend that computes a (query, key) pair drops it or keeps it alike.
    """

    p: float
    """Probability that a weight is dropped, 0 < p < 1; those kept are scaled by 1 / (1 - p)."""
    seed: int
    """0 <= seed < 2**63, the same on every rank."""
    first_head: int = 0
    """Number of the tensors' head 0 among all heads."""


@dataclass(frozen=True, kw_only=True)
class AttnSpec:
    """The mathematics of one attention call, the same on every rank and for every block of it, down to the bits."""

    softmax_scale: float
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    """(left, right): query i sees keys i-left .. i+right; -1 = unbounded. Causal acts as right = 0."""
    softcap: float = 0.0
    """Logits become softcap * tanh(logits / softcap); 0 turns it off."""
    dropout: Dropout | None = None
    deterministic: bool = False
    """As `TreeConfig.deterministic`."""

    def heads_from(self, first: int) -> AttnSpec:
        """The same call for tensors that hold its query heads from `first` on."""
        if self.dropout is None or first == 0:
            return self
        return replace(self, dropout=self.dropout._replace(first_head=self.dropout.first_head + first))

    @property
    def left(self) -> int | None:
        return None if self.window_size[0] < 0 else self.window_size[0]

    @property
    def right(self) -> int | None:
        if self.causal:
            return 0
        return None if self.window_size[1] < 0 else self.window_size[1]
