"""Transformers' layers with an index of blocks of tokens (Qwen4-Exp), each of whose queries sees the blocks it selects.

Such a layer's indexer pools the index keys of every complete block of tokens: their mean, a norm, and the rotary
embedding of the block's first token. A query sees the tokens of the blocks with the largest scores

    sum over heads of relu(q . key) / sqrt(d)

and those after its last complete block. Transformers' indexer does all of this in one function, query by query, before
the layer's keys are in the cache. With attention "tree" another takes its place: it makes index queries and keys with
the module's own projection, norm and rotary function, and the attention function has blocks selected.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....attention.selection import Blocks, tree_select_func
from ....cache.selected_attention import Index, Selection
from ....comm import group_rank, group_size, outside_graphs
from ....layout import shard_segments
from ..architectures import INSTEAD, POOLED, classes_beside
from ..infer.model_runs import Update
from ..train.batch_shards import SequenceShard
from .ngrams import share_ngrams
from .rope import rope_rule

READ = {"Qwen4ExpTextQSAIndexer": "fe449513ef900f45"}
"""By class: the digest of the source of the `forward` that is replaced."""


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
        if self.mask is None:
            return {"cp_group": None, "layout": "contiguous"}
        return {"cp_group": self.mask.cp_group, "layout": self.mask.documents or "zigzag"}

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
        options = {"topk": index.topk, "softmax_scale": index.scale, "blocks": index.blocks}
        config = None if self.mask is None else self.mask.config
        return tree_select_func(*index[:2], keys, **options, **self.where, config=config)


def block_mask(mask: Tensor | SequenceShard | None, config) -> BlockMask:
    """The mask of a model's run. Raises: ValueError for padding."""
    if isinstance(mask, Tensor):
        raise ValueError(
            f"attention_mask with padding: {type(config).__name__} has an index of blocks of tokens, which are counted "
            "from a row's first token. Run rows of one length, or use generate, whose rows have no padding"
        )
    return BlockMask(mask, functools.cache(lambda: _class_beside(config, "RotaryEmbedding")(config)))


def select_blocks_on_ranks(config) -> None:
    """Let the indexers of this configuration's model select blocks on all ranks where their mask is a `BlockMask`; done
    once.

    Raises: ValueError for an indexer that computes something else, and for what its blocks can't have.
    """
    if rope_rule(config) is not None:
        raise ValueError(
            f"{type(config).__name__} has a rotary embedding that depends on a row's length; an index of blocks of "
            f"tokens keeps keys of one embedding. {INSTEAD}"
        )
    share_ngrams(_class_beside(config, "NGramEmbedding"), _class_beside(config, "PLELayer"))
    indexer = _class_beside(config, "Indexer")
    if hasattr(indexer.forward, "selects_on_ranks"):
        return
    digest = hashlib.blake2b(inspect.getsource(indexer.forward).encode(), digest_size=8).hexdigest()
    if READ.get(indexer.__name__) != digest:
        raise ValueError(
            f"{indexer.__name__} of this version of Transformers ({digest}) is not one that attn_implementation='tree' "
            f"knows ({READ.get(indexer.__name__)}): it may select other tokens. {INSTEAD}"
        )
    indexer.forward = _selecting(indexer.forward)


def check_pages(config, page_size: int) -> None:
    """Raise ``ValueError`` unless every block of a model with such an index lies in one page of a cache."""
    if config.model_type in POOLED and page_size % config.indexer_compress_ratio:
        raise ValueError(
            f"page_size={page_size}: {type(config).__name__} selects blocks of {config.indexer_compress_ratio} tokens "
            "(indexer_compress_ratio), which have to divide it"
        )


def _class_beside(config, ending: str) -> type[nn.Module]:
    prefix = POOLED[config.model_type]
    found = [x for name, x in classes_beside(config).items() if name.startswith(prefix) and name.endswith(ending)]
    if len(found) != 1:
        raise ValueError(f"{type(config).__name__}: no single class {prefix}...{ending}. {INSTEAD}")
    return found[0]


def _selecting(forward):
    @outside_graphs
    @functools.wraps(forward)
    def select(module, hidden_states, position_embeddings, attention_mask, past_key_values):
        if not isinstance(attention_mask, BlockMask):
            return forward(module, hidden_states, position_embeddings, attention_mask, past_key_values)
        rotate, cached = forward.__globals__["apply_rotary_pos_emb"], past_key_values is not None
        return _new_index(module, hidden_states, position_embeddings, attention_mask, rotate, cached=cached)

    select.selects_on_ranks = True
    return select


@torch.no_grad()
def _new_index(module, hidden_states: Tensor, embeddings, mask: BlockMask, rotate, *, cached: bool) -> NewIndex:
    """Of new tokens hidden_states [b, n, hidden size]; embeddings: (cos, sin) of their positions."""
    heads, d = module.index_n_heads, module.index_head_dim
    q, keys = module.index_qk_proj(hidden_states).split((heads * d, d), -1)
    if not cached:
        embeddings = mask.rotary().to(q.device)(hidden_states, _positions(mask, q.shape[1], q.device)[None])
    cos, sin = embeddings
    q = rotate(module.q_layernorm(q.unflatten(-1, (heads, d))), cos=cos, sin=sin, unsqueeze_dim=2)

    def block_key(tokens: Tensor, positions: Tensor) -> Tensor:
        pooled = module.k_layernorm(tokens.float().mean(2).to(keys.dtype))
        cos, sin = mask.rotary().to(pooled.device)(hidden_states, positions[None])
        return rotate(pooled, cos=cos[0], sin=sin[0], unsqueeze_dim=0)

    weights = torch.ones(q.shape[:3], device=q.device)
    blocks = Blocks(module.compress_ratio, block_key)
    return NewIndex(Index(q.float(), weights, d**-0.5, module.block_topk, blocks), keys)


def _positions(mask: BlockMask, num_tokens: int, device) -> Tensor:
    """int64 [n]: positions of this rank's tokens in their documents."""
    where, positions = mask.where, torch.zeros(num_tokens, dtype=torch.int64, device=device)
    world = group_size(where["cp_group"])
    for s in shard_segments(num_tokens * world, group_rank(where["cp_group"]), world, where["layout"]):
        positions[s.row : s.row + s.length] = torch.arange(s.pos, s.pos + s.length, device=device)
    return positions
