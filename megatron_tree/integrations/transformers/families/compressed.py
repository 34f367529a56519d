"""DeepSeek V4's layers, whose queries see a window of keys and, before and in it, keys of compressed blocks of tokens.

A layer pools every complete block of tokens into one key, which is the value, too: by gates, with the rotary embedding
of the block's first token. "Heavily compressed" layers see the keys of all blocks that end at a query's position or
before; "compressed sparse" ones the best by an index, whose keys are pooled likewise, and their blocks overlap the ones
before. Both parts and a sink have one softmax.

With attention "tree" a block's key is made by the rank that has its last token; the tokens before come from their ranks
(`tree_halo`). So a layer's compressed keys are a sequence of their own, sharded as `Dispatched.blocks` says. The states
of attention to both sequences are merged.

Over a `TreeCache` a layer's keys of blocks lie in pages of their own, on the rank that has the tokens' page. What the
blocks to come are made of, projections of the last tokens, is a state of the layer's convolution: it is no longer than
two blocks, and all ranks have it, since in a step all ranks run the new token, and any may begin the next page.
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
from ....core.cache.attention import Index, Selection
from ....core.cache.forward import ForwardPass
from ....core.cache.pages import on_device
from ....core.comm import group_rank, group_size
from ....core.layout import Dispatched, Segment, documents_over, positions_of
from ....core.merge import State
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

NUM_STATES = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 1}
"""By type of layer: its compressor has one, and its index."""


@dataclass
class LayerRun:
    """One call of an attention module."""

    options: dict
    """`cp_group` and `config` of its collectives."""
    size: int = 0
    """Tokens of a block; 0: the layer has a window only."""
    selected: Tensor | Selection | None = None
    """What blocks queries see; None: none or, over a cache, all complete ones."""

    def tokens_of_blocks(self, rows: Tensor, reach: int, state: int) -> tuple[Tensor, Tensor]:
        """Of rows [b, s_local, c] of tokens: [b, n, reach, c], the last `reach` tokens up to the end of each of the n
        blocks that end on this rank, and their positions int64 [n, reach], below 0 before the document. Collective.

        state: number of the state of a cache that has the rows before. Over a cache b is 1.
        """
        rows, before = self.with_rows_before(rows, max(1, reach - 1), state)
        begins = torch.tensor([[s[i] for s in self.segments] for i in (0, 1)], dtype=torch.int64)
        (first, pos), ends = on_device(begins, rows.device), self.ends(rows.device)
        segment = torch.searchsorted(first, ends, right=True)[:, None] - 1
        within = ends[:, None] - first[segment] + torch.arange(1 - reach, 1, device=rows.device)
        begin = torch.where(within < 0, rows.shape[1] + (segment + 1) * before.shape[2], first[segment])
        tokens = torch.cat((rows, before.flatten(1, 2)), 1).index_select(1, (begin + within).flatten())
        return tokens.unflatten(1, within.shape), pos[segment] + within


@dataclass(kw_only=True)
class ShardRun(LayerRun):
    """Over a shard of a batch."""

    layout: Dispatched
    """Who holds which tokens."""

    @classmethod
    def of(cls, shard: SequenceShard | None, num_tokens: int) -> ShardRun:
        """shard: None for a whole sequence on this rank."""
        if shard is None:
            return cls({"cp_group": None}, layout=documents_over((num_tokens,), (num_tokens,), 1))
        return cls({"cp_group": shard.cp_group, "config": shard.config}, layout=shard.layout)

    @property
    def num_blocks(self) -> int:
        """Of the longest document or row."""
        return self.layout.longest // self.size

    @property
    def segments(self) -> tuple[Segment, ...]:
        """This rank's."""
        group = self.options["cp_group"]
        return self.layout.in_rows(group_rank(group), group_size(group))

    def ends(self, device: torch.device) -> Tensor:
        """int64 [n]: this rank's rows that complete a block."""
        rows = [torch.arange(s.row, s.row + s.length)[(-1 - s.pos) % self.size :: self.size] for s in self.segments]
        return on_device(torch.cat([*rows, torch.empty(0, dtype=torch.int64)]), device)

    def with_rows_before(self, rows: Tensor, count: int, state: int) -> tuple[Tensor, Tensor]:
        """rows, and those before each segment, [b, segments, count, c]. Collective."""
        return rows, tree_halo(rows, count, layout=self.layout, **self.options)[0]

    def put(self, keys: Tensor) -> Tensor:
        """Keys [b, n, d] of the blocks that end on this rank, then rows of 0."""
        return F.pad(keys, (0, 0, 0, self.layout.blocks(self.size).num_rows - keys.shape[1]))

    def select(self, index: Index, keys: Tensor) -> Tensor:
        """Numbers of blocks int32 [b, s_local, m] of the largest scores; keys [b, n, d_i]: of blocks. Collective."""
        where = {"layout": self.layout, "block_size": self.size, **self.options}
        return tree_select_func(index.q, index.weights, self.put(keys).float(), **index.options, **where)

    def select_all(self, hidden_states: Tensor) -> Tensor:
        """Numbers of all blocks int32 [b, s_local, m] that end up to tokens [b, s_local, c]."""
        device = hidden_states.device
        own = positions_of(self.segments, hidden_states.shape[1], device=device)
        numbers = places = torch.arange(self.num_blocks, dtype=torch.int32, device=device)
        if self.layout.tree:
            paths = self.layout.blocks(self.size).paths
            numbers = numbers.repeat(len(own), 1)
            for s in self.segments:
                path = torch.tensor(paths[s.seq], dtype=torch.int32, device=device)
                numbers[s.row : s.row + s.length, : len(path)] = path
        visible = places < ((own + 1) // self.size)[:, None]
        return torch.where(visible, numbers, -1).expand(len(hidden_states), -1, -1)


@dataclass(kw_only=True)
class CacheRun(LayerRun):
    """Over the rows of a `TreeCache`, one after another."""

    cache: object
    layer_idx: int

    @classmethod
    def of(cls, cache, layer_idx: int) -> CacheRun:
        return cls({"cp_group": cache.cp_group, "config": cache.tree_config}, cache=cache, layer_idx=layer_idx)

    @property
    def forward(self) -> ForwardPass:
        """The pass, once the layer has stored its tokens' keys."""
        return self.cache.runs.forward

    @property
    def slot(self) -> int:
        """The number of the layer of blocks in the store."""
        return self.cache.block_slot_of[self.layer_idx]

    @property
    def num_blocks(self) -> int:
        """Of the longest row."""
        return self.forward.end // self.size

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Those of this rank's new tokens."""
        first, n = self.forward.append.first, self.forward.append.num_tokens
        if self.forward.shares is None:
            return tuple([Segment(i * n, pos, n) for i, pos in enumerate(first)])
        own = self.forward.layout.segments(self.cache.rank, self.cache.world)
        return tuple([s._replace(pos=s.pos + first[0]) for s in own])

    def ends(self, device: torch.device) -> Tensor:
        return self.forward.ends_of_blocks(self.slot, device)

    def with_rows_before(self, rows: Tensor, count: int, state: int) -> tuple[Tensor, Tensor]:
        before = self.cache.get_conv_state(self.layer_idx, state)
        before = rows.new_zeros(len(rows), count, rows.shape[2]) if before is None else before.transpose(1, 2)
        if self.forward.shares is None:
            whole = torch.cat((before, rows), 1)  # a copy: the state is changed in place
            halos, last = whole[None, :, :count], whole[:, -count:]
        else:
            options = {"layout": self.forward.layout, "before": before, "return_final": True, **self.options}
            halos, last = tree_halo(rows, count, **options)
        self.cache.update_conv_state(last.transpose(1, 2), self.layer_idx, state, conv_kernel_size=count)
        return rows.flatten(0, 1)[None], halos

    def put(self, keys: Tensor) -> Tensor:
        """Store keys [1, n, d]; returns no key."""
        self.forward.write(self.slot, keys[:, :, None], keys[:, :, None, :0])
        return keys.new_zeros(len(self.forward.append.rows), 0, keys.shape[2])

    def select(self, index: Index, keys: Tensor) -> Selection | None:
        """Store index keys, and select among all. Collective."""
        return self.forward.select(self.slot, keys, index, config=self.cache.tree_config) if self.num_blocks else None


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
    cached = hasattr(past_key_values, "cp_group")
    if (past_key_values is not None and not cached) or isinstance(attention_mask, Tensor):
        what = "attention_mask with padding" if isinstance(attention_mask, Tensor) else "past_key_values"
        raise ValueError(
            f"{what}: {type(module).__name__} counts blocks of tokens from a row's first, and attn_implementation="
            "'tree' runs it on shards, or on whole rows of one length with a TreeCache or use_cache=False. Use 'eager' "
            "here"
        )
    if module.training and module.attention_dropout:
        raise ValueError(
            f"attention_dropout={module.attention_dropout}: {type(module).__name__} attends to tokens and to blocks of "
            "them, whose weights would be dropped by the same mask; set it to 0"
        )
    if cached:
        run = CacheRun.of(past_key_values, module.layer_idx)
    else:
        run = ShardRun.of(attention_mask, hidden_states.shape[1])
    token = _current.set(run)
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
    if isinstance(run, ShardRun) and not run.num_blocks:
        return hidden_states.new_empty(len(hidden_states), 1, 0, module.head_dim), None
    keys = run.put(_pooled(module, hidden_states, run, rotate, 0))
    if hasattr(module, "indexer"):
        run.selected = module.indexer(hidden_states, q_residual, position_ids, cache, layer_idx)
    elif isinstance(run, ShardRun):
        run.selected = run.select_all(hidden_states)
    return keys[:, None], None


def _pooled(module: nn.Module, hidden_states: Tensor, run: LayerRun, rotate: Callable, state: int) -> Tensor:
    """[b, n, d]: the keys of blocks that end on this rank; of a compressor or an index.

    Where it projects tokens to several parts, the last part is of a block's own tokens, the one before of the tokens of
    the block before.
    """
    size, d = run.size, module.head_dim
    series = module.position_bias.shape[1] // d
    rows = torch.cat((module.kv_proj(hidden_states), module.gate_proj(hidden_states)), -1)
    tokens, positions = run.tokens_of_blocks(rows, series * size, state)
    parts = [x.split(d, -1) for x in tokens.split(size, 2)]
    kv, gate = (torch.cat([x[i + at] for i, x in enumerate(parts)], 2) for at in (0, series))
    gate = gate + torch.cat(module.position_bias.split(d, -1))
    weights = gate.masked_fill(positions[..., None] < 0, -torch.inf).softmax(2, dtype=torch.float32)
    keys = module.kv_norm((kv * weights.to(kv.dtype)).sum(2))
    cos, sin = module.rotary_emb(keys, position_ids=positions[None, :, -size], layer_type=module.rope_layer_type)
    return rotate(keys[:, None], cos, sin)[:, 0]


@torch.no_grad()
def select(
    forward: Callable, module, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, cache, layer_idx: int
) -> Tensor | Selection | None:
    """`forward` of an indexer: the blocks of the largest scores. As in plain Transformers it has no gradient."""
    if (run := _current.get()) is None:
        return forward(module, hidden_states, q_residual, position_ids, cache, layer_idx)
    rotate, scorer = forward.__globals__["apply_rotary_pos_emb"], module.scorer
    keys = _pooled(module, hidden_states, run, rotate, 1)
    cos, sin = module.rotary_emb(hidden_states, position_ids=position_ids, layer_type=module.rope_layer_type)
    q = module.q_b_proj(q_residual).unflatten(-1, (-1, module.head_dim))
    q = rotate(q, cos, sin, unsqueeze_dim=2).float()
    weights = scorer.weights_proj(hidden_states).float() * scorer.weights_scaling
    return run.select(Index(q, weights, scorer.softmax_scale, module.index_topk), keys)


def attend(module, q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard | None, options: dict) -> Tensor:
    """Attention of q [b, s_local, h, d] to the keys of tokens, which come first in k and v, and to compressed ones."""
    run, n = _current.get(), q.shape[1]
    options |= run.options | {"layout": run.layout, "return_lse": True}
    window, sinks = (options.pop(name) for name in ("window_size", "sinks"))
    mask = {"causal": True, "window_size": window}
    if shard is not None:
        shard.used_by[module.layer_idx] = window[0] + 1
        if shard.prefix_tree is not None:
            mask = {"ranges": shard.prefix_tree.ranges(window[0] + 1)}
    out, lse = tree_attn_func(q, k[:, :n], v[:, :n], sinks=sinks, **mask, **options)
    if run.selected is None:
        return out
    options |= {"selected": run.selected, "layout_kv": run.layout.blocks(run.size)}
    more, lse_more = tree_attn_func(q, k[:, n:], v[:, n:], causal=False, **options)
    total = torch.logaddexp(lse, lse_more)
    weights = ((x - total).exp().transpose(1, 2)[..., None] for x in (lse, lse_more))
    return sum(x * weight for x, weight in zip((out, more), weights)).to(q.dtype)


def state_of_blocks(q: Tensor, options: dict) -> State | None:
    """Of attention of q [b, n, h, d] to the keys of blocks in a cache; None: there are none. Collective."""
    run = _current.get()
    if not run.size or not run.num_blocks:
        return None
    of_call = {"softmax_scale": options["softmax_scale"], "config": run.options["config"]}
    return run.forward.attend(run.slot, q, selected=run.selected, return_lse=True, **of_call)
