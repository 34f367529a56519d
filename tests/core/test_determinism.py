"""The same inputs, the same bits: run after run, on all ranks, in new processes, and for a row alone or in a batch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_tree import TreeConfig, tree_decode
from megatron_tree.core import kernels
from megatron_tree.core.kernels import KVCache
from megatron_tree.core.kernels.triton.decode import SPLIT_KEYS
from megatron_tree.core.layout import Segment
from megatron_tree.core.merge import merge_sinks, unpack_state
from megatron_tree.core.plan import default_topology, place, plan_decode
from megatron_tree.core.spec import AttnSpec
from support.attention import make_inputs, make_sinks
from support.decoding import decode_inputs, same_everywhere
from support.ranks import on_ranks, run_distributed
from support.rounding import assert_near
from support.same_bits import FIXED, bits, digest

REPO = Path(__file__).resolve().parents[2]
TIMES = 20


@pytest.mark.parametrize(
    ("times", "world", "deterministic", "dtype"),
    [
        (20, 3, True, torch.bfloat16),
        pytest.param(50, 4, False, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_the_same_bits_every_time(times, world, deterministic, dtype):
    for found in run_distributed(bits, world, dtype, times, deterministic, timeout=600):
        assert {what for _, what in found} == {"training", "decode", "prefill"}
        assert all(len(runs) == times for runs in found.values())
        assert [name for name, runs in found.items() if len(set(runs)) > 1] == []


@pytest.mark.slow
def test_the_same_bits_in_new_processes():
    """Other processes, other addresses: what they print is what the ranks of this session find."""
    code = "from support.same_bits import print_bits; print_bits()"
    paths = os.pathsep.join(map(str, (REPO, REPO / "tests")))
    command = [sys.executable, "-c", code]
    there = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=300, check=True
    )
    here = run_distributed(bits, 2, torch.bfloat16, 1, True)
    assert there.stdout.splitlines()[-1] == str(here)


@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_the_same_bits_with_as_many_threads(backend):
    """Forward and backward of a block again and again, with one thread and with four. Between them bits may differ: how
    torch's kernels cut their work for several threads is up to torch and to the processor."""
    q, k, v, dout = make_inputs(200, (4, 2), d=32, d_v=32, dtype=torch.float32)
    whole = dict(
        q_segments=(Segment(0, 0, 200),),
        k_segments=(Segment(0, 0, 200),),
        spec=AttnSpec(softmax_scale=0.2),
        backend=backend,
    )

    def bits():
        out, lse = kernels.attn_fwd(q, k, v, **whole)
        return digest(out, lse, *kernels.attn_bwd(dout, q, k, v, lse, kernels.attn_delta(dout, out), **whole))

    before = torch.get_num_threads()
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            assert len({bits() for _ in range(TIMES)}) == 1, threads
    finally:
        torch.set_num_threads(before)


