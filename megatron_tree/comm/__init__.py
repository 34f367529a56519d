"""Everything that leaves this rank: the only caller of torch.distributed below the integrations.

- call_record.py  the calls of a group on this rank: numbers, stamps, which ones still run
- calls.py        one call that all ranks make together: check, agree, run
- group.py        a process group, and what this process keeps about it
- interop.py      arguments of the public functions, modules, torch.compile, DeviceMesh and DTensor
- transforms.py   torch.func
- team.py         ranks that gather keys or queries together, nested by node, and their process groups
- machines.py     on which host every rank runs
- links.py        latency and bandwidth between ranks, measured
- work.py         messages and collectives in progress, and their time limits
- collectives.py  gathers and reduce-scatters of training, in one or two levels; sums and broadcast
- shared/         small collectives of the ranks of one host, through memory that they share
- stages.py       the order in which gathers, computation and reductions of head chunks overlap
- reductions.py   decode's reductions of one state per rank
- counting.py     the k-th largest of all ranks' integers, by counting
- local_share.py  the reduction that gives each rank its rows of the state
- wire.py         JSON values between ranks
- rendezvous.py   the default process group and its store
- traffic.py      what this rank sends, recorded for tests and benchmarks
- health/         ranks that differ, fail or hang

Tensors that travel are sequence-first ([s, ...], contiguous), so that a gather is a plain concatenation and its result
is read through strides, without a copy.
"""

from .calls import (
    Agreement,
    CollectiveCall,
    begin_step,
    call_stamp,
    collective_call,
    in_step,
    part_of_call,
    shared_checks,
)
from .collectives import (
    all_arrive,
    all_reduce,
    broadcast,
    gather_rows,
    gather_sequence,
    start_all_to_all,
    start_all_to_all_v,
    start_gather,
    start_reduce_scatter,
    sum_over_ranks,
)
from .counting import kth_largest
from .group import backend, group_rank, group_size, resolve_transport
from .health.monitored import monitored, waited_s
from .interop import check_local, derivative, forward_in_step, outside_graphs, process_group, public_call
from .links import Links, measured_links
from .local_share import by_owner
from .machines import hosts, ranks_by_host
from .reductions import Reducer, prepare_reduction
from .shared import resolve_shared
from .stages import Stages, run_stages
from .team import Team, neighbours
from .traffic import Sent, record
from .work import Pending, Transfer, start_shift, wait_until

__all__ = [
    "Agreement",
    "CollectiveCall",
    "Links",
    "Pending",
    "Reducer",
    "Sent",
    "Stages",
    "Team",
    "Transfer",
    "all_arrive",
    "all_reduce",
    "backend",
    "begin_step",
    "broadcast",
    "by_owner",
    "call_stamp",
    "check_local",
    "collective_call",
    "derivative",
    "forward_in_step",
    "gather_rows",
    "gather_sequence",
    "group_rank",
    "group_size",
    "hosts",
    "in_step",
    "kth_largest",
    "measured_links",
    "monitored",
    "neighbours",
    "outside_graphs",
    "part_of_call",
    "prepare_reduction",
    "process_group",
    "public_call",
    "ranks_by_host",
    "record",
    "resolve_shared",
    "resolve_transport",
    "run_stages",
    "shared_checks",
    "start_all_to_all",
    "start_all_to_all_v",
    "start_gather",
    "start_reduce_scatter",
    "start_shift",
    "sum_over_ranks",
    "wait_until",
    "waited_s",
]
