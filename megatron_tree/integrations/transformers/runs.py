"""A model's runs over the rows of a `TreeCache`, and the notes from a cache update to its attention.

`TreeCache.forward_pass` opens and closes a run. A model that is called with the cache alone (`model.generate`, or a
loop of the user) does neither: its run begins when a layer takes its keys again, and is over when all layers have.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ...cache.forward import ForwardPass
from ...cache.rows import Row
from .recurrent import RunStates


class Update(NamedTuple):
    """What a cache update leaves for the attention call that follows it."""

    cache: object
    """The `TreeCache`."""
    layer_idx: int
    keys: Tensor
    """[b, h_kv, n, d], what the update returned; latents [b, 1, n, r]; ..."""
    values: Tensor
    """... [b, h_kv, n, d_v]; their rotary keys [b, 1, n, d]."""
    forward: ForwardPass


last_update: contextvars.ContextVar[Update | None] = contextvars.ContextVar("tree_cache_update", default=None)
current_run: contextvars.ContextVar = contextvars.ContextVar("tree_cache_run", default=None)
"""The cache whose model is in the middle of a run."""


def just_stored(latents: Tensor) -> bool:
    """Whether these are the latents that the last update returned."""
    update = last_update.get()
    return update is not None and update.keys is latents


def forget_notes() -> None:
    """No run is under way."""
    last_update.set(None)
    current_run.set(None)


class ModelRuns:
    """The runs of one cache.

    Attributes:
        forward: the pass of the present run, or of the last one over the batch; None before its first attention layer.
        is_open: whether `TreeCache.forward_pass` has opened it.
        is_begun: whether the model itself has begun one over the batch.
    """

    def __init__(self, num_attending: int, states: RunStates):
        self.states, self._num_attending = states, num_attending
        self.forward: ForwardPass | None = None
        self.is_open = self.is_begun = False

    @contextlib.contextmanager
    def open(self, forward: ForwardPass) -> Iterator[None]:
        """Context of a run in this pass."""
        self.forward, self.is_open = forward, True
        try:
            yield
        finally:
            self.forward, self.is_open = None, False

    def begin(self, batch: Sequence[Row]) -> None:
        """A model begins a run over the batch."""
        self.end(batch)
        self.is_begun = True
        self.states.begin(batch)

    def end(self, batch: Sequence[Row]) -> None:
        """The last run over the batch is over. Raises: ``ValueError`` if it ended before all layers had run."""
        if self.forward is not None and not self.is_complete:
            n = self.forward.append.num_tokens
            raise ValueError(
                f"the model's last run over this cache ended before all layers had run: its {n} tokens are "
                f"in some layers only. Remove them with cache.crop(-{n}), or all with cache.reset()"
            )
        self.drop(batch)

    def drop(self, batch: Sequence[Row]) -> None:
        """Forget the last run over the batch; if it was complete, its rows get the recurrent states."""
        complete, self.forward, self.is_begun = self.is_complete, None, False
        if complete:
            self.states.end(batch)

    def forget(self) -> None:
        """Forget the last run over the batch, and all states: the cache is empty."""
        self.forward, self.is_begun = None, False
        self.states.begin([])

    def has_stored(self, slot: int | None) -> bool:
        """Whether the present run has stored a layer's tokens; None: those of all layers."""
        done = len(self.forward.written) == self._num_attending
        return done or slot in self.forward.written

    @property
    def is_complete(self) -> bool:
        """Whether all layers of a run have run."""
        return self.forward is not None and self.has_stored(None) and self.states.is_complete
