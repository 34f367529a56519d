"""What a function gives torch to do, operation by operation: to show that nothing in it depends on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SMALL = 1 << 12  # numbers of a tensor on the host that are written down
_COPIES = {"aten::_to_copy", "aten::copy_"}
_FROM_NUMBERS = (torch.tensor, torch.as_tensor)


@contextlib.contextmanager
def traced() -> Iterator[list[tuple]]:
    """A list that fills with every operation in this context: its name, all arguments that are not tensors, the
    tensors' shapes, and the numbers of small tensors that are made from Python numbers.

    Raises: ValueError for an operation that makes the host wait for the device.
    """
    with _Reads(), _Operations() as operations:
        yield operations.done


class _Reads(TorchFunctionMode):
    """Refuses copies from a device and to it that are no operations of torch's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (Tensor.tolist, Tensor.numpy):
            raise ValueError(f"Tensor.{func.__name__} makes the host wait for the device")
        out = func(*args, **(kwargs or {}))
        if func in _FROM_NUMBERS and not isinstance(args[0], Tensor) and out.device.type != "cpu":
            raise ValueError(f"{func.__name__} of numbers, on {out.device}, makes the host wait for the device")
        return out


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.done: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._schema.name, kwargs or {}
        out = func(*args, **kwargs)
        sources = [x for x in args if isinstance(x, Tensor)]
        crosses = name in _COPIES and isinstance(out, Tensor) and any(x.device != out.device for x in sources)
        if crosses or _reads_on_host(func, args):
            raise ValueError(f"{name} makes the host wait for the device")
        made = (out,) if name == "aten::lift_fresh" and out.device.type == "cpu" and out.numel() <= SMALL else ()
        with torch._C.DisableTorchFunction():
            numbers = [x.tolist() for x in made]
        self.done.append((name, *map(_described, (*args, *kwargs.items())), *map(str, numbers)))
        return out


def _reads_on_host(func, args) -> bool:
    """Whether the operation's result, or its shape, depends on the values of its tensors, for the host to know."""
    if func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_"):  # by numbers or, worse, by a mask
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def _described(x) -> str:
    if isinstance(x, Tensor):
        return f"{x.dtype} {list(x.shape)} {x.device}"
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(_described, x))})"
    if x is None or isinstance(x, (bool, int, float, str, torch.dtype, torch.device, torch.layout)):
        return repr(x)
    return type(x).__name__  # a process group, a generator
