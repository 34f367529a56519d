"""Arguments of public functions, checked by the functions' annotations, and of commands. Imports torch at the first
check only."""

from __future__ import annotations

import argparse
import collections.abc
import contextlib
import difflib
import functools
import inspect
import numbers
import os
import re
import reprlib
import sys
import time
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

RANK_0_FIRST_S = 15.0  # seconds for which the other ranks let rank 0 print an error and exit
_ANYTHING = (inspect.Parameter.empty, Any, object)
_KINDS = {bool: "True or False", int: "an integer", float: "a number", str: "a string", type(None): "None",
    collections.abc.Sequence: "a list or tuple", collections.abc.Callable: "a function", tuple: "a tuple",
    list: "a list", dict: "a dictionary", collections.abc.Mapping: "a dictionary"}  # fmt: skip


_ELSEWHERE = {
    "attn_mask": "ranges",
    "max_completion_tokens": "max_tokens",
    "scale": "softmax_scale",
    "sliding_window": "window_size",
    "--prompt": "--prompt-file",
}
"""Names of torch, Transformers and OpenAI's chat for what has another one, and an option that one expects."""
_FORMS = {"window_size": "(left, right), for instance (255, 0)"}
"""By the name of an argument: what a sequence holds."""


class Arguments(NamedTuple):
    """What a function takes."""

    function: str
    names: tuple[str, ...]
    """In their order."""
    required: frozenset[str]
    kinds: dict[str, tuple]
    """By name: the types that its annotation names; without those that take anything."""
    signature: inspect.Signature

    @classmethod
    def of(cls, fn: Callable) -> Arguments:
        from torch import Tensor  # modules that planning uses don't import it

        signature, hints = inspect.signature(fn), typing.get_type_hints(fn, localns={"Tensor": Tensor})
        parameters = {name: x for name, x in signature.parameters.items() if x.kind is not x.VAR_KEYWORD}
        required = (name for name, x in parameters.items() if x.default is inspect.Parameter.empty)
        kinds = {name: _kinds(hints[name]) for name in parameters if hints.get(name, Any) not in _ANYTHING}
        return cls(fn.__name__, tuple(parameters), frozenset(required), kinds, signature)

    def bound(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name. Raises ``TypeError`` as a call does."""
        given = dict(zip(self.names, args)) | kwargs
        if len(given) != len(args) + len(kwargs) or not self.required <= given.keys() <= set(self.names):
            with suggesting(kwargs, self.names, f"{self.function}(): "):
                self.signature.bind(*args, **kwargs)
        return given

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for an argument that is of another kind than its annotation."""
        for name, kinds in self.kinds.items():
            if name in given and not _is_of(given[name], kinds):
                words = [_KINDS.get(kind) or f"a {kind.__name__}" for kind in kinds]
                *some, last = dict.fromkeys(words)
                form = f": {_FORMS[name]}" if name in _FORMS else ""
                wanted = f"{', '.join(some)}{' or ' if some else ''}{last}{form}"
                raise ValueError(f"{name}={shown(given[name])} must be {wanted}")


def checked(fn: Callable) -> Callable:
    """The function, which checks its arguments first."""
    arguments = None

    @functools.wraps(fn)
    def call(*args, **kwargs):
        nonlocal arguments
        arguments = arguments or Arguments.of(fn)
        arguments.check(arguments.bound(args, kwargs))
        return fn(*args, **kwargs)

    return call


@contextlib.contextmanager
def suggesting(given: Iterable[str], names: Iterable[str], where: str = ""):
    """A ``TypeError`` of a call ends with the name that was meant, if one of those given is unknown and like it."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{where}{error}{suggestion(given, names)}") from error.__cause__


def suggestion(given: Iterable[str], names: Iterable[str], likeness: float = 0.6) -> str:
    """What to add to a message: the name that was meant by the first unknown one that is like a known one; "" if there
    is none. likeness: of the names, at least, from 0 to 1."""
    names = list(names)
    for unknown in (name for name in given if name not in names):
        elsewhere = [_ELSEWHERE[unknown]] if _ELSEWHERE.get(unknown) in names else []
        if likely := elsewhere or difflib.get_close_matches(str(unknown), names, 1, likeness):
            return f"; did you mean {likely[0]!r} instead of {unknown!r}?"
    return ""


class Parser(argparse.ArgumentParser):
    """Of a command; of its ranks, which make the same mistakes, the first one tells of them."""

    def error(self, message: str) -> NoReturn:
        """In one sentence, without the list of options."""
        if os.environ.get("RANK", "0") != "0":
            time.sleep(RANK_0_FIRST_S)
        print(f"{self.prog}: {self.advice(message)}", file=sys.stderr, flush=True)
        sys.exit(2)

    def is_switch(self, option: str) -> bool:
        """Whether an option takes no value."""
        action = self._option_string_actions.get(option)
        return action is not None and action.nargs == 0

    def advice(self, message: str) -> str:
        """The message, and the option that was meant if there is one like it."""
        _, unknown, words = message.partition("unrecognized arguments: ")
        names = re.findall(r"(--[\w-]+)", words)
        meant = suggestion(names, self._option_string_actions)
        if unknown and not words.startswith("-"):
            meant = "; an option comes before its value, and a value with spaces in quotes"
        return f"{message}{meant}; `{self.prog} --help` lists the options"


def shown(value: object) -> str:
    """A value in messages: in short."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of {value.dtype} {list(value.shape)}"
    return reprlib.repr(value)


def _kinds(annotation: Any) -> tuple[type, ...]:
    """The types that an annotation names."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(kind for x in typing.get_args(annotation) for kind in _kinds(x))
    return (typing.get_origin(annotation) or annotation,)


def _is_of(value: object, kinds: tuple[type, ...]) -> bool:
    """Whether a value is of one of these types; numpy's numbers are Python's, no number is True or False, and no text a
    list."""
    if type(value).__name__ in ("bool", "bool_"):
        return bool in kinds
    if isinstance(value, (str, bytes)):
        return type(value) in kinds
    if isinstance(value, kinds):
        return True
    number = numbers.Real if float in kinds else numbers.Integral if int in kinds else ()
    return isinstance(value, number)
