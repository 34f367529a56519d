"""TreeDotProductAttention by itself: its arguments, masks, packed and padded batches, dropout."""

import itertools
import sys
import types

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.enums import AttnMaskType

from megatron_tree import TreeConfig, packed_layout, shard_positions
from megatron_tree.integrations import megatron as tree
from support.core_attention import Group, causal_mask, config, core_attention, qkv
from support.ranks import largest, on_ranks, run_distributed
from support.rounding import assert_near

causal, no_mask, padding = AttnMaskType.causal, AttnMaskType.no_mask, AttnMaskType.padding


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, TreeConfig(backend="aten")),
        ("tree", TreeConfig(backend="aten")),
        ("p2p", TreeConfig(backend="aten", schedule="ring", ulysses_size=1)),
        ("all_gather", TreeConfig(backend="aten", schedule="grid", grid=(1, 4), ulysses_size=1)),
        ("a2a", TreeConfig(backend="aten", schedule="grid", ulysses_size=4)),
        ("a2a+tree", TreeConfig(backend="aten", ulysses_size=2)),
        ("a2a+p2p", TreeConfig(backend="aten", schedule="ring", ulysses_size=2)),
    ],
)
def test_cp_comm_type_chooses_the_schedule(name, expected):
    sizes = (2, 2) if "+" in (name or "") else (1, 4)
    assert tree.tree_config_for(name, sizes, TreeConfig(backend="aten")) == expected


def _compiled(rank, world):
    core = core_attention(options={"context_parallel_size": world})
    core.cp_group = dist.group.WORLD
    inputs = [x.requires_grad_() for x in qkv()]
    with torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(core, backend="eager")(*inputs)
    outputs = compiled, core(*inputs)
    grads = [torch.autograd.grad(x.square().sum(), inputs) for x in outputs]
    return torch.equal(*outputs) and all(map(torch.equal, *grads))


def test_torch_compile_calls_core_attention_between_graphs():
    assert run_distributed(_compiled, 2) == [True, True]


def test_newer_arguments_are_taken():
    model = config()
    groups = types.SimpleNamespace(tp=Group(1), cp=Group(1))
    kwargs = {"k_channels": 8, "v_channels": 4, "name": "decoder.layers.0", "some_new_option": None}
    module = tree.TreeDotProductAttention(model, 1, causal, "self", pg_collection=groups, **kwargs)
    q, k, v = qkv()
    assert module(q, k, v[..., :4], None, num_splits=2).shape == (6, 2, 16)


