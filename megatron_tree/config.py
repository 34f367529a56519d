"""What a user can choose (`TreeConfig`) and what one attention call is (`AttnSpec`). No torch needed."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCHEDULES = ("auto", "grid", "ring")
BACKENDS = ("auto", "triton", "aten", "reference")
COMM_DTYPES = ("auto", "fp32")
CHECKS = ("first", "always", "never")
DECODE_SCHEDULES = ("auto", "allreduce", "allgather", "butterfly", "scatter", "ring")


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

    backend: str = "auto"
    """Kernels: "triton" (ours, for GPUs), "aten" (torch's flash kernels), "reference" (the formulas in plain torch);
    "auto" logs what it chose and why."""

    comm_dtype: str = "auto"
    """What partial outputs and gradients travel in: "auto" (the inputs' dtype; lse always fp32) or "fp32"."""

    timeout_s: float = 600.0
    """Seconds that one collective may take before it becomes a `CommError`."""

    check: str = "first"
    """When ranks compare the call's signature before any payload: at its "first" use, "always", or "never"."""

    def __post_init__(self):
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("backend", self.backend, BACKENDS)
        check_choice("comm_dtype", self.comm_dtype, COMM_DTYPES)
        check_choice("check", self.check, CHECKS)
        if not (isinstance(self.timeout_s, (int, float)) and self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise ValueError(f"timeout_s={self.timeout_s!r} must be a positive number of seconds")
        if self.grid is not None:
            ok = isinstance(self.grid, (tuple, list)) and len(self.grid) == 2
            if not ok or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in self.grid):
                raise ValueError(f"grid={self.grid!r} must be a pair (a, b) of positive integers, for instance (2, 4)")
            if self.schedule == "ring":
                raise ValueError(f"grid={self.grid!r} has no meaning with schedule='ring': leave one of the two out")
            object.__setattr__(self, "grid", tuple(self.grid))


@dataclass(frozen=True, kw_only=True)
class AttnSpec:
    """The mathematics of one attention call, the same on every rank and for every block of it."""

    softmax_scale: float
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    """(left, right): query i sees keys i-left .. i+right; -1 = unbounded. Causal acts as right = 0."""
    softcap: float = 0.0
    """Logits become softcap * tanh(logits / softcap); 0 turns it off."""

    @property
    def left(self) -> int | None:
        return None if self.window_size[0] < 0 else self.window_size[0]

    @property
    def right(self) -> int | None:
        if self.causal:
            return 0
        return None if self.window_size[1] < 0 else self.window_size[1]
