"""Recurrent layers of a model that runs a prompt over a `TreeCache`.

In a sharded prefill a rank's recurrent layers run its own tokens, from the row's states before the chunk to those after
it, which are on every rank again. Layers whose scan takes no state (Jamba, Zamba) go on from one in the same way when a
rank runs all tokens.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping

from torch import nn

from ....config import TreeConfig
from ....layout import Layout
from ..infer.layers import RecurrentLayer
from .mixers import MixerRuns, wrap_mixers
from .recurrent import RecurrentRun


class RecurrentPass:
    """One pass in which all recurrent layers run in a `RecurrentRun`.

    Args:
        layers: by their number. cp_group, layout: the ranks that share the tokens, and how; None, "contiguous": this
            rank has all of them.
    """

    def __init__(
        self, layers: Mapping[int, RecurrentLayer], *, cp_group, layout: Layout, config: TreeConfig | None = None
    ):
        self._layers, self.options = layers, {"cp_group": cp_group, "layout": layout, "config": config}
        self.is_sharded = not isinstance(layout, str)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context of the model's run."""
        before = current_pass.set(self)
        try:
            yield
        finally:
            current_pass.reset(before)

    def begin(self, mixer: nn.Module) -> RecurrentRun:
        """A layer begins."""
        layer = self._layers[mixer.layer_idx]
        run = RecurrentRun(**self.options, recurrent_state=layer.recurrent_states[0])
        layer.run = run if self.is_sharded else None
        return run

    def end(self, mixer: nn.Module, *, failed: bool) -> None:
        """A layer is over."""
        layer = self._layers[mixer.layer_idx]
        if failed:
            layer.run = None
        elif layer.run is not None:
            layer.finish()


current_pass: contextvars.ContextVar[RecurrentPass | None] = contextvars.ContextVar("tree_recurrent_pass", default=None)


def follow_passes(model: nn.Module) -> list[int]:
    """Make the recurrent layers of a model run in the `RecurrentPass` of the moment; a second call changes nothing.
    Returns their numbers: those of layers whose functions can be wrapped."""
    mixers = wrap_mixers(model)
    if not getattr(model, "follows_passes", False):
        model.follows_passes = True
        MixerRuns(mixers, _begin, _end)
    return sorted(mixer.layer_idx for mixer in mixers)


def _begin(mixer: nn.Module, args, kwargs) -> RecurrentRun | None:
    of_pass = current_pass.get()
    return None if of_pass is None else of_pass.begin(mixer)


def _end(mixer: nn.Module, *, failed: bool) -> None:
    current_pass.get().end(mixer, failed=failed)
