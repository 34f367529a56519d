"""Compiles Triton kernels in many processes at once, into Triton's cache, from where later launches take them.

A launch on tensors without memory (torch's device "meta") compiles what the same launch on a GPU would: the compiler
sees shapes, dtypes and strides only. So nothing here needs a GPU but its name.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from ...core.kernels import backends, states
from ...core.kernels.triton import host
from ..calibrate.kernel_cases import KernelCase, inputs, ours
from .low_precision import Decoding, Training, decoding_inputs, run_decoding, run_training, training_inputs
from .race import CANDIDATES, pinned
from .timing import CORES

META = torch.device("meta")
Launch = Callable[[], object]


class Machine(NamedTuple):
    """What kernels are compiled for; arch: a row of `configs.ARCHES`."""

    target: GPUTarget
    arch: str
    multiprocessors: int

    @classmethod
    def this(cls, device: torch.device) -> Machine:
        target = triton.runtime.driver.active.get_current_target()
        return cls(target, host.arch(device), host.multiprocessors(device))


class AbsentGPU(DriverBase):
    """A driver of Triton that names its target and nothing else: kernels can be compiled, and not launched."""

    def __init__(self, target: GPUTarget):
        self.target = target

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, kind):
        return kind

    def get_current_target(self):
        return self.target

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_benchmarker(self):
        raise RuntimeError("nothing can be timed on a GPU that is not there")

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def launches(cases: Iterable[Training | Decoding | KernelCase], dtype: torch.dtype) -> list[Launch]:
    """The launches of our kernels in these cases."""
    return [functools.partial(_launch, case, dtype) for case in cases]


def race_launches(cases: Iterable[KernelCase], dtype: torch.dtype) -> list[Launch]:
    """Those of all candidates of a race."""
    return [
        functools.partial(_launch, case, dtype, kernel, tiles)
        for case in cases
        for kernel in (("fwd",) if case.kind == "fwd" else ("dq", "dkdv"))
        for tiles in CANDIDATES[kernel]
    ]


def _launch(case: Training | Decoding | KernelCase, dtype: torch.dtype, kernel: str = "", tiles=None) -> None:
    """kernel: runs with `tiles` instead of the table's."""
    if isinstance(case, Training):
        run_training(case, training_inputs(case, dtype, META), "triton")
    elif isinstance(case, Decoding):
        run_decoding(case, decoding_inputs(case, dtype, META), "triton")
    else:
        with pinned(kernel, tiles):
            ours(case, "triton", inputs(case, META, dtype))()


def compile_only(machine: Machine) -> None:
    """From now on, launches in this process compile for `machine` and end there. For processes of their own."""
    triton.runtime.driver.set_active(AbsentGPU(machine.target))
    launch = triton.JITFunction.run
    triton.JITFunction.run = lambda self, *args, **options: launch(self, *args, **{**options, "warmup": True})
    host.DEVICES = backends.ACCELERATORS = states.ACCELERATORS = ("meta",)
    host._arch_of = lambda index: machine.arch
    host._multiprocessors_of = lambda index: machine.multiprocessors
    torch.set_num_threads(1)


def compile_all(launches: list[Launch], machine: Machine, *, limit_s: float) -> str:
    """Compile in one process for each core, for at most limit_s seconds. Returns a line that says how far it came.

    What is not compiled in time is compiled by its first launch.
    """
    begun, errors = time.monotonic(), []
    with (
        multiprocessing.get_context("spawn").Pool(min(CORES, len(launches)), compile_only, (machine,)) as pool,
        contextlib.suppress(multiprocessing.TimeoutError),
    ):
        results = pool.imap_unordered(_try, launches)
        for _ in launches:
            errors.append(results.next(max(0.0, limit_s - (time.monotonic() - begun))))
    failed = [error for error in errors if error]
    said = f"{len(errors)} of {len(launches)} launches compiled in {time.monotonic() - begun:.0f} s on {CORES} cores"
    return said + (f"; {len(failed)} can't be compiled, the first because of {failed[0]}" if failed else "")


def _try(launch: Launch) -> str | None:
    """None, or why a launch can't be compiled: a candidate may need more shared memory than there is."""
    try:
        launch()
    except Exception as error:  # the compiler's own kinds of errors
        return f"{type(error).__name__}: {error}"
    return None
