"""Parts of a model that work token by token, for a few tokens at a time: less memory in training on long shards.

    tile_loss(model, 512)       # no logits [tokens, vocabulary]
    tile_mlps(model, 2048)      # no activations [tokens, intermediate size], also of experts

A tile is computed without a graph, and once more in the backward (`rows_in_tiles`). The weights are arguments of the
one autograd function, so each gets its gradient once and whole, with the factors of the backward in it: gradient
accumulation, loss scales and tied weights need nothing. DeepSpeed's ALST (arXiv 2506.13996) tiles likewise.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ....core.log import warn_once
from ..families.modeling import MLPS, PROJECTIONS

ELEMENTS = 2**26  # of the fp32 logits of a tile (256 MiB), if the number of tokens is not given
KNOWN = ("dtype", "shape", "ndim", "dim", "size", "numel", "is_floating_point")  # of logits that are not computed


def rows_in_tiles(function: Callable, rows: tuple[Tensor, ...], parameters: list[Tensor], tile: int) -> Tensor:
    """function(*rows) -> [n, ...] with `tile` rows at a time; each row of the result is of the rows with its number.

    rows: [n, ...] each. They and the parameters get gradients as they require them, the latter summed in fp32 at least.
    The function is called again in the backward, so it must not draw random numbers.
    """
    return _InTiles.apply(function, tile, len(rows), *rows, *(p for p in parameters if p.requires_grad))


class _InTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, tile: int, num_rows: int, *tensors: Tensor) -> Tensor:
        rows, ctx.parameters = tensors[:num_rows], tensors[num_rows:]  # ZeRO 3 takes these away, and brings them back
        ctx.save_for_backward(*rows)
        ctx.function, ctx.tile, device = function, tile, rows[0].device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        out = None
        for start in range(0, len(rows[0]), tile):
            part = function(*(x[start : start + tile] for x in rows))
            if out is None:
                out = part.new_empty(len(rows[0]), *part.shape[1:])
            out[start : start + tile] = part
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        rows, (device, dtype, enabled) = ctx.saved_tensors, ctx.autocast
        grads = [torch.empty_like(x) if needed else None for x, needed in zip(rows, ctx.needs_input_grad[3:])]
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in ctx.parameters]
        for start in range(0, len(grad), ctx.tile):
            tile = slice(start, start + ctx.tile)
            inside = [x[tile].detach().requires_grad_(dx is not None) for x, dx in zip(rows, grads, strict=True)]
            with torch.enable_grad(), torch.autocast(device, dtype, enabled):
                part = ctx.function(*inside)
            inputs = (*(x for x in inside if x.requires_grad), *ctx.parameters)
            # experts that no token of the tile has chosen are not used
            parts = iter(torch.autograd.grad(part, inputs, grad[tile], materialize_grads=True))
            for dx in grads:
                if dx is not None:
                    dx[tile] = next(parts)
            for total, more in zip(sums, parts, strict=True):
                total.add_(more)
        grads += [s.to(p.dtype) for s, p in zip(sums, ctx.parameters)]
        if torch.is_grad_enabled():
            error = "tiles have no second derivatives: leave out loss_tile and mlp_tile, or create_graph=True"
            grads = _once(grads, (*rows, *ctx.parameters, grad), error)
        return None, None, None, *grads


def _once(grads: list[Tensor | None], sources: tuple[Tensor | None, ...], error: str) -> list[Tensor | None]:
    """The gradients that a backward with create_graph=True returns; ``ValueError(error)`` if they are differentiated.

    sources: what they are functions of, with its graph: autograd looks for what it needs along that.
    torch's once_differentiable only sees the gradients that a backward gets.
    """
    given = [x for x in grads if x is not None]
    guarded = iter(_Once.apply(error, len(given), *given, *sources))
    return [None if x is None else next(guarded) for x in grads]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, error: str, count: int, *tensors: Tensor | None):
        ctx.error = error
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise ValueError(ctx.error)


class DeferredLogits:
    """What a model's head gives instead of logits: the hidden states [b, s, d], and what is done with logits later.

    Scaling and softcaps, elementwise and by numbers, are noted and done tile by tile. What only asks for their dtype or
    shape, as Accelerate's bf16 does, is told. For anything else the logits are computed whole, which is logged, or, if
    the user has asked for tiles, refused.
    """

    def __init__(self, head: nn.Linear, hidden: Tensor, tile: int, asked: bool):
        self.head, self.hidden, self.tile, self.asked, self.steps = head, hidden, tile, asked, ()
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        self.like = torch.empty(*hidden.shape[:-1], head.out_features, dtype=dtype, device="meta")
        self.device = hidden.device

    def for_tokens(self, function: Callable, labels: Tensor) -> Tensor:
        """function(logits [n, vocab], labels [n]) -> [n, ...] of all tokens, tile by tile; labels int64 [n]. Collective
        with ZeRO 3."""
        return self.head(self.hidden.flatten(0, -2), deferred=self, function=function, labels=labels)

    def float(self) -> DeferredLogits:
        return self._then(torch.Tensor.float)

    def _then(self, step: Callable) -> DeferredLogits:
        after = copy.copy(self)
        after.steps, after.like = (*self.steps, step), step(self.like)
        return after

    def _whole(self, use: str) -> Tensor:
        if self.asked:
            raise ValueError(
                f"loss_tile={self.tile}: the model uses its logits in {use}, which needs them whole; leave "
                "loss_tile out"
            )
        warn_once(
            f"the logits {list(self.like.shape)} of a shard are computed whole, as the model uses them in {use}: its "
            "loss has no tiles",
            about=f"whole logits, {use}",
        )
        return self.apply_steps(self.head(self.hidden))

    def apply_steps(self, logits: Tensor) -> Tensor:
        """The logits [..., vocab] after what the model does with them."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def __getattr__(self, name: str):
        if name in KNOWN:
            return getattr(self.like, name)
        plain = None if name.startswith("__") else getattr(torch.Tensor, name, None)
        if plain is None:
            raise AttributeError(name)
        if callable(plain):  # a look at it computes nothing
            return lambda *args, **options: getattr(self._whole(name), name)(*args, **options)
        return getattr(self._whole(name), name)

    def __getitem__(self, rows) -> Tensor:
        return self._whole("an index")[rows]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        first, kwargs = args[0], kwargs or {}
        if function is torch.tanh and isinstance(first, cls):
            return first._then(torch.tanh)
        whole = [x._whole(function.__name__) if isinstance(x, cls) else x for x in args]
        return function(*whole, **kwargs)


