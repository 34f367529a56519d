"""A Transformers cache whose tokens are spread over the ranks of a group; see `integrations/transformers.py`."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from ..comm import group_rank, group_size
from ..config import DECODE_SCHEDULES, TreeConfig, check_choice
from ..kv_cache import ShardedKVLayer
from ..shard import Layout

LAYER_TYPES = ("full_attention", "sliding_attention")


class Prefill(NamedTuple):
    """A sequence-sharded prefill under way: what this rank's rows are."""

    layout: Layout
    slots: Tensor  # int64 [kept rows]: the slots of this rank's rows that are not padding
    rows: Tensor | None  # int64 [kept rows]: their row numbers; None = all rows
    seq_len: int  # tokens of the whole prompt, without padding
    progress: Callable[[int, int], None] | None


class Update(NamedTuple):
    """What a cache update tells the attention call that follows it."""

    cache: TreeCache
    layer_idx: int
    num_rows: int  # rows of the keys and values that the update returned
    first_slot: int  # slot of the first query; the queries are replicated
    prefill: Prefill | None


last_update: contextvars.ContextVar[Update | None] = contextvars.ContextVar("tree_cache_update", default=None)
current_prefill: contextvars.ContextVar[Prefill | None] = contextvars.ContextVar("tree_cache_prefill", default=None)


def check_layers(config) -> list[str]:
    """The kind of every layer of a model. ValueError for those that attention over shards can't serve."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_encoder_decoder", False):
        raise ValueError(f"{type(text).__name__}: attn_implementation='tree' serves decoder-only models")
    kinds, _ = get_layer_types_and_kwargs(text)
    others = sorted(set(kinds) - set(LAYER_TYPES))
    if others or getattr(text, "num_kv_shared_layers", 0):
        found = ", ".join(others) or "layers that share their keys and values"
        raise ValueError(
            f"{type(text).__name__} has {found}; attn_implementation='tree' serves {' and '.join(LAYER_TYPES)} layers "
            "with keys and values of their own. Use attn_implementation='sdpa', and the model's own cache"
        )
    return list(kinds)


class TreeCacheLayer(CacheLayerMixin):
    """One layer of a `TreeCache`: this rank's rows of the keys and values, in [b, h_kv, n, d] for Transformers.

    Layers with a sliding window keep all tokens, too; the window is applied in the attention.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, rank: int, world: int, block_size: int):
        super().__init__()
        self.shard = ShardedKVLayer(rank, world, block_size)
        self.num_slots = 0

    @property
    def batch_size(self) -> int:
        if not self.is_initialized:
            raise AttributeError("batch_size is known after the first update")
        return self.keys.shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Take new tokens, replicated: k [b, h_kv, n, d], v [b, h_kv, n, d_v]. Returns all rows this rank holds.

        A rank without a row returns one row of zeros, to be hidden: latent attention can't expand an empty tensor.
        """
        self.lazy_initialization(key_states, value_states)
        n = key_states.shape[2]
        slots = torch.arange(self.num_slots, self.num_slots + n, device=key_states.device)
        self.shard.append(key_states.transpose(1, 2), value_states.transpose(1, 2), slots)
        self.num_slots += n
        keys, values = self._views()
        if self.shard.num_tokens == 0:
            return torch.zeros_like(key_states[:, :, :1]), torch.zeros_like(value_states[:, :, :1])
        return keys, values

    def update_sharded(self, key_states: Tensor, value_states: Tensor, prefill: Prefill) -> tuple[Tensor, Tensor]:
        """Take this rank's rows of a sharded prompt, without its padding rows. Returns the arguments."""
        self.lazy_initialization(key_states, value_states)
        k, v = key_states.transpose(1, 2), value_states.transpose(1, 2)
        if prefill.rows is not None:
            k, v = k[:, prefill.rows], v[:, prefill.rows]
        self.shard.append_own(k, v, prefill.slots)
        self.num_slots = prefill.seq_len
        self._views()
        return key_states, value_states

    def _views(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self.shard.k.transpose(1, 2), self.shard.v.transpose(1, 2)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.num_slots

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_slots + query_length, 0

    def reset(self) -> None:
        self.shard.reset()
        self.num_slots = 0
        self.keys = self.values = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove slots; the argument is zero or negative, as in Transformers."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.num_slots:
            raise ValueError(f"tokens_to_remove={tokens_to_remove} must be between -{self.num_slots} and 0")
        if tokens_to_remove and self.is_initialized:
            self.num_slots += tokens_to_remove
            self.shard.crop(self.num_slots)
            self._views()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            self.shard.reorder(beam_idx.to(self.device))
            self._views()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.reorder_cache(torch.arange(self.batch_size, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(torch.as_tensor(indices))


class TreeCache(Cache):
    """A KV cache for ``attn_implementation="tree"``: every rank of a group holds part of the tokens of every layer.

    Args:
        config: the model's configuration (or that of its text part); it gives the number and kinds of layers.
        cp_group: process group over which the tokens are spread; None = this rank holds them all.
        block_size: tokens that go to one rank before the next rank's turn, while decoding.
        schedule: how partial attention is merged, see `tree_decode`.
        tree_config: `TreeConfig` of all attention calls with this cache.
    Raises:
        ValueError: a layer that is not plain or sliding-window attention, an encoder-decoder model, an unknown
            schedule, a block size below 1, a rank outside of cp_group.
    """

    def __init__(
        self,
        config,
        *,
        cp_group=None,
        block_size: int = 16,
        schedule: str = "auto",
        tree_config: TreeConfig | None = None,
    ):
        check_choice("schedule", schedule, DECODE_SCHEDULES)
        if not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"block_size={block_size!r} must be a positive number of tokens")
        kinds = check_layers(config)
        self.cp_group, self.schedule, self.tree_config = cp_group, schedule, tree_config
        self.rank, self.world = group_rank(cp_group), group_size(cp_group)
        super().__init__(layers=[TreeCacheLayer(self.rank, self.world, block_size) for _ in kinds])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        layer, prefill = self.layers[layer_idx], current_prefill.get()
        first_slot = layer.num_slots
        if prefill is None:
            k, v = layer.update(key_states, value_states)
        else:
            k, v = layer.update_sharded(key_states, value_states, prefill)
            if prefill.progress is not None:
                prefill.progress(layer_idx + 1, len(self.layers))
        last_update.set(Update(self, layer_idx, k.shape[2], first_slot, prefill))
        return k, v

    @property
    def num_local_tokens(self) -> int:
        """Tokens whose keys and values this rank holds."""
        return self.layers[0].shard.num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's keys and values, all layers."""
        return sum(layer.shard.nbytes for layer in self.layers)
