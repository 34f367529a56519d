"""One training step of a model on one rank and on several, compared layer by layer: where do they begin to differ?

What a sharded step does wrong shows first where it happens: attention that sees its own shard only, positions that
begin anew on every rank, a mask or a layout that does not fit, labels that are shifted twice, a loss that every rank
divides by its own tokens, a gradient that is lost. With `TreeConfig(deterministic="ranks")` attention adds no rounding
of its own, so even the bits can be compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...core.comm import Ranks, process_group
from ...core.config import TreeConfig

GRADIENTS = ("mean", "sum")


@dataclass(frozen=True)
class Difference:
    """Where the steps begin to differ. str() says it in a sentence."""

    where: str
    """"output of NAME", "loss", "gradient at NAME" (of its output) or "gradient of NAME" (a parameter)."""
    ranks: tuple[int, ...]
    """Those that differ there."""
    error: float
    """The largest one, relative to the tensor's largest entry on one rank; infinite where shapes differ, or for NaN."""
    position: int
    """Of the first token that differs, in the whole sequence; -1 where there are no tokens."""

    def __str__(self) -> str:
        token = f", first at position {self.position}" if self.position >= 0 else ""
        how = (
            "is missing, not finite or has another shape"
            if math.isinf(self.error)
            else f"differs by {self.error:.1e} of its largest entry"
        )
        return f"{self.where} {how} on ranks {', '.join(map(str, self.ranks))}{token}"


@dataclass(frozen=True)
class Comparison:
    """The first difference beyond rounding, and the first one at all; None: there is none."""

    values: Difference | None
    bits: Difference | None


def compare_with_one_rank(
    model: nn.Module,
    alone: Callable[[], Tensor],
    sharded: Callable[[], Tensor],
    *,
    positions: Tensor,
    cp_group,
    dim: int = 1,
    gradients: str = "mean",
    tolerance: float | None = None,
) -> Comparison:
    """Run a step twice, whole on every rank and sharded over them, and find the first layer that differs. Collective.

    Outputs of modules are compared in the order of the forward, then the loss, then the gradients of these outputs in
    the order of the backward, then those of parameters. Take a short sequence, without dropout and tiles
    (`mlp_tile`): the whole step must fit one rank, and every output is kept.

    Args:
        model: the module; its gradients are set to None before and after.
        alone: runs the forward and backward of the whole batch on this rank, without the others, and returns the loss.
        sharded: the same of this rank's shard, with the others.
        positions: int64 [rows]: the token of the whole sequence that each row of the shard holds; -1: none.
        dim: of outputs, along which tokens lie: 1 for [batch, tokens, ...], 0 for Megatron's [tokens, batch, ...].
        gradients: how gradients of parameters become those of one rank: their "mean" over the ranks or their "sum".
            The gradient of a row's output is then as many times as large as on one rank, or the same.
        tolerance: the largest error of `Comparison.values`, relative to the largest entry of a tensor. Default: the
            root of its dtype's epsilon.
    Returns: the same on every rank.
    Raises: ValueError for other gradients, and for positions that are not those of a sharded sequence.
    """
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients={gradients!r} must be 'mean' or 'sum'")
    mean = gradients == "mean"
    ranks = Ranks.of(process_group(cp_group), positions.device, TreeConfig())
    count = ranks.sum(torch.tensor([int((positions >= 0).sum())], device=positions.device))
    total = int(count)
    last = int(ranks.reduce(torch.cat((positions, positions.new_tensor([-1]))).max()[None], "max"))
    if last != total - 1:
        raise ValueError(f"positions end at {last}, but the ranks hold {total} tokens: pass each token's position once")
    of_one, of_all = (_Record.of(model, step) for step in (alone, sharded))
    gradients_of_one = {name: grad for name, grad in of_one.parameters.items() if grad is not None}
    names, rows = [*of_one.tensors, *gradients_of_one], _Rows(positions, total, dim, ranks.size if mean else 1)
    most, least = ranks.reduce(torch.tensor([len(names), -len(names)], device=positions.device), "max").tolist()
    if most != -least:
        raise ValueError("alone() runs other modules on some ranks: give all ranks the same whole batch")
    found = [rows.difference(name, x, of_all.tensors.get(name)) for name, x in of_one.tensors.items()]
    for name, grad in gradients_of_one.items():
        mine = of_all.parameters[name]
        summed = ranks.sum((torch.zeros_like(grad) if mine is None else mine).contiguous()) / rows.scale
        found.append(rows.difference(name, grad, summed))
    table = torch.tensor(found, dtype=torch.float64, device=positions.device).view(1, -1, 3)
    table = ranks.gather(table)  # [ranks, names, (error, position, tolerance)]
    limit = table[..., 2] if tolerance is None else torch.full_like(table[..., 2], tolerance)
    return Comparison(_first(names, table, limit), _first(names, table, torch.zeros_like(limit)))


