"""Groups that were made in every way torch has: what matters is the backend that carries a call's tensors."""

import contextlib
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers a backend "fake", for another device here

from megatron_tree import CommError, TreeConfig, shard_sequence, tree_attn_func, tree_decode
from megatron_tree.core import comm
from megatron_tree.core.comm import rendezvous, work
from megatron_tree.core.comm import watchdog as module
from megatron_tree.core.comm.group import GroupState
from megatron_tree.core.comm.team import subgroup
from megatron_tree.core.comm.watchdog import Watchdog
from megatron_tree.core.comm.wire import share_all
from support.ranks import as_launched, run_distributed

CPU = torch.device("cpu")
STARTS = {
    "no backend": lambda world: dist.init_process_group(),
    "a mesh": lambda world: init_device_mesh("cpu", (world,)),
    "one for each device": lambda world: dist.init_process_group("cpu:gloo,cuda:fake"),
}


def _results(group, transport):
    """Of a training call, a decode step and collectives, which all ranks must get."""
    config = TreeConfig(transport=transport, timeout_s=30.0)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 16, 4, 8), torch.randn(1, 16, 2, 8), torch.randn(1, 16, 2, 8)
    q, k, v = (shard_sequence(x, group, 1).requires_grad_() for x in (q, k, v))
    out = tree_attn_func(q, k, v, cp_group=group, causal=True, config=config)
    out.square().mean().backward()
    with torch.no_grad():
        token = tree_decode(torch.ones(1, 1, 4, 8), k, v, cp_group=group, config=config)
    return [out.detach(), token, *(x.grad for x in (q, k, v)), comm.Ranks.of(group).reduce(torch.ones(1))]


def _fail(rank):
    with comm.monitored("step 5"):
        if rank == 1:
            raise MemoryError("none is left")
        dist.all_reduce(torch.ones(1))  # of gloo, whose wait ends


def _run(rank, world, name):
    expected = {transport: _results(dist.group.WORLD, transport) for transport in ("auto", "builtin")}
    with as_launched():
        STARTS[name](world)
        group = dist.group.WORLD
        assert comm.Ranks.of(group, CPU).backend == "gloo"
        for transport, wanted in expected.items():
            for a, b in zip(_results(group, transport), wanted, strict=True):
                torch.testing.assert_close(a, b)
        assert share_all(rank, comm.Ranks.of(group)) == list(range(world))
        assert comm.measured_links(comm.Ranks.of(group, CPU, limit_s=30.0)).inside.seconds > 0
        other = torch.device("cuda" if "cuda" not in GroupState.of(group).backends else "xpu")
        with pytest.raises(ValueError, match=f"no backend of this group carries tensors on {other.type}, only gloo"):
            _ = comm.Ranks.of(group, other).backend
    with pytest.raises(MemoryError if rank == 1 else CommError, match="none is left"):
        _fail(rank)


@pytest.mark.parametrize("name", STARTS)
def test_calls_ask_for_the_backend_of_their_tensors(name):
    run_distributed(_run, 2, name)


class _Options:
    def __init__(self, is_high_priority_stream):
        self.is_high_priority_stream = is_high_priority_stream


@pytest.mark.parametrize("backends", [{"cuda": "nccl"}, {"cpu": "gloo", "cuda": "nccl"}], ids=["nccl", "both"])
@pytest.mark.parametrize("device", [None, CPU])
def test_nccl_sub_groups_need_no_other_ranks(device, backends, monkeypatch):
    """With the default group bound to a device, `new_group` is collective over all its ranks, and the members alone
    call: the context-parallel group is split."""
    group, limit = type("Group", (), {})(), timedelta(seconds=30)
    ranks = SimpleNamespace(
        group=group, size=4, limit=limit, timeout_s=30.0, state=GroupState(4, 1, backends, (4, 5, 6, 7))
    )
    made = []
    monkeypatch.setattr(dist, "split_group", lambda *args, **options: made.append(("split", args, options)) or "split")
    monkeypatch.setattr(dist, "new_group", lambda *args, **options: made.append(("new", args, options)) or "new")
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
    monkeypatch.setattr(type(dist.group), "WORLD", SimpleNamespace(bound_device_id=device))
    team = comm.Team(ranks, ((1, 3),), ("keys",))
    first = subgroup(team, (3, 1))
    assert subgroup(team, (1, 3)) == first == ("new" if device is None else "split")
    [(how, args, options)] = made
    assert args == (([5, 7],) if how == "new" else (group, [[1, 3]]))
    assert (
        options["pg_options"].is_high_priority_stream and options["pg_options"]._timeout == options["timeout"] == limit
    )
    ranks.state.subgroups.clear()


