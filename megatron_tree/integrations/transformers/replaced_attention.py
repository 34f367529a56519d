"""Models of Transformers that compute attention in their own code, and how they come to call attention "tree".

BLOOM, MPT (ALiBi), Falcon (ALiBi or rotary), GPT-J, CodeGen, GPT-Neo and XGLM know nothing of Transformers'
AttentionInterface, and JetMoe repeats keys after they are in the cache. Where a configuration asks for "tree",
`replace_attention` lets such a model hand a `_Mask` to its attention. With one, attention makes queries, keys, values
and the output with the module's own weights and calls "tree" in between; with other masks it runs its own code.

ALiBi: they add slope * position to the score of a key, which differs from -slope * distance by a number that all keys
of a query share: softmax does not see it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.codegen import modeling_codegen as codegen
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.gpt_neo import modeling_gpt_neo as gpt_neo
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.jetmoe import modeling_jetmoe as jetmoe
from transformers.models.mpt import modeling_mpt as mpt
from transformers.models.xglm import modeling_xglm as xglm


def replace_attention(attend: Callable) -> None:
    """Let these models call attend(module, query, key, value, attention_mask, **options), a function of Transformers'
    AttentionInterface, where their configuration asks for attention "tree"."""
    for attention, method, with_tree in (
        (bloom.BloomAttention, "forward", _bloom),
        (codegen.CodeGenAttention, "forward", _codegen),
        (falcon.FalconAttention, "forward", _falcon),
        (gpt_neo.GPTNeoSelfAttention, "_attn", _gpt_neo),
        (gptj.GPTJAttention, "_attn", _gptj),
        (jetmoe.JetMoeAttention, "forward", _jetmoe),
        (mpt.MptAttention, "forward", _mpt),
        (xglm.XGLMAttention, "forward", _xglm),
    ):
        setattr(attention, method, _replaced(getattr(attention, method), functools.partial(with_tree, attend)))
    jetmoe.JetMoeMoA.forward = jetmoe.JetMoeMoA.reduce  # it has none
    falcon.FALCON_ATTENTION_CLASSES["tree"] = falcon.FalconAttention
    gpt_neo.GPT_NEO_ATTENTION_CLASSES["tree"] = gpt_neo.GPTNeoSelfAttention
    gptj.GPTJ_ATTENTION_CLASSES["tree"] = gptj.GPTJAttention
    for module in (bloom, codegen, falcon, gpt_neo, gptj, jetmoe, mpt, xglm):
        module.create_causal_mask = _mask_function(module.create_causal_mask)
    for model in (
        bloom.BloomPreTrainedModel,
        codegen.CodeGenPreTrainedModel,
        falcon.FalconPreTrainedModel,
        gpt_neo.GPTNeoPreTrainedModel,
        gptj.GPTJPreTrainedModel,
        mpt.MptPreTrainedModel,
        xglm.XGLMPreTrainedModel,
    ):
        model._can_set_attn_implementation = classmethod(lambda cls: True)


class _Mask:
    """What `tree_mask` returned. MPT converts a mask to bool, Falcon looks at its axes."""

    ndim = 2

    def __init__(self, of_tree):
        self.of_tree = of_tree

    def to(self, dtype: torch.dtype) -> _Mask:
        return self


def _mask_function(plain: Callable) -> Callable:
    @functools.wraps(plain)
    def create_causal_mask(*, config, **kwargs):
        if config._attn_implementation != "tree":
            return plain(config=config, **kwargs)
        kwargs.pop("allow_is_causal_skip", None)  # Falcon wants a mask of queries by keys
        return _Mask(plain(config=config, **kwargs))

    return create_causal_mask


def _replaced(original: Callable, with_tree: Callable) -> Callable:
    @functools.wraps(original)
    def method(self, *args, **kwargs):
        uses_tree = any(isinstance(x, _Mask) for x in (*args, *kwargs.values()))
        return (with_tree if uses_tree else original)(self, *args, **kwargs)

    return method


def _attended(attend: Callable, module, q: Tensor, k: Tensor, v: Tensor, mask: _Mask, cache, **options) -> Tensor:
    """[b, s, h * d] of q [b, h, s, d] and the new k, v [b, h_kv, s, d]."""
    if cache is not None:
        k, v = cache.update(k, v, module.layer_idx)
    return attend(module, q, k, v, mask.of_tree, **options)[0].flatten(2)


@functools.lru_cache
def _slopes(model, num_heads: int, device: torch.device, factor: float = 1.0) -> Tensor:
    """fp32 [h]: how much the bias of a model's module grows from a key to the next one."""
    if model is mpt:
        bias = mpt.build_mpt_alibi_tensor(num_heads, 2)
    else:
        bias = model.build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)
    first, second = bias.reshape(num_heads, 2).float().unbind(1)
    return ((second - first) * factor).to(device)


def _of_cache(module, slopes: Tensor) -> Tensor:
    """Of all heads' slopes those of the heads in the cache, if ranks share the model's weights (split_model.py)."""
    heads = getattr(module, "cached_heads", None)
    return slopes if heads is None else slopes[slice(*heads)]  # a new tensor is read, which stalls an accelerator


