"""Collectives on a GPU's side streams, with stand-ins for the streams: whose memory is kept until they have read it."""

import contextlib
import functools
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from megatron_tree import TreeConfig, shard_sequence, tree_attn_func, tree_attn_varlen_func, tree_decode
from megatron_tree.core import comm
from megatron_tree.core.attention import cell
from megatron_tree.core.cache.graph import traced
from megatron_tree.core.comm import collectives, work
from megatron_tree.core.config import DECODE_SCHEDULES
from megatron_tree.core.kernels import Backend
from support.bound import bound
from support.ranks import run_distributed


def _storage(x):
    return x.untyped_storage().data_ptr()


def _kept(rank, world):
    """Each start function, with inputs that it has to copy: what it sends is kept until the starting stream waits; only
    where it never does, it is recorded on the side stream."""
    team = bound(transport="direct").everyone
    x = torch.arange(24.0).view(3, 8).t() + 100 * rank  # [8, 3], not contiguous
    starts = {
        "gather": lambda: comm.start_gather(x, team),
        "reduce_scatter": lambda: comm.start_reduce_scatter(
            x, team, SimpleNamespace(merge=lambda parts: parts.sum(0), narrow=lambda merged: merged)
        ),
        "all_to_all": lambda: comm.start_all_to_all(x[:world], team),
        "all_to_all_v": lambda: comm.start_all_to_all_v([x[:4], x[4:]], [4, 4], team),
    }
    gpu, order = SimpleNamespace(type="cuda", index=0), []
    here, side = (
        SimpleNamespace(wait_stream=lambda other, name=name: order.append(name), device=gpu)
        for name in ("starts waits", "side waits")
    )
    recorded, sent, pending, send = [], [], [], work.Mail.send

    def noted(mail, part, to):
        sent.append(part)
        send(mail, part, to)

    def start_pending(steps, _, inputs, *others):
        pending.append(([weakref.ref(x) for x in inputs], {_storage(x) for x in inputs}))
        assert all(x.is_contiguous() for x in inputs)
        return work.Pending(steps, gpu, inputs, *others)

    @contextlib.contextmanager
    def on_stream(stream):
        order.append("enters")
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "Pending", start_pending)
        patch.setattr(work, "_side_stream", lambda stream, kind: side)
        patch.setattr(work.Mail, "send", noted)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: here)
        patch.setattr(torch.cuda, "stream", on_stream)
        patch.setattr(torch.Tensor, "record_stream", lambda x, stream: recorded.append((x, stream)), raising=False)
        for name, start in starts.items():
            for waits in (True, False):
                order.clear(), recorded.clear(), sent.clear(), pending.clear()
                of_start = start()
                [(inputs, read)] = pending
                assert sent and {_storage(x) for x in sent} <= read, name
                sent.clear(), gc.collect()
                assert all(x() is not None for x in inputs), name  # kept by what is under way
                assert order == ["side waits", "enters"], name  # memory of the side stream is taken up after that
                if waits:
                    of_start.wait()
                    assert order[2:] == ["starts waits"] and not recorded, name
                else:
                    del of_start
                    gc.collect()
                    assert {_storage(x) for x, stream in recorded if stream is side} == read, name
    return True


def test_what_a_side_stream_reads_is_kept_until_then():
    assert all(run_distributed(_kept, 2))


def test_another_stream_may_not_wait(monkeypatch):
    here, other, side = (SimpleNamespace(wait_stream=lambda stream: None, device=None) for _ in range(3))
    streams = iter((here, other))
    monkeypatch.setattr(work, "_side_stream", lambda stream, kind: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: next(streams))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    pending = work.Pending(iter(()), SimpleNamespace(type="cuda"))
    with pytest.raises(RuntimeError, match="on the stream that has started it"):
        pending.wait()


class _Stream:
    """A stream whose operations wait for those before them: each is (name, the operations that it waits for)."""

    def __init__(self, name):
        self.device, self.name, self.last = None, name, ()

    def run(self, name):
        self.last = (name, self.last)

    def wait_stream(self, other):
        self.last = ("", self.last, other.last)


