"""Transformers' layers with an index of blocks of tokens (Qwen4-Exp), each of whose queries sees the blocks it selects.

Such a layer's indexer pools the index keys of every complete block of tokens: their mean, a norm, and the rotary
embedding of the block's first token. A query sees the tokens of the blocks with the largest scores

    sum over heads of relu(q . key) / sqrt(d)

and those after its last complete block. Transformers' indexer does all of this in one function, query by query, before
the layer's keys are in the cache. With attention "tree" another takes its place: it makes index queries and keys with
the module's own projection, norm and rotary function, and the attention function has blocks selected.

Its `ple` layers also compute across tokens in two places: embeddings of n-grams of a few token ids, and a dilated
convolution behind them. On ranks both get the rows before each of their segments (`tree_convolution`). Their states are
two more convolution states of the layer's cache: the last ids, and the convolution's last inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....core.attention.selection import Blocks, tree_select_func
from ....core.cache.attention import Index, Selection
from ....core.recurrence.halo import tree_convolution
from ..infer.model_runs import Update
from ..train.batch_shards import SequenceShard, current_shard
from .modeling import INSTEAD, check_read, modeling_file
from .recurrent import current_pass
from .rope import rope_rule

READ = {"Qwen4ExpTextQSAIndexer": "fe449513ef900f45"}
"""By class: the digest of the source of the `forward` that is replaced."""
CONVOLUTION, IDS = 1, 2
"""Numbers of the states in the cache."""


class NewIndex(NamedTuple):
    """What an indexer makes of new tokens."""

    index: Index
    keys: Tensor
    """[b, n, d_i], before they are pooled."""


class BlockMask(NamedTuple):
    """What `tree_mask` returns to a model whose layers select blocks of tokens."""

    mask: SequenceShard | None
    """What it returns to other models."""
    rotary: Callable[[], nn.Module]
    """Gives the model's rotary embedding, for positions of any tokens. Few steps complete a block and need it."""
    new: NewIndex | None = None
    """Of the layer that runs."""

    dtype = torch.bool

    def __and__(self, new: NewIndex) -> BlockMask:
        """Layers combine it with what their indexer returns."""
        return self._replace(new=new)

    @property
    def where(self) -> dict:
        """How the tokens lie on the ranks, where there is no cache."""
        return {"cp_group": None, "layout": "contiguous"} if self.mask is None else self.mask.where

    def select(self, update: Update | None) -> Tensor | Selection:
        """The keys that the layer's queries see. update: of the layer's keys, which are in the cache. Collective.

        Raises: ValueError for a model whose layers have no indexer.
        """
        if self.new is None:
            raise ValueError(
                f"this model's attention does not combine its mask with what its indexer selects. {INSTEAD}"
            )
        index, keys = self.new
        if update is not None and self.mask is None:
            slot, config = update.cache.slot_of[update.layer_idx], update.cache.tree_config
            return update.forward.select(slot, keys, index, config=config)
        return tree_select_func(*index[:2], keys, blocks=index.blocks, **index.options, **self.where)


def block_mask(mask: Tensor | SequenceShard | None, config) -> BlockMask:
    """The mask of a model's run. Raises: ValueError for padding."""
    if isinstance(mask, Tensor):
        raise ValueError(
            f"attention_mask with padding: {type(config).__name__} has an index of blocks of tokens, which are counted "
            "from a row's first token. Run rows of one length, or use generate, whose rows have no padding"
        )
    return BlockMask(mask, functools.cache(lambda: _class_beside(config, "RotaryEmbedding")(config)))


def check_model(config) -> None:
    """Raise ``ValueError`` for an indexer that computes something else, and for what its blocks can't have."""
    if rope_rule(config) is not None:
        raise ValueError(
            f"{type(config).__name__} has a rotary embedding that depends on a row's length; an index of blocks of "
            f"tokens keeps keys of one embedding. {INSTEAD}"
        )
    check_read(modeling_file(config), READ)


