"""Multi-latent attention under context parallelism: the latent travels, not the keys and values made from it.

MLA's keys and values, of n heads with d_qk + d_v words a token each, come from a latent of kv_lora_rank words and a
rotary part of qk_pos_emb_head_dim words that all heads share. So every rank may gather the latents of the whole
sequence, make all keys and values itself, and attend with its own queries: the grid (1, p), and nothing more to send.
Backward, the latents are gathered once more, so that nothing of the whole sequence's length is kept between the passes,
and their gradients are reduced to the ranks they belong to.

The price: every rank makes the keys and values of all tokens, twice, nothing of it runs under communication, and with
tensor parallelism the exchanges of latents inside that group are p times as large. While a layer runs, its keys and
values take p times the room of this rank's. So it sends the least, and is the fastest way over slow links alone.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import torch

from ...attention.functional import attend_gathered
from ...attention.sequences import gather_shares
from ...attention.topology import GroupTopology
from ...config import TreeConfig, check_choice
from ...log import say_once
from ...plan import Shape
from . import compat as compat
from .attention import TreeDotProductAttention, serving
from .masks import read_mask
from .mla_choice import Choice, choose_latent
from .spec import _SpecWalk, is_tree

from megatron.core.transformer.multi_latent_attention import MLASelfAttention  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip

CHOICES = ("auto", "always", "never")


def use_mla_latent(layer_spec: Any, *, latent: str = "auto") -> Any:
    """A copy of a spec with tree attention in which MLA layers may send their latent instead of keys and values.

        spec = tree.use_mla_latent(tree.get_gpt_layer_tree_spec(multi_latent_attention=True))

    Args:
        layer_spec: what `use_tree_attention` returned. It is not changed.
        latent: "auto", "always" or "never"; see `LatentMLASelfAttention`.
    Raises: ValueError if there is no MLA layer in it, or one without tree attention.
    """
    check_choice("latent", latent, CHOICES)
    walk = _LatentWalk(latent)
    result = walk(layer_spec)
    if not walk.found:
        raise ValueError(f"no MLASelfAttention found in {type(layer_spec).__name__}: use_mla_latent is for MLA models")
    return result


class _LatentWalk(_SpecWalk):
    def __init__(self, latent: str):
        super().__init__(None)
        self.latent = latent

    def _rebuild(self, node: Any) -> Any:
        if isinstance(node, ModuleSpec) and node.module in (MLASelfAttention, LatentMLASelfAttention):
            submodules = self._submodules(node.submodules)
            params = {**(node.params or {}), "latent": self.latent}
            return ModuleSpec(module=LatentMLASelfAttention, params=params, submodules=submodules)
        if isinstance(node, functools.partial) and node.func in (MLASelfAttention, LatentMLASelfAttention):
            changed = {"submodules": self._submodules(node.keywords["submodules"]), "latent": self.latent}
            return functools.partial(LatentMLASelfAttention, *node.args, **{**node.keywords, **changed})
        return super()._rebuild(node)

    def _core_attention(self, old: Any) -> Any:
        return old

    def _submodules(self, submodules: Any) -> Any:
        self.found = True
        core = submodules.core_attention
        if not is_tree(core):
            raise ValueError(f"core_attention of an MLA layer is {core}: call use_tree_attention first")
        result = copy.copy(submodules)
        result.core_attention = ModuleSpec(module=GatheredTreeAttention, params=getattr(core, "params", {}))
        return result


class GatheredTreeAttention(TreeDotProductAttention):
    """TreeDotProductAttention that also takes keys and values of the whole sequence, which are here already."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.takes_other_keys = True

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> torch.Tensor:
        """q [b, s/p, h, d] over k and v [b, s/p or s, h_kv, d]; `options` as of `tree_attn_func`."""
        run = super().attend if k.shape[1] == q.shape[1] else attend_gathered
        return run(q, k, v, **options)


