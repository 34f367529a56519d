"""tree_select and attention to what it selects, in real processes, against the float64 oracle; ties included."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_decode, tree_select
from megatron_tree.core import comm, energy
from megatron_tree.core.attention.decode import DecodeOptions, DecodeStep
from megatron_tree.core.config import DECODE_SCHEDULES, SELECT_SCHEDULES
from megatron_tree.core.kernels import KVCache
from megatron_tree.core.plan import plan_select
from megatron_tree.core.spec import AttnSpec
from support.decoding import decode_inputs, same_everywhere
from support.paging import paged
from support.ranks import largest, on_ranks, run_distributed
from support.refusals import refused_with
from support.rounding import error, rounding

TOTAL, QUERIES, LENGTHS = 60, 3, (60, 33, 7)
TOPK = 8
INDEX = 3, 4  # heads and head_dim


def index_inputs(batch, n, total, seed=0, values=3):
    """index_q, index_weights and index_k in whole numbers: scores are exact in fp32, and many of them are equal."""
    g = torch.Generator().manual_seed(seed)
    heads, d = INDEX
    shapes = (batch, n, heads, d), (batch, n, heads), (batch, total, d)
    return [torch.randint(-values, values + 1, shape, generator=g).float() for shape in shapes]


def positions_of(rank, owners, lengths):
    """Positions [b, s_local] of the slots of a rank, backwards, and -1 beyond the rows' lengths. owners [total]."""
    mine = (owners == rank).nonzero()[:, 0].flip(0)
    return torch.stack([mine.where(mine < length, -1) for length in lengths])


def held(x, positions):
    """x [b, total, ...] at positions [b, s]; NaN at -1."""
    index = positions.clamp(min=0).unflatten(1, (-1, *(1 for _ in x.shape[2:]))).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index).masked_fill((positions < 0).unflatten(1, (-1, *(1 for _ in x.shape[2:]))), float("nan"))


def oracle_keep(index, topk, q_positions, lengths, scale=1.0):
    """bool [b, n, total]: the selected keys."""
    places = torch.arange(index[2].shape[1])
    keep = (places <= q_positions[..., None]) & (places < torch.tensor(lengths)[:, None, None])
    return energy.selected(*(x.double() for x in index), topk, keep, scale)


def oracle(q, k, v, keep, sinks=None):
    spec = AttnSpec(softmax_scale=q.shape[-1] ** -0.5)
    return energy.attention(*(x.double() for x in (q, k, v)), spec=spec, keep=keep, sinks=sinks)


def selected_positions(rows, positions):
    """bool-like int32 [b, n, total of positions + 1]: how often each position is among this rank's selected slots."""
    found = positions[torch.arange(len(rows))[:, None, None], rows.clamp(min=0).long()]
    return found.where(rows >= 0, -1)


def chosen_by_all(rows, positions, total):
    """int32 [b, n, total]: how many ranks have selected each position."""
    counts = torch.zeros(*rows.shape[:2], total + 1, dtype=torch.int32)
    if rows.shape[2]:
        counts.scatter_add_(2, selected_positions(rows, positions) % (total + 1), torch.ones_like(rows))
    dist.all_reduce(counts)
    return counts[..., :total]


def in_pages(x, positions, size=4):
    """(pages, block table, cache_seqlens, positions of its slots) of x [b, s, ...]; a page of nothing if s is 0."""
    length, missing = x.shape[1], -x.shape[1] % size or size * (x.shape[1] == 0)
    x = torch.cat((x, x.new_full((len(x), missing, *x.shape[2:]), float("nan"))), 1)
    positions = torch.nn.functional.pad(positions, (0, missing), value=-1)
    return *paged(x, size), torch.full((len(x),), length), positions


def _case(rank, world, seed):
    """(q, k, v, index, this rank's positions, positions of queries) of rows of LENGTHS, their keys dealt out: a share
    of them differs between ranks, and the last of several ranks has none."""
    g = torch.Generator().manual_seed(seed)
    owners = torch.randint(0, max(1, world - 1), (TOTAL,), generator=g) if seed else torch.arange(TOTAL) % world
    q_positions = torch.tensor(LENGTHS)[:, None] - QUERIES + torch.arange(QUERIES)
    qkv = decode_inputs(len(LENGTHS), QUERIES, TOTAL, (4, 2), 8, 6, torch.float32, seed)
    return *qkv, index_inputs(len(LENGTHS), QUERIES, TOTAL, seed), positions_of(rank, owners, LENGTHS), q_positions


def unread(x, rows):
    """x [b, s, ...] with NaN in the slots that no query of their row has selected: nobody may read them."""
    kept = torch.zeros(x.shape[0], x.shape[1] + 1, dtype=torch.bool)
    kept.scatter_(1, (rows.long() % (x.shape[1] + 1)).flatten(1), True)
    return x.masked_fill(~kept[:, :-1, None, None], float("nan"))


