"""Small messages among the ranks of one host: the first rank collects them and hands the result out.

CPU ranks of a host share its cores, where a message costs work rather than time on a wire: the 2 (n - 1) messages
through a leader cost a quarter of the n (n - 1) of a direct exchange among four ranks on two cores.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .group import group_rank, group_size
from .machines import hosts
from .traffic import note
from .work import Mail

SMALL_BYTES = 1 << 16  # above, the leader's copies cost more than messages


def has_leader(group, num_bytes: int, *, timeout_s: float) -> bool:
    """Whether a message of this size per rank goes through the first rank: more than two ranks, all on one host."""
    if group_size(group) <= 2 or num_bytes > SMALL_BYTES:
        return False
    first, *others = hosts(group, timeout_s=timeout_s)
    return all(host == first for host in others)


def through_leader(x: Tensor, group, join: Callable[[Tensor], Tensor], shape, *, timeout_s: float) -> Tensor:
    """join(parts [n, ...]) of every rank's x, computed on the first rank and sent to all: of `shape` and x's dtype."""
    n, ranks = group_size(group), range(group_size(group))
    up, down = (Mail("through_leader", group, ranks, timeout_s) for _ in range(2))
    if group_rank(group):
        result = torch.empty(shape, dtype=x.dtype, device=x.device)
        arriving = down.receive(result, 0)
        note("send", n, x.nbytes)
        up.send(x.contiguous(), 0)
        down.wait(arriving)
        up.sent()
        return result
    parts = torch.empty((n, *x.shape), dtype=x.dtype, device=x.device)
    arriving = [up.receive(parts[i], i) for i in ranks[1:]]
    parts[0] = x
    up.wait(*arriving)
    result = join(parts).contiguous()
    note("send", n, (n - 1) * result.nbytes)
    for i in ranks[1:]:
        down.send(result, i)
    down.sent()
    return result
