"""Transformers' view of the layers of a `TreeCache`, which holds the data."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DummyLayer, LinearAttentionLayer

from ..architectures import LayerKind
from ..families.recurrent import RecurrentRun


class Slots(dict):
    """Numbers in the cache by number of an attention layer in the model; another layer is a ``ValueError``."""

    def __missing__(self, layer_idx):
        raise ValueError(
            f"layer {layer_idx} has no place in this TreeCache, which was made for a model with attention in layers "
            f"{list(self)}: make it with TreeCache(model.config, ...) of the model that runs"
        )


class OwnPositions:
    """What models with an index of blocks keep of all tokens' positions in a cache: nothing here, where a token's
    position is its number in the row."""

    def __get__(self, layer, owner) -> None:
        return None

    def __set__(self, layer, position_ids: Tensor) -> None:
        """Of new tokens, int64 [3, b, n]: time, height and width. Raises: ValueError where they are not the same."""
        if position_ids.stride(0) and not (position_ids == position_ids[0]).all():
            raise ValueError(
                "positions of images in a model with an index of blocks of tokens: a TreeCache takes text only. Use "
                "attn_implementation='sdpa', and the model's own cache"
            )


class TreeCacheLayer(CacheLayerMixin):
    """Of a layer with attention. Rows are the same in all layers."""

    is_croppable = True
    supports_early_init = False
    indexer_position_ids = OwnPositions()

    def __init__(self, cache, layer_idx: int):
        super().__init__()
        self._cache, self._layer_idx = cache, layer_idx
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return self._cache.update(key_states, value_states, self._layer_idx)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length(self._layer_idx)

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_seq_length() + query_length, 0


class RecurrentLayer(LinearAttentionLayer):
    """Of a recurrent layer: it has the states of one run at a time, see `ModelRuns`.

    Attributes:
        run: of the layer over this rank's tokens of a prompt (recurrent_prefill.py); None: it runs all tokens.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, layer_idx: int, num_states: int):
        super().__init__(num_states)
        self.layer_idx = layer_idx
        self.run: RecurrentRun | None = None

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs) -> Tensor:
        """Take new inputs [b, c, n]; returns them, with those before them unless the run puts them there."""
        if self.run is None:
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        self.run.conv_state, self.run.num_final_rows = self.conv_states[state_idx], kwargs["conv_kernel_size"]
        return conv_states

    def finish(self) -> None:
        """The run over this rank's tokens is over: the convolution's state is what all ranks' tokens leave behind."""
        run, self.run = self.run, None
        super().update_conv_state(run.final_conv_state, conv_kernel_size=run.num_final_rows)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The states [b, ...] by a name that tells layer, kind and number."""
        states = {f"{self.layer_idx}.conv.{i}": x for i, x in self.conv_states.items()}
        states |= {f"{self.layer_idx}.recurrent.{i}": x for i, x in self.recurrent_states.items()}
        return {name: x for name, x in states.items() if x is not None}

    def replace(self, tensors: dict[str, Tensor]) -> None:
        """Take these states, which models change in place; none: those of rows without tokens."""
        for i in range(self.number_of_states):
            conv = tensors.get(f"{self.layer_idx}.conv.{i}")
            recurrent = tensors.get(f"{self.layer_idx}.recurrent.{i}")
            self.conv_states[i], self.recurrent_states[i] = conv, recurrent
            self.is_conv_states_initialized[i] = self.has_previous_state[i] = conv is not None
            self.is_recurrent_states_initialized[i] = recurrent is not None
            self.conv_kernel_size[i] = None if conv is None else conv.shape[-1]


class TreeHybridLayer(RecurrentLayer, TreeCacheLayer):
    """Of a layer with attention beside a recurrent layer."""

    def __init__(self, cache, layer_idx: int, num_states: int):
        TreeCacheLayer.__init__(self, cache, layer_idx)
        RecurrentLayer.__init__(self, layer_idx, num_states)


def cache_layer(cache, layer_idx: int, kind: LayerKind) -> TreeCacheLayer | RecurrentLayer | DummyLayer:
    """The view of one layer."""
    if not kind.num_states:
        return TreeCacheLayer(cache, layer_idx) if kind.attends else DummyLayer()
    if kind.attends:
        return TreeHybridLayer(cache, layer_idx, kind.num_states)
    return RecurrentLayer(layer_idx, kind.num_states)