def _waits_for(operation):
    """The names of all operations that must end before this one starts."""
    found, reached = set(), list(operation[1:])
    while reached:
        name, *before = reached.pop() or ("",)
        found.add(name)
        reached += before
    return found


def _overlaps(rank, world, grid, chunks):
    """A forward and a backward whose collectives are on stand-ins of streams.

    Gathering the rows of chunk n + 1 waits for attention over those of chunk n - 1, whose memory it takes, and for no
    later one; the first two wait for none, not that of the local pair either. Rows of two chunks exist at most.
    """
    main, sides, now, current = _Stream("main"), {}, {"stage": ("", 0)}, []
    current.append(main)
    gathers, attends, alive = {}, {}, []

    @contextlib.contextmanager
    def on_stream(stream):
        current.append(stream)
        yield
        current.pop()

    def side_stream(start, kind):
        return sides.setdefault(kind, _Stream(kind))

    class Pending(work.Pending):
        def __init__(self, steps, device, inputs, kind="gather"):
            super().__init__(steps, device, inputs, kind)
            stage, chunk = now["stage"]
            self._stream.run(f"{kind} {chunk}")
            if stage == "gather":
                gathers.setdefault(chunk, []).append(self._stream.last)
                alive.append((chunk, StorageWeakRef(self._result.untyped_storage())))
                chunks_alive = {of for of, x in alive if not x.expired()}
                assert len(chunks_alive) <= 2, chunks_alive

    def staged(cell_class, stage):
        run = getattr(cell_class, stage)

        def noted(self):
            now["stage"] = stage, self.chunk.kv.start
            run(self)
            now["stage"] = "", 0

        return noted

    def kernel(call):
        def run(*args, **options):
            stage, chunk = now["stage"]
            main.run(f"{stage} {chunk}")
            attends[stage, chunk] = main.last
            return call(*args, **options)

        return run

    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, 8, chunks, 8, requires_grad=True) for _ in range(3))
    config = TreeConfig(grid=grid, grid_backward=grid, head_chunks=chunks, transport="direct", timeout_s=20.0)
    with pytest.MonkeyPatch.context() as patch:
        for module in (work, comm):
            patch.setattr(module, "on_streams", lambda device: True)
        patch.setattr(collectives, "Pending", Pending)
        patch.setattr(work, "_side_stream", side_stream)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
        patch.setattr(torch.cuda, "stream", on_stream)
        for cell_class in (cell.CellForward, cell.CellBackward):
            for stage in ("gather", "receive", "attend"):
                patch.setattr(cell_class, stage, staged(cell_class, stage))
        for name in ("attn_fwd", "attn_bwd"):
            patch.setattr(Backend, name, kernel(getattr(Backend, name)))
        out = tree_attn_func(q, k, v, cp_group=torch.distributed.group.WORLD, causal=True, config=config)
        for backward in (False, True):
            if backward:
                gathers.clear(), attends.clear(), alive.clear()
                for stream in (main, *sides.values()):
                    stream.last = ()
                out.sum().backward()
            assert sorted(gathers) == list(range(chunks)) and len(attends) == chunks + 1  # and the local pair
            for chunk, started in gathers.items():
                for gather in started:
                    later = {f"attend {n}" for n in range(max(0, chunk - 1), chunks)}
                    assert not later & _waits_for(gather), (chunk, later)
                    assert chunk > 1 or "receive 0" not in _waits_for(gather), chunk
                    assert chunk < 2 or f"attend {chunk - 2}" in _waits_for(gather), chunk
                    assert f"gather {chunk}" in _waits_for(attends["attend", chunk])
    return True


@pytest.mark.parametrize("grid", [(1, 2), (2, 1)])
def test_a_gather_waits_for_the_attention_whose_memory_it_takes(grid):
    assert all(run_distributed(_overlaps, 2, grid, 4))


