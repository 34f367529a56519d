"""Decode steps that are replayed beside the same steps as they are."""

import torch

from megatron_tree.core.cache.graph import GraphedSteps
from megatron_tree.tools.bench.device_checks import VOCAB, SmallRunner
from support.ranks import largest
from support.tape import TapedSteps


class Pair:
    """Two runners over the same rows, one of which replays its steps: tapes of them, or with a GPU CUDA graphs."""

    def __init__(self, runners):
        self.ordinary, self.graphed = runners
        self.graphed._graphs = (GraphedSteps if self.graphed.device.type == "cuda" else TapedSteps)(self.graphed)
        self.worst, self._random = 0.0, torch.Generator().manual_seed(3)

    @classmethod
    def of(cls, **options):
        options = {"page_size": 4, **options}
        return cls([SmallRunner(**options) for _ in range(2)])

    def both(self, method, *args):
        results = [getattr(runner, method)(*args) for runner in (self.ordinary, self.graphed)]
        if isinstance(results[0], torch.Tensor):
            error = (results[1] - results[0]).abs().max() / results[0].abs().max()
            self.worst = largest((self.worst, float(error)))
        else:
            assert results[0] == results[1]
        return results[0]

    def add(self, n):
        row = self.both("add")
        self.both("prefill", row, torch.randint(1, VOCAB, (n,), generator=self._random).to(self.graphed.device))
        return row

    def steps(self, rows, count):
        tokens = torch.randint(1, VOCAB, (len(rows), 1), generator=self._random).to(self.graphed.device)
        for _ in range(count):
            tokens = self.both("step", rows, tokens).argmax(-1)


def rows_come_and_go(it, steps):
    """Rows of a pair that grow, fork and end; returns the largest difference of its runners, of the largest logit."""
    a, b, c = (it.add(n) for n in (30, 7, 3))
    it.steps([a, b, c], steps)  # over pages, and from one capacity to the next
    it.steps([b], 3)
    d = it.both("fork", a)
    it.steps([d, a, c, b], 4)  # both write to the page that they shared
    several = torch.tensor([[1, 2, 3], [4, 5, 6]], device=it.graphed.device)
    it.both("step", [b, a], several)  # an ordinary step
    it.both("crop", a, it.graphed.length(a) - 1)
    it.both("remove", c)
    e = it.add(50)
    it.steps([e, a, d], 6)
    it.steps([d], 6)
    return it.worst
