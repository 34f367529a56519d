"""Everything that leaves this rank: the only caller of torch.distributed below the integrations.

- agreement.py    one call that all ranks make together: check, agree, run; steps of calls
- watchdog.py     ranks that fail or hang become an error that names them, on all ranks
- store.py        the job's key-value store, through which ranks agree and find out who failed
- group.py        a process group, and what this process keeps about it; the record of its calls
- ranks.py        a process group as calls see it: transport, time limit, network; collectives of all its ranks
- interop.py      arguments of the public functions, modules, torch.compile, DeviceMesh and DTensor
- team.py         ranks that gather keys or queries together, nested by node, and their process groups
- links.py        latency and bandwidth between ranks, measured
- work.py         messages and collectives in progress, and their time limits; what was sent, recorded for tests
- collectives.py  gathers and reduce-scatters of a team, in one or two levels
- shared/         small collectives of the ranks of one host, through memory that they share
- symmetric.py    decode's merges in the memory of GPUs that ranks read from one another
- reductions.py   decode's reductions of one state per rank; the k-th largest of all ranks' integers
- wire.py         JSON values between ranks
- rendezvous.py   the default process group and its store

Tensors that travel are sequence-first ([s, ...], contiguous), so that a gather is a plain concatenation and its result
is read through strides, without a copy.
"""

from .agreement import (
    Agreement,
    CollectiveCall,
    begin_step,
    call_stamp,
    in_step,
    part_of_call,
    shared_checks,
)
from .collectives import start_all_to_all, start_all_to_all_v, start_gather, start_reduce_scatter
from .group import group_rank, group_size
from .interop import check_local, derivative, forward_in_step, outside_graphs, process_group, public_call
from .links import Links, measured_links
from .ranks import Network, Ranks
from .reductions import Reduction, by_owner, kth_largest
from .team import Team
from .watchdog import monitored, waited_s
from .work import Pending, Sent, Transfer, on_streams, record, start_shift, wait_until

__all__ = [
    "Agreement",
    "CollectiveCall",
    "Links",
    "Network",
    "Pending",
    "Ranks",
    "Reduction",
    "Sent",
    "Team",
    "Transfer",
    "begin_step",
    "by_owner",
    "call_stamp",
    "check_local",
    "derivative",
    "forward_in_step",
    "group_rank",
    "group_size",
    "in_step",
    "kth_largest",
    "measured_links",
    "monitored",
    "on_streams",
    "outside_graphs",
    "part_of_call",
    "process_group",
    "public_call",
    "record",
    "shared_checks",
    "start_all_to_all",
    "start_all_to_all_v",
    "start_gather",
    "start_reduce_scatter",
    "start_shift",
    "wait_until",
    "waited_s",
]