def _class_beside(config, ending: str) -> type[nn.Module]:
    names = modeling_file(config)
    found = [x for name, x in names.items() if name.startswith("Qwen4ExpText") and name.endswith(ending)]
    if len(found) != 1:
        raise ValueError(f"{type(config).__name__}: no single class Qwen4ExpText...{ending}. {INSTEAD}")
    return found[0]


def select(forward: Callable, module, hidden_states: Tensor, position_embeddings, attention_mask, past_key_values):
    """`forward` of an indexer, of which another one takes the place where its mask is a `BlockMask`."""
    if not isinstance(attention_mask, BlockMask):
        return forward(module, hidden_states, position_embeddings, attention_mask, past_key_values)
    rotate, cached = forward.__globals__["apply_rotary_pos_emb"], past_key_values is not None
    return _new_index(module, hidden_states, position_embeddings, attention_mask, rotate, cached=cached)


@torch.no_grad()
def _new_index(module, hidden_states: Tensor, embeddings, mask: BlockMask, rotate, *, cached: bool) -> NewIndex:
    """Of new tokens hidden_states [b, n, hidden size]; embeddings: (cos, sin) of their positions."""
    heads, d = module.index_n_heads, module.index_head_dim
    q, keys = module.index_qk_proj(hidden_states).split((heads * d, d), -1)
    if not cached:
        positions = torch.arange(q.shape[1]) if mask.mask is None else mask.mask.positions
        embeddings = mask.rotary().to(q.device)(hidden_states, positions.to(q.device)[None])
    cos, sin = embeddings
    q = rotate(module.q_layernorm(q.unflatten(-1, (heads, d))), cos=cos, sin=sin, unsqueeze_dim=2)

    def block_key(tokens: Tensor, positions: Tensor) -> Tensor:
        pooled = module.k_layernorm(tokens.float().mean(2).to(keys.dtype))
        cos, sin = mask.rotary().to(pooled.device)(hidden_states, positions[None])
        return rotate(pooled, cos=cos[0], sin=sin[0], unsqueeze_dim=0)

    weights = torch.ones(q.shape[:3], device=q.device)
    blocks = Blocks(module.compress_ratio, block_key)
    return NewIndex(Index(q.float(), weights, d**-0.5, module.block_topk, blocks), keys)


def _options() -> dict | None:
    """Those of `tree_convolution` in a run whose tokens ranks share; None in others."""
    if (shard := current_shard.get()) is not None:
        return shard.where
    of_pass = current_pass.get()
    return of_pass.options if of_pass is not None and of_pass.is_sharded else None


def embed_ngrams(forward: Callable, module, ids: Tensor, past_key_values) -> Tensor:
    """`forward` of an embedding of n-grams of ids [b, s_local]. Before a sequence are ids eos, which are zeros here."""
    if (options := _options()) is None:
        return forward(module, ids, past_key_values)
    eos, count, cache = module.eos_token_id, module.context_len, past_key_values
    before = None if cache is None else cache.get_conv_state(module.layer_idx, state_idx=IDS)
    out, final = tree_convolution(
        lambda x: forward(module, x + eos, None),
        ids - eos,
        count,
        before=None if before is None else before - eos,
        return_final=cache is not None,
        **options,
    )
    if cache is not None:
        cache.update_conv_state(final + eos, module.layer_idx, state_idx=IDS, conv_kernel_size=count)
    return out


def convolution(short_conv: Callable, module, x: Tensor, past_key_values) -> Tensor:
    """The dilated convolution of x [b, s_local, c] behind n-grams."""
    if (options := _options()) is None:
        return short_conv(module, x, past_key_values)
    count, cache = module.short_conv_state_len, past_key_values
    before = None if cache is None else cache.get_conv_state(module.layer_idx, state_idx=CONVOLUTION)
    out, final = tree_convolution(
        lambda x: short_conv(module, x, None),
        x,
        count,
        before=None if before is None else before.transpose(1, 2),
        return_final=cache is not None,
        **options,
    )
    if cache is not None:
        last = final.transpose(1, 2)
        cache.update_conv_state(last, module.layer_idx, state_idx=CONVOLUTION, conv_kernel_size=count)
    return out
