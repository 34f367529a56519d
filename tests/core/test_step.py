"""The layers of a decode step: those that are alike are checked once, and no other one is taken for one of them."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_decode
from megatron_tree.attention import step
from support.attention import make_slopes
from support.decoding import decode_inputs, decode_oracle
from support.ranks import largest, run_distributed
from support.rounding import error, rounding

LENGTHS, TABLE = torch.tensor([5, 8]), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
POSITIONS = {"q_positions": torch.tensor([[4], [7]]), "cache_positions": torch.arange(8)}
CONFIG = TreeConfig()


def _layer(seed=0, heads=(4, 2), d=8, d_v=8, dtype=torch.float32, **options):
    """q [2, 1, h, d], pages of 4 slots, and options."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((2, 1, heads[0], d), (4, 4, heads[1], d), (4, 4, heads[1], d_v))
    )
    call = dict(cp_group=None, block_table=TABLE, cache_seqlens=LENGTHS, config=CONFIG)
    return (q, k, v), call | options


OTHERS = {
    "heads": {"heads": (8, 2)},
    "KV heads": {"heads": (4, 1)},
    "head_dim": {"d": 16},
    "head_dim_v": {"d_v": 12},
    "dtype": {"dtype": torch.bfloat16},
    "scale": {"softmax_scale": 0.5},
    "softcap": {"softcap": 2.0},
    "window": {"window_size": (3, 0), **POSITIONS},
    "positions": POSITIONS,
    "slopes": {"alibi_slopes": make_slopes(4), **POSITIONS},
    "sinks": {"sinks": torch.linspace(-1, 1, 4)},
    "schedule": {"schedule": "scatter"},
    "lengths": {"cache_seqlens": torch.tensor([2, 8])},
    "table": {"block_table": torch.tensor([[3, 2], [1, 0]], dtype=torch.int32)},
    "config": {"config": TreeConfig(backend="reference")},
}


@pytest.fixture
def checks(monkeypatch):
    """Grows with every call that is checked."""
    real, found = step._checked, []
    monkeypatch.setattr(step, "_checked", lambda *args: found.append(args) or real(*args))
    return found


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_differs_is_checked_and_right(name, checks):
    decode = step.DecodeStep()
    for seed, options in enumerate(({}, OTHERS[name], {}, OTHERS[name])):
        tensors, call = _layer(seed, **options)
        out, lse = decode.decode(*tensors, **call)
        assert len(checks) == min(seed + 1, 2)
        want_out, want_lse = tree_decode(*tensors, return_lse=True, **call)
        checks.pop()
        assert torch.equal(out, want_out) and torch.equal(lse, want_lse)


def test_a_later_layer_that_is_wrong_is_refused():
    decode = step.DecodeStep()
    decode.decode(*(layer := _layer())[0], **layer[1])
    (q, k, v), call = layer
    for wrong, message in (((q[:, :, :3], k, v), "must divide"), ((q, k[:3], v), "same number of pages")):
        with pytest.raises(ValueError, match=message):
            decode.decode(*wrong, **call)
    with pytest.raises(ValueError, match="k_scale"):
        decode.decode(q, k.to(torch.int8), v.to(torch.int8), **call)


def test_calls_that_are_to_be_checked_always_are(checks):
    for check, times in (("first", 1), ("never", 1), ("always", 3), ("finite", 3)):
        decode, config = step.DecodeStep(), TreeConfig(check=check)
        for seed in range(3):
            tensors, call = _layer(seed, config=config)
            decode.decode(*tensors, **call)
        assert len(checks) == times
        checks.clear()
    tensors[0][1, 0, 2, 3] = float("nan")
    with pytest.raises(ValueError, match=r"q\[1, 0, 2, 3\]"):
        decode.decode(*tensors, **call)


def _on_ranks(rank, world):
    decode, worst = step.DecodeStep(), 0.0
    for layer in range(4):
        q, k, v = (x.roll(layer, -1) for x in decode_inputs(2, 1, 8 * world, (6, 2), dtype=torch.float32))
        mine = slice(8 * rank, 8 * rank + 8)
        out, lse = decode.decode(q, k[:, mine], v[:, mine], cp_group=dist.group.WORLD)
        truth = decode_oracle(q, k, v, None)
        worst = largest((worst, error(out, truth[0]), error(lse, truth[1])))
    with pytest.raises(ValueError) as caught:  # one rank takes the layer for one that it knows
        decode.decode(q, k[:, mine], v[:, mine], cp_group=dist.group.WORLD, softcap=2.0 * rank)
    return worst, str(caught.value)


def test_ranks_whose_later_layers_differ_raise_the_same():
    found = run_distributed(_on_ranks, 2)
    assert largest(worst for worst, _ in found) < rounding(16)
    assert found[0][1] == found[1][1] and "softcap=0.0" in found[0][1] and "softcap=2.0" in found[0][1]