def _call(arguments, options):
    q, k, v, more = arguments
    return tree_decode(q, k, v, **more, **options)


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), (5, torch.float32)], ids=str)
@on_ranks(timeout=300)
def test_a_row_alone_and_in_a_batch(rank, world, dtype):
    """Schedules and forms in which a row of a batch of 8 has other bits than alone."""
    # 5 ranks: torch's own sum over that many parts takes another order at the end of a tensor
    group, share, size, different = dist.group.WORLD, 37, 16, []
    q, k, v = decode_inputs(8, 2, share * world, heads=(6, 2), d=24, d_v=20, dtype=dtype)
    lengths = torch.tensor([share, 0, 5, 20, 36, 1, share, 17])
    q_positions = torch.tensor([[n + share * (world - 1), n + share * (world - 1) + 1] for n in lengths.tolist()])
    slots = share * rank + torch.arange(share).expand(8, -1)
    slots = slots.where(slots % 7 != 3, -1)
    k, v = (x[:, share * rank :][:, :share] for x in (k, v))
    pages = [torch.zeros(24, size, *x.shape[2:], dtype=dtype) for x in (k, v)]
    table = torch.randperm(24).reshape(8, 3).to(torch.int32)
    for whole, own in zip(pages, (k, v)):
        whole[table.long()] = torch.nn.functional.pad(own, (0, 0, 0, 0, 0, 11)).unflatten(1, (3, size))
    forms = {
        "dense": lambda i, n: (q[i, :1], k[i], v[i], dict(sinks=make_sinks(6))),
        "ragged": lambda i, n: (q[i, :1], k[i], v[i], dict(cache_seqlens=lengths[i])),
        "positions": lambda i, n: (
            *(q[i], k[i], v[i]),
            dict(q_positions=q_positions[i], cache_positions=slots[i], window_size=(50, 0), softcap=5.0),
        ),
        "paged": lambda i, n: (q[i, :1], *pages, dict(block_table=table[i, :n], cache_seqlens=lengths[i])),
    }
    for form, arguments in forms.items():
        for schedule in FIXED:
            options = dict(cp_group=group, schedule=schedule, config=TreeConfig(deterministic=True), return_lse=True)
            together = [x.split(1) for x in _call(arguments(slice(0, 8), 3), options)]
            assert all(same_everywhere(x[0]) for x in together)
            for row in range(8):
                needed = max(1, -(-int(lengths[row]) // size))  # alone a row has a table of its own length
                alone = _call(arguments(slice(row, row + 1), needed), options)
                if not all(torch.equal(x, y[row]) for x, y in zip(alone, together)):
                    different.append((form, schedule, row))
    assert different == [], different


@pytest.mark.parametrize("num_states", [2, 5, 8, 16])
def test_merges_do_not_depend_on_where_a_row_stands(num_states):
    g = torch.Generator().manual_seed(0)
    packed = torch.randn(num_states, 8, 1, 6, 33, generator=g)
    together = kernels.merge_packed(packed)
    sunk, lse = merge_sinks(*unpack_state(together, torch.float32), make_sinks(6).float())
    for i in range(8):
        alone = kernels.merge_packed(packed[:, i : i + 1].contiguous())
        assert torch.equal(alone, together[i : i + 1])
        o, l = merge_sinks(*unpack_state(alone, torch.float32), make_sinks(6).float())
        assert torch.equal(o, sunk[i : i + 1]) and torch.equal(l, lse[i : i + 1])


@pytest.mark.parametrize("paged", [False, True])
def test_splits_of_triton_do_not_depend_on_the_batch(paged):
    """Without deterministic=True, and without lengths by which each row is cut, they do: the bits of a row change. Two
    splits of SPLIT_KEYS, the second one ragged."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    n = SPLIT_KEYS + 128
    q, k, v = (x.to(device) for x in decode_inputs(4, 1, n, heads=(2, 1), d=16, d_v=16, dtype=torch.float32))
    lengths = torch.tensor([n - 5, 300, n, 1], device=device)
    pages = n // 64
    table = torch.arange(4 * pages, dtype=torch.int32, device=device).reshape(4, pages)

    def states(deterministic):
        call = dict(spec=AttnSpec(softmax_scale=0.25, deterministic=deterministic), backend="triton")
        found = []
        for i, wide in ((slice(0, 4), pages), (slice(0, 1), pages), (slice(1, 2), 5)):  # row 1: a table of its length
            of_rows = lengths[i] if deterministic else None
            cache = KVCache(k[i], v[i], lengths=of_rows)
            if paged:
                of_pages = [x.flatten(0, 1).unflatten(0, (-1, 64)) for x in (k, v)]
                cache = KVCache(*of_pages, lengths=of_rows, block_table=table[i, :wide].contiguous())
            found.append(kernels.attn_decode(q[i], cache, **call))
        return found

    together, first, second = states(True)
    assert torch.equal(together[:1], first) and torch.equal(together[1:2], second)
    together, first, _ = states(False)
    assert not torch.equal(together[:1], first)
    assert_near(together[:1], first, n)


def test_what_cannot_be_reproduced_is_refused():
    with FakeTensorMode():
        q, wide = (torch.empty(1, 4, 2, d, device="cuda", dtype=torch.float16) for d in (64, 300))
    fixed, free = (AttnSpec(softmax_scale=1.0, deterministic=x) for x in (True, False))
    assert kernels.choose(q, q, q, free, "aten").name == "aten"
    with pytest.raises(ValueError, match=r"backend='aten' can't take deterministic=True on CUDA.*adds up in any order"):
        kernels.choose(q, q, q, fixed, "aten")
    assert kernels.choose(q, q, q, fixed).name == "triton"
    assert kernels.choose(wide, wide, wide, fixed).name == "reference"
    with pytest.raises(ValueError, match="deterministic='yes' is unknown"):
        TreeConfig(deterministic="yes")


def test_auto_leaves_the_all_reduce_out():
    """Where nothing else fits the memory, it is planned; deterministic=True says what the others would need."""
    topology, state = default_topology("gloo"), 129 * 4
    call = dict(rows=1, head_dim_v=128, kv_bytes=None, topology=topology, placement=place(topology, list(range(8))))
    assert plan_decode(8, **call, memory_budget=2 * state).schedule == "allreduce"
    with pytest.raises(ValueError, match=f"memory_budget={2 * state} bytes is too small"):
        plan_decode(8, **call, memory_budget=2 * state, deterministic=True)
    assert plan_decode(8, **call, memory_budget=4 * state, deterministic=True).schedule in FIXED


@on_ranks(2, timeout=60)
def test_every_rank_is_told_why(rank):
    """Messages of calls that deterministic=True refuses, on every rank before anything is sent; the group goes on."""
    q, k, v = decode_inputs(2, 1, 8, dtype=torch.float32)
    call, said = dict(cp_group=dist.group.WORLD, config=TreeConfig(deterministic=True, timeout_s=20)), []
    for options in (dict(schedule="allreduce"), dict(config=TreeConfig(deterministic=rank == 1, timeout_s=20))):
        try:
            tree_decode(q, k, v, **{**call, **options})
        except ValueError as error:
            said.append(str(error))
    out = tree_decode(q, k, v, **call)
    refused, different = said
    assert "schedule='allreduce' leaves the order of its sum to the backend" in refused, said
    assert "deterministic=False" in different and "deterministic=True" in different, said
    assert same_everywhere(out)
