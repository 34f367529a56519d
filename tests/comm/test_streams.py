"""Collectives on a GPU's side streams, with stand-ins for the streams: whose memory is kept until they have read it."""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron_tree.core import comm
from megatron_tree.core.comm import collectives, work
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
