"""GLM-5.3's layers (`glm5_next`), whose queries see the tokens of pools that an index selects, and those after them.

An indexer makes one key of every complete pool of tokens: a sum of their index keys, weighted in each channel by the
softmax of gates. Transformers' indexer and the mask that attention makes of its result are in the model's own code, and
the mask function is never asked. With attention "tree" a `PoolMask` takes the place of the model's padding mask; every
layer hands it on to its indexer, which puts into it what ranks have selected together.

On shards a pool's key is made by the rank that has its last token, of tokens from their ranks (`tree_halo`); over a
cache a pool lies in one page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....core.attention.selection import Blocks, selected_tokens
from ....core.cache.attention import Index, Selection
from ..infer.model_runs import last_update
from ..train.batch_shards import SequenceShard, current_shard
from .compressed import ShardRun
from .modeling import INSTEAD, check_read, modeling_file

READ = {
    "Glm5NextTextIndexer.forward": "0e8a8e7a934bd922",
    "Glm5NextTextIndexer.get_pooled_states": "6c78e91ed0b62cdc",
    "Glm5NextTextIndexer.get_visible_tokens": "97819d05a07ca795",
    "Glm5NextTextIndexer.append_visible_tail": "b8d2e486846672bf",
    "Glm5NextTextAttention.forward": "a3516cfbc3384881",
}
"""By method: the digest of the source whose mathematics is here."""


class PoolMask(NamedTuple):
    """What the model's layers get in place of its padding mask."""

    shard: SequenceShard | None
    """Of a batch; None: of a whole sequence, or of new tokens over a cache."""
    selected: Tensor | Selection | None = None
    """The keys that queries see."""

    def bool(self) -> PoolMask:
        """The model makes all masks boolean."""
        return self


def check_model(config) -> None:
    """Raise ``ValueError`` for an indexer that computes something else, and for queries that might see no key."""
    check_read(modeling_file(config), READ)
    if not config.index_kpool_always_select_tail:
        raise ValueError(
            f"index_kpool_always_select_tail=False: a query of {type(config).__name__} that comes before the end of "
            f"the first pool of {config.index_kpool} tokens would see no key. Set it to True. {INSTEAD}"
        )


def pool_mask(create: Callable, *, config, attention_mask: Tensor | None, **kwargs):
    """`create_recurrent_attention_mask`, of which the model makes the mask of all layers."""
    if config._attn_implementation != "tree":
        return create(config=config, attention_mask=attention_mask, **kwargs)
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(
            f"attention_mask with padding: {type(config).__name__} has an index of pools of tokens, which are counted "
            "from a row's first token. Run rows of one length, or use generate, whose rows have no padding"
        )
    return PoolMask(current_shard.get())


def leave_tokens(zero_padding: Callable, hidden_states: Tensor, attention_mask) -> Tensor:
    """`apply_mask_to_padding_states`, where there is no padding."""
    return hidden_states if isinstance(attention_mask, PoolMask) else zero_padding(hidden_states, attention_mask)


def hand_on(build: Callable, module, topk_indices, **kwargs):
    """`build_attention_mask_from_topk`: attention is given what the indexer has returned."""
    return topk_indices if isinstance(topk_indices, PoolMask) else build(module, topk_indices, **kwargs)


def parts_of(module, attention_mask) -> PoolMask:
    """The mask that attention has been given. Raises: ValueError for one of Transformers' own."""
    if isinstance(attention_mask, PoolMask):
        return attention_mask
    raise ValueError(
        f"{type(module).__name__} makes a mask of queries by keys as long as nothing says that the model runs with "
        "attn_implementation='tree': make a TreeCache(model.config), or call train_on_shards(model), first"
    )


def select(forward: Callable, module, *, attention_mask, past_key_values, **inputs):
    """`forward` of an indexer, of which another one takes the place where its mask is a `PoolMask`."""
    if not isinstance(attention_mask, PoolMask):
        return forward(module, attention_mask=attention_mask, past_key_values=past_key_values, **inputs)
    return attention_mask._replace(selected=_select(module, attention_mask.shard, past_key_values, **inputs))


@torch.no_grad()
def _select(module, shard: SequenceShard | None, cache, hidden_states: Tensor, q_resid: Tensor) -> Tensor | Selection:
    q = module.wq_b(q_resid).unflatten(-1, (-1, module.head_dim)).float()
    weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).float() * module.n_heads**-0.5
    gates = F.linear(hidden_states, module.index_kpool_compress_gate)
    rows, size = torch.cat((module.k_norm(module.wk(hidden_states)), gates), -1), module.index_kpool
    blocks = Blocks(size, lambda tokens, _: _pooled(module, tokens))
    index = Index(q, weights, module.softmax_scale, module.index_topk // size, blocks)
    if cache is None:
        return _select_of_shard(index, rows, ShardRun.of(shard, rows.shape[1]))
    if (update := last_update.get()) is None or shard is not None:
        raise ValueError("layers with an index need a TreeCache, or neither a cache nor use_cache=True")
    slot, config = update.cache.slot_of[update.layer_idx], update.cache.tree_config
    return update.forward.select(slot, rows, index, config=config)


def _pooled(module: nn.Module, tokens: Tensor) -> Tensor:
    """The keys [b, n, d] of pools whose tokens have keys and gates [b, n, size, 2 d]."""
    keys, gates = tokens.chunk(2, -1)
    weights = (gates.float() + module.index_kpool_compress_ape.float()).softmax(2)
    return (weights.to(keys.dtype) * keys).sum(2)


def _select_of_shard(index: Index, rows: Tensor, run: ShardRun) -> Tensor:
    """int32 [b, s_local, m]: positions of the tokens that queries see, of this rank's keys and gates [b, s_local, 2 d].
    Collective."""
    run.size = size = index.block_size
    pools = index.q.new_empty(*index.q.shape[:2], 0)
    if run.num_blocks:
        pools = run.select(index, index.blocks.key(run.tokens_of_blocks(rows, size, 0)[0], None))
    return selected_tokens(pools.long(), run.segments, size, run.layout.tree)
