"""One decode step over a sharded KV cache: every schedule on the same inputs, with the planner's prediction."""

from __future__ import annotations

import argparse
import math
import zlib

import torch
from torch import Tensor

from ...core import comm, energy, kernels
from ...core.attention.decode import tree_decode
from ...core.config import TreeConfig
from ...core.merge import pack_state, unpack_state
from ...core.plan import Topology, place, plan_decode
from ..calibrate.kernel_cases import relative_error
from . import cases
from .cases import Bench, Case, Settings
from .options import DECODE as OURS
from .timing import Laps, time_together

ORACLE_TOKENS = 4096  # at a time, in float64
LSE_ALLOWED = 1e-4


def run(args: argparse.Namespace) -> None:
    """Check, time, print and write CSV, JSON and PNG into args.out. Raises `WrongResult` before any speed is shown."""
    cases.run(args, "decode", DecodeBench)


class DecodeBench(Bench):
    """One query over this rank's shard of the keys."""

    ours = OURS

    def __init__(self, case: Case, how: Settings, group, meeting, topology: str, shared: None):
        super().__init__(case, how, group, meeting)
        # "never": gloo's ranks don't meet before the paper's all-reduces, which would cost them a latency
        self.config = TreeConfig(topology=topology, tune=False, check="never")
        ranks = case.machines.ranks
        q = torch.randn(1, 1, case.num_heads, case.head_dim, generator=torch.Generator().manual_seed(0))
        shape = (1, case.seq_len // ranks, case.num_heads_kv, case.head_dim)
        self.q, (self.k, self.v) = q.to(self.dtype), uneven(shape, self.dtype, self.rank, ranks)
        self.truth = self._oracle()

    def _oracle(self) -> tuple[Tensor, Tensor]:
        """out [b, 1, h, d] and lse [b, h, 1] in float64: the shard's parts, merged by the energy's derivative."""
        parts = []
        for at in range(0, max(1, self.k.shape[1]), ORACLE_TOKENS):
            k, v = (x[:, at : at + ORACLE_TOKENS].double() for x in (self.k, self.v))
            parts.append(energy.attention(self.q.double(), k, v, spec=self.spec))
        local = energy.merge_by_energy(*(torch.stack(x) for x in zip(*parts)))
        whole = comm.Ranks.of(self.group).gather(pack_state(*local, torch.float64)[None])
        return energy.merge_by_energy(*unpack_state(whole, torch.float64))

    def step(self, contender: str, laps: Laps) -> tuple[Tensor, ...]:
        options = dict(cp_group=self.group, schedule=contender, config=self.config)
        results = tree_decode(self.q, self.k, self.v, **options, return_lse=True)
        laps("decode")
        return results

    def error(self, results: tuple[Tensor, ...], contender: str) -> float:
        """The worst error on any rank as a fraction of the allowed one; infinite if the ranks' bits differ."""
        out, lse = results
        errors = (
            relative_error(out, self.truth[0]) / self.allowed,
            float((lse - self.truth[1]).abs().max()) / LSE_ALLOWED,
        )
        bits = zlib.crc32(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in results))
        seen = self.meeting.meet(self.rank, *errors, float(bits))
        worst = max(max(a, b) if a == a and b == b else math.inf for a, b, _ in seen)
        return worst if len({s[2] for s in seen}) == 1 else math.inf

    def local_seconds(self) -> float:
        """The local attention alone, all ranks at once: the slowest rank's median."""
        if self.how.compute == "modelled":
            return (self.k.nbytes + self.v.nbytes) / self.how.speed.memory_bandwidth
        cache = kernels.KVCache(self.k, self.v)
        call = lambda: kernels.attn_decode(self.q, cache, self.spec)  # noqa: E731
        return time_together(call, self.meeting, self.rank)

    @staticmethod
    def held_bytes(case: Case) -> int:
        """Bytes that a rank holds before the step: its KV shard."""
        return case.kv_bytes

    @staticmethod
    def predict(case: Case, topology: Topology, contender: str) -> dict:
        """The plan of one of `ours`, by pass."""
        call = dict(rows=case.num_heads, head_dim_v=case.head_dim, topology=topology)
        call.update(placement=place(topology, case.machines.hosts), schedule=contender)
        chosen = plan_decode(case.machines.ranks, kv_bytes=None, **call)  # as tree_decode asks
        weighed = plan_decode(case.machines.ranks, kv_bytes=case.kv_bytes, **call).candidates
        return {"decode": next(c for c in weighed if (c.schedule, c.across) == (chosen.schedule, chosen.across))}

    @staticmethod
    def limits(case: Case, how: Settings, local_s: float) -> dict[str, float]:
        """Seconds of lower bounds, and of a ring whose links are always busy."""
        bounds = {"local attention alone": local_s}
        if case.machines.emulated and case.machines.nodes > 1:
            p, byte_s = case.machines.ranks, 8 / how.rate_bits
            state = 4 * case.num_heads * (case.head_dim + 1)
            bounds["local + log2(p) steps"] = local_s + math.log2(p) * (how.latency_s + state * byte_s)
            bounds["ring at line rate"] = local_s + (p - 1) * max(local_s, how.latency_s + case.kv_bytes * byte_s)
        return bounds


def uneven(shape, dtype: torch.dtype, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Random keys and values [b, s, h, d] of one rank, at a level that differs by rank: wrong merge weights show."""
    level = (rank + 0.5) / world
    generator = torch.Generator().manual_seed(1 + rank)
    k, v = (torch.empty(shape, dtype=dtype).normal_(generator=generator) for _ in range(2))
    return k.mul_(0.5 + level), v.add_(level)
