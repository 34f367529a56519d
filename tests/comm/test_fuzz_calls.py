"""Ranks whose calls differ after an error that was caught: what a call returns is right, or it is an error.

Every rank runs a script of calls that all ranks know. In some of them a rank rejects a call, makes two in another
order, leaves one out or makes one more, catches what is raised and goes on. The n-th calls of ranks belong together.

    TREE_FUZZ_SESSIONS=1000 TREE_FUZZ_SEED=7 python -m pytest tests/comm/test_fuzz_calls.py -m slow
"""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from megatron_tree import CommError, TreeConfig, tree_attn_func, tree_decode, unshard_sequence
from megatron_tree.core.comm import agreement
from support.bound import bound
from support.ranks import run_distributed

SEED = int(os.environ.get("TREE_FUZZ_SEED", "0"))
SESSIONS = int(os.environ.get("TREE_FUZZ_SESSIONS", "40"))  # of the slow tests, for each transport and number of ranks
LENGTH = 5  # calls of a session
LIMIT_S = 4.0  # for those who wait for a rank that makes fewer calls
TRANSPORTS = ("auto", "direct", "builtin")
DECODE = ("auto", "allreduce", "allgather", "butterfly", "scatter", "two_level", "ring")
KINDS = (
    *(("decode", schedule, 2) for schedule in DECODE),  # name, option, heads
    ("decode", "auto", 4),  # as the first, but for the size
    *(("train", grid, heads) for grid in ("rows", "columns", "ring") for heads in (2, 4)),
    ("forward", "rows", 2),
    ("unshard", None, 2),
    ("unshard", None, 3),
)
REFUSED = "refused"


def scripts(world, rng):
    """The calls of every rank; what begins with REFUSED is a call that this rank rejects."""
    common = [rng.choice(KINDS) for _ in range(LENGTH)]
    found = [list(common) for _ in range(world)]
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        what = rng.choice(("refuse", "refuse", "swap", "leave out", "add"))
        rank, at = rng.randrange(world), rng.randrange(LENGTH - 1)
        own = found[rank]
        if what == "refuse":
            for script in rng.choice(([own], [own], found)):
                script[at] = (REFUSED, *script[at])
        elif what == "swap":
            own[at : at + 2] = reversed(own[at : at + 2])
        elif what == "leave out":
            del own[at]
        else:
            own.insert(at, rng.choice(KINDS))
    return found


def numbered(script):
    """The calls of a script one by one: a backward is one, too."""
    found = []
    for kind in script:
        found.append(kind)
        if kind[0] == "train":
            found.append(("backward", *kind[1:]))
    return found


def inputs(kind, rank, number):
    """q, k, v and dout of a rank in its call of this number; what is replicated does not depend on the rank."""
    name, _, heads = kind
    g = torch.Generator().manual_seed(1000 * number + rank)
    if name == "decode":
        q = torch.randn(1, 1, heads, 8, generator=torch.Generator().manual_seed(number))
        return q, torch.randn(1, 3, 2, 8, generator=g), torch.randn(1, 3, 2, 8, generator=g), None
    return [torch.randn(1, 4, n, 8, generator=g, dtype=torch.float64) for n in (heads, 2, 2, heads)]


def whole(parts):
    """The sequence of zigzag shards."""
    chunks = [chunk for part in parts for chunk in part.chunk(2, 1)]
    return torch.cat([*chunks[::2], *reversed(chunks[1::2])], 1)


def expected(kind, world, number):
    """By plain attention in float64: what every rank should get."""
    name = kind[0]
    every = [inputs(kind, rank, number) for rank in range(world)]
    if name == "unshard":
        return [[torch.cat([q for q, *_ in every], 1)]] * world
    if name == "decode":
        q = every[0][0].double()
        k, v = (torch.cat([x[i] for x in every], 1).double() for i in (1, 2))
    else:
        q, k, v, dout = (whole([x[i] for x in every]) for i in range(4))
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=name != "decode", enable_gqa=True)
    if name == "decode":
        return [[out.transpose(1, 2)]] * world
    results = [out]
    if name == "train":
        results += torch.autograd.grad(out, (q, k, v), dout.transpose(1, 2))
    shards = [shard_zigzag(x.transpose(1, 2).detach(), world) for x in results]
    return [[x[rank] for x in shards] for rank in range(world)]


def shard_zigzag(x, world):
    chunks = x.chunk(2 * world, 1)
    return [torch.cat((chunks[rank], chunks[-1 - rank]), 1) for rank in range(world)]


def config_of(kind, world, transport, limit_s):
    grid = {"rows": (world, 1), "columns": (1, world)}.get(kind[1])
    schedule = {"schedule": "ring"} if kind[0] == "train" and kind[1] == "ring" else {}
    return TreeConfig(transport=transport, timeout_s=limit_s, grid=grid, **schedule)


