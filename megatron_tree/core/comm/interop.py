"""What the public functions do first, and with torch's own tools: arguments, modules, torch.compile, DeviceMesh and
DTensor."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from ..arguments import Arguments, shown
from ..config import default_config
from ..log import warn_once
from .agreement import check_transforms, in_step, shared_checks

_REASON = "ranks run it together, between two graphs of torch.compile: leave out fullgraph=True"


def outside_graphs(fn: Callable) -> Callable:
    """The function, which torch.compile leaves as it is: one graph ends before a call, the next begins after it.

    Where autograd records, dispatch modes don't see what it does: selective checkpointing would save and repeat
    operations of which a first call has more than its recomputation.
    """
    disabled = None

    @functools.wraps(fn)
    def call(*args, **kwargs):
        nonlocal disabled
        try:  # a frame that breaks in a try block is left alone; another one is compiled for all kinds of arguments
            if get_eval_frame_callback() is None:  # nothing is compiled
                if torch._C._len_torch_dispatch_stack() and torch.is_grad_enabled():
                    with _disable_current_modes():
                        return fn(*args, **kwargs)
                return fn(*args, **kwargs)
            if disabled is None:
                disabled = torch.compiler.disable(fn, reason=_REASON)
            return disabled(*args, **kwargs)
        except BaseException:
            raise

    # as torch.compiler.disable marks functions, so that graphs end at this call and messages show the reason
    call._torchdynamo_disable, call._torchdynamo_disable_msg = True, _REASON
    return call


def forward_in_step(model: nn.Module, groups_of: Callable[[dict], Sequence], is_over=lambda kwargs: False) -> None:
    """Make every forward of a module a step of some groups (`in_step`), from the next one on.

    groups_of(its keyword arguments): the groups. is_over(those): whether no rank waits any more for one that fails now.
    """
    forwards = _ForwardSteps(groups_of, is_over)
    model.register_forward_pre_hook(forwards.enter, with_kwargs=True, prepend=True)
    model.register_forward_hook(forwards.leave, with_kwargs=True, always_call=True)


class _ForwardSteps:
    """Hooks around the forward of a module, which is a step of some groups."""

    def __init__(self, groups_of: Callable[[dict], Sequence], is_over: Callable[[dict], bool]):
        self._groups_of, self._is_over, self._running = groups_of, is_over, None

    def __deepcopy__(self, memo) -> _ForwardSteps:
        return _ForwardSteps(self._groups_of, self._is_over)

    def __reduce_ex__(self, protocol):
        raise ValueError(
            "this model was made to compute on shards, which holds in its process alone: save its state_dict() or call "
            "its save_pretrained(folder) instead of pickling the model (torch.save(model)), and make the loaded one "
            "compute on shards again"
        )

    @outside_graphs
    def enter(self, model, args, kwargs) -> None:
        self._end(None)  # one that was left unseen
        self._running = in_step(*self._groups_of(kwargs)), sys.exception()
        self._running[0].__enter__()

    @outside_graphs
    def leave(self, model, args, kwargs, output) -> None:
        self._end(None if self._is_over(kwargs) else sys.exception())

    def _end(self, error: BaseException | None) -> None:
        if self._running is not None:
            (step, handled), self._running = self._running, None
            error = None if error is handled else error
            step.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)


def public_call(fn: Callable) -> Callable:
    """A public function that all ranks of its `cp_group` call together; torch.compile leaves it as it is.

    It gets a process group or None, and its own `TreeConfig` or the default one. Arguments that are of another kind
    than its annotations say, or tensors without values of their own, are an error on all ranks of cp_group.
    """
    arguments = None

    @functools.wraps(fn)
    def call(*args, **kwargs):
        nonlocal arguments
        arguments = arguments or Arguments.of(fn)
        given = arguments.bound(args, kwargs)
        group = given["cp_group"] = process_group(given["cp_group"])
        if group is None:
            _say_alone(fn.__name__, sys._getframe(2))
        with shared_checks(fn.__name__, group):
            arguments.check(given)
            check_local(**given)
            if "config" in arguments.names and given.get("config") is None:
                given["config"] = default_config()
        return fn(**given)

    return outside_graphs(call)


def _say_alone(name: str, caller) -> None:
    """On rank 0, warn a program of several ranks that calls without a group, which in torch means all of them. Our own
    modules know what they do. caller: the frame of the call."""
    is_first_of_several = dist.is_initialized() and dist.get_rank() == 0 < dist.get_world_size() - 1
    if is_first_of_several and not caller.f_globals.get("__name__", "").startswith("megatron_tree."):
        warn_once(
            f"{name}: cp_group=None computes on this rank alone, in a job of {dist.get_world_size()} ranks: pass "
            "dist.group.WORLD, or a group of your own, if ranks share the sequence"
        )


def derivative(rule: Callable) -> Callable:
    """A backward or jvp in which ranks communicate: `outside_graphs`, and refused within vmap before a rank sends."""

    @outside_graphs
    @functools.wraps(rule)
    def checked(ctx, *tensors):
        check_transforms("a derivative of several ranks", *tensors, differentiable=True)
        return rule(ctx, *tensors)

    return checked


def process_group(group):
    """The process group of a public function's argument, which may be a 1-D DeviceMesh. None stays None.

    Raises: ValueError for a mesh of more dimensions, on ranks that are not in the mesh, and for anything else.
    """
    if group is None or isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER:
        return group
    if not isinstance(group, DeviceMesh):
        raise ValueError(
            f"cp_group={shown(group)} must be a process group of torch.distributed, a 1-D DeviceMesh, or None for one "
            "rank"
        )
    if group.ndim != 1:
        names = group.mesh_dim_names
        way = f"mesh[{names[-1]!r}]" if names else 'make it with mesh_dim_names, and pass mesh["cp"]'
        raise ValueError(
            f"cp_group is a DeviceMesh of shape {tuple(group.shape)} with the dimensions {names}: pass the one over "
            f"which the sequence is sharded, for instance {way}"
        )
    if group.get_coordinate() is None:
        raise ValueError(f"cp_group: this rank is not in {group}; pass the mesh this rank belongs to")
    return group.get_group()


def check_local(**given) -> None:
    """Raise ``ValueError`` for DTensors, and for tensors without values or strides, in lists and tuples, too; other
    things than tensors pass."""
    for name, x in given.items():
        if isinstance(x, Tensor):
            _check_plain(name, x)
        elif isinstance(x, (tuple, list)):
            for i, part in enumerate(x):
                if isinstance(part, Tensor):
                    _check_plain(f"{name}[{i}]", part)


def _check_plain(name: str, x: Tensor) -> None:
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is not None and isinstance(x, kind):  # without that module there are none
        raise ValueError(
            f"{name} is a DTensor with placements {x.placements}: pass this rank's shard as a plain tensor, "
            f"{name}.to_local()"
        )
    if x.is_meta:
        raise ValueError(f"{name} is on the meta device, where tensors have no values: pass one on a CPU or a GPU")
    if x.layout is not torch.strided or x.is_nested:
        raise ValueError(f"{name} is a sparse or nested tensor ({x.layout}): pass a plain one")