def _operator(name: str) -> Callable:
    def deferred(self, number):
        if isinstance(number, (int, float)):
            return self._then(lambda logits: getattr(logits, name)(number))
        return getattr(self._whole(name), name)(number)

    return deferred


for _name in ("__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__"):
    setattr(DeferredLogits, _name, _operator(_name))


def _head_forward(
    head: nn.Linear, plain: Callable, hidden: Tensor, deferred=None, function=None, labels=None
) -> Tensor:
    """The forward of a head: logits [..., vocab], or function(logits, labels [n]) [n, ...] of hidden [n, d]."""
    if deferred is None:
        return plain(hidden)

    def for_tile(rows: Tensor, labels: Tensor) -> Tensor:
        return function(deferred.apply_steps(plain(rows)), labels)

    return rows_in_tiles(for_tile, (hidden, labels), list(head.parameters()), deferred.tile)


class TiledLoss:
    """While a model runs forward in `with`, its head defers its logits."""

    def __init__(self, model, name: str, head: nn.Linear, tile: int | None):
        self.model, self.name, self.head = model, name, head
        self.asked, self.tile = tile is not None, tile or default_tile(head.out_features)
        # bound before DeepSpeed adds hooks, which stay around the module's call
        head.forward = functools.partial(_head_forward, head, head.forward)

    def begin(self, num_tokens: int, tile: int | None = None) -> None:
        """Of a forward that ends in a loss. tile: another one than the model's."""
        asked, tile = tile is not None or self.asked, tile or self.tile
        if num_tokens > tile:
            # looked up before the module of this name, whose call would gather its weights with ZeRO 3
            vars(self.model)[self.name] = lambda hidden: DeferredLogits(self.head, hidden, tile, asked)

    def end(self) -> None:
        """Also after an error."""
        vars(self.model).pop(self.name, None)