@pytest.mark.parametrize(("world", "transport"), [(1, "auto"), (2, "auto"), (3, "direct"), (4, "builtin"), (4, "shm")])
@on_ranks()
def test_selected_keys_are_the_oracles(rank, world, transport):
    """Every schedule, dense and in pages: the oracle's keys on some rank each, attention to them, the same bits."""
    worst, group = 0.0, dist.group.WORLD
    config = TreeConfig(transport=transport, timeout_s=60)
    for seed in range(3):
        q, k, v, index, positions, q_positions = _case(rank, world, seed)
        keep = oracle_keep(index, TOPK, q_positions, LENGTHS)
        sinks = torch.linspace(-1, 1, 4)
        truth, lse_truth = oracle(q, k, v, keep, sinks.double())
        local_k, local_v, local_i = (held(x, positions) for x in (k, v, index[2]))
        seen = dict(q_positions=q_positions, cache_positions=positions)
        call = dict(topk=TOPK, cp_group=group, config=config)
        for schedule in SELECT_SCHEDULES:
            rows = tree_select(*index[:2], local_i, **seen, schedule=schedule, **call)
            assert rows.dtype == torch.int32 and rows.shape[2] <= min(TOPK, positions.shape[1])
            assert torch.equal(chosen_by_all(rows, positions, TOTAL), keep.int()), (seed, schedule)
        local_k, local_v = (unread(x, rows) for x in (local_k, local_v))
        of_decode = dict(selected=rows, sinks=sinks, cp_group=group, config=config, return_lse=True)
        out, lse = tree_decode(q, local_k, local_v, **of_decode)
        assert same_everywhere(out) and same_everywhere(lse)
        worst = largest((worst, error(out, truth), error(lse, lse_truth)))

        pages, table, lengths, at = in_pages(local_i, positions)
        seen = dict(q_positions=q_positions, cache_positions=at, cache_seqlens=lengths, block_table=table)
        of_pages = tree_select(*index[:2], pages, **seen, **call)
        assert torch.equal(of_pages, rows)
    assert worst < rounding(TOTAL), worst


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_layers_that_select_their_own_keys(rank, world):
    """The layers of a step share a plan, whatever each selects; every schedule; heads that are split over the ranks."""
    group, worst, step = dist.group.WORLD, 0.0, DecodeStep()
    options = DecodeOptions(comm.Ranks.of(group, config=TreeConfig(timeout_s=60)))
    for seed in range(3):
        q, k, v, index, positions, q_positions = _case(rank, world, seed)
        q, q_positions = q[:, -1:], q_positions[:, -1:]
        index = [x[:, -1:] for x in index[:2]] + index[2:]
        truth, _ = oracle(q, k, v, oracle_keep(index, TOPK + seed, q_positions, LENGTHS))
        local_k, local_v, local_i = (held(x, positions) for x in (k, v, index[2]))
        seen = dict(q_positions=q_positions, cache_positions=positions)
        rows = tree_select(*index[:2], local_i, topk=TOPK + seed, cp_group=group, **seen)
        out, _ = step.decode(q, KVCache(local_k, local_v, selected=rows), options)
        worst = largest((worst, error(out, truth)))
        for schedule in set(DECODE_SCHEDULES) - {"ring"}:
            out = tree_decode(q, local_k, local_v, selected=rows, cp_group=group, schedule=schedule)
            worst = largest((worst, error(out, truth)))
        shares = [4] if world == 1 else [1, 3]
        mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
        call = dict(selected=rows, cp_group=group, head_shares=shares)
        out = tree_decode(q[:, :, mine], local_k, local_v, **call)
        worst = largest((worst, error(out, truth[:, :, mine])))
    assert len(step._known) == world, "with 2 ranks the shards of seed 0 have another length"
    assert worst < rounding(TOTAL), worst


BATCH, WIDE, MANY = 5, 32, 128  # rows of one query, and keys of each


def _bytes(rank, world):
    """({what: bytes that this rank sends}; of schedules also those of the plan), and the keys that it has selected.
    Of MANY keys some have the score 0, as have others."""
    group, config = dist.group.WORLD, TreeConfig(transport="direct", topology="ethernet", timeout_s=60)
    g = torch.Generator().manual_seed(0)
    q, w, k = (torch.randn(BATCH, *shape, generator=g) for shape in ((1, 3, 4), (1, 3), (200, 4)))
    mine = slice(rank, None, world)
    seen = dict(q_positions=torch.tensor([199]), cache_positions=torch.arange(200)[mine])
    network, sent = comm.Ranks.of(group, q.device, config).network_of_memory, {}

    def bytes_of(function, *args, **options):
        function(*args, **options, cp_group=group, config=config)  # the first call also compares the calls
        with comm.record() as log:
            result = function(*args, **options, cp_group=group, config=config)
        return sum(x.bytes for x in log), result

    for schedule in SELECT_SCHEDULES[1:]:
        said, _ = plan_select(
            world, rows=BATCH, topk=WIDE, topology=network.topology, placement=network.placement, schedule=schedule
        )
        found, rows = bytes_of(tree_select, q, w, k[:, mine], topk=WIDE, **seen, schedule=schedule)
        sent[schedule] = found, round(said.cost.bytes), said.bits
    sent["ties"], _ = bytes_of(tree_select, q, w, k[:, mine], topk=MANY, **seen, schedule="counts")
    sent["few"], _ = bytes_of(tree_select, q, w, k[:, mine], topk=200, **seen)
    sent["known"], _ = bytes_of(tree_select, q, w, k[:, mine], topk=100, **seen, max_seqlen=100)
    keys = torch.randn(BATCH, len(k[0, mine]), 1, 6)
    of_decode = dict(schedule="allgather", head_dim_v=4)
    query = torch.ones(BATCH, 1, 2, 6)
    sent["decode"], _ = bytes_of(tree_decode, query, keys, None, selected=rows, **of_decode)
    return sent, int((rows >= 0).sum())


