"""DeviceMesh as cp_group, and DTensor as an input."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_tree import (
    dispatch_documents,
    shard_sequence,
    tree_attn_func,
    tree_attn_varlen_func,
    tree_decode,
    tree_prefill,
    unshard_sequence,
)
from megatron_tree.core.layout import Segment
from support.ranks import run_distributed


def _results(x, group):
    """Of every public function that takes cp_group; x [16, 2, 8], the same on all ranks."""
    rank = dist.get_rank() % 2
    layout = dispatch_documents([0, 5, 16], group)
    own = shard_sequence(x, group, 0, layout)
    yield own
    yield unshard_sequence(own, group, 0, layout)
    yield tree_attn_varlen_func(own, own, own, layout=layout, cp_group=group)
    yield tree_attn_func(own[None], own[None], own[None], cp_group=group)
    held = x[None, 8 * rank : 8 * rank + 8]
    yield tree_decode(x[None, -1:], held, held, cp_group=group)
    shares, segments = [[(14, 1)], [(15, 1)]], [Segment(0, 8 * rank, 8)]
    yield tree_prefill(held[:, -1:], held, held, cp_group=group, shares=shares, key_segments=segments)


def _meshes(rank, world):
    x = torch.randn(16, 2, 8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    expected = _results(x, mesh.get_group("cp"))
    for a, b in zip(_results(x, mesh["cp"]), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    for whole, way in ((mesh, r"mesh\['cp'\]"), (init_device_mesh("cpu", (2, 2)), "mesh_dim_names")):
        with pytest.raises(ValueError, match=rf"DeviceMesh of shape \(2, 2\).*{way}"):
            tree_attn_func(x[None], x[None], x[None], cp_group=whole)
    return True


def test_a_mesh_of_one_dimension_is_a_group():
    assert run_distributed(_meshes, 4) == [True] * 4


def _dtensors(rank, world):
    """On rank 1 one input is a DTensor; both ranks must raise the same sentence, and can go on."""
    group, mesh = dist.group.WORLD, init_device_mesh("cpu", (world,))
    x = torch.randn(1, 8, 2, 8)
    other = DTensor.from_local(x, mesh, [Shard(1)]) if rank else x
    calls = {
        "q": lambda: tree_attn_func(other, x, x, cp_group=group),
        "v": lambda: tree_attn_varlen_func(x[0], x[0], other[0] if rank else x[0], cu_seqlens=[0, 16], cp_group=group),
        "k_cache": lambda: tree_decode(x[:, :1], other, x, cp_group=group),
        "v_cache": lambda: tree_prefill(
            x[:, :1], x, other, cp_group=group, shares=[[(14, 1)], [(15, 1)]], key_segments=[Segment(0, 8 * rank, 8)]
        ),
        "x": lambda: unshard_sequence(other, group, 1),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"{name} is a DTensor .*{name}.to_local\(\)"):
            call()
    with pytest.raises(ValueError, match="q is a DTensor"):
        tree_attn_func(DTensor.from_local(x, mesh, [Shard(1)]), x, x, cp_group=None)
    return unshard_sequence(torch.full((1,), float(rank)), group, 0, "contiguous").tolist()


def test_a_dtensor_is_refused_before_anything_is_sent():
    assert run_distributed(_dtensors, 2) == [[0.0, 1.0]] * 2
