"""Everything that leaves this rank: the only caller of torch.distributed below the integrations.

Tensors that travel are sequence-first ([s, ...], contiguous), so that a gather is a plain concatenation and its result
is read through strides, without a copy. Each function is one collective; `record` lists them with the bytes sent.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
import weakref
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .errors import CommError
from .kernels import merge_packed
from .merge import NEG_INF, merge_states, pack_state, unpack_state

# the newer name; the older one warns from torch 2.13 on
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Sent(NamedTuple):
    """One operation of this rank: its name, the ranks in its group, and the payload bytes this rank sends."""

    op: str
    ranks: int
    bytes: int


_recorders: list[list[Sent]] = []


@contextlib.contextmanager
def record():
    """A list that fills with every operation of this rank while the context is open."""
    log: list[Sent] = []
    _recorders.append(log)
    try:
        yield log
    finally:
        _recorders.remove(log)


def group_size(group) -> int:
    """Ranks in `group`; None stands for one rank alone."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group) -> int:
    """This rank's number in `group`. Raises ``ValueError`` where it is not a member."""
    if group is None:
        return 0
    rank = -1 if group is dist.GroupMember.NON_GROUP_MEMBER else dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"cp_group: rank {dist.get_rank()} is not a member of it; pass the group this rank belongs to")
    return rank


_grids: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # group -> {grid: (row group, column group)}


def grid_groups(group, grid: tuple[int, int], timeout_s: float):
    """(row_group, column_group) of this rank on an a x b grid, rank = i * b + j; made once, by the members alone."""
    a, b = grid
    if a == 1:
        return group, None
    if b == 1:
        return None, group
    made = _grids.setdefault(group, {})
    if grid not in made:
        i, j = divmod(group_rank(group), b)
        ranks = dist.get_process_group_ranks(group)
        options = dict(
            backend=dist.get_backend(group), timeout=timedelta(seconds=timeout_s), use_local_synchronization=True
        )
        row = dist.new_group(ranks[i * b : (i + 1) * b], **options)
        made[grid] = row, dist.new_group(ranks[j::b], **options)
    return made[grid]


def _run(op: str, group, num_bytes: int, timeout_s: float, start) -> None:
    """Start one asynchronous operation, wait for it within the limit, and turn failures into `CommError`."""
    for log in _recorders:
        log.append(Sent(op, group_size(group), num_bytes))
    try:
        _wait(start(), group, timeout_s)
    except RuntimeError as error:
        raise _failure(op, group, timeout_s, error) from error


def _wait(work, group, timeout_s: float) -> None:
    for w in work if isinstance(work, list) else [work]:
        if dist.get_backend(group) == "nccl":
            w.wait()  # orders the stream; NCCL's own watchdog keeps the time limit
        else:
            w.wait(timedelta(seconds=timeout_s))
            _settle_at_exit()


@functools.cache
def _settle_at_exit() -> None:
    """gloo's threads drop finished work late; one that asks an ending interpreter for its lock aborts the process."""
    atexit.register(time.sleep, 0.1)


def _failure(op: str, group, timeout_s: float, error: Exception) -> CommError:
    ranks = dist.get_process_group_ranks(group)
    return CommError(
        f"{op} among ranks {ranks} failed on rank {dist.get_rank()} (time limit {timeout_s:g} s): {error}. A peer "
        "has died, is stuck or called something else; look at the first error of the other ranks"
    )


