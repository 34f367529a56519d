"""Values of tensors that the host reads, which stalls an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class ReadOnce:
    """What `read(x, *arguments)` returns of tensors, until they change. Tensors of inference mode don't count their
    changes: they are read every time."""

    def __init__(self, read: Callable[..., Any]):
        self._read = read

    @cached_property
    def _known(self):
        from torch.utils.weak import WeakTensorKeyDictionary

        return WeakTensorKeyDictionary()

    def __call__(self, x: Tensor, *arguments) -> Any:
        if x.is_inference():
            return self._read(x, *arguments)
        state, known = (x._version, arguments), self._known.get(x)
        if known is None or known[0] != state:
            known = self._known[x] = state, self._read(x, *arguments)
        return known[1]
