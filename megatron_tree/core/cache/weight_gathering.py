"""Prefill of a model whose weights are split over ranks, in which every rank runs its share of the tokens.

The weights of attention are gathered one layer ahead. Those of MLPs and experts are gathered too where that moves fewer
bytes; otherwise their tokens are gathered and their results reduced and scattered (`plan/weights.py`). The rank that
owns a vocabulary row embeds it for the others. All ranks run the LM head on the last token's hidden state.
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

from ..comm import Pending, Ranks, Team, start_all_to_all_v, start_gather, start_reduce_scatter
from ..merge import SumReducer
from ..plan.weights import PrefillPlan, PrefillSizes, plan_prefill
from .gathered import Parts, even_shares, num_words, own_part, whole_parameters

current_pass: contextvars.ContextVar[GatheringPass | None] = contextvars.ContextVar("gathering_pass", default=None)
"""The pass that the model is in."""


class SplitFeedForward(NamedTuple):
    """An MLP or experts whose weights are split over the ranks."""

    name: str
    summed: nn.Module
    """The module whose output is summed over the ranks."""
    weights: tuple[Parts, ...]


class SplitLayer(NamedTuple):
    """A decoder layer whose weights are split over the ranks."""

    name: str
    attention: tuple[Parts, ...]
    feed_forwards: tuple[SplitFeedForward, ...]

    @property
    def weights(self) -> Iterator[tuple[Parts, ...]]:
        """The weights of attention, then those of each feed-forward part."""
        yield self.attention
        yield from (part.weights for part in self.feed_forwards)


class WeightGathering:
    """Runs chunks of a prompt through a model with split weights, each rank its own tokens.

    Args:
        model: its parameters are this rank's pieces. ranks: those that share its weights.
        layers: the decoder layers. head: the module that makes logits.
        module_sizes: (object, attribute, value in the whole model, value on this rank) of every size that a module
            keeps beside its weights.
        head_groups, hidden, sizes: fields of `PrefillSizes` that do not follow from the layers.
        dim: the token dimension of the hidden states.
    Attributes:
        forced: whether chunks are run this way; None: as `plan_prefill` says. Tests and measurements set it.
    """

    def __init__(
        self,
        model,
        ranks: Ranks,
        layers: list[SplitLayer],
        head: nn.Module,
        *,
        module_sizes: list[tuple[object, str, object, object]],
        head_groups: int,
        hidden: int,
        dim: int = -2,
        **sizes,
    ):
        self.model, self.ranks, self.layers, self.head = model, ranks, layers, head
        self.module_sizes, self.head_groups, self.dim = module_sizes, head_groups, dim
        self.rank, self.world, self.forced = ranks.rank, ranks.size, None
        self.unfinished: Pending | None = None
        """A gather that a failed pass has left under way."""
        width = next(model.parameters()).dtype.itemsize
        cost = lambda parts: (self.world - 1) * width * num_words(parts, self.world)  # noqa: E731
        self._sizes = PrefillSizes(
            world=self.world,
            head_groups=head_groups,
            hidden=hidden,
            attention=[cost(layer.attention) for layer in layers],
            blocks=[cost(part.weights) for layer in layers for part in layer.feed_forwards],
            **sizes,
        )

    @functools.cached_property
    def place(self) -> Team:
        """The ranks at this rank's place of every head group."""
        size = self.world // self.head_groups
        return Team(self.ranks, (tuple(range(self.rank % size, self.world, size)),), ("place", size))

    def plan(self, num_tokens: int) -> PrefillPlan:
        """How a chunk of num_tokens is run."""
        plan = plan_prefill(num_tokens, self._sizes)
        return plan if self.forced is None else plan._replace(shares_tokens=self.forced and self.world > 1)

    @contextlib.contextmanager
    def run(self, num_tokens: list[int], last: int) -> Iterator[None]:
        """Context of one pass of the model.

        Args:
            num_tokens: by rank, 1 or more. last: the rank whose last token's logits all ranks return.
        """
        if self.unfinished is not None:  # all ranks have started it
            self.unfinished.wait()
        gathering = GatheringPass(self, num_tokens, last)
        outer, hooks = current_pass.set(gathering), self._add_hooks(gathering)
        for module, name, whole, _ in self.module_sizes:
            setattr(module, name, whole)
        try:
            yield
        finally:
            current_pass.reset(outer)
            for hook in hooks:
                hook.remove()
            gathering.end_layer()
            for module, name, _, local in self.module_sizes:
                setattr(module, name, local)
            self.unfinished = gathering.arriving

    def _add_hooks(self, gathering: GatheringPass) -> list[RemovableHandle]:
        """Hooks of layers, feed-forward parts and the LM head; removed after the pass, since others don't need them."""
        model, hooks = self.model, []
        for i, layer in enumerate(self.layers):
            module = model.get_submodule(layer.name)
            hooks.append(module.register_forward_pre_hook(lambda module, args, i=i: gathering.begin_layer(i)))
            hooks.append(module.register_forward_hook(lambda module, args, out: gathering.end_layer()))
            for part in filter(gathering.moves_tokens, layer.feed_forwards):
                module = model.get_submodule(part.name)
                hooks.append(module.register_forward_pre_hook(gathering.gather_arguments, with_kwargs=True))
        return [*hooks, self.head.register_forward_pre_hook(lambda module, args: gathering.last_token(*args))]


