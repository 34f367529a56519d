"""Models of Transformers that compute attention in their own code: BLOOM, MPT (ALiBi) and Falcon (ALiBi or rotary).

Their attention modules know nothing of Transformers' AttentionInterface. `replace_own_code` gives them a forward that
makes queries, keys and values and the output with the module's own weights, and calls attention "tree" in between; with
any other attention implementation they run their own code. They add slope * position to the score of a key, which
differs from ALiBi's -slope * distance by a number that all keys of a query share: softmax does not see it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.mpt import modeling_mpt as mpt


def replace_own_code(attend: Callable) -> None:
    """Let these models call attend(module, query, key, value, attention_mask, **options), a function of Transformers'
    AttentionInterface, where their configuration asks for attention "tree"."""
    forwards = {bloom.BloomAttention: _bloom, falcon.FalconAttention: _falcon, mpt.MptAttention: _mpt}
    for attention, forward in forwards.items():
        attention.__init__ = _keeping_config(attention.__init__)
        attention.forward = _replaced(attention.forward, functools.partial(forward, attend))
    falcon.FALCON_ATTENTION_CLASSES["tree"] = falcon.FalconAttention
    for module in (falcon, mpt):
        module.create_causal_mask = _mask_function(module.create_causal_mask)
    for model in (bloom.BloomPreTrainedModel, falcon.FalconPreTrainedModel, mpt.MptPreTrainedModel):
        model._can_set_attn_implementation = classmethod(lambda cls: True)
        model.set_attn_implementation = _handing_config(model.set_attn_implementation, tuple(forwards))


def _keeping_config(init: Callable) -> Callable:
    @functools.wraps(init)
    def keep(self, config, *args, **kwargs):
        init(self, config, *args, **kwargs)
        self.config = config

    return keep


def _handing_config(set_implementation: Callable, attentions: tuple[type, ...]) -> Callable:
    """For models that were made before `replace_own_code` was called."""

    @functools.wraps(set_implementation)
    def set_attn_implementation(self, *args, **kwargs):
        set_implementation(self, *args, **kwargs)
        for module in self.modules():
            if isinstance(module, attentions):
                module.config = self.config

    return set_attn_implementation


def _replaced(own_code: Callable, with_tree: Callable) -> Callable:
    @functools.wraps(own_code)
    def forward(self, *args, **kwargs):
        config = getattr(self, "config", None)
        uses_tree = config is not None and config._attn_implementation == "tree"
        return with_tree(self, *args, **kwargs) if uses_tree else own_code(self, *args, **kwargs)

    return forward


def _mask_function(plain: Callable) -> Callable:
    """These models want a mask of queries by keys, or one that can be converted, where "tree" has none."""

    @functools.wraps(plain)
    def create_causal_mask(*, config, **kwargs):
        if config._attn_implementation != "tree":
            return plain(config=config, **kwargs)
        kwargs.pop("allow_is_causal_skip", None)
        mask = plain(config=config, **kwargs)
        return _NoMask() if mask is None else mask

    return create_causal_mask


class _NoMask:
    """A mask that hides nothing. MPT converts it to bool, Falcon looks at its axes."""

    ndim = 2

    def to(self, dtype: torch.dtype) -> _NoMask:
        return self


def _attended(attend: Callable, module, q: Tensor, k: Tensor, v: Tensor, mask, cache, **options) -> Tensor:
    """[b, s, h * d] of q [b, h, s, d] and the new k, v [b, h_kv, s, d]."""
    if cache is not None:
        k, v = cache.update(k, v, module.layer_idx)
    return attend(module, q, k, v, None if isinstance(mask, _NoMask) else mask, **options)[0].flatten(2)


@functools.lru_cache
def _slopes(bias: Callable, num_heads: int, device: torch.device, factor: float = 1.0) -> Tensor:
    """fp32 [h]: how much bias(number of positions) -> [h, 1, positions] grows from a key to the next one."""
    first, second = bias(2).reshape(num_heads, 2).float().unbind(1)
    return ((second - first) * factor).to(device)


@functools.lru_cache
def _bias(build: Callable, num_heads: int) -> Callable:
    """BLOOM's and Falcon's: of a row without padding."""
    return lambda n: build(torch.ones(1, n, dtype=torch.int64), num_heads, torch.float32)


@functools.lru_cache
def _mpt_bias(num_heads: int) -> Callable:
    return functools.partial(mpt.build_mpt_alibi_tensor, num_heads)


def _bloom(attend, self, hidden_states, residual, alibi, attention_mask, layer_past=None, use_cache=False, **kwargs):
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    options = dict(scaling=self.inv_norm_factor, dropout=self.attention_dropout.p if self.training else 0.0)
    slopes = _slopes(_bias(bloom.build_alibi_tensor, self.num_heads), self.num_heads, q.device)
    out = _attended(attend, self, q, k, v, attention_mask, layer_past, alibi_slopes=slopes, **options, **kwargs)
    return residual + F.dropout(self.dense(out), self.hidden_dropout, self.training), None


def _mpt(attend, self, hidden_states, position_bias, past_key_values=None, attention_mask=None, **kwargs):
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    q, k, v = (x.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for x in qkv.chunk(3, -1))
    options = dict(scaling=self.softmax_scale, dropout=self.attn_dropout_p if self.training else 0.0)
    slopes = _slopes(_mpt_bias(self.n_heads), self.n_heads, q.device)
    out = _attended(attend, self, q, k, v, attention_mask, past_key_values, alibi_slopes=slopes, **options, **kwargs)
    return self.out_proj(out), None


def _falcon(
    attend, self, hidden_states, alibi, attention_mask, position_ids=None, layer_past=None, use_cache=False,
    output_attentions=False, position_embeddings=None, **kwargs,
):  # fmt: skip
    qkv = self.query_key_value(hidden_states)
    if self.new_decoder_architecture:  # in the cache KV heads are not repeated
        qkv = qkv.unflatten(-1, (self.num_kv_heads, -1, self.head_dim))
        q, k, v = (x.flatten(2, 3) for x in qkv.tensor_split((-2, -1), -2))
    else:
        q, k, v = self._split_heads(qkv)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = dict(scaling=1 / math.sqrt(self.head_dim), output_attentions=output_attentions)
    if alibi is None:
        q, k = falcon.apply_rotary_pos_emb(q, k, *position_embeddings)
    else:
        of_heads = _bias(falcon.build_alibi_tensor, self.num_heads)
        options["alibi_slopes"] = _slopes(of_heads, self.num_heads, q.device, self.inv_norm_factor)
        options["dropout"] = self.attention_dropout.p if self.training else 0.0
    return self.dense(_attended(attend, self, q, k, v, attention_mask, layer_past, **options, **kwargs)), None