def act(kind, rank, number, group, config, refused=False):
    """One call, with the backward that belongs to it."""
    name, option, _ = kind
    q, k, v, dout = inputs(kind, rank, number)
    bad = {"softmax_scale": float("nan")} if refused else {}
    if name == "unshard":
        return [unshard_sequence(q, group, 1, layout="stripes" if refused else "contiguous")]
    if name == "decode":
        return [tree_decode(q, k, v, cp_group=group, schedule=option, config=config, **bad)]
    q, k, v = (x.requires_grad_(name == "train") for x in (q, k, v))
    out = tree_attn_func(q, k, v, cp_group=group, config=config, **bad)
    return [out.detach(), *(torch.autograd.grad(out, (q, k, v), dout) if name == "train" else ())]


def attempt(kind, rank, number, group, transport, limit_s):
    """The results of one call of a script, or its error in words."""
    refused = kind[0] == REFUSED
    kind = kind[refused:]
    try:
        config = config_of(kind, dist.get_world_size(group), transport, limit_s)
        return act(kind, rank, number, group, config, refused)
    except (ValueError, CommError) as error:
        return f"{type(error).__name__}: {error}"


def _run(rank, world, transport, seeds):
    found = []
    for seed in seeds:
        script = scripts(world, random.Random(seed))
        limit_s = 60.0 if all(calls == script[0] for calls in script) else LIMIT_S
        group, number, results = dist.new_group(list(range(world))), 0, []
        for kind in dict.fromkeys(kind[kind[0] == REFUSED :] for calls in script for kind in calls):  # now all know it
            act(kind, rank, 0, group, config_of(kind, world, transport, limit_s))
        dist.barrier(group=group)
        for kind in script[rank]:
            results.append((number, kind, attempt(kind, rank, number, group, transport, limit_s)))
            number += 1 + (kind[0] == "train")
        found.append(results)
        dist.barrier()  # of the default group: all are done
    return found


def judge(world, transport, seeds):
    right = errors = 0
    limit = 60.0 * (1 + len(seeds))
    for seed, results in zip(seeds, zip(*run_distributed(_run, world, transport, seeds, timeout=limit))):
        script = scripts(world, random.Random(seed))
        told = f"seed {seed}, {transport}, {world} ranks: {script}"
        made = [dict(enumerate(numbered(calls))) for calls in script]
        alike = all(calls == script[0] for calls in script)
        for rank, calls in enumerate(results):
            for number, kind, result in calls:
                if isinstance(result, str):
                    assert kind[0] == REFUSED or not alike, f"{told}: {result}"
                    errors += 1
                    continue
                for other in made:
                    assert other.get(number) == kind, f"{told}: rank {rank} has a result of call {number}, {kind}"
                for x, truth in zip(result, expected(kind, world, number)[rank], strict=True):
                    error = (x - truth).abs().max() / truth.abs().max()
                    assert error <= 1e-5, f"{told}: rank {rank}, call {number}, {kind}: error {error:.1e}"
                right += 1
    print(f"{right} results, {errors} errors")
    assert right and errors


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_call_meets_none_but_its_own(world, transport):
    judge(world, transport, [f"{SEED} {world} {i}" for i in range(3)])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_call_meets_none_but_its_own_whatever_happens(world, transport):
    judge(world, transport, [f"{SEED} {world} slow {i}" for i in range(SESSIONS)])


def _goes_on(rank, world, transport):
    """Rank 1 rejects a known call, catches the error and makes the next one; the others are in the call before."""
    config, group = TreeConfig(transport=transport, timeout_s=60.0), dist.group.WORLD
    said = []
    for step in range(4):
        q, k, v = (torch.full((1, 2, 2, 8), float(100 * step + rank)) for _ in "qkv")
        try:
            scale = float("nan") if (rank, step) == (1, 2) else None
            tree_decode(q[:, :1] * 0, k, v, cp_group=group, config=config, softmax_scale=scale)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_goes_on_after_its_error(transport):
    for rank, said in enumerate(run_distributed(_goes_on, 3, transport)):
        assert said[:2] == ["", ""] and "softmax_scale=nan" in said[2], said
        assert "rank 1 rejected its input" in said[3] and (rank == 1 or "rank 1 rejected" in said[2]), said


def _agree(name):
    with bound(timeout_s=60.0).call(name) as call:
        call.agree()


def _in_another_order(rank, world):
    """Nothing of a call's messages says which call it is, as with NCCL."""
    agreement.UNSTAMPED = {"gloo"}
    for name in "ab":
        _agree(name)
    dist.barrier()
    names = ["a", "b"] * 200
    if rank == 1:
        names[20:22] = reversed(names[20:22])
    for done, name in enumerate(names):
        try:
            _agree(name)
            time.sleep(0.01)
            if rank != 1 and done > 100:  # those that agree with the first rank hear of it where they wait
                bound(timeout_s=60.0).broadcast(torch.ones(1), 1)
        except ValueError as error:
            return done, str(error)


def test_calls_whose_messages_say_nothing_of_them_are_compared_afterwards():
    results = run_distributed(_in_another_order, 3, fresh=True)
    assert all("in another order: call 23 is " in text and "b on rank 1" in text for _, text in results), results
    assert results[1][0] < 200
