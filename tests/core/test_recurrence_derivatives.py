"""Derivatives of recurrent layers of any order on ranks with no tokens, and with rows that depend on no other rank's.

test_fuzz_recurrences.py draws such calls.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_tree import Decay, TreeConfig, tree_convolution, tree_halo, tree_recurrence, tree_scan
from megatron_tree.core.layout import Dispatched, Packed
from support.fuzz import run_session
from support.fuzz_recurrences import FUNCTIONS, WAYS, DerivedLayer, check, run
from support.ranks import run_distributed

EMPTY = ("zigzag", 0), ((4, 0), 4), ((0, 3), 3), (Packed((0,), (4,)), 4), (Packed((0, 3), (4, 4)), 8)
SPREAD = Dispatched((6, 4), (6, 4), (((0, 3),), ((3, 3),), ((6, 4),)), 4)  # one document on two ranks, one on the third


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_depend_on_no_other(way):
    cases = [DerivedLayer(layout="contiguous", seq_len=6, function=function, way=way) for function in FUNCTIONS]
    cases += [
        DerivedLayer(layout=(3, 0), seq_len=3, function="layer", way=way, begins=True, ends=True, schedule="exchange"),
        DerivedLayer(layout=(0, 3), seq_len=3, function="convolution", way=way, curved=False, wrt=("weight",)),
    ]
    run_session(run, check, (0, 0), cases)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_sequences_without_tokens(function):
    cases = []
    for layout, seq_len in EMPTY:
        single = layout != Packed((0, 3), (4, 4))
        for way in ("gradient", "tangent"):
            options = dict(function=function, way=way, begins=single, ends=single)
            cases.append(DerivedLayer(layout=layout, seq_len=seq_len, **options))
    run_session(run, check, (0, 0), cases)
    alone = [DerivedLayer(layout=(0,), seq_len=0, function=function, begins=True, ends=True)]
    run_session(run, check, (0,), alone)


@pytest.mark.parametrize("recomputed", ["non-reentrant", "reentrant"])
def test_recomputed_where_a_rank_has_whole_documents(recomputed):
    options = dict(layout=SPREAD, seq_len=12, recomputed=recomputed)
    run_session(run, check, (0, 0, 0), [DerivedLayer(function=x, **options) for x in FUNCTIONS])


@pytest.mark.parametrize("world", [1, 2])
def test_results_may_be_changed_in_place(world):
    options = dict(layout="zigzag", seq_len=8, begins=True, ends=True, in_place=True)
    cases = [
        DerivedLayer(function=function, schedule=schedule, **options)
        for function in FUNCTIONS
        for schedule in ("gather", "exchange")
    ]
    run_session(run, check, (0,) * world, cases)


def _calls(config):
    options = dict(cp_group=dist.group.WORLD, layout="contiguous", config=config)

    def kernel(inputs, v, state):
        final = v.sum(1)[:, :, None] * inputs[0].sum(1)[..., None]
        return v * inputs[0][..., :1], final if state is None else final + state

    def recurrence(v, q, log_decay):
        decay = None if log_decay is None else Decay(log_decay, q)
        return tree_recurrence(kernel, (q,), v, head_dim=2, decay=decay, **options)[0]

    return {
        "tree_recurrence": recurrence,
        "tree_scan": lambda v, q, log_decay: tree_scan(log_decay[:, :1], v[:, :1, :, None].mT * q[:, :1], **options)[0],
        "tree_halo": lambda v, q, log_decay: tree_halo(v, 1, before=q[:, :1], **options)[0],
        "tree_convolution": lambda v, q, log_decay: tree_convolution(torch.tanh, v, 1, before=q[:, :1], **options)[0],
    }


def _unlike(rank, world, name, tangents):
    """The error of a call in which one rank alone differentiates, and whether the next call is right."""
    v, q = torch.randn(1, 3, 1, 2, dtype=torch.float64), torch.randn(1, 3, 1, 2, dtype=torch.float64)
    log_decay = -torch.rand(1, 3, 1, dtype=torch.float64)
    call = _calls(TreeConfig(check="always"))[name]
    want = call(v, q, log_decay)

    def mine():
        if tangents and rank == 1:
            torch.func.jvp(lambda q: call(v, q, log_decay), (q,), (q,))
        else:
            call(v, q.clone().requires_grad_(not tangents and rank == 1), log_decay)

    with pytest.raises(ValueError, match="call this with different arguments") as error:
        mine()
    assert torch.equal(call(v, q, log_decay), want)
    return str(error.value)


@pytest.mark.parametrize("name", ["tree_recurrence", "tree_scan", "tree_halo", "tree_convolution"])
@pytest.mark.parametrize("tangents", [False, True])
def test_one_rank_alone_differentiates(name, tangents):
    first, second = run_distributed(_unlike, 2, name, tangents)
    assert first == second and ("tangents" if tangents else "goes_backward") in first
