"""Attention forward and backward over a sharded sequence: ring, KV gather, pure tree, the best grid without an exchange
of heads, Ulysses, the planner's choice, and torch's own context parallelism."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor

from .. import comm, kernels
from ..attention.functional import tree_attn_func
from ..config import AttnSpec, TreeConfig
from ..kernels import reference
from ..layout import Segment, shard_positions, shard_segments
from ..plan import Shape, Topology, place, plan_training
from . import rivals, runs, session
from .accelerator import attention_flops, visible_pairs
from .decode import uneven
from .kernel_cases import DTYPES
from .measure import Laps, relative_error, shared_tensor, time_together
from .runs import Case, Machines, Settings

PINS: dict[str, Callable[[Machines], dict]] = {
    "ring": lambda m: dict(schedule="ring"),
    "kv_gather": lambda m: dict(grid=(1, m.ranks)),
    "pure_tree": lambda m: dict(grid=(m.ranks, 1)),
    "grid": lambda m: dict(ulysses_size=1),
    "ulysses": lambda m: dict(ulysses_size=m.ranks),
    "auto": lambda m: {},
}
"""Our schedules, by name: options of `TreeConfig` and of the planner on these machines."""
GRADIENTS = 3.0  # their errors may be larger by this factor: dout.v - delta cancels where few keys are visible
EXAMPLES = """\
examples:
  megatron-tree bench train --ranks 4 --seq-len 2k
  megatron-tree bench train --emulate 4x4 --kv-heads 16,4,2 --dilate 10
  megatron-tree bench train --emulate 2x4 4x4 --seq-len 2k 4k --dilate 10       over ranks and lengths
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs.add_arguments(parser, "train", (*PINS, *rivals.TRAIN))


def run(args: argparse.Namespace) -> None:
    """Check, time, print and write CSV, JSON and PNG into args.out. Raises `WrongResult` before any speed is shown."""
    session.run(args, "train", TrainBench)


class Whole:
    """Inputs [b, s, h, d] and float64 results of the whole sequence, in memory shared by forked ranks."""

    def __init__(self, case: Case):
        dtype, rows = DTYPES[case.dtype], (case.batch, case.seq_len)
        q, kv = ((*rows, h, case.head_dim) for h in (case.num_heads, case.num_heads_kv))
        self.q, self.k, self.v, self.dout = (shared_tensor(shape, dtype) for shape in (q, kv, kv, q))
        self.truth = tuple(shared_tensor(shape, torch.float64) for shape in (q, q, kv, kv))  # out, dq, dk, dv

    def solve(self, head: int, spec: AttnSpec) -> None:
        """Compute one KV head and its query heads: the formulas in float64."""
        ratio = self.q.shape[2] // self.k.shape[2]
        of_keys, of_queries = slice(head, head + 1), slice(head * ratio, (head + 1) * ratio)
        heads = of_queries, of_queries, of_keys, of_keys
        q, dout, k, v = (x[:, :, h].double() for x, h in zip((self.q, self.dout, self.k, self.v), heads))
        whole = (Segment(0, 0, self.q.shape[1]),)
        block = dict(q_segments=whole, k_segments=whole, spec=spec)
        out, lse = reference.attn_fwd(q, k, v, **block)
        delta = (dout * out).sum(-1).transpose(1, 2)
        for x, h, result in zip(self.truth, heads, (out, *reference.attn_bwd(dout, q, k, v, lse, delta, **block))):
            x[:, :, h] = result


