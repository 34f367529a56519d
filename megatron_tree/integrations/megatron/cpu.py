"""Run Megatron-core on CPU ranks (gloo): redirect the few CUDA calls that it makes unconditionally.

For tests, quickstarts and debugging on machines without an accelerator. With CUDA nothing is changed. At the end of the
context everything is undone.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any
from unittest import mock

import torch

from . import compat

# Factories that Megatron-core calls with device="cuda" (loss scale, token counts, gradient norms, causal masks, ...).
_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "full",
    "ones",
    "ones_like",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


@contextlib.contextmanager
def megatron_on_cpu():
    """Context in which Megatron-core models can be built, trained and checkpointed without an accelerator.

    Yields True, or False if CUDA is available: then nothing is changed.

        with megatron_on_cpu():
            model = GPTModel(config=TransformerConfig(..., use_cpu_initialization=True), ...)

    Redirected are `torch.cuda.current_device`, `synchronize`, the CUDA random state (to the CPU's), `Tensor.cuda` and
    `Module.cuda` (they return the object itself), factories with a CUDA device (to the CPU), `Tensor.type()` (a CUDA
    type's name, by which Megatron's optimizer sorts parameters), and streams (Megatron's token dispatcher of experts
    makes some). Fused kernels are not available: turn `gradient_accumulation_fusion`, the `*_fusion` options and
    `moe_grouped_gemm` off.
    """
    if torch.cuda.is_available():
        yield False
        return
    with contextlib.ExitStack() as stack:
        for target, name, replacement in _redirections():
            stack.enter_context(mock.patch.object(target, name, replacement))
        for target, name, replacement in compat.core_replacements():
            stack.enter_context(mock.patch.object(target, name, replacement, create=name == "te_general_gemm"))
        stack.enter_context(compat.mla_without_transformer_engine())
        yield True


def _redirections() -> list[tuple[Any, str, Any]]:
    cpu = torch.device("cpu")
    return [
        (torch.cuda, "current_device", lambda: cpu),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda new_state, *args, **kwargs: torch.set_rng_state(new_state)),
        (torch.cuda, "manual_seed", lambda seed: torch.manual_seed(seed) and None),
        (torch.cuda, "Stream", _CpuStream),
        (torch.cuda, "current_stream", _CpuStream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.Tensor, "cuda", lambda self, *args, **kwargs: self),
        (torch.nn.Module, "cuda", lambda self, *args, **kwargs: self),
        (torch.Tensor, "type", _cuda_type_name(torch.Tensor.type)),
        *((torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES),
    ]


class _CpuStream:
    """A stream, and an event, of a device that runs everything synchronously."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CpuStream)

    def __hash__(self) -> int:
        return hash(_CpuStream)

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, event: Any = None) -> _CpuStream:
        return self


def _on_cpu(factory):
    @functools.wraps(factory)
    def redirected(*args, **kwargs):
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int) and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return redirected


def _cuda_type_name(original):
    @functools.wraps(original)
    def named(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and self.device.type == "cpu":
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return named
