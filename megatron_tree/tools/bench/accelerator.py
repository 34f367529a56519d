"""An emulated accelerator: kernels that take as long as on a real one, and return results computed before.

With sixteen ranks on two cores, timings of real kernels would show contention for the cores. So the first step of a
schedule computes with real kernels and is checked against the oracle; the kernels' results are recorded. Timed steps
communicate everything again, but instead of running a kernel they sleep as long as an accelerator of the given speed
would compute, and return the recorded result. Records are keyed by the shapes and by samples of the queries and keys
that have arrived: a timed step that receives anything else fails.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ...core.kernels import Backend
from ...core.kernels.blocks import DIAGONAL, split
from ...core.plan.sizes import DUAL_PRODUCTS

SAMPLES = 32  # rows of a tensor that identify it


class UnseenInput(RuntimeError):
    """A timed step received queries or keys that the checked step of this schedule did not have."""


class Speed(NamedTuple):
    """The emulated accelerator's bytes/s of KV cache in decoding, and flop/s in training."""

    memory_bandwidth: float | None
    flops: float | None


ACCELERATOR = Speed(memory_bandwidth=7e9, flops=1e12)  # a GPU, scaled down as far as the emulated network


def sleep_until(instant: float) -> None:
    """Sleep until an instant of time.monotonic(); spinning would delay other ranks on the same core."""
    while (left := instant - time.monotonic()) > 0:
        time.sleep(left)


class Accelerator:
    """Replaces the kernels while `recording` or `replaying` is open."""

    def __init__(self, speed: Speed):
        self.speed = speed
        self._results: dict[tuple, object] = {}

    def recording(self) -> contextlib.AbstractContextManager:
        """Run the real kernels and record their results; drops earlier records."""
        self._results.clear()
        return _replaced(self._record)

    def replaying(self) -> contextlib.AbstractContextManager:
        """Sleep instead of computing; return copies of the recorded results."""
        return _replaced(self._replay)

    def _record(self, name: str, run, args, options, dual: bool):
        result = run(*args, **options)
        self._results[_key(name, args, options)] = _copy(result)
        return result

    def _replay(self, name: str, run, args, options, dual: bool):
        end = time.monotonic() + self.seconds(name, args, options, dual)
        key = _key(name, args, options)
        if key not in self._results:
            raise UnseenInput(f"{name} got queries or keys that the checked step did not have: {key[1]}")
        result = _copy(self._results[key])
        sleep_until(end)
        return result

    def seconds(self, name: str, args, options, dual: bool) -> float:
        """Duration of one call: from the shard's bytes for decoding, from the visible pairs' flops for training. dual:
        of dual tensors, with twice the columns."""
        if name == "attn_decode":
            return (args[1].k.nbytes + args[1].values.nbytes) / self.speed.memory_bandwidth
        q, _, v = args[1:4] if name == "attn_bwd" else args[:3]
        pairs = visible_pairs(options["q_segments"], options["k_segments"], options["spec"])
        flops = attention_flops(pairs * q.shape[0] * q.shape[2], q.shape[3], v.shape[3], name)
        return flops * (DUAL_PRODUCTS / 2 if dual else 1) / self.speed.flops


def visible_pairs(q_segments, k_segments, spec) -> int:
    """Number of visible (query, key) pairs of the segments."""
    blocks = split(q_segments, k_segments, spec)
    return sum(b.q_len * (b.q_len + 1) // 2 if b.kind == DIAGONAL else b.q_len * b.k_len for b in blocks)


def attention_flops(pairs: int, head_dim: int, head_dim_v: int, name: str = "attn_fwd") -> float:
    """Flops of the matrix products over `pairs` (query, key, head) triples: two products forward, five backward."""
    return 2.0 * pairs * (3 * head_dim + 2 * head_dim_v if name == "attn_bwd" else head_dim + head_dim_v)


@contextlib.contextmanager
def _replaced(handler) -> Iterator[None]:
    """Replace the functions of every backend by handler(name, original, args, options, whether tensors are dual)."""
    originals = {name: getattr(Backend, name) for name in ("attn_decode", "attn_fwd", "attn_bwd")}

    def replaced(name: str, run):
        return lambda self, *args, **options: handler(name, functools.partial(run, self), args, options, self.dual)

    for name, run in originals.items():
        setattr(Backend, name, replaced(name, run))
    try:
        yield
    finally:
        for name, run in originals.items():
            setattr(Backend, name, run)


def _copy(result):
    return result.clone() if isinstance(result, Tensor) else tuple(x.clone() for x in result)


def _key(name: str, args, options) -> tuple:
    q, k = args[1:3] if name == "attn_bwd" else args[:2]
    k = k.k if name == "attn_decode" else k
    segments = options.get("q_segments"), options.get("k_segments")
    return name, (tuple(q.shape), tuple(k.shape)), segments, _sample(q), _sample(k)


def _sample(x: Tensor) -> tuple[float, ...]:
    """A few values of x [b, s, h, d], spread over its rows."""
    if x.numel() == 0:
        return ()
    return tuple(x[0, :: max(1, x.shape[1] // SAMPLES), 0, 0].tolist())
