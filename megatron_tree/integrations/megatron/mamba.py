"""Megatron's Mamba 2 on shards of a sequence: the state goes from rank to rank, heads stay where they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.config import TreeConfig
from ...core.recurrence.layer import Decay
from . import compat
from .recurrent import ShardedMixer, Shards

from megatron.core.ssm.mamba_mixer import MambaMixer  # isort: skip


class TreeMambaMixer(ShardedMixer, MambaMixer):
    """Replaces `MambaMixer`; same parameters, so checkpoints fit. Any number of heads and context-parallel ranks.

    The convolution gets the rows before each of this rank's segments. States decay, so what a segment does to the
    state before it has a closed form, and mamba_ssm's chunk scan runs once (`tree_recurrence`). The layer's
    `cp_comm_type` is that of the TransformerConfig; if it has no tree, the layer is Megatron's own, which exchanges
    heads.

    Args:
        tree_config: `check`, `timeout_s`, `transport`, `topology` and `tune` are used.
        Others as in Megatron's.
    Raises: ValueError for an inference context, in the forward.
    """

    def __init__(
        self,
        config: Any,
        *args: Any,
        layer_number: int | None = None,
        pg_collection: Any = None,
        tree_config: TreeConfig | None = None,
        **others: Any,
    ):
        kind = compat.cp_comm_type_of_layer(config, layer_number)
        groups = self._place(config, pg_collection, kind, tree_config)
        super().__init__(config, *args, layer_number=layer_number, pg_collection=groups, **others)
        self.pg_collection = pg_collection

    def forward(
        self, hidden_states: Tensor, inference_context: Any = None, *, packed_seq_params: Any = None, **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states: [s/cp, b, hidden], with sequence parallelism [s/cp/tp, b, hidden]. packed_seq_params: "thd".

        Returns (out, bias) like Megatron's. Raises: ValueError for an inference context.
        """
        self._refuse_inference(inference_context, others.get("inference_params"))
        shards = self._shards(hidden_states, packed_seq_params)
        if shards is None:
            return super().forward(hidden_states, inference_context, packed_seq_params=packed_seq_params, **others)
        mixed, _ = self.in_proj(hidden_states)
        inner, states = self.d_inner_local_tp, self.ngroups_local_tp * self.d_state
        z, xBC, dt = mixed.transpose(0, 1).split((inner, inner + 2 * states, self.nheads_local_tp), -1)
        convolution = compat.short_convolution(self, self.cp.get_conv1d_weight(), self.cp.get_conv1d_bias(), self.act)
        x, B, C = shards.convolve(xBC, convolution, self.d_conv).split((inner, states, states), -1)
        x = x.unflatten(-1, (-1, self.headdim)).contiguous()
        B, C = (part.unflatten(-1, (-1, self.d_state)).contiguous() for part in (B, C))
        y = self._recur(shards, x, B, C, dt.contiguous())
        y, z = y.flatten(2).transpose(0, 1).contiguous(), z.transpose(0, 1).contiguous()
        return self.out_proj(self.norm(y, z) if self.rmsnorm else y * self.act(z))

    def _recur(self, shards: Shards, x: Tensor, B: Tensor, C: Tensor, dt: Tensor) -> Tensor:
        """x: [b, s, heads, headdim]. B, C: [b, s, groups, d_state]. dt: [b, s, heads]. Returns the shape of x."""
        A, dt_bias, D = -torch.exp(self.cp.get_A_log().float()), self.cp.get_dt_bias().float(), self.cp.get_D()
        D = D.float().unflatten(0, (-1, self.headdim)) if self.D_has_hdim else D
        scan = compat.chunk_scan(self)

        def kernel(inputs: tuple[Tensor, ...], x: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
            B, C, dt = inputs
            initial_states = None if initial_state is None else initial_state.transpose(2, 3)
            options = dict(D=D, dt_bias=dt_bias, dt_softplus=True, initial_states=initial_states)
            y, final = scan(x, dt, A, B, C, self.chunk_size, **options, return_final_states=True)
            return y, final.transpose(2, 3)

        heads_per_group = self.nheads_local_tp // self.ngroups_local_tp
        decay = Decay(F.softplus(dt.float() + dt_bias) * A, C.repeat_interleave(heads_per_group, 2))
        return shards.recur(kernel, (B, C, dt), x, head_dim=self.d_state, decay=decay)
