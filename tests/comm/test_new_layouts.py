"""Packed batches with a new layout each: compared among the ranks while the call runs, without a wait."""

import time

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, dispatch_documents, tree_attn_varlen_func
from megatron_tree.core.comm import agreement
from megatron_tree.core.comm.store import StoreClient
from support.ranks import run_distributed

FAST = TreeConfig(timeout_s=20)


def _attend(cu_seqlens, kind, *, config=FAST, grad=True):
    group = dist.group.WORLD
    layout = dispatch_documents(cu_seqlens, group) if kind == "dispatched" else kind
    rows = layout.num_rows if kind == "dispatched" else cu_seqlens[-1] // dist.get_world_size()
    q, k, v = (torch.ones(rows, 2, 8, requires_grad=grad) for _ in "qkv")
    options = {} if kind == "dispatched" else {"cu_seqlens": torch.tensor(cu_seqlens)}
    return tree_attn_varlen_func(q, k, v, cp_group=group, causal=True, layout=layout, config=config, **options)


def _count_waits(rank, world):
    """Requests to the store that a call waits for, per batch."""
    waits, run = [], StoreClient.run
    StoreClient.run = lambda self, *args: waits.append(args) or run(self, *args)
    counts, batches = [], ([0, 12, 24], [0, 24, 36], [0, 6, 12, 48], [0, 24, 36])
    for cu_seqlens in batches:
        del waits[:]
        _attend(cu_seqlens, "zigzag").sum().backward()
        counts.append(len(waits))
    _attend([0, 12, 24], "zigzag", grad=False)  # another kind of call
    asked, again = [], StoreClient.submit
    StoreClient.submit = lambda self, request: asked.append(request) or again(self, request)
    _attend([0, 12, 24], "zigzag", grad=False)
    return counts, len(asked)


def test_only_the_first_batch_waits_for_a_comparison():
    for counts, asked in run_distributed(_count_waits, 3):
        assert counts[0] > 0 and counts[1:] == [0, 0, 0]
        assert asked == 0, "a batch that was seen before is not compared"


def _slowly(compare):
    def slow(*args):
        began = time.monotonic()
        while time.monotonic() < began + 0.3:
            yield
        return (yield from compare(*args))

    return slow


def _differ(rank, world, kind, known, ours, theirs, with_grad):
    """Rank 1 has another new layout than the others, in a kind of call that is known."""
    for cu_seqlens in known:
        out = _attend(cu_seqlens, kind, grad=with_grad)
        if with_grad:
            out.sum().backward()
    agreement.compare = _slowly(agreement.compare)  # the attention is over by then, unless it waits
    started = time.monotonic()
    with torch.set_grad_enabled(with_grad), pytest.raises(ValueError) as caught:  # noqa: PT012
        out = _attend(theirs if rank == 1 else ours, kind, grad=with_grad)
        assert with_grad, "a result that no backward checks"
        out.sum().backward()
    seconds = time.monotonic() - started
    with pytest.raises(ValueError, match="this group can't be used any more"):
        _attend(known[0], kind)
    return str(caught.value), seconds


EVEN = [list(range(0, 25, 2))]  # four documents for each rank: nothing is sent


@pytest.mark.parametrize(
    ("kind", "known", "ours", "theirs", "with_grad"),
    [
        pytest.param("zigzag", [[0, 12, 24]], [0, 6, 24], [0, 18, 24], True, id="messages of equal length"),
        pytest.param("documents", [[0, 12, 24]], [0, 6, 24], [0, 18, 24], False, id="Megatron's, no gradient"),
        pytest.param("dispatched", EVEN, [0, 8, 16, 24], list(range(0, 25, 4)), True, id="nothing is sent"),
        pytest.param("dispatched", EVEN, [0, 8, 16, 24], list(range(0, 25, 4)), False, id="nothing, no gradient"),
        pytest.param("dispatched", EVEN, [0, 2, 24], [0, 22, 24], True, id="messages of other lengths"),
        pytest.param("zigzag", [[0, 12, 24], [0, 18, 24]], [0, 6, 24], [0, 18, 24], True, id="one repeats a batch"),
    ],
)
def test_ranks_with_different_layouts_get_the_same_error(kind, known, ours, theirs, with_grad):
    said = run_distributed(_differ, 3, kind, known, ours, theirs, with_grad, fresh=True)
    for text, seconds in said:
        assert text.split(" (this group")[0] == said[0][0].split(" (this group")[0]
        assert "call this with different arguments" in text and "rank 1 has " in text and "layout.lengths=" in text
        assert seconds < FAST.timeout_s / 2, said
