"""A model's runs over the rows of a `TreeCache`: which layers have run, and the states of recurrent layers in between.

`TreeCache.forward_pass` opens and closes a run. A model that is called with the cache alone (`model.generate`, or a
loop of the user) does neither: its run begins when a layer takes its keys again, and is over when all layers have.

Recurrent states don't grow with the row, so every rank has them whole, or those of its heads where weights are split.
During a run they are in Transformers' cache layers, which models change in place, for all rows together; afterwards
each row has its own (`RowState`). A run that fails leaves the rows' states as they were.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ....core.cache.forward import ForwardPass
from ....core.cache.rows import Row
from ....core.cache.states import join_states, split_states
from ....core.config import TreeConfig
from ..families.recurrent import RecurrentLayer, RecurrentPass, current_pass


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


def forget_notes() -> None:
    """No run is under way."""
    last_update.set(None)
    current_run.set(None)


class ModelRuns:
    """The runs of one cache.

    Args:
        num_stored: layers of the cache's store. layers: those with a recurrent state.
        continues: whether the model goes on from a state with several tokens at once.
    Attributes:
        forward: the pass of the present run, or of the last one over the batch; None before its first attention layer.
        is_open: whether `TreeCache.forward_pass` has opened it.
        is_begun: whether the model itself has begun one over the batch.
        can_share: whether a rank can run its own tokens of a prompt.
    """

    def __init__(self, num_stored: int, layers: Sequence[RecurrentLayer], *, continues: bool):
        self._continues, self._num_stored = continues, num_stored
        self._layers = {layer.layer_idx: layer for layer in layers}
        self._expected = {(layer.layer_idx, i) for layer in layers for i in range(layer.number_of_states)}
        self._reached: set[tuple[int, int]] = set()
        self.forward: ForwardPass | None = None
        self.is_open = self.is_begun = False
        self.can_share = not layers

    def share(self, layers: Sequence[int]) -> None:
        """A model's layers of these numbers follow the `RecurrentPass` of `recurrent_pass`: those that have functions
        that are known. If these are all, a rank can run its own tokens."""
        self.can_share = sorted(layers) == sorted(self._layers)

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent layers."""
        return bool(self._layers)

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
        self.take_states(batch)

    def end(self, batch: Sequence[Row]) -> None:
        """The last run over the batch is over. Raises: ``ValueError`` if it ended before all layers had run."""
        if self.forward is not None and not self._is_complete:
            n = self.forward.append.num_tokens
            raise ValueError(
                f"the model's last run over this cache ended before all layers had run: its {n} tokens are "
                f"in some layers only. Remove them with cache.crop(-{n}), or all with cache.reset()"
            )
        self.drop(batch)

    def drop(self, batch: Sequence[Row]) -> None:
        """Forget the last run over the batch; if it was complete, its rows get the recurrent states."""
        complete, self.forward, self.is_begun = self._is_complete, None, False
        if complete:
            self.give_states(batch)

    def forget(self) -> None:
        """Forget the last run over the batch, and all states: the cache is empty."""
        self.forward, self.is_begun = None, False
        self.take_states([])

    def has_stored(self, slot: int | None) -> bool:
        """Whether the present run has stored a layer's tokens; None: all layers' tokens."""
        done = len(self.forward.written) == self._num_stored
        return done or slot in self.forward.written

    @property
    def _is_complete(self) -> bool:
        return self.forward is not None and self.has_stored(None) and self._reached == self._expected

    def take_states(self, rows: Sequence[Row]) -> None:
        """A run over these rows begins. Raises: ValueError for rows that hold tokens but not their state, and for rows
        without tokens beside others where a state is one of token ids."""
        self._reached.clear()
        if not self._layers:
            return
        for row in rows:
            if row.length and (row.state is None or row.state.length != row.length):
                raise ValueError(
                    f"a row holds {row.length} tokens of attention layers only: the state of the recurrent layers is "
                    "missing. Run it from its first token"
                )
        joined, begin = join_states([row.state for row in rows]), [row.state is None for row in rows]
        if any(begin) and not all(x.is_floating_point() for x in joined.values()):
            raise ValueError(
                f"{sum(begin)} of {len(rows)} rows begin beside rows that go on, but this model keeps the last token "
                "ids of a row (n-grams): run the first tokens of new rows by themselves"
            )
        for layer in self._layers.values():
            layer.replace(joined)

    def reaches(self, number: int, state: int) -> bool:
        """A layer takes one of its states; returns whether it had already in this run."""
        before = (number, state) in self._reached
        self._reached.add((number, state))
        return before

    def recurrent_pass(self, num_tokens: int, *, cp_group, config: TreeConfig | None) -> RecurrentPass | None:
        """How the recurrent layers run so many tokens on this rank; None: as they do by themselves."""
        if not self._layers or not self.can_share:
            return None
        if self.forward.shares is not None:
            return RecurrentPass(self._layers, cp_group=cp_group, layout=self.forward.layout, config=config)
        if self._continues or num_tokens == 1:
            return None
        return RecurrentPass(self._layers, cp_group=None, layout="contiguous", config=config)

    def give_states(self, rows: Sequence[Row]) -> None:
        """The run is over: the rows have its states now. Raises: ValueError for layers that took none."""
        if missing := sorted({number for number, _ in self._expected - self._reached}):
            raise ValueError(
                f"layers {missing} did not take their recurrent states from the TreeCache: this model keeps them "
                "elsewhere. Use attn_implementation='sdpa' for it, and its own cache"
            )
        if self._layers:
            tensors = {name: x for layer in self._layers.values() for name, x in layer.tensors.items()}
            for row, state in zip(rows, split_states(tensors, [row.length for row in rows]), strict=True):
                row.state = state

    def check_update(self, number: int, state: int, num_tokens: int) -> None:
        """Raise ``ValueError`` if a layer can't run so many tokens from the state that it has."""
        goes_on = self._continues or current_pass.get() is not None
        if not goes_on and num_tokens > 1 and self._layers[number].has_previous_state[state]:
            raise ValueError(
                f"this model's recurrent layers go on with one token at a time (Transformers' scan of several begins "
                f"anew), not with {num_tokens}: run the whole text at once, or use Runner or generate, which do that"
            )
