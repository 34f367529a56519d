"""The loss that trains an index: how far what it predicts is from the attention of the heads, over a sharded sequence.

Of query i and its visible keys a, in fp32, with I of `selection` and the weights p of attention,

    KL_i = sum_a t_ia log(t_ia / r_ia),    t_ia = mean_h p_iha,    r_ia = exp(I_ia) / sum_b exp(I_ib)        (17)
    dI_ia = r_ia - t_ia                                                                                      (18)

Attention is the target: it gets no gradient. Source: DeepSeek V3.2, section 2.1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import comm
from ..config import TreeConfig
from ..duals import goes_backward
from ..kernels.index import index_scores, index_scores_bwd
from ..layout import Layout, Segment, Sharding
from ..merge import NEG_INF, SumReducer, state_dtype
from ..spec import AttnSpec
from .selection import KeysInOrder, check_index, check_scale, strips
from .sequences import layouts_of, sharding_of
from .validate import check_heads, check_selected


@comm.public_call
def tree_index_loss_func(
    index_q: Tensor,
    index_weights: Tensor,
    index_k: Tensor,
    q: Tensor,
    k: Tensor,
    *,
    cp_group,
    softmax_scale: float,
    index_scale: float = 1.0,
    selected: Tensor | None = None,
    head_group=None,
    epsilon: float = 0.0,
    weights: Tensor | None = None,
    layout: Layout = "zigzag",
    config: TreeConfig | None = None,
) -> Tensor:
    """The sum of (17) over this rank's queries, causal, differentiable by the index alone. Collective over cp_group.

    Keys and index keys of all ranks are gathered, and gradients of index keys summed on the ranks that have them. All
    of that is done in the forward: the backward scales what the forward has computed, and no rank waits there.

    Args:
        index_q: [b, s/p, h_i, d_i], index_weights: [b, s/p, h_i] and index_k: [b, s/p, d_i] of this rank's shard.
        q: [b, s/p, h, d] and k: [b, s/p, h_kv, d]; h_kv divides h.
        softmax_scale, index_scale: factors of the products of q and k, and of index_q and index_k.
        selected: int32 [b, s/p, m] of `tree_select_func`: (17) over these keys only; None: over all visible ones. Every
            query has selected a key.
        head_group: the ranks that have other heads of the same queries (tensor parallelism), a process group; None for
            one rank. All have the same index.
        epsilon: what is added to probabilities before their logarithm; the gradient is that of the result.
        weights: fp32 [b, s/p], a factor of each query's term, such as the number of rows that have a token of a prefix
            tree; default: 1.
        Others as in `tree_attn_func`; layout as in `tree_select_func`.
    Returns: fp32, a number; rows of padding have no part in it.
    Raises: ValueError for bad input or arguments that differ between ranks; CommError if a rank failed.
    """
    ranks = comm.Ranks.of(cp_group, index_q.device, config)
    (layout,) = layouts_of(layout, ranks, "tree_index_loss_func", index_k=index_k)
    with ranks.call("tree_index_loss_func") as call:
        check_index(index_q, index_weights, index_k, 1, 1.0)
        check_heads(q, k, k, "k", "k")
        if q.shape[:2] != index_q.shape[:2] or k.shape[1] != q.shape[1]:
            raise ValueError(
                f"q {list(q.shape)} and k {list(k.shape)} must have the tokens of index_q {list(index_q.shape)}"
            )
        check_scale("softmax_scale", softmax_scale)
        check_scale("index_scale", index_scale)
        if not 0 <= epsilon < 1:
            raise ValueError(f"epsilon={epsilon} is added to probabilities: pass a number from 0 to 1")
        if selected is not None:
            check_selected(selected, q, AttnSpec(softmax_scale=softmax_scale), None)
        if weights is not None and (weights.shape, weights.dtype) != (q.shape[:2], torch.float32):
            raise ValueError(
                f"weights {list(weights.shape)} must have a number for each query of q, {list(q.shape[:2])}, in fp32, "
                f"not {weights.dtype}"
            )
        sharding, tree = sharding_of(index_k, "index_k", ranks, layout), getattr(layout, "tree", ())
        backward = goes_backward(index_q, index_weights, index_k)
        call.agree(
            index_q=(len(index_q), *index_q.shape[2:]), q=q.shape[2:], k=k.shape[2:], seq_len=sharding.seq_len,
            layout=str(layout), dtypes=(index_k.dtype, k.dtype), scales=(softmax_scale, index_scale, epsilon),
            selected=None if selected is None else selected.shape[2], goes_backward=backward, config=config,
        )  # fmt: skip
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            heads = comm.Ranks.of(head_group, q.device, config)
            index_keys = KeysInOrder.gathered(index_k, sharding, ranks, tree)
            keys = KeysInOrder.gathered(k.flatten(2), sharding, ranks, tree)
            target = Target(q, keys, k.shape[2], softmax_scale, selected, heads)
            index = Index(index_q, index_weights, index_keys, index_scale, epsilon)
            weights = index_q.new_ones(index_q.shape[:2], dtype=torch.float32) if weights is None else weights
            loss, grads = index.divergence(target, sharding.in_rows(ranks.rank), weights, backward)
            if not backward:
                return loss
            grads[2] = _sum_on_owners(grads[2], index_keys, sharding, ranks)[:, : index_k.shape[1]]
        return IndexLoss.apply(index_q, index_weights, index_k, loss, *grads)


class Target(NamedTuple):
    """The attention that an index is to predict."""

    q: Tensor
    keys: KeysInOrder
    heads_kv: int
    scale: float
    selected: Tensor | None
    heads: comm.Ranks
    """Those with the other heads."""

    def of(self, row: int, strip: Segment, later: Tensor) -> tuple[Tensor, Tensor]:
        """t and whether it counts, [n, keys] both, of a strip of queries of a row; later: keys after the query."""
        at, (k, numbers, _) = slice(strip.row, strip.row + strip.length), self.keys.before(strip)
        hidden = later
        if self.selected is not None:
            chosen, count = self.selected[row, at].long(), later.shape[1]
            chosen = torch.searchsorted(numbers, chosen).masked_fill(chosen < 0, count)
            seen = later.new_zeros(len(later), count + 1).scatter_(1, chosen, True)
            hidden = later | ~seen[:, :count]
        dtype = state_dtype(self.q.dtype)
        q, k = self.q[row, at].to(dtype), k[row].unflatten(-1, (self.heads_kv, -1)).to(dtype)
        total = torch.zeros(hidden.shape, dtype=dtype, device=q.device)
        for head in range(q.shape[1]):  # one by one: the scores of all heads are large
            scores = (q[:, head] @ k[:, head * self.heads_kv // q.shape[1]].T).mul_(self.scale)
            total += scores.masked_fill_(hidden, NEG_INF).softmax(-1)
        total = self.heads.reduce(total)
        return total.div_(total.sum(-1, keepdim=True)).float(), ~hidden


class Index(NamedTuple):
    """An index, with the keys of all ranks."""

    q: Tensor
    weights: Tensor
    keys: KeysInOrder
    scale: float
    epsilon: float

    def divergence(
        self, target: Target, queries: tuple[Segment, ...], weights: Tensor, backward: bool
    ) -> tuple[Tensor, list[Tensor] | None]:
        """The sum of (17) over these queries, times their weights, and its gradients by q, the index's weights and the
        keys in their order, in fp32."""
        q = self.q
        loss = torch.zeros((), dtype=torch.float64, device=q.device)
        dq, dweights = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, self.weights))
        dk = torch.zeros((len(q), len(self.keys.source), q.shape[-1]), device=q.device)
        for strip in strips(queries):
            at, (k, _, later) = slice(strip.row, strip.row + strip.length), self.keys.before(strip)
            place = self.keys.place(strip)
            for row in range(len(q)):
                of_row, factor = (q[row, at], self.weights[row, at], k[row], self.scale), weights[row, at, None]
                terms, dscores = self._compare(index_scores(*of_row), *target.of(row, strip, later))
                loss += (terms * factor).sum(dtype=torch.float64)
                if backward:
                    dq[row, at], dweights[row, at], more = index_scores_bwd(dscores * factor, *of_row)
                    dk[row, place] += more
        return loss.float(), [dq, dweights, dk] if backward else None

    def _compare(self, scores: Tensor, t: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """The terms of (17), and (18), of scores, t and what counts, [n, keys]."""
        log_r = scores.masked_fill_(~seen, NEG_INF).log_softmax(-1)
        r = log_r.exp()
        if not self.epsilon:
            log_r.masked_fill_(~seen, 0.0)
            return torch.xlogy(t, t) - t * log_r, r - t
        terms = t * ((t + self.epsilon).log() - (r + self.epsilon).log())
        of_r = t * r / (r + self.epsilon)
        return terms, r * of_r.sum(-1, keepdim=True) - of_r


class IndexLoss(torch.autograd.Function):
    """The loss with the gradients that its forward has found."""

    @staticmethod
    def forward(ctx, index_q, index_weights, index_k, loss: Tensor, *grads: Tensor):
        ctx.dtypes = [x.dtype for x in (index_q, index_weights, index_k)]
        ctx.save_for_backward(*grads)
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss):
        grads = [(dloss * grad).to(dtype) for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes)]
        return *grads, None, None, None, None


def _sum_on_owners(dk: Tensor, keys: KeysInOrder, sharding: Sharding, ranks: comm.Ranks) -> Tensor:
    """Gradients [b, n, d] of all keys in their order, of every rank -> those of this rank's rows [b, s/p, d]."""
    rows = dk.new_zeros(ranks.size * sharding.rows, len(dk), dk.shape[-1])
    rows[keys.source] = dk.transpose(0, 1)
    if ranks.size > 1:
        reducer = SumReducer(dk.dtype, dk.dtype)
        rows = comm.start_reduce_scatter(rows, ranks.everyone, reducer).wait()
    return rows.transpose(0, 1)