def gather_sequence(x: Tensor, group, *, timeout_s: float = 600.0) -> Tensor:
    """All-gather x [s, ...], equally long on all ranks, to [n * s, ...] in rank order."""
    n = group_size(group)
    x = x.contiguous()
    if n == 1:
        return x
    out = torch.empty((n * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    _run(
        "all_gather",
        group,
        (n - 1) * x.nbytes,
        timeout_s,
        lambda: _all_gather_single(out, x, group=group, async_op=True),
    )
    return out


def exchange(x: Tensor, group, *, timeout_s: float = 600.0) -> Tensor:
    """All-to-all: x [n, ...], x[j] goes to rank j; returns [n, ...] whose entry j came from rank j."""
    n = group_size(group)
    assert x.shape[0] == n, (x.shape, n)
    x = x.contiguous()
    if n == 1:
        return x
    out = torch.empty_like(x)
    _run(
        "all_to_all",
        group,
        x.nbytes // n * (n - 1),
        timeout_s,
        lambda: dist.all_to_all_single(out, x, group=group, async_op=True),
    )
    return out


def all_reduce(x: Tensor, group, *, op: str = "sum", timeout_s: float = 600.0) -> Tensor:
    """Reduce x in place over the group: op "sum" or "max"."""
    n = group_size(group)
    if n > 1:
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        _run(
            "all_reduce",
            group,
            2 * (n - 1) * x.nbytes // n,
            timeout_s,
            lambda: dist.all_reduce(x, reduce_op, group=group, async_op=True),
        )
    return x


def broadcast(x: Tensor, group, src: int, *, timeout_s: float = 600.0) -> Tensor:
    """x of group rank `src` on all ranks, in place."""
    n = group_size(group)
    if n > 1:
        sent = x.nbytes if group_rank(group) == src else 0
        start = functools.partial(dist.broadcast, x, group=group, group_src=src, async_op=True)
        _run("broadcast", group, sent, timeout_s, start)
    return x


class Transfer:
    """Point-to-point messages under way: what this rank sends and what it will have received after `wait`."""

    def __init__(self, send: Tensor | None, dst: int, recv: Tensor | None, src: int, group, timeout_s: float):
        self.recv, self._send, self._group, self._timeout_s = recv, send, group, timeout_s
        ops = []
        if recv is not None:
            ops.append(dist.P2POp(dist.irecv, recv, group=group, group_peer=src))
        if send is not None:
            ops.append(dist.P2POp(dist.isend, send, group=group, group_peer=dst))
            for log in _recorders:
                log.append(Sent("send", group_size(group), send.nbytes))
        self._name = f"send/receive with group ranks {sorted({dst, src})}"
        try:
            self._work = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise _failure(self._name, group, timeout_s, error) from error

    def wait(self) -> Tensor | None:
        try:
            _wait(self._work, self._group, self._timeout_s)
        except RuntimeError as error:
            raise _failure(self._name, self._group, self._timeout_s, error) from error
        self._send = None
        return self.recv


def start_shift(x: Tensor, group, *, timeout_s: float = 600.0) -> Transfer:
    """Start passing x (contiguous, equal shapes) to the next rank of the ring while the previous one's is received."""
    n, r = group_size(group), group_rank(group)
    return Transfer(x, (r + 1) % n, torch.empty_like(x), (r - 1) % n, group, timeout_s)


def reduce_scatter_state(out, lse, group, *, wire: torch.dtype, timeout_s: float = 600.0) -> tuple[Tensor, Tensor]:
    """Merge states down a column: every rank keeps the share of rows that is its own.

    Args: out [b, n * s, h, d], lse [b, h, n * s] fp32, rows in rank order. Returns out [b, s, h, d] and lse [b, h, s],
    both fp32. One all-to-all, then the n states that arrive are merged in rank order.
    """
    n = group_size(group)
    if n == 1:
        return out, lse
    packed = pack_state(out.transpose(0, 1), lse.permute(2, 0, 1), wire).unflatten(0, (n, -1))  # [n, s, b, h, d + w]
    o, l = unpack_state(exchange(packed, group, timeout_s=timeout_s), lse.dtype)
    o, l = merge_states(o, l)
    return o.transpose(0, 1), l.permute(1, 2, 0).contiguous()


def reduce_scatter_sum(x: Tensor, group, *, wire: torch.dtype, timeout_s: float = 600.0) -> Tensor:
    """Sum x [b, n * s, h, d] over the group, each rank keeping its rows [b, s, h, d]; sums in fp32, in rank order."""
    n = group_size(group)
    if n == 1:
        return x
    parts = exchange(x.transpose(0, 1).to(wire).unflatten(0, (n, -1)), group, timeout_s=timeout_s)
    total = parts[0].to(x.dtype)
    for part in parts[1:]:
        total = total + part
    return total.transpose(0, 1)


def reduce_state(state: Tensor, group, schedule: str, *, timeout_s: float = 600.0) -> Tensor:
    """Decode's reduction: merge one packed state per rank; every rank gets the same result to the last bit.

    Args: state [..., d + 1], fp32: out, then lse; equal shapes on all ranks; schedule "allreduce", "allgather",
    "butterfly" or "scatter" (docs/design.md, section 3). Returns the merged state.
    """
    return state if group_size(group) == 1 else _REDUCTIONS[schedule](state, group, timeout_s)


def _allreduce(state, group, timeout_s):
    out, lse = unpack_state(state, state.dtype)
    m = all_reduce(lse.clone(), group, op="max", timeout_s=timeout_s)
    m = torch.where(m == NEG_INF, 0.0, m)
    w = torch.exp(lse - m)[..., None]
    total = all_reduce(torch.cat((out * w, w), -1), group, timeout_s=timeout_s)
    den = total[..., -1]
    safe = torch.where(den == 0, 1.0, den)
    return pack_state(
        total[..., :-1] / safe[..., None], torch.where(den == 0, NEG_INF, m + torch.log(safe)), state.dtype
    )


def _allgather(state, group, timeout_s):
    return merge_packed(gather_sequence(state[None], group, timeout_s=timeout_s))


def _scatter(state, group, timeout_s):
    n, rows = group_size(group), state.flatten(0, -2)
    shares = F.pad(rows, (0, 0, 0, -rows.shape[0] % n)).unflatten(0, (n, -1))
    mine = merge_packed(exchange(shares, group, timeout_s=timeout_s))
    return gather_sequence(mine, group, timeout_s=timeout_s)[: rows.shape[0]].view(state.shape)


def _butterfly(state, group, timeout_s):
    """Recursive doubling; ranks beyond the largest power of two fold in first and get the result last."""
    n, r = group_size(group), group_rank(group)
    core = 1 << (n.bit_length() - 1)
    state = state.contiguous()

    def swap(peer, send=True, receive=True):
        other = torch.empty_like(state) if receive else None
        return Transfer(state if send else None, peer, other, peer, group, timeout_s).wait()

    if r >= core:
        swap(r - core, receive=False)
        return swap(r - core, send=False)
    if r + core < n:
        state = merge_packed(torch.stack((state, swap(r + core, send=False))))
    step = 1
    while step < core:
        other = swap(r ^ step)
        state = merge_packed(torch.stack((other, state) if r & step else (state, other)))
        step *= 2
    if r + core < n:
        swap(r + core, receive=False)
    return state


_REDUCTIONS = {"allreduce": _allreduce, "allgather": _allgather, "butterfly": _butterfly, "scatter": _scatter}
