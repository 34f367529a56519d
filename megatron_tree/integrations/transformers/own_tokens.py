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

from ...comm import (
    Pending,
    Team,
    broadcast,
    gather_sequence,
    group_rank,
    resolve_transport,
    start_all_to_all_v,
    start_gather,
    start_reduce_scatter,
)
from ...merge import SumReducer
from ...plan.prefill import PrefillPlan, PrefillSizes, plan_prefill
from .gathered import Parts, num_words, own_part, whole_parameters
from .head_groups import even_shares
from .pieces import Layout

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


class OwnTokens:
    """What a model's runs of own tokens need; `split.connect` makes it.

    own_numbers: (object, attribute, value of a whole model, this rank's value): what modules know of their sizes.
    forced: whether chunks are run this way; None: as `plan_prefill` says. Others are for tests and measurements.
    """

    def __init__(self, model, layout: Layout, group, own_numbers: list[tuple[object, str, int, int]], timeout_s: float):
        self.model, self.layout, self.group, self.timeout_s = model, layout, group, timeout_s
        self.own_numbers = own_numbers
        self.rank, self.world, self.forced = group_rank(group), layout.world, None
        self.unfinished: Pending | None = None
        """A gather of a run that failed."""
        self.layers = [_layer(model, layout, name) for name in layout.attentions]
        held = {p.name for layer in self.layers for parts in _all_parts(layer) for p in parts}
        head = model.get_output_embeddings()
        for name in {*layout.pieces, *layout.of_first_rank} - held:
            owner = model.get_submodule(name.rpartition(".")[0])
            assert owner is head or isinstance(owner, nn.Embedding), f"{name} is outside of all layers"

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
        head = model.get_output_embeddings()
        return [*hooks, head.register_forward_pre_hook(lambda module, args: run.last_token(*args))]

    @functools.cached_property
    def place(self) -> Team:
        """The ranks at this rank's place of every head group."""
        size = self.layout.heads.size
        ranks = tuple(range(self.rank % size, self.world, size))
        return Team(self.group, (ranks,), self.team.transport, self.timeout_s, ("place", size))

    @functools.cached_property
    def team(self) -> Team:
        """All ranks."""
        transport = resolve_transport(self.group, self.model.get_input_embeddings().weight.device)
        return Team.flat(self.group, transport=transport, timeout_s=self.timeout_s)

    @functools.cached_property
    def _sizes(self) -> PrefillSizes:
        heads, model, width = self.layout.heads, self.model, self.model.dtype.itemsize
        d = getattr(model.get_submodule(self.layout.attentions[0]), "head_dim", 0)
        num_heads = heads.num_groups * (sum(heads.shares) + heads.num_heads_kv)
        cost = lambda parts: (self.world - 1) * width * num_words(parts, self.world)  # noqa: E731
        return PrefillSizes(
            world=self.world,
            head_groups=heads.num_groups,
            hidden=model.get_input_embeddings().weight.shape[1] * width,
            heads=2 * num_heads * d * width,
            attention=[cost(layer.attention) for layer in self.layers],
            blocks=[cost(block.weights) for layer in self.layers for block in layer.blocks],
            gathered=sum(self.layout.gathered.values()) * width,
        )

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
        every = self.gather(ids[..., None])[0, :, 0].view(world, -1)
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
        """A tensor of this rank's tokens [.., n, w] -> those of all ranks, padded; anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        own, rows = self._own, x.movedim(-2, 0)
        rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, max(self._num_tokens) - len(rows)))
        whole = gather_sequence(rows.contiguous(), own.group, timeout_s=own.timeout_s)
        return whole.movedim(0, -2)

    def tokens_of_all(self, module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """A hook: a block's arguments, of all ranks' tokens; of an MLP the first, others are added to its result."""
        if module not in self._moved and args:
            return (self.gather(args[0]), *args[1:]), kwargs
        return tuple(map(self.gather, args)), {name: self.gather(x) for name, x in kwargs.items()}

    def sum_up(self, summed: nn.Module, out: Tensor) -> Tensor:
        """What a module returns that computes a partial sum where its block's tokens are gathered."""
        if summed not in self._moved:
            return out
        reducer = SumReducer(out.dtype, torch.promote_types(out.dtype, torch.float32))
        rows = start_reduce_scatter(out.movedim(-2, 0), self._own.team, reducer).wait()
        return rows[: self._num_tokens[self._own.rank]].movedim(0, -2).to(out.dtype)

    def last_token(self, x: Tensor) -> tuple[Tensor]:
        """The hidden state [1, 1, width] whose logits are wanted, on all ranks."""
        return (broadcast(x.contiguous(), self._own.group, self._last, timeout_s=self._own.timeout_s),)


def _layer(model, layout: Layout, attention: str) -> Layer:
    """The layer that an attention belongs to; weights that belong to no block are gathered with attention's."""
    parts = attention.split(".")
    name = ".".join(parts[: max(i for i, part in enumerate(parts) if part.isdigit()) + 1])
    split = [p for p in (*layout.pieces, *layout.of_first_rank) if p.startswith(f"{name}.")]
    blocks = []
    for summed in layout.summed:
        is_projection = f"{summed}.weight" in layout.pieces
        block = summed.rpartition(".")[0] if is_projection else summed
        if not block.startswith(f"{name}.") or attention.startswith(block):
            continue
        inside = [p for p in split if p.startswith(f"{block}.")]
        blocks.append(Block(block, model.get_submodule(summed), tuple(Parts.of(layout, p) for p in inside)))
        split = [p for p in split if p not in inside]
    return Layer(name, tuple(Parts.of(layout, p) for p in split), tuple(blocks))


def _all_parts(layer: Layer) -> Iterator[tuple[Parts, ...]]:
    yield layer.attention
    yield from (block.weights for block in layer.blocks)
