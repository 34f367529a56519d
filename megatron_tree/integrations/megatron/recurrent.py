"""What Megatron's mixers with a recurrent state have in common when each rank runs its own tokens of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...core import comm
from ...core.config import TREE_CP_COMM_TYPES, TreeConfig, default_config
from ...core.layout import Layout, packed_layout
from ...core.recurrence.halo import tree_convolution
from ...core.recurrence.layer import Decay, Kernel, tree_recurrence
from . import compat
from .documents import check_cut, is_one_document


@dataclass(frozen=True)
class Shards:
    """How a batch lies on the ranks."""

    cp_group: Any
    layout: Layout
    config: TreeConfig

    def convolve(self, x: Tensor, convolution: Callable[[Tensor], Tensor], width: int) -> Tensor:
        """A causal convolution over `width` tokens of every document. x: [b, s_local, c]; returns the same shape.

        convolution: [b, t, c] -> [b, t, c] of rows with zeros before them.
        """
        return convolution(x) if width == 1 else tree_convolution(convolution, x, width - 1, **vars(self))[0]

    def recur(
        self, kernel: Kernel, inputs: tuple[Tensor, ...], v: Tensor, *, head_dim: int, decay: Decay | None = None
    ) -> Tensor:
        """The outputs of `tree_recurrence` over this batch."""
        return tree_recurrence(kernel, inputs, v, head_dim=head_dim, decay=decay, **vars(self))[0]


class ShardedMixer:
    """Mixin before a mixer of Megatron's, whose constructor calls `_place` first.

    A layer whose `cp_comm_type` has no tree is Megatron's own.
    """

    def _place(self, config: Any, pg_collection: Any, cp_comm_type: str | None, tree_config: TreeConfig | None) -> Any:
        """Note the ranks. Returns the process groups for Megatron's constructor."""
        self.has_tree = cp_comm_type is None or cp_comm_type in TREE_CP_COMM_TYPES
        _, self.cp_group = compat.layer_groups(config, pg_collection)
        self.tree_config = tree_config if tree_config is not None else default_config()
        if self.has_tree:
            if self.cp_group is not None:
                compat.check_layout(config, "linear_cp_layout", "cp_partition_mode")
            return compat.as_on_one_rank(pg_collection)
        if self.cp_group is not None and not compat.exchanges_heads(type(self)):
            raise ValueError(
                f"cp_comm_type={cp_comm_type!r} in a layer with a gated delta net, which has no context parallelism of "
                f"its own in megatron-core {compat.megatron_version()}: use cp_comm_type='tree' in this layer"
            )
        return pg_collection

    def _shards(self, hidden_states: Tensor, packed_seq_params: Any) -> Shards | None:
        """Where a batch lies of which this rank has hidden_states; None if Megatron's own forward computes it."""
        packed = packed_seq_params
        if not self.has_tree or (self.cp_group is None and getattr(packed, "layout", None) is None):
            return None
        group = compat.group_of_batch(packed, self.cp_group)
        if packed is None or is_one_document(packed):
            return Shards(group, "zigzag", self.tree_config)
        if packed.qkv_format != "thd":
            raise ValueError(f"packed_seq_params.qkv_format={packed.qkv_format!r}: recurrent layers take 'thd'")
        check_cut(packed, group)
        layout = getattr(packed, "layout", None)
        if layout is None:
            rows = len(hidden_states) * comm.group_size(group)
            rows *= self.pg_collection.tp.size() if self.config.sequence_parallel else 1
            layout = packed_layout(packed.cu_seqlens_q, packed.cu_seqlens_q_padded, num_rows=rows)
        return Shards(group, layout, self.tree_config)

    def _refuse_inference(self, *contexts: Any) -> None:
        if any(context is not None for context in contexts) and self.has_tree and self.cp_group is not None:
            raise ValueError(
                f"an inference context is set, but Megatron's inference has no context parallelism: build the "
                f"model with context_parallel_size=1, not {self.config.context_parallel_size}"
            )
