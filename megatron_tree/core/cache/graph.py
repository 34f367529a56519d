"""Decode steps, each captured once in a CUDA graph for a number of rows and a capacity, and replayed for every token.

    step 1 of a capacity   the static step (static.py) is run: kernels are compiled, ranks compare their calls
    step 2                 it is captured; the graph is replayed
    later steps            the numbers of the step are copied to the device; the graph is replayed

Which of them it is depends on what all ranks know, but for one case: a rank whose pages have moved, because its cache
has grown, captures again while others only replay. Capturing sends nothing, unless NCCL registers the buffers that it
captures: ranks then wait for one another. NCCL_GRAPH_REGISTER=0 forbids it, if set before the first communicator.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from .. import comm
from ..attention.decode import TRUSTING
from ..config import TreeConfig
from ..kernels import ACCELERATORS
from ..log import warn_once
from .forward import appended
from .static import Capacities, Capacity, StaticPass, StepInputs
from .trace import traced

MAX_GRAPHS = 32  # the least recently used one is dropped
BACKENDS = ("auto", "triton")  # others read lengths on the host


def check_cuda_graphs(*, device_type: str, schedule: str, config: TreeConfig) -> None:
    """Raise ``ValueError`` where decode steps with these options can't be captured, whatever the model."""
    reason = None
    if device_type not in ACCELERATORS:
        reason = f"the model is on device type {device_type!r}, and only a GPU has CUDA graphs"
    elif schedule == "ring":
        reason = "schedule='ring' depends on how many tokens each rank holds; choose another one, or 'auto'"
    elif config.check not in TRUSTING:
        reason = f"check={config.check!r} looks at every call on the host; choose 'first' or 'never'"
    elif config.backend not in BACKENDS:
        reason = f"backend={config.backend!r} reads lengths on the host; choose 'triton' or 'auto'"
    elif config.deterministic == "ranks":
        reason = "deterministic='ranks' reads lengths on the host; choose True"
    if reason is not None:
        raise ValueError(f"cuda_graphs=True can't be had: {reason}; or leave cuda_graphs out")


def check_runner(runner) -> None:
    """Raise ``ValueError`` where a `RowRunner`'s decode steps can't be captured."""
    check_cuda_graphs(device_type=runner.device.type, schedule=runner.schedule, config=runner.config)
    groups = [group for group in (runner.cp_group, runner.token_group) if comm.group_size(group) > 1]
    others = [x for group in groups if (x := comm.Ranks.of(group, runner.device).backend) != "nccl"]
    pages = runner.store.layers[0]
    reason = runner.depends_on_host
    if others:
        reason = f"collectives of {others[0]} can't be captured, only those of nccl"
    elif pages.latent and not pages.joined:
        reason = "latents in 8 bits are put together on the host; choose another dtype of the cache"
    if reason is not None:
        raise ValueError(f"cuda_graphs=True can't be had: {reason}; or leave cuda_graphs out")
    if groups and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        warn_once(
            "cuda_graphs=True: a rank whose cache has grown captures alone, and NCCL may let it wait for the others "
            "until the time limit: set NCCL_GRAPH_REGISTER=0 before process groups are made"
        )


class CudaGraph:
    """A step that was captured. logits: [rows, 1, vocab_size], written by every replay."""

    def __init__(self, run: Callable[[], Tensor], pool, stream):
        self._graph, self._event = torch.cuda.CUDAGraph(), torch.cuda.Event()
        # other threads, NCCL's among them, may ask for events meanwhile
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.logits = run()

    def replay(self) -> None:
        """Run it again, on what its inputs hold now."""
        self._graph.replay()
        self._event.record()

    def is_done(self) -> bool:
        """Whether the device has finished the last replay."""
        return self._event.query()


class _Step:
    """The static step of one capacity."""

    def __init__(self, inputs: StepInputs):
        self.inputs = inputs
        self.captured: CudaGraph | None = None
        self.moves = 0
        """Of the pages until then: a graph reads and writes them where they were."""