def default_tile(vocab_size: int) -> int:
    """Tokens whose fp32 logits are 256 MiB."""
    return max(1, ELEMENTS // vocab_size)


def tile_loss(model, tile: int | None) -> TiledLoss | None:
    """Prepare a causal language model for a loss without whole logits.

    tile: tokens at a time; 0: never; None: as many as give 256 MiB of logits, for shards that have more tokens, and
    only where the head is an ``nn.Linear`` of the model.
    Raises: ValueError for a tile that is not such a number, and if one is given and the head is another one.
    """
    _check("loss_tile", tile)
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_children() if module is head), None)
    if tile == 0:
        return None
    if name is None or type(head) is not nn.Linear:
        if tile is not None:
            raise ValueError(
                f"loss_tile={tile}: the head of {type(model).__name__} is no nn.Linear of the model itself, its logits "
                "are computed whole; leave loss_tile out"
            )
        return None
    return TiledLoss(model, name, head, tile)


def tile_mlps(model, tile: int | None) -> list[nn.Module]:
    """Make the MLPs and experts of a model compute `tile` tokens at a time. Returns them; none if tile is None or 0.

    Routers are not part of a tile, so their logits, and losses of these, are those without tiles.
    Raises: ValueError for a tile that is not such a number, and for models with layers whose MLP can't be tiled.
    """
    _check("mlp_tile", tile)
    if not tile:
        return []
    text = model.get_decoder()
    mlps = [module for module in text.modules() if _is_dense_mlp(module) or _is_experts(module)]
    layers = [(name, m) for name, m in text.named_modules() if isinstance(m, GradientCheckpointingLayer)]
    lacking = [name for name, layer in layers if not any(module in mlps for module in layer.modules())]
    lacking += [name for name, module in text.named_modules() if _is_stacked(module) and module not in mlps]
    if lacking or not mlps:
        raise ValueError(
            f"mlp_tile={tile}: {type(model).__name__} has {len(mlps)} MLPs of linear layers without dropout that "
            f"return their own result only, or experts, and none in {', '.join(lacking[:2]) or 'its layers'}; leave "
            "mlp_tile out"
        )
    for mlp in mlps:
        mlp.forward = functools.partial(_mlp_forward, mlp, mlp.forward, tile)
    return mlps


def _mlp_forward(mlp: nn.Module, plain: Callable, tile: int, x: Tensor, *routing: Tensor) -> Tensor:
    """routing: which experts the tokens have chosen, and with what weights; [n, top_k] each."""
    if x.shape[:-1].numel() <= tile:
        return plain(x, *routing)
    rows = (x.flatten(0, -2), *routing)
    return rows_in_tiles(plain, rows, list(mlp.parameters()), tile).view(x.shape)


def _is_dense_mlp(module: nn.Module) -> bool:
    layers = [m for m in module.modules() if m._parameters]
    dropped = any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules())
    names = (
        all(isinstance(getattr(module, name, None), PROJECTIONS) for name in (ups[-1], down)) for ups, down in MLPS
    )
    fused = isinstance(getattr(module, "gate_up_proj", None), nn.Linear)
    down = isinstance(getattr(module, "down_proj", None), nn.Linear)
    if len(inspect.signature(module.forward).parameters) != 1:
        return False  # more is done inside
    return (any(names) or (fused and down)) and all(isinstance(m, PROJECTIONS) for m in layers) and not dropped


def _is_stacked(module: nn.Module) -> bool:
    """Experts, all of them in one parameter."""
    return isinstance(getattr(module, "down_proj", None), nn.Parameter)


def _is_experts(module: nn.Module) -> bool:
    """Stacked ones of hidden states, numbers of experts and their weights."""
    return _is_stacked(module) and len(inspect.signature(module.forward).parameters) == 3


def _check(name: str, tile) -> None:
    if tile is not None and (not isinstance(tile, int) or isinstance(tile, bool) or tile < 0):
        raise ValueError(f"{name}={tile!r} must be a number of tokens, or 0 for everything at once")