class GatheringPass:
    """One pass of the model; its hooks call the methods."""

    def __init__(self, gathering: WeightGathering, num_tokens: list[int], last: int):
        self._of, self._num_tokens, self._last = gathering, num_tokens, last
        plan = gathering.plan(sum(num_tokens))
        parts = [part for layer in gathering.layers for part in layer.feed_forwards]
        self._moved = {part.summed for part, gathers in zip(parts, plan.gathers, strict=True) if not gathers}
        self._replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        self.arriving: Pending | None = self._start(0)

    def _weights(self, i: int) -> list[Parts]:
        layer = self._of.layers[i]
        others = [part.weights for part in layer.feed_forwards if not self.moves_tokens(part)]
        return [*layer.attention, *itertools.chain(*others)]

    def _start(self, i: int) -> Pending | None:
        of = self._of
        if i == len(of.layers):
            return None
        return start_gather(own_part(of.model, self._weights(i), of.world, of.rank), of.ranks.everyone)

    def begin_layer(self, i: int) -> None:
        """Give layer i its whole parameters, and start to gather the next layer's."""
        model = self._of.model
        arrived, self.arriving = self.arriving.wait(), None
        whole = whole_parameters(model, self._weights(i), arrived)
        del arrived  # two layers' weights exist at any time, in whatever form
        self.arriving = self._start(i + 1)
        for name, value in whole.items():
            module, _, last = name.rpartition(".")
            module = model.get_submodule(module)
            self._replaced.append((module, last, getattr(module, last)))
            setattr(module, last, nn.Parameter(value, requires_grad=False))

    def end_layer(self) -> None:
        """Give the layer its pieces back."""
        for module, name, piece in self._replaced:
            setattr(module, name, piece)
        self._replaced = []

    def look_up(self, rows_of, ids: Tensor, first: int, stop: int, num_rows: int) -> Tensor:
        """Embeddings [1, n, width] of this rank's tokens ids [1, n].

        rows_of: looks up local rows. first, stop: this rank's rows of the table's num_rows.
        """
        of = self._of
        of_ranks = self._gather_rows(ids[0, :, None]).view(of.world, -1)
        wanted = [x[:n] for x, n in zip(of_ranks, self._num_tokens, strict=True)]
        wanted = [x[(x >= first) & (x < stop)] - first for x in wanted]
        parts = rows_of(torch.cat(wanted)).split([len(x) for x in wanted])
        ends = torch.tensor(even_shares(num_rows, of.world), device=ids.device).cumsum(0)
        owners = torch.bucketize(ids[0], ends, right=True)
        lengths = owners.bincount(minlength=of.world).tolist()
        arrived = start_all_to_all_v(list(parts), lengths, of.ranks.everyone).wait()
        rows = torch.empty_like(arrived)
        rows[owners.argsort(stable=True)] = arrived
        return rows[None]

    def moves_tokens(self, part: SplitFeedForward) -> bool:
        """Whether the part's tokens are gathered, not its weights."""
        return part.summed in self._moved

    def _gather(self, x):
        """A tensor of this rank's tokens -> the tokens of all ranks, padded; anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        return self._gather_rows(x.movedim(self._of.dim, 0)).movedim(0, self._of.dim)

    def _gather_rows(self, rows: Tensor) -> Tensor:
        rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, max(self._num_tokens) - len(rows)))
        return self._of.ranks.gather(rows.contiguous())

    def gather_arguments(self, module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Gather a feed-forward part's arguments; of an MLP the first one only, others are added to its result."""
        if module not in self._moved and args:
            return (self._gather(args[0]), *args[1:]), kwargs
        return tuple(map(self._gather, args)), {name: self._gather(x) for name, x in kwargs.items()}

    def sum_up(self, summed: nn.Module, out: Tensor) -> Tensor:
        """The output of `summed`, reduced and scattered if it is a partial sum over all ranks' tokens."""
        if summed not in self._moved:
            return out
        of, reducer = self._of, SumReducer(out.dtype, torch.promote_types(out.dtype, torch.float32))
        rows = start_reduce_scatter(out.movedim(of.dim, 0), of.ranks.everyone, reducer).wait()
        return rows[: self._num_tokens[of.rank]].movedim(0, of.dim).to(out.dtype)

    def last_token(self, x: Tensor) -> tuple[Tensor]:
        """The hidden state [1, 1, width] whose logits all ranks compute."""
        return (self._of.ranks.broadcast(x.contiguous(), self._last),)