def test_bytes_are_those_of_the_formula():
    p, lists = 4, 8 * WIDE * BATCH
    share = math.ceil(BATCH / p) * 8 * WIDE
    want = dict(allgather=(p - 1) * lists, butterfly=2 * lists, scatter=2 * (p - 1) * share, two_level=(p - 1) * lists)
    results = run_distributed(_bytes, p)
    for sent, _ in results:
        for schedule, num_bytes in want.items():
            assert sent[schedule][0] == num_bytes, schedule
            assert sent[schedule][1] == num_bytes, schedule
        counted, said, bits = sent["counts"]
        assert counted == said == math.ceil(32 / bits) * (p - 1) * BATCH * 4 * 2**bits
        assert sent["ties"] == 2 * counted
        assert sent["few"] == sent["known"] == 0
        assert sent["decode"] == (p - 1) * BATCH * 2 * 5 * 4
    assert sum(rows for _, rows in results) == BATCH * WIDE


@on_ranks(2)
def test_refusals_reach_all_ranks(rank, world):
    """Where all are wrong, where the last one is, and where they differ."""
    group = dist.group.WORLD
    q, k, v, index, positions, q_positions = _case(rank, world, 0)
    local_k, local_v, local_i = (held(x, positions) for x in (k, v, index[2]))
    call = dict(index_q=index[0], index_weights=index[1], index_k=local_i, topk=4, cp_group=group)
    call |= dict(q_positions=q_positions, cache_positions=positions)
    rows = tree_select(**call)
    attend = dict(q=q, k_cache=local_k, v_cache=local_v, cp_group=group, selected=rows)
    of_select = [
        ("topk=0", dict(topk=0)),
        ("topk=True", dict(topk=True)),
        ("topk=2.0", dict(topk=2.0)),
        ("max_seqlen='many'", dict(max_seqlen="many")),
        ("schedule='ring'", dict(schedule="ring")),
        ("index_q must be a 4-D", dict(index_q=q[0])),
        ("index_weights (3, 1, 3)", dict(index_weights=index[1][:, :1])),
        ("index_q's head_dim, 4", dict(index_k=local_i[..., :3])),
        ("index_k must be a 3-D", dict(index_k=local_i.long())),
        ("q_positions=None must be", dict(cache_positions=None, q_positions=None)),
        ("q_positions=None must be", dict(q_positions=None)),
        ("cache_positions must be", dict(cache_positions=positions[:, 1:])),
        ("block_table needs cache_seqlens", dict(block_table=torch.zeros(3, 1, dtype=torch.int32))),
    ]
    of_decode = [
        ("selected must be int32 [3, 3", dict(selected=rows.long())),
        ("selected must be int32 [3, 3", dict(selected=rows[:, :1])),
        ("slots of this rank's", dict(selected=rows + 100)),
        ("selected holds -3", dict(selected=rows - 2)),
        ("'ring'", dict(schedule="ring")),
        ("window_size", dict(window_size=(4, 0))),
        ("q_positions", dict(q_positions=q_positions, cache_positions=positions)),
        ("alibi_slopes", dict(alibi_slopes=torch.ones(4))),
    ]
    for function, given, cases in ((tree_select, call, of_select), (tree_decode, attend, of_decode)):
        for message, change in cases:
            with refused_with(message):
                function(**given | change)
            with refused_with(message, *([] if rank else ["rank 1"])):
                function(**given | (change if rank == world - 1 else {}))
    attend["config"] = call["config"] = TreeConfig(check="finite", timeout_s=60)
    tree_decode(**attend | dict(selected=tree_select(**call)))  # NaN in hidden and other slots is nobody's
    spoiled = {name: call[name].masked_fill(torch.tensor(rank == 1), float("nan")) for name in list(call)[:3]}
    spoiled["k_cache"] = local_k.masked_fill(torch.tensor(rank == 1), float("nan"))
    for name, x in spoiled.items():
        with pytest.raises(ValueError, match=rf"{name} on rank 1 of cp_group holds NaN"):
            (tree_decode if name == "k_cache" else tree_select)(**(attend if name == "k_cache" else call) | {name: x})
    del call["config"]
    for change in (dict(topk=4 + rank), dict(softmax_scale=1.0 + rank), dict(max_seqlen=3 if rank else 100)):
        with pytest.raises(ValueError, match="differ"):
            tree_select(**call | change)
