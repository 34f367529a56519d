"""The largest logit of each head, over ranks, against all logits of the whole sequence in float64."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, packed_layout, shard_positions, tree_attn_func, tree_attn_varlen_func
from megatron_tree.core import energy
from megatron_tree.core.kernels import maxima
from megatron_tree.core.spec import AttnSpec
from support.attention import configs, make_inputs, seen_in
from support.ranks import on_ranks

SEQ, HEADS = 24, (6, 3)
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window_size": (3, 0)},
    "both sides": {"causal": False, "window_size": (2, 4)},
    "softcap": {"softcap": 1.5},
    "ranges": {"ranges": [((0, 10), (0, 12), "full"), ((10, 24), (3, 24), "causal")]},
}
DOCUMENTS = ([0, 7, 12, 20], [0, 8, 16, 24])


def largest_of(q, k, keep, softcap=0.0):
    """[h], densely."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    return logits.masked_fill(~keep, float("-inf")).amax((0, 2, 3))


def _truth(q, k, mask):
    if "ranges" in mask:
        return largest_of(q, k, seen_in(mask["ranges"], SEQ, SEQ))
    spec = AttnSpec(softmax_scale=1.0, **{name: value for name, value in mask.items() if name != "softcap"})
    return largest_of(q, k, energy.visible(torch.arange(SEQ), torch.arange(SEQ), spec), mask.get("softcap", 0.0))


def _packed(rank, world, group):
    """Of documents; rows of padding are NaN."""
    layout = packed_layout(*(torch.tensor(x) for x in DOCUMENTS))
    q, k, v = (x[0] for x in make_inputs(SEQ, HEADS, batch=1)[:3])
    sequences = torch.full((SEQ,), -1)
    for n, (start, end) in enumerate(zip(DOCUMENTS[1], torch.tensor(DOCUMENTS[0]).diff().tolist())):
        sequences[start : start + end] = n
    keep = (sequences[:, None] == sequences) & (sequences >= 0) & torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    wanted = largest_of(q[None], k[None], keep)
    q, k, v = (x.masked_fill(sequences[:, None, None] < 0, float("nan")) for x in (q, k, v))
    rows = shard_positions(SEQ, rank, world, layout)
    options = dict(cu_seqlens=torch.tensor(DOCUMENTS[0]), cu_seqlens_padded=torch.tensor(DOCUMENTS[1]))
    found = tree_attn_varlen_func(*(x[rows] for x in (q, k, v)), cp_group=group, return_max_logit=True, **options)[1]
    return float((found - wanted).abs().max())


@on_ranks(4)
def test_the_largest_logit_of_all_ranks(rank, world):
    """{what: largest difference}; every rank has the maximum over all ranks."""
    maxima.QUERIES, maxima.KEYS = 3, 4  # several tiles in a block
    group, errors = dist.group.WORLD, {}
    q, k, v, _ = make_inputs(SEQ, HEADS)
    rows = shard_positions(SEQ, rank, world, "zigzag")
    others = {"Ulysses": TreeConfig(ulysses_size=2), "head chunks": TreeConfig(grid=(world, 1), head_chunks=3)}
    for name, mask in MASKS.items():
        wanted = _truth(q, k, mask)
        for kind, config in (*configs(world), *others.items()):
            if kind == "ring" and "ranges" in mask:
                continue
            _, lse, found = tree_attn_func(
                *(x[:, rows] for x in (q, k, v)),
                cp_group=group,
                config=config,
                return_lse=True,
                return_max_logit=True,
                **mask,
            )
            assert lse.shape == (2, 6, len(rows)) and not found.requires_grad
            errors[f"{name}, {kind}"] = float((found - wanted).abs().max())
    window = TreeConfig(schedule="cast")
    found = tree_attn_func(
        *(x[:, rows] for x in (q, k, v)), cp_group=group, config=window, window_size=(3, 0), return_max_logit=True
    )[1]
    errors["window, cast"] = float((found - _truth(q, k, MASKS["window"])).abs().max())
    errors["packed"] = _packed(rank, world, group)
    assert not {name: error for name, error in errors.items() if not error < 1e-12}, errors


def test_alone_and_where_nothing_is_seen():
    q, k, v, _ = make_inputs(SEQ, HEADS)
    out, found = tree_attn_func(q, k, v, cp_group=None, return_max_logit=True)
    torch.testing.assert_close(found, _truth(q, k, {}))
    assert torch.equal(out, tree_attn_func(q, k, v, cp_group=None))
    nothing = [((0, 4), (5, 5), "full")]
    assert (tree_attn_func(q, k, v, cp_group=None, ranges=nothing, return_max_logit=True)[1] == float("-inf")).all()
    with pytest.raises(ValueError, match="return_max_logit=True does not take alibi_slopes"):
        tree_attn_func(q, k, v, cp_group=None, alibi_slopes=torch.ones(6), return_max_logit=True)
