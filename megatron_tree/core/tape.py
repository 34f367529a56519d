"""`Tape`: what a function does on a CPU, written down once and done again on the same memory, without the Python around
it: torch's operations, run by TorchScript's interpreter, and launches of C code (`launch`)."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_current: contextvars.ContextVar[Tape | None] = contextvars.ContextVar("tape", default=None)
static: contextvars.ContextVar[bool] = contextvars.ContextVar("static", default=False)
"""Whether what runs may be written down, so that Python must not look at the values of tensors."""
_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
JOIN_AT = 32  # replays of a tape; then functions are made of its operations, which costs what 15 replays save
_COPIES = torch.ops.aten.clone.default, torch.ops.aten._to_copy.default


def launch(function: Callable, *args) -> None:
    """function(*args), which reads and writes memory that its arguments name; on a tape it is written down only."""
    if (tape := _current.get()) is None:
        function(*args)
    else:
        tape.add(functools.partial(function, *args))


class Tape(TorchDispatchMode):
    """What run() does. Nothing may depend on values in memory but what operations and launches read there.

    kernels: functions that take an operation's arguments and return what it returns, by operations and launches that
        are better here; or None, to leave it as it is.
    Attributes: logits: what run() has returned, written by every `replay`. All tensors that run() made are kept.
    """

    def __init__(self, run: Callable[[], Tensor], kernels: Mapping[OpOverload, Callable[..., Tensor | None]] = {}):
        super().__init__()
        self._kernels = kernels
        self._done: list[Callable] = []
        self._kept: list = []
        self._replays = 0
        token = _current.set(self)
        try:
            with torch.inference_mode(False), torch.no_grad(), self:
                self.logits = run()
        finally:
            _current.reset(token)

    def add(self, again: Callable) -> None:
        self._done.append(again)

    def replay(self) -> None:
        self._replays += 1
        if self._replays == JOIN_AT:
            self._done = list(_joined(self._done))
        with torch.jit.optimized_execution(False):  # as they are, one after another
            for again in self._done:
                again()

    def is_done(self) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not func._schema.name.startswith("c10d::"), f"{func} can't be written down"
        kwargs = kwargs or {}
        with self:  # what a kernel calls is written down
            if (kernel := self._kernels.get(func)) is not None and (out := kernel(*args, **kwargs)) is not None:
                return out
            if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                return out  # `to` and `contiguous`, which arrive whole from there and may be copies
        out = func(*args, **kwargs)
        if func.is_view or func._schema.name in _EMPTY:
            self._kept.append(out)
            return out
        before, after = set(), set()
        args, kwargs = _now(args, before), {name: _now(x, before) for name, x in kwargs.items()}
        made = _now(out, after)
        self._kept.append(made)
        if func._schema.is_mutable:
            self.add(_Operation.of(func, args, kwargs))
        elif not after <= before:  # else it is the same memory
            self.add(_into(func, args, kwargs, made))
        return out


class _Operation(functools.partial):
    """A call of an operation of torch, whose results go where its arguments say."""

    overload: OpOverload

    @classmethod
    def of(cls, overload: OpOverload, args: Sequence, kwargs: dict) -> _Operation:
        operation = cls(overload._op, *args, **kwargs)
        operation.overload = overload
        return operation

    def append_to(self, graph: torch._C.Graph) -> bool:
        """Whether a graph of TorchScript can have it; it is its last node then."""
        schema, args = self.overload._schema, self.args
        args = [*args, *(self.keywords.get(x.name, x.default_value) for x in schema.arguments[len(args) :])]
        tensors = [x for x in args if isinstance(x, Tensor)]
        try:
            values = [_constant(graph, x, y.type, tensors) for x, y in zip(args, schema.arguments, strict=True)]
            node = graph.create(schema.name, values, len(schema.returns))
            if node.schema() != str(schema):  # another overload
                return False
        except (RuntimeError, TypeError):  # an argument, or its type
            return False
        graph.appendNode(node)
        return True


def _constant(graph: torch._C.Graph, x, kind: torch._C.JitType, others: list[Tensor]) -> torch._C.Value:
    """others: the operation's tensors. A number in the place of one becomes one, unless that changes dtypes."""
    if isinstance(x, (list, tuple)) and isinstance(kind.getElementType(), (torch._C.TensorType, torch._C.OptionalType)):
        tensors = graph.create("prim::ListConstruct", [graph.insertConstant(y) for y in x], 1)
        tensors.output().setType(kind)
        return graph.appendNode(tensors).output()
    takes_part = isinstance(kind, torch._C.TensorType) and type(x) in (int, float)
    if takes_part and all(y.dim() and (type(x) is int or y.is_floating_point()) for y in others):
        x = torch.tensor(x, dtype=torch.int64 if type(x) is int else torch.float64)
    return graph.insertConstant(x)


def _joined(done: list[Callable]) -> Iterator[Callable]:
    """The same, where operations that follow one another are one function: TorchScript's interpreter takes a third of
    the time that a call from Python does."""
    graph = torch._C.Graph()
    for again in done:
        if not (isinstance(again, _Operation) and again.append_to(graph)):
            yield from _function(graph)
            yield again
            graph = torch._C.Graph()
    yield from _function(graph)


def _function(graph: torch._C.Graph) -> Iterator[Callable]:
    """What runs the graph, unless it is empty."""
    if next(graph.nodes(), None) is not None:
        graph.registerOutput(graph.insertConstant(None))
        yield torch._C._create_function_from_graph("operations", graph)


def _now(x, storages: set[int]):
    """Tensors, in lists and tuples, at the memory that they have now: `x.data = y` may give them other; it is added."""
    if isinstance(x, Tensor):
        storages.add(x.untyped_storage().data_ptr())
        return x.detach()
    return type(x)([_now(y, storages) for y in x]) if type(x) in (list, tuple) else x


def _into(func, args, kwargs, made) -> Callable:
    """func(*args, **kwargs) again, into the memory of its results."""
    if func in _COPIES:  # their variants make a copy first
        return _Operation.of(torch.ops.aten.copy_.default, (made, args[0]), {})
    results = [made] if isinstance(made, Tensor) else made
    if (variant := _out_variant(func)) is not None:
        names = [x.name for x in variant._schema.arguments if x.is_out]
        if len(names) == len(results):
            return _Operation.of(variant, args, kwargs | dict(zip(names, results)))

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