class GraphedSteps:
    """Steps of one token in each row of a `RowRunner`, see this module.

    capture: makes a `CudaGraph`, or what has its methods, of a function without arguments that returns logits.
    Raises: ValueError, see `check_runner`.
    """

    def __init__(self, runner, capture: Callable[[Callable[[], Tensor]], CudaGraph] | None = None):
        if capture is None:
            check_runner(runner)
            pool = torch.cuda.graph_pool_handle()  # memory that the graphs share: one of them runs at a time
            capture = functools.partial(CudaGraph, pool=pool, stream=torch.cuda.Stream(runner.device))
        self._runner, self._store, self._capture = runner, runner.store, capture
        self._capacities = Capacities(runner.store)
        self._steps: OrderedDict[Capacity, _Step] = OrderedDict()
        self._is_static, self._resets = False, runner.store.resets

    def step(self, rows: list[int], tokens: Tensor) -> Tensor:
        """Append a token to each row, tokens int64 [len(rows), 1]. Collective; a failure removes them again.

        Returns: fp32 logits [len(rows), 1, vocab_size], a copy.
        Raises: ValueError if the model's step depends on what the host knows of lengths.
        """
        store, runner = self._store, self._runner
        with appended(store, rows, 1, (runner.cp_group, runner.token_group)) as append:
            if self._resets != store.resets:  # there may be no pages yet, and none may be made while a step is captured
                self._steps.clear()
                self._resets = store.resets
            capacity = self._capacities.of(rows)
            step, is_known = self._steps.get(capacity), capacity in self._steps
            if not is_known:
                step = self._steps[capacity] = _Step(StepInputs(store, capacity, runner.device))
                if len(self._steps) > MAX_GRAPHS:
                    self._steps.popitem(last=False)
            self._steps.move_to_end(capacity)
            step.inputs.fill(append, tokens)
            try:
                logits = self._replay(step) if is_known else self._run(step.inputs)
                if not self._is_static:
                    self._prove(step.inputs)
                    self._is_static = True
            except BaseException:
                self._steps.pop(capacity, None)
                raise
            return logits[: len(rows)].to(torch.float32, copy=True)

    def _run(self, inputs: StepInputs, end: int | None = None) -> Tensor:
        runner = self._runner
        forward = StaticPass(inputs, end=end, **runner.of_passes)
        with runner.running(forward):
            return runner._run(forward, inputs.tokens, inputs.positions, keep=None)

    def _prove(self, inputs: StepInputs) -> None:
        """Raise ``ValueError`` unless the step does the same whatever the host takes for the rows' length."""
        traces = []
        try:
            for end in (inputs.capacity.tokens, inputs.capacity.tokens - 1):
                with traced() as operations:
                    self._run(inputs, end)
                traces.append(operations)
            reason = _difference(*traces)
        except ValueError as error:
            raise ValueError(_REFUSED.format(error)) from error
        if reason is not None:
            raise ValueError(_REFUSED.format(reason))

    def _replay(self, step: _Step) -> Tensor:
        runner = self._runner
        capacity = step.inputs.capacity
        with runner.ranks.call("decode step") as call:
            call.agree(**capacity._asdict(), schedule=runner.schedule, config=runner.config)
            self._store.reserve()
            moves = self._store.moves
            if step.captured is None or step.moves != moves:
                step.captured = None  # its memory is free for the next one
                with comm.part_of_call():
                    step.captured = self._capture(lambda: self._run(step.inputs))
                step.moves = moves
            step.captured.replay()
            comm.wait_until(step.captured.is_done, "a decode step", runner.token_ranks)
        return step.captured.logits


_REFUSED = "cuda_graphs=True can't be had for this model: {}; leave cuda_graphs out"


def _difference(before: list[tuple], after: list[tuple]) -> str | None:
    """The first operation in which two runs differ; None if they are equal."""
    pairs = zip(before, after)
    for one, other in pairs:
        if one != other:
            return f"what it does depends on what the host knows of the rows' length: {one} or {other}"
    if len(before) != len(after):
        return f"{len(before)} operations or {len(after)}, by what the host knows of the rows' length"
    return None
