"""What the public functions do with torch.compile, DeviceMesh and DTensor."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

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


def process_group(group):
    """The process group of a public function's argument, which may be a 1-D DeviceMesh. None stays None.

    Raises: ValueError for a mesh of more dimensions, and on ranks that are not in the mesh.
    """
    if not isinstance(group, DeviceMesh):
        return group
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


def check_local(**tensors) -> None:
    """Raise ``ValueError`` for a DTensor; other things than tensors pass."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None:  # without that module there are none
        return
    for name, x in tensors.items():
        if isinstance(x, kind):
            raise ValueError(
                f"{name} is a DTensor with placements {x.placements}: pass this rank's shard as a plain tensor, "
                f"{name}.to_local()"
            )
