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

from ...comm import outside_graphs
from ...config import TreeConfig
from ...layout import Layout
from .layers import RecurrentLayer
from .mixers import check_used, current_run, wrap_mixers
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
        self._layers, self._options = layers, {"cp_group": cp_group, "layout": layout, "config": config}
        self._is_sharded = not isinstance(layout, str)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context of the model's run."""
        before = current_pass.set(self)
        try:
            yield
        finally:
            current_pass.reset(before)

    def begin(self, mixer: nn.Module) -> None:
        """A layer begins."""
        layer = self._layers[mixer.layer_idx]
        run = RecurrentRun(**self._options, recurrent_state=layer.recurrent_states[0])
        layer.run = run if self._is_sharded else None
        current_run.set(run)

    def end(self, mixer: nn.Module, needed: frozenset[str], *, failed: bool) -> None:
        """A layer is over. Raises ``ValueError`` if it did not call the functions that it needs."""
        run, layer = current_run.get(), self._layers[mixer.layer_idx]
        current_run.set(None)
        if failed:
            layer.run = None
            return
        check_used(mixer, needed, run)
        if layer.run is not None:
            layer.finish()


current_pass: contextvars.ContextVar[RecurrentPass | None] = contextvars.ContextVar("tree_recurrent_pass", default=None)


def follow_passes(model: nn.Module) -> list[int]:
    """Make the recurrent layers of a model run in the `RecurrentPass` of the moment; a second call changes nothing.
    Returns their numbers: those of layers whose functions can be wrapped."""
    mixers = wrap_mixers(model)
    if not getattr(model, "follows_passes", False):
        model.follows_passes = True
        for mixer, needed in mixers.items():
            mixer.register_forward_pre_hook(outside_graphs(_begin))
            mixer.register_forward_hook(outside_graphs(_MixerEnd(needed)), always_call=True)
    return sorted(mixer.layer_idx for mixer in mixers)


def _begin(mixer: nn.Module, args) -> None:
    if (of_pass := current_pass.get()) is not None:
        of_pass.begin(mixer)


class _MixerEnd:
    """The hook after a mixer, also one that failed."""

    def __init__(self, needed: frozenset[str]):
        self.needed = needed

    def __call__(self, mixer: nn.Module, args, output) -> None:
        if (of_pass := current_pass.get()) is not None:
            of_pass.end(mixer, self.needed, failed=output is None)
