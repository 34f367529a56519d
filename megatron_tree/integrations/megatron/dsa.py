"""Megatron's DSA on shards of a sequence: attention to the keys that an index selects, and the loss that trains it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core import comm
from ...core.attention.functional import tree_attn_func
from ...core.attention.index_loss import tree_index_loss_func
from ...core.attention.selection import tree_select_func
from ...core.config import TreeConfig
from ...core.layout import Dispatched, Packed, document_positions, packed_layout, shard_positions
from . import compat
from .attention import TreeDotProductAttention, read_mask
from .documents import check_cut, check_rolled

from megatron.core.transformer.spec_utils import build_module  # isort: skip


class TreeDSAttention(TreeDotProductAttention):
    """Replaces `DSAttention`; same parameters, so checkpoints fit. Any number of context-parallel ranks.

    The indexer, and the scaling and the log of its loss, are Megatron's. Index keys of all ranks are gathered, and
    selection is exact over all of them; attention runs as everywhere, under the mask of the selected keys. In training
    with `dsa_indexer_loss_coeff` every rank gathers all keys of its heads once more, for the loss; without, or with 0,
    the indexer gets no gradient. There is no dropout, as in Megatron.

    Args:
        submodules: Megatron's `DSAttentionSubmodules`.
        cp_comm_type: as in `tree_config_for`, without an exchange of heads.
        Others as in `TreeDotProductAttention`.
    Raises: ValueError for options that would change the result.
    """

    requires_dsa_inputs = consumes_absorbed_v_up_projection = True  # what MultiLatentAttention asks for (0.19 on)

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        tree_config: TreeConfig | None = None,
        **others: Any,
    ):
        compat.refuse_indexed(config)
        where = dict(cp_comm_type=cp_comm_type, pg_collection=pg_collection, tree_config=tree_config)
        super().__init__(config, layer_number, attn_mask_type, attention_type, **where, **others)
        if self.is_cross or self.tree_config.ulysses_size not in (None, 1):
            raise ValueError(
                f"attention_type={attention_type!r}, cp_comm_type={cp_comm_type!r}, "
                f"ulysses_size={self.tree_config.ulysses_size} in a layer with DSA, which is for self attention and "
                "selects keys for all heads of a query: use cp_comm_type='tree', and leave ulysses_size out"
            )
        self.indexer = build_module(submodules.indexer, config=config, pg_collection=pg_collection)

    @comm.outside_graphs
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        attention_mask: Tensor | None = None,
        *,
        x: Tensor | None = None,
        qr: Tensor | None = None,
        position_ids: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        up_v_weight: Tensor | None = None,
        **newer_arguments: Any,
    ) -> Tensor:
        """Attention of this rank's queries to the keys of the whole sequence that they select.

        Args:
            query, key, value: as in `TreeDotProductAttention`, also packed. Without their up-projection (0.19 on):
                query [s/cp, b, heads/tp, r + d_pe], key [s/cp, b, 1, r + d_pe] and value None, with up_v_weight
                [heads/tp, d_v, r].
            attention_mask: None or a causal mask; padding at the end of rows is treated like text, as in Megatron.
            x: [s/cp, b, hidden], the layer's input, and qr: [s/cp, b, q_lora_rank], its compressed queries; with
                sequence parallelism [s/cp/tp, ...]. packed_seq_params: "thd". position_ids is not read.
        Returns: [s/cp, b, heads/tp * d_v], dtype of `query`.
        """
        compat.refuse_unknown_arguments("the forward of TreeDSAttention", newer_arguments)
        if attention_bias is not None or x is None or qr is None:
            raise ValueError(
                f"attention_bias={attention_bias is not None}, x={x is not None}, qr={qr is not None} are given: DSA "
                "takes no bias, and needs the layer's input x and its compressed queries qr"
            )
        if (value is None) != (up_v_weight is not None):
            raise ValueError(
                f"value={value is not None}, up_v_weight={up_v_weight is not None} are given: pass one of the two"
            )
        if packed_seq_params is not None:
            query, key, value = (y.unsqueeze(1) if y is not None and y.dim() == 3 else y for y in (query, key, value))
            x, qr = (y.unsqueeze(1) if y.dim() == 2 else y for y in (x, qr))
        where = self._where(query, attention_mask, attn_mask_type, packed_seq_params)
        learns = self.training and torch.is_grad_enabled() and (self.config.dsa_indexer_loss_coeff or 0) > 0
        index = self._index(x, qr, query, where, learns)
        value = key[..., : up_v_weight.shape[-1]] if value is None else value
        q, k, v = (y.transpose(0, 1) for y in (query, key, value))
        selected = tree_select_func(*index, topk=self.indexer.index_topk, **where)
        options = dict(selected=selected, softmax_scale=self.softmax_scale, **where)
        out = tree_attn_func(q, k, v, causal=True, **options)
        if up_v_weight is not None:
            out = torch.einsum("bshc,hdc->bshd", out, up_v_weight.to(out))
        out = out.transpose(0, 1).flatten(2)
        return self._with_loss(out, index, q.detach(), k.detach(), packed_seq_params, options) if learns else out

    def _with_loss(
        self, out: Tensor, index: list[Tensor], q: Tensor, k: Tensor, packed: Any, options: dict[str, Any]
    ) -> Tensor:
        """out, whose backward adds the gradient of the indexer's loss. options: of `tree_attn_func`."""
        layout, cp_group, config = options["layout"], options["cp_group"], self.config
        if not config.dsa_indexer_use_sparse_loss:
            options["selected"] = None
        head_group = self.tp_group if self.tp_group.size() > 1 else None
        of_loss = dict(head_group=head_group, epsilon=compat.index_epsilon())
        count = len(q) * (q.shape[1] * comm.group_size(cp_group) if layout == "zigzag" else sum(layout.lengths))
        if getattr(packed, "times", None) is not None:
            of_loss["weights"], count = packed.times, packed.num_tokens
        divergence = tree_index_loss_func(*index, q, k, **options, **of_loss)
        about = dict(coeff=config.dsa_indexer_loss_coeff, count=count, layer_number=self.layer_number)
        return compat.attach_index_loss(out, divergence, **about, config=config, cp_group=cp_group)

    def _where(self, query: Tensor, mask: Tensor | None, mask_type: Any, packed: Any) -> dict[str, Any]:
        """How the batch lies on the ranks, as the public functions take it. Raises ValueError for what is not causal,
        or packed in another way."""
        group = compat.group_of_batch(packed, self.cp_group)
        mask_type = self.attn_mask_type if mask_type is None else mask_type
        where, (s, b) = dict(cp_group=group, layout="zigzag", config=self._config_over(group)), query.shape[:2]
        ranks = comm.Ranks.of(group, query.device, self.tree_config)
        if not read_mask(mask, mask_type, batch=b, num_queries=s, num_keys=s, ranks=ranks).causal:
            raise ValueError(f"attn_mask_type={mask_type} in a layer with DSA, which is causal: use causal")
        if packed is None:
            return where
        if packed.qkv_format != "thd" or mask is not None:
            raise ValueError(
                f"packed_seq_params with qkv_format={packed.qkv_format!r}, attention_mask: {mask is not None}: DSA "
                "takes documents in the format 'thd' without a mask"
            )
        check_cut(packed, group)
        check_rolled(packed, self.config)
        layout = getattr(packed, "layout", None)
        if layout is None:
            layout = packed_layout(packed.cu_seqlens_q, packed.cu_seqlens_q_padded, num_rows=s * ranks.size)
        return where | dict(layout=layout)

    def _index(self, x: Tensor, qr: Tensor, query: Tensor, where: dict[str, Any], learns: bool) -> list[Tensor]:
        """Index queries [b, s, h, d], weights [b, s, h] and index keys [b, s, d] of this rank's tokens."""
        layout, ranks = where["layout"], comm.Ranks.of(where["cp_group"], query.device, self.tree_config)
        if isinstance(layout, (Packed, Dispatched)):
            positions, length = document_positions(layout, ranks.rank, ranks.size), layout.longest
        else:
            length = len(query) * ranks.size
            positions = shard_positions(length, ranks.rank, ranks.size)
        with torch.set_grad_enabled(learns):
            tokens = x.detach(), qr.detach()
            index = compat.project_index(self.indexer, *tokens, positions.to(x.device), max(1, length))
        return [y.transpose(0, 1) for y in index]

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict:
        """The indexer's parameters, under the keys of Megatron's own."""
        return super(TreeDotProductAttention, self).sharded_state_dict(*args, **kwargs)
