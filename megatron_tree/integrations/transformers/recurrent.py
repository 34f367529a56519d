"""Recurrent layers of Transformers' hybrid models: their states between the runs of a model over a `TreeCache`.

Their states don't grow with the row, so every rank has them whole and runs these layers on all tokens. During a run
they are in Transformers' own cache layers, which models change in place, for all of its rows together; afterwards each
row of the cache has its own (`RowState`). A run that fails leaves the rows' states as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...cache.rows import Row
from ...cache.states import join_states, split_states
from .layers import RecurrentLayer

NOT_CONTINUED = ("jamba", "zamba")  # their scan of several tokens begins with a state of zeros, whatever the cache has


class RunStates:
    """The states of a model's recurrent layers, for one run after another.

    continues: whether the model goes on from a state with several tokens at once.
    """

    def __init__(self, layers: Sequence[RecurrentLayer], *, continues: bool):
        self.continues = continues
        self._layers = {layer.layer_idx: layer for layer in layers}
        self._expected = {(layer.layer_idx, i) for layer in layers for i in range(layer.number_of_states)}
        self._reached: set[tuple[int, int]] = set()

    def __bool__(self) -> bool:
        return bool(self._layers)

    def begin(self, rows: Sequence[Row]) -> None:
        """A run over these rows begins. Raises: ValueError for rows that hold tokens but not their state."""
        self._reached.clear()
        if not self:
            return
        for row in rows:
            if row.length and (row.state is None or row.state.length != row.length):
                raise ValueError(
                    f"a row holds {row.length} tokens of attention layers only: the state of the recurrent layers is "
                    "missing. Run it from its first token"
                )
        joined = join_states([row.state for row in rows])
        for layer in self._layers.values():
            layer.replace(joined)

    def reaches(self, number: int, state: int) -> bool:
        """A layer takes one of its states; returns whether it had already in this run."""
        before = (number, state) in self._reached
        self._reached.add((number, state))
        return before

    @property
    def is_complete(self) -> bool:
        """Whether all layers have run."""
        return self._reached == self._expected

    def end(self, rows: Sequence[Row]) -> None:
        """The run is over: the rows have its states now. Raises: ValueError for layers that took none."""
        if not self.is_complete:
            missing = sorted({number for number, _ in self._expected - self._reached})
            raise ValueError(
                f"layers {missing} did not take their recurrent states from the TreeCache: this model keeps them "
                "elsewhere. Use attn_implementation='sdpa' for it, and its own cache"
            )
        if self:
            tensors = {name: x for layer in self._layers.values() for name, x in layer.tensors.items()}
            for row, state in zip(rows, split_states(tensors, [row.length for row in rows]), strict=True):
                row.state = state

    def check_update(self, number: int, state: int, num_tokens: int) -> None:
        """Raise ``ValueError`` if a layer can't run so many tokens from the state that it has."""
        if not self.continues and num_tokens > 1 and self._layers[number].has_previous_state[state]:
            raise ValueError(
                f"this model's recurrent layers go on with one token at a time (Transformers' scan of several begins "
                f"anew), not with {num_tokens}: run the whole text at once, or use Runner or generate, which do that"
            )
