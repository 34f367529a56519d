"""A chunk's tokens over all ranks of several head groups: who runs what, and the exchange of heads for tokens."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree.core import comm, energy
from megatron_tree.core.attention.shares import HeadsForTokens, count_tokens, shares_by_rank
from megatron_tree.core.cache import ShardedCache
from megatron_tree.core.cache.forward import forward_pass
from megatron_tree.core.spec import AttnSpec
from support.bound import bound
from support.ranks import largest, on_ranks
from support.rounding import error, rounding


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_every_token_is_run_once_by_a_rank_of_its_place(groups):
    shares = [[(0, 7), (21, 4)], [(7, 14)], [], [(25, 1)]]
    parts = shares_by_rank(shares, groups)
    for place, runs in enumerate(shares):
        of_place = parts[place :: len(shares)]
        counts = [count_tokens(part) for part in of_place]
        assert max(counts) - min(counts) <= 1 and all(count for part in of_place for _, count in part)
        positions = [p + i for part in of_place for p, count in part for i in range(count)]
        assert positions == [p + i for p, count in runs for i in range(count)]
    if groups == 1:
        assert parts == shares


@pytest.mark.parametrize(("groups", "heads", "heads_kv", "window"), [(2, 12, 2, (-1, -1)), (4, 4, 4, (6, 0))])
@on_ranks(4)
def test_attention_of_own_tokens_over_several_head_groups(rank, world, groups, heads, heads_kv, window):
    """The worst error of two chunks of a row, run with each rank's own tokens, and what an exchange sends."""
    d, places, worst = 8, world // groups, []
    group, place = divmod(rank, places)
    cp_group = [dist.new_group(range(g * places, (g + 1) * places)) for g in range(groups)][group]
    team = comm.Team(bound(transport="direct"), (tuple(range(place, world, places)),))
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 45, h, d, generator=generator) for h in (heads, heads_kv, heads_kv))
    sinks, spec = torch.linspace(-1, 1, heads), AttnSpec(softmax_scale=d**-0.5, window_size=window)
    keep = energy.visible(torch.arange(45), torch.arange(45), spec)
    truth, _ = energy.attention(*(x.double() for x in (q, k, v)), spec=spec, keep=keep, sinks=sinks.double())
    store = ShardedCache([None if window[0] < 0 else window[0] + 1], rank=place, world=places, page_size=2)
    row = store.book.add()
    for n in (26, 19):
        with forward_pass(store, [row], n, cp_group=cp_group, sharded=True, place=team) as forward:
            own = [p + i for p, count in forward.shares[rank] for i in range(count)]
            mine = [x[:, own or [0]] for x in (q, k, v)]  # a rank without tokens has one that is ignored
            with comm.record() as sent:
                forward.write(0, *mine[1:])
            out = forward.attend(0, mine[0], sinks=sinks, softmax_scale=d**-0.5, window_size=window)
            worst.append(error(out[:, : len(own)], truth[:, own]))
            assert sum(x.bytes for x in sent) == len(own) * heads_kv * 2 * d * 4 * (groups - 1) // groups
            assert store.layers[0].k.shape[2] == heads_kv // groups
    found = largest(worst)
    assert found < rounding(45), found


@on_ranks(3)
def test_ranks_without_tokens(rank):
    team = bound(transport="direct").everyone
    exchange = HeadsForTokens(team, [0, 1, 0])
    x = torch.arange(12.0).view(1, 1, 6, 2)
    heads = exchange.to_heads(x)
    assert torch.equal(heads, x[:, :, 2 * rank : 2 * rank + 2])
    assert torch.equal(exchange.to_tokens(heads, num_rows=1), x if rank == 1 else torch.zeros_like(x))
