"""Training hybrid models on shards: losses and gradients are those of one rank, also of their recurrent layers."""

import copy
import io

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
from megatron_tree.core.comm import record
from support.hf_architectures import HYBRIDS, POOLED, STATE_SPACE, long_lived_model, random_model
from support.hf_models import prompt
from support.hf_training import check_trained_batches, gradients
from support.ranks import on_ranks

FAST = ("qwen3_next", "falcon_h1", "jamba", "zaya", "qwen4_exp_text")  # one of each kind of function, or index


def _is_fast(name, world):
    return name in FAST and (world == 2 or name == FAST[0])


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, marks=() if _is_fast(name, world) else pytest.mark.slow, id=f"{name}-{world}")
        for name in (*HYBRIDS, *POOLED, *STATE_SPACE)
        for world in (2, 4)
    ],
)
@on_ranks()
def test_training(world, name):
    check_trained_batches(lambda: long_lived_model(name))


def _distance(model, want, world):
    """Of the gradients from those wanted, relative to these."""
    apart = torch.zeros(2, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if name in want:
            grad = torch.zeros_like(want[name]) if parameter.grad is None else parameter.grad.float()
            if world > 1:
                dist.all_reduce(grad)
            apart += torch.stack([(grad / world - want[name]).norm(), want[name].norm()]).double() ** 2
    return float((apart[0] / apart[1]).sqrt())


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "jamba"])
@on_ranks(2)
def test_bf16_is_as_far_from_fp32_as_on_one_rank(world, name):
    """How far bf16 gradients are from those in fp32: of one rank, and of all."""
    ids, apart = prompt(2, 100), []
    batch = {"input_ids": ids, "labels": ids}
    wanted = random_model(name).bfloat16().float()
    wanted(**batch, use_cache=False).loss.backward()
    for shared in (False, True):
        model = random_model(name).bfloat16()
        if shared:
            tree_hf.train_on_shards(model)
        own = tree_hf.shard_batch(batch, cp_group=dist.group.WORLD) if shared else batch | {"use_cache": False}
        model(**own).loss.backward()
        apart.append(_distance(model, gradients(wanted), world if shared else 1))
    of_one, of_all = apart
    assert 0 < of_all < 2.5 * of_one, (of_one, of_all)  # the roundings of a few tokens are most of it


@on_ranks(2)
def test_a_copy_of_a_model_is_trained_by_itself_and_not_pickled():
    model, ids = random_model("qwen3_next"), prompt(1, 24)
    tree_hf.train_on_shards(model)
    other = copy.deepcopy(model)
    shard = tree_hf.shard_batch({"input_ids": ids, "labels": ids}, cp_group=dist.group.WORLD)
    losses = [m(**shard).loss for m in (model, other)]
    assert torch.equal(*losses)
    losses[1].backward()
    assert not gradients(model) and gradients(other)
    for m in (model, other):
        with pytest.raises(ValueError, match=r"compute on shards.*state_dict\(\).*torch\.save\(model\)"):
            torch.save(m, io.BytesIO())


@on_ranks(4)
def test_what_is_sent_does_not_depend_on_the_length():
    """What this rank sends in a training step of a model of recurrent layers, for two lengths."""
    sent = []
    for tokens in (64, 256):
        model, ids = random_model("mamba2"), prompt(1, tokens)
        tree_hf.train_on_shards(model)
        with record() as calls:
            model(**tree_hf.shard_batch({"input_ids": ids, "labels": ids}, cp_group=dist.group.WORLD)).loss.backward()
        sent.append(sum(call.bytes for call in calls))
    short, long = sent
    assert short == long > 0, (short, long)


def _step(model):
    ids = prompt(1, 9)
    return model(**tree_hf.shard_batch({"input_ids": ids, "labels": ids}, cp_group=None))


def test_a_layer_that_computes_elsewhere():
    model = random_model("qwen3_next")
    tree_hf.train_on_shards(model)
    model.model.layers[0].linear_attn.forward = lambda hidden_states, **options: hidden_states
    with pytest.raises(ValueError, match=r"layer_idx=0\) did not call causal_conv1d_fn, torch_chunk_gated_delta_rule"):
        _step(model)


def test_a_layer_whose_functions_are_not_known():
    model = random_model("lfm2")
    conv = model.model.layers[2].conv
    conv.__class__ = type("OtherConv", (type(conv),), {"forward": lambda self, hidden_states, **options: hidden_states})
    with pytest.raises(ValueError, match=r"recurrent state \(0, 2\), but .* were found in \[0\]"):
        tree_hf.train_on_shards(model)


def test_a_layer_that_lost_its_shard():
    model = random_model("falcon_h1").train()
    tree_hf.train_on_shards(model)
    with pytest.raises(ValueError, match=r"layer_idx=1\) runs again, in the backward, without its shard"):
        model.model.layers[1].mamba(torch.zeros(1, 4, 32))


def test_documents_in_a_kernels_own_form():
    model, positions = random_model("lfm2"), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])
    tree_hf.train_on_shards(model)
    batch = {"input_ids": prompt(1, 9), "position_ids": positions}
    with pytest.raises(ValueError, match="seq_idx: on shards packed documents are told by position_ids"):
        model(**tree_hf.shard_batch(batch, cp_group=None), seq_idx=torch.zeros(1, 9, dtype=torch.int32))
