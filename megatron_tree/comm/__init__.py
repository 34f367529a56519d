"""Everything that leaves this rank: with agree.py the only caller of torch.distributed below the integrations.

- groups.py       who is in a group, and teams: rows and columns of the grid, nested by node
- board.py        what ranks tell each other through the job's key-value store
- watch.py        who has failed: how ranks that wait for one another find out
- machines.py     on which host every rank runs
- work.py         messages and collectives under way, and their time limits
- collectives.py  gathers and reduce-scatters of training, in one or two levels; plain all-reduce and broadcast
- reductions.py   decode's reductions of one state per rank

Tensors that travel are sequence-first ([s, ...], contiguous), so that a gather is a plain concatenation and its result
is read through strides, without a copy. `record` lists what this rank sends.
"""

from .collectives import all_reduce, broadcast, gather_sequence, start_all_to_all, start_gather, start_reduce_scatter
from .groups import Sent, Team, backend, group_rank, group_size, record, resolve_transport
from .health.watch import Task, stage
from .machines import hosts
from .reductions import start_reduction
from .work import Pending, Transfer, start_shift

__all__ = [
    "Pending",
    "Sent",
    "Task",
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
    "stage",
    "start_all_to_all",
    "start_gather",
    "start_reduce_scatter",
    "start_reduction",
    "start_shift",
]
