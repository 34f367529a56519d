"""The layers of a decode step: those that are alike are checked once, and no other one is taken for one of them."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_decode
from megatron_tree.core.attention.decode import DecodeOptions, DecodeStep, PlannedDecode
from megatron_tree.core.comm import Ranks
from megatron_tree.core.kernels import KVCache
from support.attention import make_slopes
from support.decoding import decode_inputs, decode_oracle
from support.ranks import largest, run_distributed
from support.rounding import error, rounding

LENGTHS, TABLE = torch.tensor([5, 8]), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
POSITIONS = {"q_positions": torch.tensor([[4], [7]]), "k_positions": torch.arange(8)}
CONFIG = TreeConfig()
NAMES = {"lengths": "cache_seqlens", "k_positions": "cache_positions"}  # of fields of a KVCache, in `tree_decode`


def _layer(seed=0, heads=(4, 2), d=8, d_v=8, dtype=torch.float32, **options):
    """q [2, 1, h, d], a cache of pages of 4 slots, options, and sinks."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((2, 1, heads[0], d), (4, 4, heads[1], d), (4, 4, heads[1], d_v))
    )
    seen = dict(lengths=LENGTHS, block_table=TABLE)
    seen |= {name: options.pop(name) for name in KVCache._fields if name in options}
    sinks = options.pop("sinks", None)
    return (
        q,
        KVCache(k, v, **seen),
        DecodeOptions(Ranks.of(None, config=options.pop("config", CONFIG)), **options),
        sinks,
    )


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
    "lengths": {"lengths": torch.tensor([2, 8])},
    "table": {"block_table": torch.tensor([[3, 2], [1, 0]], dtype=torch.int32)},
    "config": {"config": TreeConfig(backend="reference")},
}


@pytest.fixture
def checks(monkeypatch):
    """Grows with every call that is checked."""
    real, calls = PlannedDecode.of, []
    monkeypatch.setattr(PlannedDecode, "of", lambda *args: calls.append(args) or real(*args))
    return calls


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_differs_is_checked_and_right(name, checks):
    step = DecodeStep()
    for seed, other in enumerate(({}, OTHERS[name], {}, OTHERS[name])):
        q, cache, options, sinks = _layer(seed, **other)
        out, lse = step.decode(q, cache, options, sinks=sinks)
        assert len(checks) == min(seed + 1, 2)
        given = {NAMES.get(field, field): x for field, x in cache._asdict().items() if field not in ("k", "v")}
        given |= options._asdict() | {"sinks": sinks, "return_lse": True}
        ranks = given.pop("ranks")
        given |= {"cp_group": ranks.group, "config": ranks.config}
        want_out, want_lse = tree_decode(q, cache.k, cache.v, **given)
        checks.pop()
        assert torch.equal(out, want_out) and torch.equal(lse, want_lse)


def test_a_later_layer_that_is_wrong_is_refused():
    step, (q, cache, options, _) = DecodeStep(), _layer()
    step.decode(q, cache, options)
    eight_bits = cache._replace(k=cache.k.to(torch.int8), v=cache.v.to(torch.int8))
    for queries, wrong, message in (
        (q[:, :, :3], cache, "must divide"),
        (q, cache._replace(k=cache.k[:3]), "same number of pages"),
        (q, eight_bits, "k_scale"),
    ):
        with pytest.raises(ValueError, match=message):
            step.decode(queries, wrong, options)


def test_calls_that_are_to_be_checked_always_are(checks):
    for check, times in (("first", 1), ("never", 1), ("always", 3), ("finite", 3)):
        step, config = DecodeStep(), TreeConfig(check=check)
        for seed in range(3):
            q, cache, options, _ = _layer(seed, config=config)
            step.decode(q, cache, options)
        assert len(checks) == times
        checks.clear()
    q[1, 0, 2, 3] = float("nan")
    with pytest.raises(ValueError, match=r"q\[1, 0, 2, 3\]"):
        step.decode(q, cache, options)


def _on_ranks(rank, world):
    step, worst, options = DecodeStep(), 0.0, DecodeOptions(Ranks.of(dist.group.WORLD, config=CONFIG))
    for layer in range(4):
        q, k, v = (x.roll(layer, -1) for x in decode_inputs(2, 1, 8 * world, (6, 2), dtype=torch.float32))
        mine = slice(8 * rank, 8 * rank + 8)
        out, lse = step.decode(q, cache := KVCache(k[:, mine], v[:, mine]), options)
        truth = decode_oracle(q, k, v, None)
        worst = largest((worst, error(out, truth[0]), error(lse, truth[1])))
    with pytest.raises(ValueError) as caught:  # one rank takes the layer for one that it knows
        step.decode(q, cache, options._replace(softcap=2.0 * rank))
    return worst, str(caught.value)


def test_ranks_whose_later_layers_differ_raise_the_same():
    found = run_distributed(_on_ranks, 2)
    assert largest(worst for worst, _ in found) < rounding(16)
    assert found[0][1] == found[1][1] and "softcap=0.0" in found[0][1] and "softcap=2.0" in found[0][1]
