"""Runs of a model whose weights are split over ranks in which every rank runs its own tokens of a prompt.

The weights of attention are gathered, one layer ahead, and those of MLPs and experts where that moves less; otherwise
their tokens are gathered before and their results reduced and scattered after them (`plan/prefill.py`). The ranks that
have a word look it up for the others. The LM head gets the last token's hidden state on all ranks.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..comm import (
    Pending,
    Team,
    broadcast,
    gather_sequence,
    group_rank,
    group_size,
    resolve_transport,
    start_all_to_all_v,
    start_gather,
    start_reduce_scatter,
)
from ..merge import SumReducer
from ..plan.prefill import PrefillPlan, PrefillSizes, plan_prefill
from .gathered import Parts, even_shares, num_words, own_part, whole_parameters

running: contextvars.ContextVar[Run | None] = contextvars.ContextVar("run_of_own_tokens", default=None)
"""The run that the model is in."""


class Block(NamedTuple):
    """An MLP or experts: what is summed over ranks is the output of the module `summed`."""

    name: str
    summed: nn.Module
    weights: tuple[Parts, ...]


class Layer(NamedTuple):
    """A decoder layer."""

    name: str
    attention: tuple[Parts, ...]
    blocks: tuple[Block, ...]

    @property
    def weights(self) -> Iterator[tuple[Parts, ...]]:
        """Of attention, and of each block."""
        yield self.attention
        yield from (block.weights for block in self.blocks)


class OwnTokens:
    """What a model's runs of own tokens need.

    Args:
        model: its parameters are this rank's pieces. group: the ranks that share its weights. layers, head: of the
            model; head is the module that makes logits.
        heads: q, k, v and attention output of a token, all heads: bytes in a layer. See `PrefillSizes` for it, for
            head_groups and for sizes, its other fields that do not follow from the layers.
        own_numbers: (object, attribute, value of a whole model, this rank's value): what modules know of their sizes.
        dim: the dimension of tokens in what the model's layers pass on.
    Attributes:
        forced: whether chunks are run this way; None: as `plan_prefill` says. Others are for tests and measurements.
    """

    def __init__(
        self,
        model,
        group,
        layers: list[Layer],
        head: nn.Module,
        *,
        own_numbers: list[tuple[object, str, object, object]],
        head_groups: int,
        hidden: int,
        dim: int = -2,
        transport: str = "auto",
        timeout_s: float,
        **sizes,
    ):
        self.model, self.group, self.layers, self.head, self.timeout_s = model, group, layers, head, timeout_s
        self.wire = {"transport": transport, "timeout_s": timeout_s}
        self.own_numbers, self.head_groups, self.dim = own_numbers, head_groups, dim
        self.rank, self.world, self.forced = group_rank(group), group_size(group), None
        self.unfinished: Pending | None = None
        """A gather of a run that failed."""
        width = next(model.parameters()).dtype.itemsize
        cost = lambda parts: (self.world - 1) * width * num_words(parts, self.world)  # noqa: E731
        self._sizes = PrefillSizes(
            world=self.world,
            head_groups=head_groups,
            hidden=hidden,
            attention=[cost(layer.attention) for layer in layers],
            blocks=[cost(block.weights) for layer in layers for block in layer.blocks],
            **sizes,
        )

    def _add_hooks(self, run: Run) -> list[RemovableHandle]:
        """What a run does at layers, blocks and the LM head; removed after it, as other runs would only pay for it."""
        model, hooks = self.model, []
        for i, layer in enumerate(self.layers):
            module = model.get_submodule(layer.name)
            hooks.append(module.register_forward_pre_hook(lambda module, args, i=i: run.begin(i)))
            hooks.append(module.register_forward_hook(lambda module, args, out: run.end()))
            for block in filter(run.moves, layer.blocks):
                module = model.get_submodule(block.name)
                hooks.append(module.register_forward_pre_hook(run.tokens_of_all, with_kwargs=True))
        return [*hooks, self.head.register_forward_pre_hook(lambda module, args: run.last_token(*args))]

    @functools.cached_property
    def place(self) -> Team:
        """The ranks at this rank's place of every head group."""
        size = self.world // self.head_groups
        ranks = tuple(range(self.rank % size, self.world, size))
        return Team(self.group, (ranks,), self.team.transport, self.timeout_s, ("place", size))

    @functools.cached_property
    def team(self) -> Team:
        """All ranks."""
        transport = resolve_transport(self.group, next(self.model.parameters()).device, self.wire["transport"])
        return Team.flat(self.group, transport=transport, timeout_s=self.timeout_s)

    def plan(self, num_tokens: int) -> PrefillPlan:
        """How a chunk of num_tokens is run."""
        plan = plan_prefill(num_tokens, self._sizes)
        return plan if self.forced is None else plan._replace(shares_tokens=self.forced and self.world > 1)

    @contextlib.contextmanager
    def run(self, num_tokens: list[int], last: int) -> Iterator[None]:
        """Context of one run of the model. num_tokens: by rank, 1 or more; last: the rank whose last token's logits are
        returned on all ranks."""
        if self.unfinished is not None:  # all ranks have started it
            self.unfinished.wait()
        run = Run(self, num_tokens, last)
        outer, hooks = running.set(run), self._add_hooks(run)
        for module, name, whole, _ in self.own_numbers:
            setattr(module, name, whole)
        try:
            yield
        finally:
            running.reset(outer)
            for hook in hooks:
                hook.remove()
            run.end()
            for module, name, _, own in self.own_numbers:
                setattr(module, name, own)
            self.unfinished = run.arriving


class Run:
    """One run of the model, what its hooks call."""

    def __init__(self, own: OwnTokens, num_tokens: list[int], last: int):
        self._own, self._num_tokens, self._last = own, num_tokens, last
        plan = own.plan(sum(num_tokens))
        blocks = [block for layer in own.layers for block in layer.blocks]
        self._moved = {block.summed for block, gathers in zip(blocks, plan.gathers, strict=True) if not gathers}
        self._replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        self.arriving: Pending | None = self._start(0)

    def _weights(self, i: int) -> list[Parts]:
        """What is gathered of layer i."""
        layer = self._own.layers[i]
        blocks = [block.weights for block in layer.blocks if not self.moves(block)]
        return [*layer.attention, *itertools.chain(*blocks)]

    def _start(self, i: int) -> Pending | None:
        own = self._own
        if i == len(own.layers):
            return None
        return start_gather(own_part(own.model, self._weights(i), own.world, own.rank), own.team)

    def begin(self, i: int) -> None:
        """Layer i runs with whole parameters; those of the next layer are on their way meanwhile."""
        own = self._own
        arrived, self.arriving = self.arriving.wait(), None
        whole = whole_parameters(own.model, self._weights(i), arrived)
        del arrived  # two layers' weights exist at any time, in whatever form
        self.arriving = self._start(i + 1)
        for name, value in whole.items():
            module, _, last = name.rpartition(".")
            module = own.model.get_submodule(module)
            self._replaced.append((module, last, getattr(module, last)))
            setattr(module, last, nn.Parameter(value, requires_grad=False))

    def end(self) -> None:
        """The layer has its pieces again."""
        for module, name, piece in self._replaced:
            setattr(module, name, piece)
        self._replaced = []

    def look_up(self, rows_of, ids: Tensor, first: int, stop: int, num_rows: int) -> Tensor:
        """Rows [1, n, width] of an embedding of num_rows rows, of which this rank has those from `first` to `stop`: it
        looks up what others need of them. ids: of this rank's tokens, [1, n]; rows_of: the embedding of own rows."""
        own, world = self._own, self._own.world
        every = self._gather_rows(ids[0, :, None]).view(world, -1)
        found = [x[:n] for x, n in zip(every, self._num_tokens, strict=True)]
        found = [x[(x >= first) & (x < stop)] - first for x in found]
        parts = rows_of(torch.cat(found)).split([len(x) for x in found])
        ends = torch.tensor(even_shares(num_rows, world), device=ids.device).cumsum(0)
        owners = torch.bucketize(ids[0], ends, right=True)
        lengths = owners.bincount(minlength=world).tolist()
        arrived = start_all_to_all_v(list(parts), lengths, own.team).wait()
        rows = torch.empty_like(arrived)
        rows[owners.argsort(stable=True)] = arrived
        return rows[None]

    def moves(self, block: Block) -> bool:
        """Whether a block's tokens are gathered, not its weights."""
        return block.summed in self._moved

    def gather(self, x):
        """A tensor of this rank's tokens -> those of all ranks, padded; anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        return self._gather_rows(x.movedim(self._own.dim, 0)).movedim(0, self._own.dim)

    def _gather_rows(self, rows: Tensor) -> Tensor:
        rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, max(self._num_tokens) - len(rows)))
        return gather_sequence(rows.contiguous(), self._own.group, **self._own.wire)

    def tokens_of_all(self, module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """A hook: a block's arguments, of all ranks' tokens; of an MLP the first, others are added to its result."""
        if module not in self._moved and args:
            return (self.gather(args[0]), *args[1:]), kwargs
        return tuple(map(self.gather, args)), {name: self.gather(x) for name, x in kwargs.items()}

    def sum_up(self, summed: nn.Module, out: Tensor) -> Tensor:
        """What a module returns that computes a partial sum where its block's tokens are gathered."""
        if summed not in self._moved:
            return out
        own, reducer = self._own, SumReducer(out.dtype, torch.promote_types(out.dtype, torch.float32))
        rows = start_reduce_scatter(out.movedim(own.dim, 0), own.team, reducer).wait()
        return rows[: self._num_tokens[own.rank]].movedim(0, own.dim).to(out.dtype)

    def last_token(self, x: Tensor) -> tuple[Tensor]:
        """The hidden state [1, 1, width] whose logits are wanted, on all ranks."""
        return (broadcast(x.contiguous(), self._own.group, self._last, **self._own.wire),)
