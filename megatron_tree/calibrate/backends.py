"""Which of the backends is fastest on this GPU, kept in the user's own table for backend="auto"."""

from __future__ import annotations

import contextlib
import io

import torch

from .. import kernels
from ..bench.kernel_cases import KernelCase, KernelTiming, fastest_backends, time_case
from ..config import AttnSpec
from ..kernels import fastest

CASES = tuple(KernelCase(kind, 1, 4096, 16, 4, d) for d in (64, 128, 256) for kind in ("fwd", "bwd"))


def keep_fastest(device: torch.device, cases: tuple[KernelCase, ...] = CASES) -> tuple[tuple[str, str], ...]:
    """Check and time causal attention in bf16 with each backend that takes it, and write the user's table.

    Returns (quantity, value) for printing. Raises `WrongResult` if a result was wrong.
    """
    rows: list[KernelTiming] = []
    with contextlib.redirect_stdout(io.StringIO()):  # tables of all contenders
        for case in cases:
            which = tuple(name for name in fastest.NAMES if _takes(name, case, device))
            time_case(case, which, rows.append, device=device, dtype=torch.bfloat16)
    gpu, names = fastest.name_of(device), fastest_backends(rows)
    path = fastest.keep(gpu, names)
    return (
        *((f"fastest up to head_dim {width}", name) for width, name in names.items()),
        ("kept for backend='auto'", f"{path} ({gpu})"),
    )


def _takes(name: str, case: KernelCase, device: torch.device) -> bool:
    q, k = (torch.empty(1, 1, h, case.d, dtype=torch.bfloat16, device=device) for h in (case.h, case.h_kv))
    try:
        kernels.choose(q, k, k, AttnSpec(softmax_scale=1.0), name)
    except ValueError:  # not installed, or not for this GPU
        return False
    return True
