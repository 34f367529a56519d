"""Megatron's gated delta net on shards of a sequence: the state goes from rank to rank, heads stay where they are."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...core.config import TreeConfig
from . import compat
from .recurrent import ShardedMixer, Shards

from megatron.core.ssm.gated_delta_net import GatedDeltaNet  # isort: skip


class TreeGatedDeltaNet(ShardedMixer, GatedDeltaNet):
    """Replaces `GatedDeltaNet`; same parameters, so checkpoints fit. Any number of context-parallel ranks.

    The convolution gets the rows before each of this rank's segments, the delta rule the state before it
    (`tree_recurrence`). The kernels are Megatron's: fla's, or its own in torch with `deterministic_mode`.

    Args:
        cp_comm_type: "tree", "a2a+tree" or None; with others the layer is Megatron's own, where that has context
            parallelism (0.18 on).
        tree_config: `check`, `timeout_s`, `transport`, `topology` and `tune` are used.
        Others as in Megatron's.
    Raises: ValueError for another cp_comm_type with a release that has none, or recomputation of `gdn_norm_out`.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int | None = None,
        *,
        pg_collection: Any = None,
        cp_comm_type: str | None = None,
        tree_config: TreeConfig | None = None,
        **others: Any,
    ):
        groups = self._place(config, pg_collection, cp_comm_type, tree_config)
        super().__init__(config, submodules, layer_number, pg_collection=groups, **others)
        self.pg_collection = pg_collection
        if self.has_tree and getattr(self, "recompute_norm_out", False):
            raise ValueError(
                "recompute_modules has 'gdn_norm_out', which a gated delta net with a tree does not recompute: leave "
                "it out, or recompute whole layers (recompute_granularity='full')"
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states: [s/cp, b, hidden], with sequence parallelism [s/cp/tp, b, hidden]. packed_seq_params: "thd".

        attention_mask is not read, as in Megatron: a causal layer needs none. Returns (out, bias) like Megatron's.
        Raises: ValueError for an inference context.
        """
        self._refuse_inference(inference_context, others.get("inference_params"))
        shards = self._shards(hidden_states, packed_seq_params)
        if shards is None:
            own = dict(inference_context=inference_context, packed_seq_params=packed_seq_params)
            return super().forward(hidden_states, attention_mask, **own, **others)
        mixed, _ = self.in_proj(hidden_states)
        qk, v, heads = self.qk_dim // self.tp_size, self.v_dim // self.tp_size, self.num_value_heads // self.tp_size
        qkv, gate, beta, alpha = mixed.transpose(0, 1).split((2 * qk + v, v, heads, heads), -1)
        convolution = compat.short_convolution(self, self.conv1d.weight, self.conv1d.bias, self.act_fn)
        qkv = shards.convolve(qkv, convolution, self.conv_kernel_dim)
        out = self._delta_rule(shards, qkv.split((qk, qk, v), -1), beta, alpha)
        out = self._apply_gated_norm(out, gate.unflatten(-1, (-1, self.value_head_dim)).contiguous())
        return self.out_proj(out.reshape(*qkv.shape[:2], -1).transpose(0, 1).contiguous())

    def _delta_rule(self, shards: Shards, qkv: tuple[Tensor, ...], beta: Tensor, alpha: Tensor) -> Tensor:
        """qkv: [b, s, channels] each. beta, alpha: [b, s, heads]. Returns [b, s, heads, value_head_dim]."""
        q, k = (x.unflatten(-1, (-1, self.key_head_dim)).contiguous() for x in qkv[:2])
        v = qkv[2].unflatten(-1, (-1, self.value_head_dim)).contiguous()
        if self.use_qk_l2norm:
            norm = compat.l2norm(self)
            q, k = norm(q), norm(k)
        g = -self.A_log.exp() * F.softplus(alpha.float() + self.dt_bias)
        rule, shared = compat.gated_delta_rule(self), self.num_value_heads // self.num_key_heads

        def kernel(inputs: tuple[Tensor, ...], v: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
            q, k, g, beta = inputs
            q, k = (x.repeat_interleave(shared, 2) if shared > 1 else x for x in (q, k))
            return rule(
                q,
                k,
                v,
                g=g,
                beta=beta,
                initial_state=initial_state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=False,
            )

        return shards.recur(kernel, (q, k, g, beta.sigmoid()), v, head_dim=self.key_head_dim)
