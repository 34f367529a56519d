"""DeepSeek V4's layers, whose queries see a window of keys and, before and in it, keys of compressed blocks of tokens.

A layer pools every complete block of tokens into one key, which is the value, too: by gates, with the rotary embedding
of the block's first token. "Heavily compressed" layers see the keys of all blocks that end at a query's position or
before; "compressed sparse" ones the best by an index, whose keys are pooled likewise, and their blocks overlap the ones
before. Both parts and a sink have one softmax.

With attention "tree" a block's key is made by the rank that has its last token; the tokens before come from their ranks
(`tree_halo`). So a layer's compressed keys are a sequence of their own, sharded as `Dispatched.blocks` says. The states
of attention to both sequences are merged.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....core.attention.functional import tree_attn_func
from ....core.attention.selection import tree_select_func
from ....core.comm import group_rank, group_size
from ....core.layout import Dispatched, documents_over, positions_of
from ....core.recurrence.halo import tree_halo
from ..train.batch_shards import SequenceShard
from .modeling import check_read, modeling_file

READ = {
    "DeepseekV4Attention": "07511ef7f0bd612f",
    "DeepseekV4HCACompressor": "b29459626ce48dac",
    "DeepseekV4CSACompressor": "299fe8d0851db9a3",
    "DeepseekV4Indexer": "34dafcf59cd8ff90",
    "DeepseekV4IndexerScorer": "842b9862abfd7c0c",
}
"""By class: the digest of the source of the `forward` whose mathematics is here."""


@dataclass
class LayerRun:
    """One call of an attention module."""

    options: dict
    """`cp_group` and `config` of its collectives."""
    layout: Dispatched
    """Who holds which tokens."""
    size: int = 0
    """Tokens of a block."""
    selected: Tensor | None = None
    """int32 [b, s_local, m]: numbers of the blocks that queries see; None: there are none."""

    @classmethod
    def of(cls, shard: SequenceShard | None, num_tokens: int) -> LayerRun:
        """shard: None for a whole sequence on this rank."""
        if shard is None:
            return cls({"cp_group": None}, documents_over((num_tokens,), (num_tokens,), 1))
        return cls({"cp_group": shard.cp_group, "config": shard.config}, shard.layout)

    @property
    def segments(self):
        group = self.options["cp_group"]
        return self.layout.segments(group_rank(group), group_size(group))

    def tokens_of_blocks(self, rows: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """Of rows [b, s_local, c] of tokens: [b, n, reach, c], the last `reach` tokens up to the end of each of the n
        blocks that end on this rank, and their positions int64 [n, reach], below 0 before the document. Collective."""
        count, num_rows = max(1, reach - 1), rows.shape[1]
        halos, _ = tree_halo(rows, count, layout=self.layout, **self.options)
        places, positions = [], []
        for i, s in enumerate(self.segments):
            ends = torch.arange(s.pos // self.size + 1, (s.pos + s.length) // self.size + 1) * self.size
            at = ends[:, None] + torch.arange(-reach, 0)
            before = num_rows + (i + 1) * count + at - s.pos
            places.append(torch.where(at < s.pos, before, at - s.pos + s.row))
            positions.append(at)
        empty = torch.empty(0, reach, dtype=torch.int64)
        places, positions = (torch.cat([*x, empty]).to(rows.device) for x in (places, positions))
        tokens = torch.cat((rows, halos.flatten(1, 2)), 1).index_select(1, places.flatten())
        return tokens.unflatten(1, places.shape), positions


_current: contextvars.ContextVar[LayerRun | None] = contextvars.ContextVar("tree_compressed", default=None)


def check_model(config) -> None:
    """Raise ``ValueError`` for layers that compute something else."""
    check_read(modeling_file(config), READ)


def run_layer(
    forward: Callable,
    module,
    hidden_states: Tensor,
    position_embeddings,
    position_ids: Tensor,
    attention_mask: SequenceShard | Tensor | None,
    past_key_values=None,
    **kwargs,
):
    """`forward` of an attention module."""
    inputs = hidden_states, position_embeddings, position_ids, attention_mask, past_key_values
    if module.config._attn_implementation != "tree":
        return forward(module, *inputs, **kwargs)
    if past_key_values is not None or isinstance(attention_mask, Tensor):
        what = "attention_mask with padding" if past_key_values is None else "past_key_values"
        raise ValueError(
            f"{what}: {type(module).__name__} counts blocks of tokens from a row's first, and attn_implementation="
            "'tree' runs it on shards, or on whole rows of one length with use_cache=False. Use 'eager' here"
        )
    if module.training and module.attention_dropout:
        raise ValueError(
            f"attention_dropout={module.attention_dropout}: {type(module).__name__} attends to tokens and to blocks of "
            "them, whose weights would be dropped by the same mask; set it to 0"
        )
    token = _current.set(LayerRun.of(attention_mask, hidden_states.shape[1]))
    try:
        return forward(module, *inputs, **kwargs)
    finally:
        _current.reset(token)


def compress(
    forward: Callable, module, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, cache, layer_idx: int
) -> tuple[Tensor, Tensor | None]:
    """`forward` of a compressor: [b, 1, n, d], the compressed keys of this rank, and no mask."""
    if (run := _current.get()) is None:
        return forward(module, hidden_states, q_residual, position_ids, cache, layer_idx)
    run.size, rotate = module.compress_rate, forward.__globals__["apply_rotary_pos_emb"]
    most = max(run.layout.lengths, default=0) // run.size
    if not most:
        return hidden_states.new_empty(len(hidden_states), 1, 0, module.head_dim), None
    keys = _pooled(module, hidden_states, run, rotate)
    if hasattr(module, "indexer"):
        run.selected = module.indexer(hidden_states, q_residual, position_ids, cache, layer_idx)
    else:
        own = positions_of(run.segments, hidden_states.shape[1], device=keys.device)
        numbers = torch.arange(most, dtype=torch.int32, device=keys.device)
        visible = numbers < ((own + 1) // run.size)[:, None]
        run.selected = torch.where(visible, numbers, -1).expand(len(keys), -1, -1)
    return keys[:, None], None


def _pooled(module: nn.Module, hidden_states: Tensor, run: LayerRun, rotate: Callable) -> Tensor:
    """[b, n, d]: the keys of blocks that end on this rank, then rows of 0; of a compressor or an index.

    Where it projects tokens to several parts, the last part is of a block's own tokens, the one before of the tokens of
    the block before.
    """
    size, d = run.size, module.head_dim
    series = module.position_bias.shape[1] // d
    rows = torch.cat((module.kv_proj(hidden_states), module.gate_proj(hidden_states)), -1)
    tokens, positions = run.tokens_of_blocks(rows, series * size)
    parts = [x.split(d, -1) for x in tokens.split(size, 2)]
    kv, gate = (torch.cat([x[i + at] for i, x in enumerate(parts)], 2) for at in (0, series))
    gate = gate + torch.cat(module.position_bias.split(d, -1))
    weights = gate.masked_fill(positions[..., None] < 0, -torch.inf).softmax(2, dtype=torch.float32)
    keys = module.kv_norm((kv * weights.to(kv.dtype)).sum(2))
    cos, sin = module.rotary_emb(keys, position_ids=positions[None, :, -size], layer_type=module.rope_layer_type)
    keys = rotate(keys[:, None], cos, sin)[:, 0]
    return F.pad(keys, (0, 0, 0, run.layout.blocks(size).num_rows - keys.shape[1]))


@torch.no_grad()
def select(
    forward: Callable, module, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, cache, layer_idx: int
) -> Tensor:
    """`forward` of an indexer: int32 [b, s_local, m], numbers of the blocks of the largest scores. As in plain
    Transformers it has no gradient."""
    if (run := _current.get()) is None:
        return forward(module, hidden_states, q_residual, position_ids, cache, layer_idx)
    rotate, scorer = forward.__globals__["apply_rotary_pos_emb"], module.scorer
    keys = _pooled(module, hidden_states, run, rotate)
    cos, sin = module.rotary_emb(hidden_states, position_ids=position_ids, layer_type=module.rope_layer_type)
    q = module.q_b_proj(q_residual).unflatten(-1, (-1, module.head_dim))
    return tree_select_func(
        rotate(q, cos, sin, unsqueeze_dim=2).float(),
        scorer.weights_proj(hidden_states).float() * scorer.weights_scaling,
        keys.float(),
        topk=module.index_topk,
        softmax_scale=scorer.softmax_scale,
        layout=run.layout,
        block_size=run.size,
        **run.options,
    )


def attend(module, q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard | None, options: dict) -> Tensor:
    """Attention of q [b, s_local, h, d] to the keys of tokens, which come first in k and v, and to compressed ones."""
    run, n = _current.get(), q.shape[1]
    if shard is not None:
        shard.used_by[module.layer_idx] = options["window_size"][0] + 1
    options |= run.options | {"layout": run.layout, "return_lse": True}
    out, lse = tree_attn_func(q, k[:, :n], v[:, :n], causal=True, **options)
    if run.selected is None:
        return out
    del options["window_size"], options["sinks"]
    options |= {"selected": run.selected, "layout_kv": run.layout.blocks(run.size)}
    more, lse_more = tree_attn_func(q, k[:, n:], v[:, n:], causal=False, **options)
    total = torch.logaddexp(lse, lse_more)
    weights = ((x - total).exp().transpose(1, 2)[..., None] for x in (lse, lse_more))
    return sum(x * weight for x, weight in zip((out, more), weights)).to(q.dtype)