def _in_either_order(rank, world, options):
    torch.manual_seed(rank)
    config = TreeConfig(transport="direct", timeout_s=20.0, **options)
    inputs = [torch.randn(1, 8, 8, 8, requires_grad=True) for _ in range(3)]
    results = []
    for streams in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comm, "on_streams", lambda device, streams=streams: streams)
            out = tree_attn_func(*inputs, cp_group=torch.distributed.group.WORLD, causal=True, config=config)
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    return all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("schedule", ["grid", "heads", "ring", "gather"])
def test_the_order_of_streams_gives_the_same_bits(schedule):
    options = {
        "grid": dict(grid=(2, 2), grid_backward=(1, 4), head_chunks=4),
        "heads": dict(ulysses_size=2, grid=(1, 2), grid_backward=(2, 1), head_chunks=4),
        "ring": dict(ulysses_size=2, schedule="ring"),
        "gather": dict(deterministic="ranks", head_chunks=2),
    }
    assert all(run_distributed(_in_either_order, 4, options[schedule]))


def _apart(kernel):
    """Not looked at: what a backend does inside is its own."""

    def run(*args, **options):
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return kernel(*args, **options)

    return run


def _repeated_calls(group, world):
    """Calls of every schedule, by name."""
    torch.manual_seed(0)
    bounds = torch.tensor([0, 8, 8 * world])  # read once
    q, k, v = (shard_sequence(torch.randn(1, 8 * world, h, 8), group, 1).requires_grad_() for h in (8, 2, 2))
    sinks, call = torch.zeros(8, requires_grad=True), dict(transport="builtin", check="never", tune=False)

    def train(config, **options):
        out, lse = tree_attn_func(
            q, k, v, cp_group=group, causal=True, return_lse=True, config=TreeConfig(**call, **config), **options
        )
        (out.sum() + lse.sum()).backward()

    def pack(config, layout="zigzag"):
        x, config = (x.detach()[0].requires_grad_() for x in (q, k, v)), TreeConfig(**call, **config)
        tree_attn_varlen_func(*x, cu_seqlens=bounds, layout=layout, cp_group=group, config=config).sum().backward()

    for config in (
        {"grid": (2, 2), "grid_backward": (1, 4), "head_chunks": 2},
        {"schedule": "ring"},
        {"ulysses_size": 4},  # more ranks than KV heads
        {"ulysses_size": 2, "grid": (1, 2)},
    ):
        yield str(config), functools.partial(train, config, sinks=sinks)
    yield "cast", functools.partial(train, {"schedule": "cast"}, window_size=(9, 0))
    for config in ({"grid": (2, 2)}, {"schedule": "ring"}):
        yield f"documents, {config}", functools.partial(pack, config)
    yield "documents, lengths", functools.partial(pack, {}, (8,) * world)  # "contiguous" asks for them in every call
    yield "lengths", functools.partial(train, {}, layout=(8,) * world)
    token, shard = torch.randn(1, 1, 8, 8), (k.detach(), v.detach())
    for schedule in set(DECODE_SCHEDULES) - {"ring"}:  # whose ranks ask one another how much they hold
        step = functools.partial(tree_decode, token, *shard, cp_group=group, schedule=schedule)
        yield schedule, functools.partial(step, config=TreeConfig(**call))


def _waiting(rank, world):
    """Of calls that were made before: what a GPU's host would copy to the device or wait for."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("attn_fwd", "attn_bwd", "attn_decode"):
            patch.setattr(Backend, name, _apart(getattr(Backend, name)))
        for name, call in _repeated_calls(torch.distributed.group.WORLD, world):
            call()
            with traced() as operations:
                call()
            found[name] = [name for name, *_ in operations if name == "aten::lift_fresh"]  # numbers, lists as indices
    return found


def test_the_host_neither_waits_nor_copies_in_repeated_calls():
    for found in run_distributed(_waiting, 4):
        assert len(found) > 10 and not any(found.values()), found
