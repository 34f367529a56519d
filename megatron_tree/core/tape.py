"""`Tape`: what a function does on a CPU, written down once and done again on the same memory, without the Python around
it: torch's operations, and launches of C code (`launch`)."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_current: contextvars.ContextVar[Tape | None] = contextvars.ContextVar("tape", default=None)
static: contextvars.ContextVar[bool] = contextvars.ContextVar("static", default=False)
"""Whether what runs may be written down, so that Python must not look at the values of tensors."""
_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}


def launch(function: Callable, *args) -> None:
    """function(*args), which reads and writes memory that its arguments name; on a tape it is written down only."""
    if (tape := _current.get()) is None:
        function(*args)
    else:
        tape.add(functools.partial(function, *args))


class Tape(TorchDispatchMode):
    """What run() does. Nothing may depend on values in memory but what operations and launches read there.

    Attributes: logits: what run() has returned, written by every `replay`. All tensors that run() made are kept.
    """

    def __init__(self, run: Callable[[], Tensor]):
        super().__init__()
        self._done: list[Callable] = []
        self._kept: list = []
        token = _current.set(self)
        try:
            with torch.inference_mode(False), torch.no_grad(), self:
                self.logits = run()
        finally:
            _current.reset(token)

    def add(self, again: Callable) -> None:
        self._done.append(again)

    def replay(self) -> None:
        for again in self._done:
            again()

    def is_done(self) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not func._schema.name.startswith("c10d::"), f"{func} can't be written down"
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view or func._schema.name in _EMPTY:
            self._kept.append(out)
            return out
        before, after = set(), set()
        args, kwargs = _now(args, before), {name: _now(x, before) for name, x in kwargs.items()}
        made = _now(out, after)
        self._kept.append(made)
        if func._schema.is_mutable:
            self.add(functools.partial(func._op, *args, **kwargs))
        elif not after <= before:  # else it is the same memory
            self.add(_into(func, args, kwargs, made))
        return out


def _now(x, storages: set[int]):
    """Tensors, in lists and tuples, at the memory that they have now: `x.data = y` may give them other; it is added."""
    if isinstance(x, Tensor):
        storages.add(x.untyped_storage().data_ptr())
        return x.detach()
    return type(x)([_now(y, storages) for y in x]) if type(x) in (list, tuple) else x


def _into(func, args, kwargs, made) -> Callable[[], object]:
    """func(*args, **kwargs) again, into the memory of its results."""
    results = [made] if isinstance(made, Tensor) else made
    if (variant := _out_variant(func)) is not None:
        names = [x.name for x in variant._schema.arguments if x.is_out]
        if len(names) == len(results):
            return functools.partial(variant._op, *args, **kwargs, **dict(zip(names, results)))

    def again() -> None:
        new = func(*args, **kwargs)
        for old, x in zip(results, [new] if isinstance(new, Tensor) else new, strict=True):
            old.copy_(x)

    return again


@functools.cache
def _out_variant(func):
    """The overload of the same operation that takes the same arguments and where to put its results, if any."""
    packet = func._overloadpacket
    wanted = [(x.name, str(x.type)) for x in func._schema.arguments]
    for name in packet.overloads():
        one = getattr(packet, name)
        given = [(x.name, str(x.type)) for x in one._schema.arguments if not x.is_out]
        if len(given) < len(one._schema.arguments) and given == wanted:
            return one
    return None