def _first(names: list[str], table: Tensor, limit: Tensor) -> Difference | None:
    beyond = table[..., 0] > limit
    at = beyond.any(0).nonzero()[:1, 0].tolist()
    if not at:
        return None
    (i,), ranks = at, beyond[:, at[0]].nonzero()[:, 0].tolist()
    error, position = table[ranks, i, 0].max(), table[ranks, i, 1].min()
    return Difference(names[i], tuple(ranks), float(error), int(position))


class _Record:
    """What a step gives, by name: outputs of modules, the loss and gradients of outputs; and those of parameters."""

    def __init__(self):
        self.tensors: dict[str, Tensor] = {}
        self.parameters: dict[str, Tensor | None] = {}
        self._times: Counter[str] = Counter()
        """How often each name came."""

    @classmethod
    def of(cls, model: nn.Module, step: Callable[[], Tensor]) -> _Record:
        record = cls()
        named = [(name, module) for name, module in model.named_modules() if name]
        hooks = [module.register_forward_hook(record._hook(name)) for name, module in named]
        model.zero_grad(set_to_none=True)
        try:
            record._keep("loss", step())
        finally:
            for hook in hooks:
                hook.remove()
        gradients = {name: x for name, x in record.tensors.items() if name.startswith("gradient at")}
        record.tensors = {name: x for name, x in record.tensors.items() if name not in gradients} | gradients
        record.parameters = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        return record

    def _hook(self, name: str):
        def keep(module, args, output) -> None:
            for x in _tensors(output):
                self._keep(f"output of {name}", x)
                if x.requires_grad:
                    x.register_hook(lambda grad: self._keep(f"gradient at {name}", grad))

        return keep

    def _keep(self, name: str, x: Tensor) -> None:
        """A name that comes again gets a number."""
        self._times[name] += 1
        number = self._times[name]
        self.tensors[f"{name} ({number})" if number > 1 else name] = x.detach().clone()


def _tensors(output) -> list[Tensor]:
    """Floating-point tensors of a module's output."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return [x for part in parts for x in _tensors(part)]


@dataclass(frozen=True)
class _Rows:
    """Which rows of whole tensors this rank has."""

    positions: Tensor
    total: int
    dim: int
    scale: int

    def _axis(self, whole: Tensor, mine: Tensor) -> int | None:
        """Along which tokens lie: `dim`, or where a batch is missing the axis that is sharded; None: along none."""
        if whole.dim() > self.dim and whole.shape[self.dim] == self.total:
            return self.dim
        sizes = [*zip(whole.shape, mine.shape)]
        return sizes.index(sharded) if (sharded := (self.total, len(self.positions))) in sizes else None

    def difference(self, name: str, whole: Tensor, mine: Tensor | None) -> tuple[float, int, float]:
        """(error relative to the largest entry, first position that differs or -1, the default tolerance)."""
        if mine is None:  # the module was not called, or its output has no gradient
            return math.inf, -1, 0.0
        size = whole.abs().max().double().clamp(min=torch.finfo(torch.float64).tiny) if whole.numel() else 1.0
        limit, tokens = math.sqrt(torch.finfo(whole.dtype).eps), None
        if (axis := self._axis(whole, mine)) is not None:
            held = self.positions >= 0
            if mine.dim() != whole.dim() or mine.shape[axis] != len(held):
                return math.inf, -1, limit
            tokens = self.positions[held]
            whole, mine = whole.movedim(axis, 0)[tokens], mine.movedim(axis, 0)[held]
            mine = mine / self.scale if name.startswith("gradient at") else mine
        if whole.shape != mine.shape:
            return math.inf, -1, limit
        gap = torch.where(whole == mine, 0.0, (whole.double() - mine.double()).abs()).nan_to_num(math.inf)
        if tokens is None or not gap.any():
            return float((gap / size).max()) if gap.numel() else 0.0, -1, limit
        differ = gap.flatten(1).any(1) if gap.dim() > 1 else gap > 0
        return float((gap / size).max()), int(tokens[differ].min()), limit
