"""Attention forward and backward over packed documents: cut zigzag one by one, with ring, KV gather, Ulysses and the
planner's choice; cut as a whole; and dispatched, short ones whole on one rank."""

from __future__ import annotations

import argparse
import itertools
import random
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..attention.functional import tree_attn_varlen_func
from ..attention.sequences import shard_sequence
from ..config import MaskBounds, TreeConfig
from ..layout import Dispatched, Packed, Segment, Sharding, documents_over, sequences_of, spread_documents
from ..plan import Mask, Topology
from . import runs, session
from .measure import Laps
from .runs import Case
from .train import PINS, TrainBench, Whole, planned

LONGEST = 100  # the longest document is 1 / LONGEST of the sequence, so there are about twice as many
EXAMPLES = """\
examples:
  megatron-tree bench documents --ranks 4 --seq-len 8k
  megatron-tree bench documents --emulate 4x1 --seq-len 8k --kv-heads 16,4 --dilate 10
"""


class DocumentContender(NamedTuple):
    """How documents are sharded, and a schedule of train.PINS."""

    sharding: str
    schedule: str = "auto"


CONTENDERS = {
    **{name: DocumentContender("one by one", name) for name in ("ring", "kv_gather", "ulysses")},
    "one_by_one": DocumentContender("one by one"),
    "as_a_whole": DocumentContender("as a whole"),
    "auto": DocumentContender("dispatched"),
}
"""By name; "auto" is what `dispatch_documents` and the planner make of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs.add_arguments(parser, "documents", CONTENDERS)


def run(args: argparse.Namespace) -> None:
    """Check, time, print and write CSV, JSON and PNG into args.out. Raises `WrongResult` before any speed is shown."""
    if args.batch > 1:
        raise ValueError(f"--batch {args.batch}: documents are packed in one row")
    session.run(args, "documents", DocumentsBench)


def lengths_of(seq_len: int) -> tuple[int, ...]:
    """The documents of a sequence: 1 to seq_len / 100 tokens each, all lengths equally often."""
    draw, lengths, left = random.Random(0), [], seq_len
    while left:
        lengths.append(min(left, draw.randint(1, max(1, seq_len // LONGEST))))
        left -= lengths[-1]
    return tuple(lengths)


def layout_of(name: str, lengths: tuple[int, ...], world: int) -> Packed | Dispatched:
    """The layout of a contender."""
    sharding = CONTENDERS[name].sharding
    if sharding == "one by one":
        return Packed(lengths, tuple(-(-n // (2 * world)) * 2 * world for n in lengths))
    return spread_documents(lengths, world) if sharding == "dispatched" else documents_over(lengths, lengths, world)


class PackedWhole(Whole):
    """The whole sequence, in which no document sees another."""

    def __init__(self, case: Case):
        super().__init__(case)
        lengths = lengths_of(case.seq_len)
        starts = itertools.accumulate(lengths, initial=0)
        self.segments = tuple(Segment(start, 0, n, i) for i, (start, n) in enumerate(zip(starts, lengths)))


class DocumentsBench(TrainBench):
    """Packed documents for `session`: the inputs of `bench train`, sharded as each contender does it."""

    shared = PackedWhole
    ours = tuple(CONTENDERS)
    rivals: ClassVar[dict] = {}

    def __init__(self, case, settings, topology: str, group, meeting, whole: PackedWhole):
        super().__init__(case, settings, topology, group, meeting, whole)
        self.lengths, world = lengths_of(case.seq_len), self.machines.ranks
        self.layouts = {name: layout_of(name, self.lengths, world) for name in CONTENDERS}
        local = self.layouts["auto"].segments(self.rank, world)
        self.segments = dict(q_segments=local, k_segments=local)  # most documents are whole on a rank
        inputs = whole.q, whole.k, whole.v, whole.dout
        self.inputs, self.truths = (
            {name: [self._shard(x, layout) for x in tensors] for name, layout in self.layouts.items()}
            for tensors in (inputs, whole.truth)
        )

    def _shard(self, x: Tensor, layout: Packed | Dispatched) -> Tensor:
        """This rank's rows of x [1, s, h, d]."""
        if isinstance(layout, Dispatched):
            return shard_sequence(x[0], self.group, 0, layout)
        padded = x.new_zeros(layout.starts[-1], *x.shape[2:])
        rows = [torch.arange(start, start + n) for start, n in zip(layout.starts, layout.lengths)]
        padded[torch.cat(rows)] = x[0]
        return shard_sequence(padded, self.group, 0, layout)

    def config(self, name: str) -> TreeConfig:
        return TreeConfig(topology=self.topology, **PINS[CONTENDERS[name].schedule](self.machines))

    def step(self, contender: str, laps: Laps) -> tuple[Tensor, ...]:
        *leaves, dout = (x.detach() for x in self.inputs[contender])
        leaves, layout = [x.requires_grad_() for x in leaves], self.layouts[contender]
        documents = dict(layout=layout)
        if isinstance(layout, Packed):
            bounds = [0, *itertools.accumulate(layout.lengths)]
            documents = dict(cu_seqlens=bounds, cu_seqlens_padded=layout.starts)
        out = tree_attn_varlen_func(*leaves, **documents, cp_group=self.group, config=self.config(contender))
        laps("forward")
        grads = torch.autograd.grad(out, leaves, dout)
        laps("backward")
        return out.detach(), *grads

    def checked(self, results: tuple[Tensor, ...], contender: str) -> list[tuple[Tensor, Tensor]]:
        local = self.layouts[contender].segments(self.rank, self.machines.ranks)
        real = sequences_of(local, len(results[0])) >= 0
        return [(x[real], truth[real]) for x, truth in zip(results, self.truths[contender])]

    @staticmethod
    def applies(case: Case, contender: str) -> bool:
        """Whether there are heads enough to exchange."""
        return TrainBench.applies(case, CONTENDERS[contender].schedule)

    @staticmethod
    def predict(case: Case, topology: Topology, contender: str) -> dict:
        world, lengths = case.machines.ranks, lengths_of(case.seq_len)
        layout = layout_of(contender, lengths, world)
        shares = Sharding(seq_len=layout.rows(world) * world, world=world, layout=layout)
        return planned(
            case,
            topology,
            PINS[CONTENDERS[contender].schedule](case.machines),
            seq_len=shares.seq_len,
            visible_fraction=layout.pairs / shares.seq_len**2,
            mask=Mask(MaskBounds(None, 0), shares, shares) if isinstance(layout, Dispatched) else None,
        )