@pytest.mark.parametrize("comes_first", [False, True])
@pytest.mark.parametrize("name", [(), ("keys",)], ids=["unnamed", "keys"])
def test_a_team_of_all_ranks_comes_before_attention(name, comes_first, monkeypatch):
    """It has a group of its own only where the ranks' group has no priority, and not for small messages of the host."""
    options = SimpleNamespace(options=_Options(comes_first))
    group = type("Group", (), {"_get_backend": lambda self, device: options})()
    state = GroupState(2, 1, {"cuda": "nccl"}, (4, 5))
    ranks = SimpleNamespace(
        group=group, size=2, limit=timedelta(seconds=30), timeout_s=30.0, state=state, backend="nccl", device=CPU
    )
    made = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append((ranks, options)) or "new")
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
    monkeypatch.setattr(type(dist.group), "WORLD", SimpleNamespace(bound_device_id=None))
    found = subgroup(comm.Team(ranks, ((0, 1),), name), (1, 0))
    assert subgroup(comm.Team(ranks, ((0,), (1,)), (*name, *name)), (1, 0)) == found
    if comes_first or not name:
        assert found is group and not made
    else:
        [(whole, options)] = made
        assert found == "new" and whole == [4, 5] and options["pg_options"].is_high_priority_stream
    state.subgroups.clear()


def test_a_default_group_of_nccl(monkeypatch):
    """Its kernels come first."""
    made = {}
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(rendezvous, "_store", lambda *_: None)
    monkeypatch.setattr(rendezvous, "_missing", lambda *_: ())
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: made.update(options))
    rendezvous.start_default_group("nccl", timeout_s=30.0, device_id=CPU)
    assert made["pg_options"].is_high_priority_stream and made["pg_options"]._timeout == made["timeout"]


class _Nccl:
    """As much of ProcessGroupNCCL as its time limit needs."""

    def __init__(self, limit):
        self.options = SimpleNamespace(_timeout=limit)

    def _set_default_timeout(self, limit):
        self.options._timeout = limit


def test_nccl_collectives_have_the_limit_of_their_call():
    """Also where starting one fails; the group's own is untouched."""
    own, ours, noted = timedelta(minutes=30), timedelta(seconds=7), []
    backend = _Nccl(own)
    group = SimpleNamespace(_get_backend={torch.device("cuda", 1): backend}.__getitem__)
    watchdog = SimpleNamespace(note_queued=lambda *what: noted.append(what))
    ranks = SimpleNamespace(
        backend="nccl", limit=ours, timeout_s=7.0, device=torch.device("cuda", 1), watchdog=watchdog
    )
    for error in (None, RuntimeError):
        with contextlib.suppress(RuntimeError), work.nccl_limit("all_gather", group, ranks):
            assert backend.options._timeout == ours
            if error:
                raise error
        assert backend.options._timeout == own
    assert noted == [("all_gather", 7.0)] * 2
    with work.nccl_limit("all_gather", None, SimpleNamespace(backend="gloo")):
        pass


def _late(rank, world):
    """In a step, a collective that was queued on a device long ago is told once."""
    told = []
    watchdog = Watchdog.of(dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch, comm.in_step(dist.group.WORLD):
        patch.setattr(module.logger, "warning", lambda text, *values: told.append(text % values))
        patch.setattr(module, "LATE", 0.0)
        with comm.monitored("step 5"):
            time.sleep(0.3)  # polls
            assert not told
            with comm.Ranks.of(dist.group.WORLD, CPU).call("tree_attn_func") as call:
                call.start()
                watchdog.note_queued("all_gather", 30.0)
            end = time.monotonic() + 20
            while not told and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(0.3)
    [text] = told
    assert text.startswith(f"rank {rank} has queued nothing for ") and "30 s" in text
    assert "all_gather in tree_attn_func, call 1 of its group, in step 5" in text


def test_the_log_names_rank_and_call_before_torch_ends_a_process():
    run_distributed(_late, 2)