class LatentMLASelfAttention(MLASelfAttention):
    """MLASelfAttention whose latent travels under context parallelism where that is cheaper.

    Parameters and checkpoints are those of MLASelfAttention. The layer's core attention must be
    GatheredTreeAttention; `use_mla_latent` puts both into a spec.

    Args:
        latent: "auto": where it is predicted to be faster, if the planner chooses the schedule (`cp_comm_type` "tree"
            without a pinned grid) and the batch is neither packed nor padded; "always"; "never".
        Others as of MLASelfAttention.
    Raises: ValueError for "always" in a layer whose schedule is pinned, and in the forward with packed sequences.
    """

    def __init__(self, *args, latent: str = "auto", **kwargs):
        check_choice("latent", latent, CHOICES)
        with compat.mla_without_transformer_engine():
            super().__init__(*args, **kwargs)
        self.latent, self._attention_mask = latent, None
        self._user_recomputes_up_proj = self.recompute_up_proj
        self._pinned = self._reason_for_expanding()
        if latent == "always" and self._pinned:
            raise ValueError(f'latent="always" in an MLA layer, but {self._pinned}: leave one of the two out')

    def _reason_for_expanding(self) -> str:
        core = self.core_attention
        if not isinstance(core, GatheredTreeAttention):
            return f"its core attention is {type(core).__name__}"
        default, tree = TreeConfig(), core.tree_config
        if core.cp_comm_type not in (None, "tree"):
            return f"cp_comm_type={core.cp_comm_type!r}"
        for name in ("schedule", "grid", "grid_backward", "head_groups", "ulysses_size", "comm_dtype"):
            if getattr(tree, name) != getattr(default, name):
                return f"{name}={getattr(tree, name)!r} is pinned"
        if tree.check == "finite":
            return 'check="finite" looks at keys and values, which do not travel then'
        offloading = getattr(self.config, "fine_grained_activation_offloading", False)
        return "fine_grained_activation_offloading=True" if offloading else ""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args,
        inference_context: Any = None,
        inference_params: Any = None,
        **kwargs,
    ):
        """As of MLASelfAttention. Raises: ValueError for inference over several context-parallel ranks."""
        if self.config.context_parallel_size > 1 and (inference_context is not None or inference_params is not None):
            raise ValueError(
                "inference_context is set: Megatron's own inference knows no context parallelism. Use MegatronRunner, "
                "or run inference with context_parallel_size=1"
            )
        self._attention_mask = attention_mask
        try:
            return super().forward(hidden_states, attention_mask, *args, inference_context=inference_context, **kwargs)
        finally:
            self._attention_mask = None

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        **kwargs,
    ):
        """query [s/p, b, n, d_qk], key and value [s, b, n, d]: of the whole sequence where the latent travels."""
        arguments = (hidden_states, key_value_states, position_ids, packed_seq_params)
        self.recompute_up_proj, self.qkv_up_checkpoint = self._user_recomputes_up_proj, None
        if not self._latent_travels(hidden_states, packed_seq_params):
            return super().get_query_key_value_tensors(*arguments, **kwargs)
        with self._up_projection_seen() as latent:
            query, key, _, *others = super().get_query_key_value_tensors(*arguments, **kwargs)
        k_pos_emb = key[:, :, :1, self.config.qk_head_dim :].clone()  # [s/p, b, 1, d_rope], rotated; of every head
        key, value = self._whole_keys_and_values(latent[0], k_pos_emb)
        return query, key, value, *others

    def _latent_travels(self, hidden_states: torch.Tensor, packed_seq_params: Any) -> bool:
        if self.config.context_parallel_size == 1 or self.latent == "never" or self._pinned:
            return False
        if serving.get() is not None:
            return False
        rows, batch = hidden_states.shape[0] * self._parts, hidden_states.shape[1]
        if packed_seq_params is not None or self._is_padded(rows, batch):
            if self.latent == "always":
                raise ValueError(
                    'latent="always" in an MLA layer, but the batch is padded or packed (attention_mask, '
                    'packed_seq_params): then keys and values must travel; use latent="auto"'
                )
            return False
        if self.latent == "always":
            return True
        choice = self.choice(rows, batch, hidden_states.dtype, hidden_states.device)
        if self.core_attention.cp_group.rank() == 0:
            say_once(f"MLA with {'latents' if choice.latent else 'keys and values'} travelling: {choice.reason}")
        return choice.latent

    @property
    def _parts(self) -> int:
        """Parts of a share that the tensor-parallel ranks hold one of."""
        return self.core_attention.tp_group.size() if self.config.sequence_parallel else 1

    def _is_padded(self, rows: int, batch: int) -> bool:
        core, sizes = self.core_attention, {"batch": batch, "num_queries": rows, "num_keys": rows}
        limit = core.tree_config.timeout_s
        found = read_mask(self._attention_mask, self.attn_mask_type, **sizes, cp_group=core.cp_group, timeout_s=limit)
        return found[1] is not None

    def choice(self, rows: int, batch: int, dtype: torch.dtype, device: torch.device) -> Choice:
        """What "auto" chooses for shares of this size. Collective at the context-parallel group's first call."""
        cp, config, tree = self.core_attention.cp_group, self.config, self.core_attention.tree_config
        n, world = self.num_attention_heads_per_partition, cp.size()
        shape = Shape(n, n, self.q_head_dim, config.v_head_dim)
        network = GroupTopology.of(cp, device, tree).placed(cp, device, tree)
        widths = config.kv_lora_rank * n * (config.qk_head_dim + config.v_head_dim)
        return choose_latent(
            world,
            shape,
            config.kv_lora_rank // self._parts + config.qk_pos_emb_head_dim,
            2 * batch * rows * widths,
            batch=batch,
            seq_len=rows * world,
            bytes_per_word=dtype.itemsize,
            topology=network.topology,
            placement=network.placement,
            memory_budget=tree.memory_budget,
        )

    @contextlib.contextmanager
    def _up_projection_seen(self):
        """Keep what the up-projection of keys and values is called with, [s/p, b, kv_lora_rank].

        What it returns is not differentiated: of the keys made from it only the rotary part is used.
        """
        seen = []

        def keep(module, inputs, outputs):
            seen.append(inputs[0])
            return outputs[0].detach(), *outputs[1:]

        handle = self.linear_kv_up_proj.register_forward_hook(keep)
        try:
            yield seen
        finally:
            handle.remove()

    def _whole_keys_and_values(self, latent: torch.Tensor, k_pos_emb: torch.Tensor):
        """key, value [s, b, n, d] of all ranks' tokens, rank by rank; made again in the backward, not kept.

        The forward of MLASelfAttention discards what `qkv_up_checkpoint` made as soon as attention is done.
        """
        if self.config.recompute_granularity == "full":  # then this runs in the backward anyway
            return self._gather_and_project(latent, k_pos_emb)
        ours, theirs = compat.checkpoint_without_output(self.config), self.qkv_up_checkpoint
        key, value = ours.checkpoint(self._gather_and_project, latent, k_pos_emb)
        self.recompute_up_proj = True
        self.qkv_up_checkpoint = ours if theirs is None else _Both(theirs, ours)
        return key, value

    def _gather_and_project(self, latent: torch.Tensor, k_pos_emb: torch.Tensor):
        config, cp = self.config, self.core_attention.cp_group
        tree = self.core_attention.tree_config
        latent, k_pos_emb = (gather_shares(x, cp, 0, config=tree) for x in (latent, k_pos_emb))
        kv, _ = self.linear_kv_up_proj(latent)
        if kv.shape[0] != latent.shape[0]:  # sequence parallel: the up-projection gathers tp parts of every cp share
            kv = kv.unflatten(0, (-1, cp.size(), latent.shape[0] // cp.size())).transpose(0, 1).flatten(0, 2)
        n = self.num_attention_heads_per_partition
        k_nope, value = kv.unflatten(-1, (n, -1)).split([config.qk_head_dim, config.v_head_dim], -1)
        key = torch.cat((k_nope, k_pos_emb.expand(-1, -1, n, -1)), -1)
        return key, value.contiguous()


class _Both:
    """Two checkpoints whose outputs are discarded at the same place, and made again in this order."""

    def __init__(self, *checkpoints):
        self.checkpoints = checkpoints

    def discard_output_and_register_recompute(self, hook_tensor: torch.Tensor) -> None:
        for checkpoint in self.checkpoints:
            checkpoint.discard_output_and_register_recompute(hook_tensor)