def _bloom(attend, self, hidden_states, residual, alibi, attention_mask, layer_past=None, use_cache=False, **kwargs):
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    num_heads = len(alibi) // len(q)
    slopes = _of_cache(self, _slopes(bloom, num_heads, q.device))
    options = dict(scaling=self.inv_norm_factor, dropout=self.attention_dropout.p if self.training else 0.0)
    out = _attended(attend, self, q, k, v, attention_mask, layer_past, alibi_slopes=slopes, **options, **kwargs)
    return residual + F.dropout(self.dense(out), self.hidden_dropout, self.training), None


def _mpt(attend, self, hidden_states, position_bias, past_key_values=None, attention_mask=None, **kwargs):
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    qkv = qkv.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
    # ranks that share the weights may have more KV heads than query heads
    q, k, v = qkv.tensor_split((self.n_heads, (qkv.shape[1] + self.n_heads) // 2), 1)
    num_heads = len(position_bias)
    slopes = _of_cache(self, _slopes(mpt, num_heads, q.device))
    options = dict(scaling=self.softmax_scale, dropout=self.attn_dropout_p if self.training else 0.0)
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
        num_heads = len(alibi) // len(q)
        options["alibi_slopes"] = _of_cache(self, _slopes(falcon, num_heads, q.device, self.inv_norm_factor))
        options["dropout"] = self.attention_dropout.p if self.training else 0.0
    return self.dense(_attended(attend, self, q, k, v, attention_mask, layer_past, **options, **kwargs)), None


def _codegen(attend, self, hidden_states, layer_past=None, attention_mask=None, position_ids=None, **kwargs):
    """The heads of its projection lie in four blocks of queries, values and keys. Ranks that share the weights have
    queries, keys and values one after another, unless a rank has all of them."""
    heads = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
    if heads.shape[2] * self.head_dim == 3 * self.embed_dim:
        q, v, k = (x.flatten(2, 3) for x in heads.unflatten(2, (4, 3, -1)).unbind(3))
    else:
        num_queries = self.num_attention_heads
        q, k, v = heads.tensor_split((num_queries, (heads.shape[2] + num_queries) // 2), 2)
    turned = self.rotary_dim or self.head_dim
    sin, cos = self.embed_positions.to(q.device)[position_ids].chunk(2, -1)

    def rotary(x: Tensor) -> Tensor:
        first = codegen.apply_rotary_pos_emb(x[..., :turned], sin, cos)  # in fp32
        return torch.cat((first.to(x.dtype), x[..., turned:]), -1)

    q, k, v = (x.transpose(1, 2) for x in (rotary(q), rotary(k), v))
    options = dict(scaling=1 / self.scale_attn, dropout=self.attn_dropout.p if self.training else 0.0)
    out = _attended(attend, self, q, k, v, attention_mask, layer_past, **options)
    return self.resid_dropout(self.out_proj(out)), None


def _gptj(attend, self, query, key, value, attention_mask):
    """After the cache's update: q, k, v [b, h, s, d] -> [b, h, s, d]."""
    options = dict(scaling=1 / self.scale_attn, dropout=self.attn_dropout.p if self.training else 0.0)
    return attend(self, query, key, value, attention_mask.of_tree, **options)[0].transpose(1, 2), None


def _gpt_neo(attend, self, query, key, value, attention_mask):
    """As `_gptj`; scores are not scaled, and local layers have a window."""
    self.layer_idx = self.layer_id
    window = self.config.window_size if self.attention_type == "local" else None
    options = dict(scaling=1.0, sliding_window=window, dropout=self.attn_dropout.p if self.training else 0.0)
    return attend(self, query, key, value, attention_mask.of_tree, **options)[0].transpose(1, 2), None


def _xglm(attend, self, hidden_states, key_value_states=None, past_key_values=None, attention_mask=None, **kwargs):
    if key_value_states is not None:
        raise ValueError("XGLM attends to encoder_hidden_states: attn_implementation='tree' serves decoder-only models")
    projections = (self.q_proj, self.k_proj, self.v_proj)
    q, k, v = (p(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
    options = dict(scaling=self.scaling, dropout=self.dropout if self.training else 0.0)
    return self.out_proj(_attended(attend, self, q, k, v, attention_mask, past_key_values, **options, **kwargs)), None


def _jetmoe(attend, self, hidden_states, attention_mask=None, position_embeddings=None, past_key_values=None, **kwargs):
    """Every token's queries are those of its top_k experts, each with a head for every KV head."""
    q, router_logits, chosen = self.experts.map(hidden_states)
    k, v = self.kv_proj(hidden_states).chunk(2, -1)
    q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q.flatten(2), k, v))
    q, k = jetmoe.apply_rotary_pos_emb(q, k, *position_embeddings)
    q = q.unflatten(1, (self.top_k, -1)).transpose(1, 2).flatten(1, 2)  # heads of a KV head lie together
    options = dict(scaling=self.scaling, dropout=self.attention_dropout if self.training else 0.0)
    out = _attended(attend, self, q, k, v, attention_mask, past_key_values, **options, **kwargs)
    out = out.unflatten(-1, (-1, self.top_k, self.head_dim)).transpose(2, 3).flatten(3)
    return self.experts(out, chosen).view(hidden_states.shape), None, router_logits