class TrainBench:
    """Training for `session`. Constructed on every rank with its share of the inputs and of the truth."""

    shared = Whole
    ours = tuple(PINS)
    rivals = rivals.TRAIN

    def __init__(self, case: Case, settings: Settings, topology: str, group, meeting, whole: Whole):
        self.group, self.meeting, self.rank, self.settings = group, meeting, comm.group_rank(group), settings
        self.spec = AttnSpec(softmax_scale=case.head_dim**-0.5)
        self.topology, self.machines, world = topology, case.machines, case.machines.ranks
        rows = shard_positions(case.seq_len, self.rank, world)
        dtype = DTYPES[case.dtype]
        kv = (case.batch, len(rows), *whole.k.shape[2:])
        whole.k[:, rows], whole.v[:, rows] = uneven(kv, dtype, self.rank, world)
        whole.q[:, rows], whole.dout[:, rows] = (
            torch.empty(case.batch, len(rows), *whole.q.shape[2:], dtype=dtype).normal_(
                generator=torch.Generator().manual_seed(1000 * (i + 1) + self.rank)
            )
            for i in range(2)
        )
        meeting.meet(self.rank)
        for head in range(self.rank, case.num_heads_kv, world):
            whole.solve(head, self.spec)
        meeting.meet(self.rank)
        self.q, self.k, self.v, self.dout = (x[:, rows].clone() for x in (whole.q, whole.k, whole.v, whole.dout))
        self.truth = [x[:, rows] for x in whole.truth]
        local = shard_segments(case.seq_len, self.rank, world)
        self.segments = dict(q_segments=local, k_segments=local)
        self.allowed = session.ALLOWED[dtype]

    def step(self, contender: str, laps: Laps) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        if contender in self.rivals:
            out = self.rivals[contender](self.group, *leaves)
        else:
            config = TreeConfig(topology=self.topology, **PINS[contender](self.machines))
            out = tree_attn_func(*leaves, cp_group=self.group, config=config)
        laps("forward")
        grads = torch.autograd.grad(out, leaves, self.dout)
        laps("backward")
        return out.detach(), *grads

    def error(self, results: tuple[Tensor, ...], contender: str) -> float:
        """The worst error on any rank as a fraction of the allowed one."""
        out, *grads = (relative_error(x, truth) / self.allowed for x, truth in zip(results, self.truth))
        local = max(out, *(error / GRADIENTS for error in grads))
        worst = self.meeting.most(self.rank, local)[0]
        return worst if worst == worst else math.inf

    def local_seconds(self) -> float:
        """A rank's compute alone: p pairs of shares of equal cost. With real kernels one pair is measured."""
        p = comm.group_size(self.group)
        if self.settings.compute == "modelled":
            b, _, h, d = self.q.shape
            pairs = b * h * visible_pairs(**self.segments, spec=self.spec)
            both = sum(attention_flops(pairs, d, d, name) for name in ("attn_fwd", "attn_bwd"))
            return p * both / self.settings.speed.flops
        options = dict(**self.segments, spec=self.spec)

        def pair():
            out, lse = kernels.attn_fwd(self.q, self.k, self.v, **options)
            delta = kernels.attn_delta(self.dout, out)
            kernels.attn_bwd(self.dout, self.q, self.k, self.v, lse, delta, **options)

        return p * time_together(pair, self.meeting, self.rank)

    @staticmethod
    def applies(case: Case, contender: str) -> bool:
        """Whether there are heads enough to exchange."""
        return contender != "ulysses" or case.machines.ranks <= case.num_heads

    @staticmethod
    def held_bytes(case: Case) -> int:
        """Bytes that a rank holds before the step: q, k, v and dout of its share."""
        return case.kv_bytes * (1 + case.num_heads // case.num_heads_kv)

    @staticmethod
    def predict(case: Case, topology: Topology, contender: str) -> dict:
        """The plan of one of `ours`, by pass."""
        shape = Shape(case.num_heads, case.num_heads_kv, case.head_dim, case.head_dim)
        call = dict(batch=case.batch, seq_len=case.seq_len, bytes_per_word=DTYPES[case.dtype].itemsize)
        where = dict(topology=topology, placement=place(topology, case.machines.hosts))
        plan = plan_training(case.machines.ranks, shape, **call, **where, **PINS[contender](case.machines))
        return {"forward": plan.forward, "backward": plan.backward}

    @staticmethod
    def limits(case: Case, settings: Settings, local_s: float) -> dict[str, float]:
        """Seconds of a lower bound, and of a ring whose links are always busy."""
        bounds = {"local attention alone": local_s}
        if case.machines.nodes > 1:
            p = case.machines.ranks
            forward_s, backward_s = (local_s / p * part / 7 for part in (2, 5))  # by the matrix products of each pass
            shift_s = settings.latency_s + case.kv_bytes * 8 / settings.rate_bits
            forward_s += (p - 1) * max(forward_s, shift_s)
            backward_s += (p - 1) * max(backward_s, 2 * shift_s - settings.latency_s) + shift_s
            bounds["ring at line rate"] = forward_s + backward_s
        return bounds
