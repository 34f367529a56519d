"""Everything that leaves this rank: with agree.py the only caller of torch.distributed below the integrations.

- groups.py       who is in a group, on which host, and teams: rows and columns of the grid, nested by node
- work.py         messages and collectives under way, their time limits and failures
- collectives.py  gathers and reduce-scatters of training, in one or two levels; plain all-reduce and broadcast
- reductions.py   decode's reductions of one state per rank

Tensors that travel are sequence-first ([s, ...], contiguous), so that a gather is a plain concatenation and its result
is read through strides, without a copy. `record` lists what this rank sends.
"""

from .collectives import all_reduce, broadcast, gather_sequence, start_all_to_all, start_gather, start_reduce_scatter
from .groups import Sent, Team, backend, group_rank, group_size, hosts, record, resolve_transport
from .reductions import start_reduction
from .work import Pending, Transfer, start_shift

__all__ = [
    "Pending",
    "Sent",
    "Team",
    "Transfer",
    "all_reduce",
    "backend",
    "broadcast",
    "gather_sequence",
    "group_rank",
    "group_size",
    "hosts",
    "record",
    "resolve_transport",
    "start_all_to_all",
    "start_gather",
    "start_reduce_scatter",
    "start_reduction",
    "start_shift",
]
