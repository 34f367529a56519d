"""Attention forward and backward over a sharded sequence: ring, KV gather, pure tree, the best grid without an exchange
of heads, Ulysses, the planner's choice, and torch's own context parallelism. With --pass jvp a forward with tangents,
beside an all-gather and torch.func.jvp of dense attention on every rank; with --pass no-grad a forward under no_grad,
where "auto" is the plan that repeated calls have measured."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ...core import energy, kernels
from ...core.attention.functional import tree_attn_func
from ...core.attention.tuning import REPEATED
from ...core.config import TreeConfig
from ...core.duals import dual
from ...core.kernels import reference
from ...core.kernels.leaves import are_whole
from ...core.layout import Segment, Sharding, shard_positions, shard_segments
from ...core.plan import Shape, Topology, TrainingPlan, place, plan_training
from ...core.plan.plans import DUAL_PRODUCTS
from ...core.spec import AttnSpec
from ..calibrate.kernel_cases import DTYPES, relative_error
from . import cases
from .cases import Bench, Case, Machines, Settings
from .decode import uneven
from .rivals import JVP, TRAIN, no_torch_ring
from .timing import Laps, attention_flops, shared_tensor, time_together, visible_pairs

PINS: dict[str, Callable[[Machines], dict]] = {
    "ring": lambda m: dict(schedule="ring"),
    "kv_gather": lambda m: dict(grid=(1, m.ranks)),
    "pure_tree": lambda m: dict(grid=(m.ranks, 1)),
    "grid": lambda m: dict(ulysses_size=1),
    "ulysses": lambda m: dict(ulysses_size=m.ranks),
    "auto": lambda m: {},
}
"""Our schedules, by name: options of `TreeConfig` and of the planner on these machines."""
TRAINING = PINS | {"same_bits": lambda m: dict(deterministic="ranks")}
"""Those that train; not all have tangents."""
DERIVATIVES = 3.0  # their errors may be larger by this factor: dout.v - delta and r - mu out cancel
ORACLE_STRIP = 256  # queries at a time, in float64


def run(args: argparse.Namespace) -> None:
    """Check, time, print and write CSV, JSON and PNG into args.out. Raises `WrongResult` before any speed is shown."""
    passes = {"training": TrainBench, "jvp": JvpBench, "no-grad": ForwardBench}
    named = "train" if args.passes == "training" else f"train --pass {args.passes}"
    cases.run(args, named, passes[args.passes])


class Whole:
    """Inputs and float64 results of the whole sequence, [b, s, h, d] each, in memory shared by forked ranks."""

    inputs_of, results_of = "qkkq", "qqkk"
    """Whose heads they have: q, k, v, dout; out, dq, dk, dv."""

    def __init__(self, case: Case):
        shapes = {x: (1, case.seq_len, h, case.head_dim) for x, h in zip("qk", (case.num_heads, case.num_heads_kv))}
        self.inputs = [shared_tensor(shapes[x], DTYPES[case.dtype]) for x in self.inputs_of]
        self.truth = [shared_tensor(shapes[x], torch.float64) for x in self.results_of]

    def draw(self, rows: Tensor, rank: int, world: int) -> None:
        """Draw this rank's rows of the inputs."""
        q, k, v, *rest = self.inputs
        k[:, rows], v[:, rows] = uneven((k.shape[0], len(rows), *k.shape[2:]), k.dtype, rank, world)
        for i, x in enumerate((q, *rest)):
            generator = torch.Generator().manual_seed(1000 * (i + 1) + rank)
            x[:, rows] = torch.empty_like(x[:, rows]).normal_(generator=generator)

    def solve(self, head: int, spec: AttnSpec) -> None:
        """Compute one KV head and its query heads."""
        ratio = self.inputs[0].shape[2] // self.inputs[1].shape[2]
        heads = {"k": slice(head, head + 1), "q": slice(head * ratio, (head + 1) * ratio)}
        inputs = [x[:, :, heads[of]].double() for x, of in zip(self.inputs, self.inputs_of)]
        for x, of, result in zip(self.truth, self.results_of, self.solution(spec, *inputs)):
            x[:, :, heads[of]] = result

    @staticmethod
    def solution(spec: AttnSpec, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Sequence[Tensor]:
        """By the formulas."""
        whole = (Segment(0, 0, q.shape[1]),)
        block = dict(q_segments=whole, k_segments=whole, spec=spec)
        out, lse = reference.attn_fwd(q, k, v, **block)
        delta = (dout * out).sum(-1).transpose(1, 2)
        return out, *reference.attn_bwd(dout, q, k, v, lse, delta, **block)


class TrainBench(Bench):
    """A forward and a backward, on this rank's share of the inputs."""

    shared = Whole
    ours = tuple(TRAINING)
    rivals = TRAIN
    missing = staticmethod(no_torch_ring)

    def __init__(self, case: Case, how: Settings, group, meeting, topology: str, whole: Whole):
        super().__init__(case, how, group, meeting)
        self.topology, world = topology, case.machines.ranks
        rows = shard_positions(case.seq_len, self.rank, world)
        whole.draw(rows, self.rank, world)
        meeting.meet(self.rank)
        for head in range(self.rank, case.num_heads_kv, world):
            whole.solve(head, self.spec)
        meeting.meet(self.rank)
        self.q, self.k, self.v, *self.rest = (x[:, rows].clone() for x in whole.inputs)
        self.truth = [x[:, rows] for x in whole.truth]
        local = shard_segments(case.seq_len, self.rank, world)
        self.segments = dict(q_segments=local, k_segments=local)

    def attend(self, contender: str, *qkv: Tensor) -> Tensor:
        """out of one of `ours`."""
        config = TreeConfig(topology=self.topology, tune=False, **TRAINING[contender](self.case.machines))
        return tree_attn_func(*qkv, cp_group=self.group, config=config)

    def step(self, contender: str, laps: Laps) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        if contender in self.rivals:
            out = self.rivals[contender](self.group, *leaves)
        else:
            out = self.attend(contender, *leaves)
        laps("forward")
        grads = torch.autograd.grad(out, leaves, *self.rest)
        laps("backward")
        return out.detach(), *grads

    def error(self, results: tuple[Tensor, ...], contender: str) -> float:
        """The worst error on any rank as a fraction of the allowed one."""
        out, *derived = (relative_error(x, truth) / self.allowed for x, truth in zip(results, self.truth))
        local = max([out, *(error / DERIVATIVES for error in derived)])
        worst = self.meeting.most(self.rank, local)[0]
        return worst if worst == worst else math.inf

    def local_seconds(self) -> float:
        """A rank's compute alone: p pairs of shares of equal cost. With real kernels one pair is measured."""
        p = self.case.machines.ranks
        if self.how.compute == "modelled":
            return p * self.pair_flops() / self.how.speed.flops
        return p * time_together(self.pair, self.meeting, self.rank)

    def pair_flops(self, names: Iterable[str] = ("attn_fwd", "attn_bwd")) -> float:
        """Of a pair of shares."""
        b, _, h, d = self.q.shape
        pairs = b * h * visible_pairs(**self.segments, spec=self.spec)
        return sum(attention_flops(pairs, d, d, name) for name in names)

    def pair(self) -> None:
        """Compute a pair of shares."""
        options = dict(**self.segments, spec=self.spec)
        out, lse = kernels.attn_fwd(self.q, self.k, self.v, **options)
        delta = kernels.attn_delta(*self.rest, out)
        kernels.attn_bwd(*self.rest, self.q, self.k, self.v, lse, delta, **options)

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
        plan = _plan(case, topology, contender)
        return {"forward": plan.forward, "backward": plan.backward}

    @staticmethod
    def limits(case: Case, how: Settings, local_s: float) -> dict[str, float]:
        """Seconds of a lower bound, and of a ring whose links are always busy."""
        bounds = {"local attention alone": local_s}
        if case.machines.nodes > 1:
            p = case.machines.ranks
            forward_s, backward_s = (local_s / p * part / 7 for part in (2, 5))  # by the matrix products of each pass
            shift_s = how.latency_s + case.kv_bytes * 8 / how.rate_bits
            forward_s += (p - 1) * max(forward_s, shift_s)
            backward_s += (p - 1) * max(backward_s, 2 * shift_s - how.latency_s) + shift_s
            bounds["ring at line rate"] = forward_s + backward_s
        return bounds


class WholeWithTangents(Whole):
    inputs_of, results_of = "qkkqkk", "qq"
    """Whose heads they have: q, k, v and their tangents; out and its tangent."""

    @staticmethod
    def solution(spec: AttnSpec, q: Tensor, k: Tensor, v: Tensor, *tangents: Tensor) -> Sequence[Tensor]:
        """By autograd of the energy, strip by strip."""
        positions, strips = torch.arange(q.shape[1]), []
        for rows in positions.split(ORACLE_STRIP):
            seen = slice(0, int(rows[-1]) + 1)
            keep = energy.visible(rows, positions[seen], spec)
            qkv, along = ((x[:, rows], y[:, seen], z[:, seen]) for x, y, z in ((q, k, v), tangents))
            out, _ = energy.attention(*qkv, spec=spec, keep=keep)
            strips.append((out, energy.attention_tangents(*qkv, along, spec=spec, keep=keep)[0]))
        return [torch.cat(parts, 1) for parts in zip(*strips)]


class JvpBench(TrainBench):
    """A forward with tangents."""

    shared = WholeWithTangents
    ours = tuple(PINS)
    rivals = JVP
    missing = staticmethod(lambda: None)

    def step(self, contender: str, laps: Laps) -> tuple[Tensor, ...]:
        inputs, tangents = (self.q, self.k, self.v), tuple(self.rest)
        if contender in self.rivals:
            results = self.rivals[contender](self.group, inputs, tangents)
        else:
            results = torch.func.jvp(functools.partial(self.attend, contender), inputs, tangents)
        laps("jvp")
        return results

    def pair_flops(self) -> float:
        return DUAL_PRODUCTS * super().pair_flops(("attn_fwd",))

    def pair(self) -> None:
        duals = list(map(dual, (self.q, self.k, self.v), self.rest))
        width = max(self.q.shape[-1], self.v.shape[-1])
        backend = kernels.choose(self.q, self.k, self.v, self.spec).for_duals(self.q.dtype, width)
        backend.attn_fwd(*duals, **self.segments, spec=self.spec)

    @staticmethod
    def held_bytes(case: Case) -> int:
        """Bytes that a rank holds before the step: q, k, v and their tangents of its share."""
        return case.kv_bytes * (2 + case.num_heads // case.num_heads_kv)

    @staticmethod
    def predict(case: Case, topology: Topology, contender: str) -> dict:
        return {"jvp": _plan(case, topology, contender, with_lse=True, dual=True).forward}

    @staticmethod
    def limits(case: Case, how: Settings, local_s: float) -> dict[str, float]:
        return _forward_limits(case, how, local_s, sent=2)


class ForwardBench(TrainBench):
    """A forward under no_grad. "auto" is the plan that its repeated calls have measured, as for every user."""

    ours = tuple(PINS)

    def __init__(self, case: Case, how: Settings, *where):
        super().__init__(case, how, *where)
        if "auto" in how.schedules:
            for _ in range(REPEATED + case.machines.ranks + 1):  # the last of these calls measures
                self.step("auto", lambda name: None)

    def attend(self, contender: str, *qkv: Tensor) -> Tensor:
        if contender != "auto":
            return super().attend(contender, *qkv)
        return tree_attn_func(*qkv, cp_group=self.group, config=TreeConfig(topology=self.topology))

    def step(self, contender: str, laps: Laps) -> tuple[Tensor, ...]:
        qkv = self.q, self.k, self.v
        with torch.no_grad():
            out = self.rivals[contender](self.group, *qkv) if contender in self.rivals else self.attend(contender, *qkv)
        laps("forward")
        return (out,)

    def pair_flops(self) -> float:
        return super().pair_flops(("attn_fwd",))

    def pair(self) -> None:
        kernels.attn_fwd(self.q, self.k, self.v, **self.segments, spec=self.spec)

    @staticmethod
    def predict(case: Case, topology: Topology, contender: str) -> dict:
        """Of a measured plan nothing is predicted."""
        return {} if contender == "auto" else {"forward": _plan(case, topology, contender).forward}

    @staticmethod
    def limits(case: Case, how: Settings, local_s: float) -> dict[str, float]:
        return _forward_limits(case, how, local_s, sent=1)


def _forward_limits(case: Case, how: Settings, local_s: float, *, sent: int) -> dict[str, float]:
    """`limits` of a forward that sends so many times the keys and values."""
    bounds = {"local attention alone": local_s}
    if case.machines.nodes > 1:
        p = case.machines.ranks
        shift_s = how.latency_s + sent * case.kv_bytes * 8 / how.rate_bits
        bounds["ring at line rate"] = local_s / p + (p - 1) * max(local_s / p, shift_s)
    return bounds


def _plan(case: Case, topology: Topology, contender: str, **derivatives: bool) -> TrainingPlan:
    shape = Shape(case.num_heads, case.num_heads_kv, case.head_dim, case.head_dim)
    call = dict(batch=1, seq_len=case.seq_len, bytes_per_word=DTYPES[case.dtype].itemsize)
    where = dict(topology=topology, placement=place(topology, case.machines.hosts))
    pins = TRAINING[contender](case.machines)
    if pins.get("deterministic") == "ranks":
        pins["integers"] = are_whole(Sharding(seq_len=case.seq_len, world=case.machines.ranks, layout="zigzag"))
    return plan_training(case.machines.ranks, shape, **call, **where, **derivatives, **pins)