def dense(q, k, v, *, scale, hidden, sinks=None):
    q, k, v = (x.double().permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (scale * q @ k.mT).masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    p = scores.softmax(-1)[..., : k.shape[2]]
    return (p @ v).permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("layer_number", [1, 2])
@pytest.mark.parametrize("mask", [causal, no_mask])
def test_one_rank_equals_the_formula(softmax_type, layer_number, mask):
    options = {"softmax_type": softmax_type, "window_size": (2, 0), "window_attn_skip_freq": 2}
    module = core_attention(layer_number=layer_number, mask=mask, options=options, softmax_scale=0.3)
    assert module.window_size == ((2, 0) if layer_number == 1 else (-1, -1))
    q, k, v = qkv()
    i, j = torch.arange(6)[:, None], torch.arange(6)
    hidden = (j > i) if mask is causal else torch.zeros(6, 6, dtype=torch.bool)
    if layer_number == 1:
        hidden = hidden | (j < i - 2) | (j > i)
    expected = dense(q, k, v, scale=0.3, hidden=hidden, sinks=module.softmax_offset)
    assert_near(module(q, k, v), expected, 8)


# --- over ranks: this rank's rows of what one rank computes ---

SEQ, BATCH = 16, 3
LENGTHS = (16, 5, 11)


def inputs_of(*, s_kv=SEQ, batch=BATCH):
    generator = torch.Generator().manual_seed(3)
    shapes = [(SEQ, batch, 4, 8), (s_kv, batch, 2, 8), (s_kv, batch, 2, 8), (SEQ, batch, 32)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def key_padding(lengths=LENGTHS, s=SEQ):
    return torch.arange(s) >= torch.tensor(lengths)[:, None]  # [b, s], True = hidden


def run_core(inputs, world, rows=None, k_rows=None, *, drop=0.0, name="tree", **call):
    """[out, dq, dk, dv] of `core_attention` on these rows, on this rank or (rows None) on one rank for the whole."""
    q, k, v, dout = inputs
    rows = torch.arange(len(q)) if rows is None else rows
    k_rows = torch.arange(len(k)) if k_rows is None else k_rows
    model = config(context_parallel_size=world, attention_dropout=drop)
    groups = types.SimpleNamespace(tp=Group(1), cp=dist.group.WORLD if world > 1 else Group(1))
    cross = "cross" if call.pop("cross", False) else "self"
    module = tree.TreeDotProductAttention(model, 1, causal, cross, pg_collection=groups, cp_comm_type=name)
    leaves = [x[i].clone().requires_grad_() for x, i in ((q, rows), (k, k_rows), (v, k_rows))]
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    torch.manual_seed(77)
    out = module(*leaves, **call)
    return [out.detach(), *torch.autograd.grad((out * dout[rows].view_as(out)).sum(), leaves)]


def compare(mine, whole, rows, k_rows, real=None):
    """Largest difference; real [s, b]: rows of the output that count."""
    worst = 0.0
    for i, (x, y) in enumerate(zip(mine, whole)):
        difference = x - y[rows if i < 2 else k_rows]
        if i == 0 and real is not None:
            difference = difference[real[rows]]
        worst = largest((worst, float(difference.abs().max())))
    return worst


def dense_with_gradients(inputs, hidden):
    """[out, dq, dk, dv] of dense attention in float64; hidden [b, 1, s_q or 1, s_k]. Rows that see nothing see all."""
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = dense(*leaves, scale=8**-0.5, hidden=hidden & ~hidden.all(-1, keepdim=True))
    return [out.detach(), *torch.autograd.grad((out * inputs[3]).sum(), leaves)]


def test_masks_of_a_loader_that_makes_causal_ones_are_not_read(monkeypatch):
    arguments = types.SimpleNamespace(reset_attention_mask=False)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", types.SimpleNamespace(_GLOBAL_ARGS=arguments))
    module, tensors = core_attention(), qkv()
    unread = torch.zeros(1, dtype=torch.bool)
    assert torch.equal(module(*tensors, unread), module(*tensors))
    arguments.reset_attention_mask = True
    with pytest.raises(ValueError, match="attention_mask"):
        module(*tensors, unread)


@pytest.mark.supports("hybrid context parallelism", with_="batches over 1 and 2 of 4 ranks, sbhd and thd")
@on_ranks(4)
def test_batches_over_ranks_of_their_own(rank, world):
    """A batch over ranks of its own, as hybrid context parallelism makes them; cp_comm_type is as of all ranks."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    bounds, errors = torch.tensor([0, SEQ]), {}
    want = run_core(inputs_of(batch=1), 1)
    for size, group in ((2, pairs[rank // 2]), (1, None)):
        rows = shard_positions(SEQ, rank % size, size)
        for form, name in itertools.product(("sbhd", "thd"), ("tree", "p2p", "all_gather", "a2a")):
            packed = PackedSeqParams(form, bounds, bounds, max_seqlen_q=SEQ, max_seqlen_kv=SEQ, local_cp_size=size)
            packed.cp_group = group
            inputs = [x.flatten(0, 1) if form == "thd" else x for x in inputs_of(batch=1)]
            found = run_core(inputs, world, rows, rows, packed_seq_params=packed, name=name)
            whole = [x.view(len(x), *y.shape[1:]) for x, y in zip(want, found)]
            errors[size, form, name] = compare(found, whole, rows, rows)
    assert len(errors) == 16 and largest(errors.values()) < 1e-12, errors


@pytest.mark.supports("attention_mask", with_="causal, padding, both; cp = 4")
@pytest.mark.supports("cross attention", with_="padded keys of another length; cp = 4")
@pytest.mark.parametrize("world", [1, 4])
@on_ranks()
def test_masks_are_read_as_lengths(rank, world):
    """Padding masks in all their shapes, with and without causality, self and cross attention."""
    rows = shard_positions(SEQ, rank, world)
    hidden = key_padding()
    later = causal_mask(SEQ)
    pad = hidden[:, None, None]
    both = later | pad
    square = pad | hidden[:, None, :, None]  # BERT's: rows of padding see nothing either
    arbitrary, padding_causal = AttnMaskType.arbitrary, AttnMaskType.padding_causal
    cases = {
        "padding, one row": (padding, pad, pad),
        "padding, square": (padding, square, square[:, :, rows]),
        "padding, local keys": (padding, square, square[:, :, rows][..., rows]),
        "arbitrary, padding": (arbitrary, square, square[:, :, rows]),
        "arbitrary, causal": (arbitrary, later, later[:, :, rows]),
        "causal": (causal, later, later[:, :, rows]),
        "causal and padding": (causal, both, both[:, :, rows]),
        "padding_causal": (padding_causal, pad, pad),
        "padding_causal, square": (padding_causal, both | square, (both | square)[:, :, rows]),
        "padding_causal, padding alone": (padding_causal, square, square[:, :, rows]),
        "nothing hidden": (padding, pad & False, pad & False),
    }
    errors = {}
    for name, (mask_type, mask, share) in cases.items():
        unpadded = name in ("causal", "arbitrary, causal", "nothing hidden")
        real = (~hidden | unpadded).T  # [s, b]: the loss looks at these rows alone
        inputs = inputs_of()
        inputs[3] = inputs[3] * real[..., None]
        want = dense_with_gradients(inputs, mask | later if "causal" in mask_type.name else mask)
        for comm_type in ("tree", "p2p", "all_gather") if world > 1 else ("tree",):
            options = dict(attn_mask_type=mask_type, attention_mask=share, name=comm_type)
            errors[name, comm_type] = compare(run_core(inputs, world, rows, rows, **options), want, rows, rows, real)
    k_rows = shard_positions(2 * SEQ, rank, world)
    inputs = inputs_of(s_kv=2 * SEQ)
    pad = key_padding((32, 3, 20), 2 * SEQ)[:, None, None]
    want = dense_with_gradients(inputs, pad)
    for name, share in (("all keys", pad), ("local keys", pad[..., k_rows])):
        options = dict(attn_mask_type=padding, attention_mask=share, cross=True)
        errors["cross", name] = compare(run_core(inputs, world, rows, k_rows, **options), want, rows, k_rows)
    assert largest(errors.values()) < 1e-12, errors


@on_ranks(4)
def test_what_a_padding_mask_hides_may_be_nan(rank, world):
    """What a padding mask hides holds NaN in q, k, v and dout: results are those of zeros there, to the bit."""
    rows, padded = shard_positions(SEQ, rank, world), key_padding().T  # [s, b]
    for mask_type in (padding, AttnMaskType.padding_causal):
        for comm_type in ("tree", "p2p", "all_gather"):
            call = dict(attn_mask_type=mask_type, attention_mask=key_padding()[:, None, None], name=comm_type)
            results = []
            for what in (float("nan"), 0.0):
                inputs = [x.masked_fill(padded.view(SEQ, BATCH, *(1,) * (x.dim() - 2)), what) for x in inputs_of()]
                results.append(run_core(inputs, world, rows, rows, **call))
            assert all(map(torch.equal, *results)), (mask_type, comm_type)
            assert not any(x[padded[rows]].any() for x in results[0][1:]), (mask_type, comm_type)


def _packed(rank, world, drop):
    """Packed documents and, with dropout, the same mask for any number of ranks: against the module on one rank."""
    lengths, padded = (7, 0, 8, 16), (8, 0, 8, 16)
    cu_seqlens, cu_padded = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (lengths, padded))
    packed = PackedSeqParams("thd", cu_seqlens, cu_seqlens, cu_padded, cu_padded, max_seqlen_q=16, max_seqlen_kv=16)
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(32, *n, generator=generator, dtype=torch.float64) for n in ((4, 8), (2, 8), (2, 8), (32,))]
    rows = shard_positions(32, rank, world, packed_layout(cu_seqlens, cu_padded))
    whole = run_core(inputs, 1, packed_seq_params=packed, drop=drop)
    if not drop:
        at, n = 8, 8
        alone = run_core([x[at : at + n, None] for x in inputs], 1)
        assert all(torch.allclose(x[at : at + n].flatten(), y.flatten(), atol=1e-12) for x, y in zip(whole, alone))
    errors = {}
    for name in ("tree", "p2p", "all_gather", "a2a"):
        mine = run_core(inputs, world, rows, rows, packed_seq_params=packed, drop=drop, name=name)
        errors[name] = compare(mine, whole, rows, rows)
    padded_batch = dict(attn_mask_type=padding, attention_mask=key_padding()[:, None, None], drop=drop)
    rows = shard_positions(SEQ, rank, world)
    for options in (padded_batch, dict(drop=drop), dict(attn_mask_type=no_mask, drop=drop)):
        whole = run_core(inputs_of(), 1, **options)
        mine = run_core(inputs_of(), world, rows, rows, **options)
        errors[f"batch, {options.get('attn_mask_type')}"] = compare(mine, whole, rows, rows)
    return errors, whole[0]


@pytest.mark.supports("attention_dropout", with_="the same mask on 1 and 4 ranks; also packed and padded")
def test_packed_documents_and_dropout():
    kept, dropped = run_distributed(_packed, 4, 0.0), run_distributed(_packed, 4, 0.3)
    for errors, _ in kept + dropped:
        assert largest(errors.values()) < 1e-12, errors
    assert not torch.allclose(kept[0][1], dropped[0][1])


def test_dropout_is_drawn_anew_in_training_only():
    model = config(attention_dropout=0.5)
    groups = types.SimpleNamespace(tp=Group(1), cp=Group(1))
    module = tree.TreeDotProductAttention(model, 1, causal, "self", pg_collection=groups)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    tensors = qkv()
    first, second = module(*tensors), module(*tensors)
    assert not torch.equal(first, second)
    module.eval()
    assert torch.equal(module(*tensors), core_attention()(*tensors))


def test_tensor_parallel_ranks_drop_other_pairs():
    """With sequence parallelism Megatron's random state for attention is the same on all of them."""
    model = config(attention_dropout=0.5, tensor_model_parallel_size=2, sequence_parallel=True)
    tensors, found = qkv(), []
    for rank in (0, 1, 0):
        groups = types.SimpleNamespace(tp=Group(2, rank), cp=Group(1))
        module = tree.TreeDotProductAttention(model, 1, causal, "self", pg_collection=groups)
        torch.manual_seed(0)
        found.append(module(*tensors))
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


@pytest.mark.refuses("a mask that is wrong on one rank only", when="the forward, on all ranks")
@on_ranks(2, timeout=60)
def test_a_bad_mask_on_one_rank_is_an_error_on_all(rank, world):
    rows = shard_positions(SEQ, rank, world)
    mask = causal_mask(SEQ)[:, :, rows].clone()
    if rank == 1:
        mask[..., 0, 0] = ~mask[..., 0, 0]
    with pytest.raises(ValueError, match="neither the causal mask"):
        run_core(inputs_of(), world, rows, rows, attention_mask=mask)
