"""Collectives on a GPU's side streams, with stand-ins for the streams: whose memory is kept until they have read it."""

import contextlib
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
    """Each start function, with inputs that it has to copy: what it sends is recorded on the side stream."""
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
    gpu, here, side = (SimpleNamespace(wait_stream=lambda stream: None, device=None) for _ in range(3))
    gpu.type, gpu.index = "cuda", 0
    recorded, sent, send = [], [], work.Mail.send

    def noted(mail, part, to):
        sent.append(part)
        send(mail, part, to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "Pending", lambda steps, _, *others: work.Pending(steps, gpu, *others))
        patch.setattr(work, "_side_stream", lambda index, kind: side)
        patch.setattr(work.Mail, "send", noted)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: here)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.Tensor, "record_stream", lambda x, stream: recorded.append((x, stream)), raising=False)
        for name, start in starts.items():
            recorded.clear(), sent.clear()
            start().wait()
            read = {_storage(x) for x, stream in recorded if stream is side}
            assert sent and {_storage(x) for x in sent} <= read, name
            assert all(x.is_contiguous() for x, _ in recorded), name
    return True


def test_what_a_side_stream_reads_is_kept_until_then():
    assert all(run_distributed(_kept, 2))
