"""Every public function with arguments that have no business there: a ValueError or TypeError with a sentence."""

import inspect
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

import megatron_tree
from megatron_tree import (
    Decay,
    TreeConfig,
    dispatch_documents,
    dispatch_prefix_tree,
    document_positions,
    packed_layout,
    prefix_tree,
    shard_positions,
    shard_sequence,
    tree_attn_func,
    tree_attn_varlen_func,
    tree_convolution,
    tree_decode,
    tree_halo,
    tree_prefill,
    tree_recurrence,
    tree_scan,
    tree_select,
    tree_select_func,
    unshard_sequence,
)
from megatron_tree.core.arguments import Arguments, checked
from megatron_tree.core.layout import Segment
from support.ranks import run_distributed


def _kernel(inputs, v, state):
    """A kernel that takes anything."""
    return v, v.new_zeros(len(v), v.shape[2], 4, v.shape[3]) if state is None else state


def _x(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


Q, K, TREE = _x(1, 8, 4, 8), _x(1, 8, 2, 8), prefix_tree([[1, 2, 3], [1, 2, 4]])
INDEX = dict(index_q=_x(1, 8, 2, 8), index_weights=_x(1, 8, 2), index_k=_x(1, 8, 8), topk=4)
AT = dict(q_positions=torch.arange(8), cache_positions=torch.arange(8))
FUNCTIONS = {
    tree_attn_func: dict(q=Q, k=K, v=K),
    tree_attn_varlen_func: dict(q=Q[0], k=K[0], v=K[0], cu_seqlens=[0, 4, 8]),
    tree_decode: dict(q=Q[:, :1], k_cache=K, v_cache=K),
    tree_prefill: dict(q=Q, k_cache=K, v_cache=K, shares=[[(0, 8)]], key_segments=[Segment(0, 0, 8)]),
    tree_select_func: INDEX,
    tree_select: INDEX | AT,
    tree_scan: dict(transition=torch.ones(1, 1, 2), update=_x(1, 1, 2, 4, 4)),
    tree_recurrence: dict(kernel=_kernel, inputs=(_x(1, 8, 2, 4),), v=_x(1, 8, 2, 4), head_dim=4),
    tree_halo: dict(x=_x(1, 8, 4), count=2),
    tree_convolution: dict(kernel=lambda x: x, x=_x(1, 8, 4), count=2),
    shard_sequence: dict(x=_x(8, 3), dim=0),
    unshard_sequence: dict(x=_x(8, 3), dim=0),
    dispatch_documents: dict(cu_seqlens=[0, 4, 8]),
    dispatch_prefix_tree: dict(tree=TREE),
    prefix_tree: dict(rows=[[1, 2, 3], [1, 2, 4]]),
    packed_layout: dict(cu_seqlens=[0, 4, 8]),
    shard_positions: dict(seq_len=8, rank=0, world=1),
    document_positions: dict(layout=packed_layout([0, 4, 8]), rank=0, world=1),
}
OBJECTS = [
    None, 2, -1, 0, 2.5, float("nan"), "abc", b"x", True, [1, 2], [], (1, 2), [[1, 2]], {"grid": (1, 2)}, {}, {1},
    object(), int, np.ones((2, 2)), torch.tensor(3), torch.randn(2), torch.tensor([0, 4]), torch.nn.Linear(4, 4),
]  # fmt: skip


def _tensors(x):
    """Tensors in place of x."""
    yield from (x.new_zeros(()), x.new_zeros(3), x[..., :0], x[:0], x[None], x.long(), x.bool(), x.to(torch.complex64))
    yield from (x.to("meta"), x.to_sparse(), torch.nested.nested_tensor([x[0]]))


def _complains(fn, given):
    """The error's text; None if there is none."""
    try:
        fn(**given)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_odd_arguments_are_explained(fn):
    arguments, given = Arguments.of(inspect.unwrap(fn)), dict(FUNCTIONS[fn])
    if "cp_group" in arguments.names:
        given["cp_group"] = None
    assert _complains(fn, given) is None
    for name in arguments.names:
        if name == "device":  # torch's own errors
            continue
        odd = [*OBJECTS, *(_tensors(given[name]) if isinstance(given.get(name), torch.Tensor) else ())]
        said = [_complains(fn, given | {name: value}) for value in odd]
        assert sum(text is not None for text in said) > len(odd) / 3, (name, said)
        assert any(re.search(rf"\b{name}\b", text or "") for text in said), (name, said)


def test_the_examples_of_a_user():
    call = dict(q=Q, k=K, v=K, cp_group=None)
    for changed, message in {
        "q=\\[1, 2\\] must be a Tensor": dict(q=[1, 2]),
        "k has head_dim 0 but q has 8|head_dim": dict(q=Q[..., :0], k=K[..., :0]),
        "q is on the meta device": dict(q=Q.to("meta")),
        "k is a sparse or nested tensor": dict(k=K.to_sparse()),
        "config={'grid': \\(1, 2\\)} must be a TreeConfig or None": dict(config={"grid": (1, 2)}),
        "cp_group=2 must be a process group of torch.distributed, a 1-D DeviceMesh, or None": dict(cp_group=2),
        "return_lse=1 must be True or False": dict(return_lse=1),
        "softcap='5' must be a number": dict(softcap="5"),
        "window_size='ab' must be a list or tuple: .left, right., for instance": dict(window_size="ab"),
    }.items():
        with pytest.raises(ValueError, match=changed):
            tree_attn_func(**call | message)
    with pytest.raises(TypeError, match=r"tree_attn_func\(\): missing a required argument: 'v'"):
        tree_attn_func(q=Q, k=K, cp_group=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        tree_attn_func(**call, casual=True)
    for fn, word, meant in (
        (tree_attn_func, "casual", "causal"),
        (tree_attn_varlen_func, "cu_seqlens_q", "cu_seqlens"),
        (TreeConfig, "gird", "grid"),
        (tree_attn_func, "attn_mask", "ranges"),
    ):
        with pytest.raises(TypeError, match=f"; did you mean '{meant}' instead of '{word}'"):
            fn(**{word: 1})
    given = FUNCTIONS[tree_recurrence] | {"inputs": (_x(1, 8, 2).to("meta"),)}
    with pytest.raises(ValueError, match="inputs\\[0\\] is on the meta device"):
        tree_recurrence(**given, cp_group=None)


def test_kinds_of_arguments():
    @checked
    def fn(a: int, b: float = 1.0, c: bool = True, d: tuple[int, ...] | list[str] | None = None, e=None, **more: int):
        return a, b, c

    assert fn(np.int64(3), np.float32(2), np.bool_(False), d=[]) == (3, 2, False)
    assert fn(1, 2, more=3) == (1, 2, True)
    for odd, text in {
        "a=True must be an integer": dict(a=True),
        "a=1.0 must be an integer": dict(a=1.0),
        "b='1' must be a number": dict(a=1, b="1"),
        "c=0 must be True or False": dict(a=1, c=0),
        "d='x' must be a tuple, a list or None": dict(a=1, d="x"),
        "d=ndarray of float64 \\[2\\] must be": dict(a=1, d=np.ones(2)),
    }.items():
        with pytest.raises(ValueError, match=odd):
            fn(**text)


def _on_one_rank(rank, world):
    """What both ranks say where rank 1 is given something odd; then they go on."""
    group, q, k = dist.group.WORLD, Q[:, :4], K[:, :4]
    odd = [dict(q=[1, 2]), dict(config={"grid": (1, 2)}), dict(v=K[:, :4].to("meta")), dict(q=q[..., :0], k=k[..., :0])]
    said = []
    for changed in odd:
        call = dict(q=q, k=k, v=k, cp_group=group, config=TreeConfig(timeout_s=20)) | (changed if rank else {})
        with pytest.raises(ValueError, match="rank 1 rejected its input: " if rank == 0 else ".") as caught:
            tree_attn_func(**call)
        said.append(str(caught.value).removeprefix("rank 1 rejected its input: "))
    decay = Decay(_x(1, 4, 2), None if rank else _x(1, 4, 2, 4))
    with pytest.raises(ValueError, match="decay.readout must be a tensor, got NoneType"):
        tree_recurrence(_kernel, (), _x(1, 4, 2, 4), head_dim=4, cp_group=group, decay=decay)
    assert tree_attn_func(q, k, k, cp_group=group).isfinite().all()
    return said


def test_what_one_rank_is_given_all_ranks_hear_of():
    said, own = run_distributed(_on_one_rank, 2)
    assert said == own


def test_init_inference_takes_models():
    pytest.importorskip("deepspeed")
    for model in (torch.nn.Linear(2, 2), None, 3, [1]):
        with pytest.raises(ValueError, match=r"model=.* must be a Transformers model, or the folder of one"):
            megatron_tree.init_inference(model)
