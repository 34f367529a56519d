"""Wrappers with a dtype of their own (FSDP2's policy, Accelerate's bf16): the errors of bf16 on whole sequences."""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_tree import prefix_tree
from support.hf_models import prompt, tiny_model
from support.ranks import on_ranks
from support.trainers import ADDRESS

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState

TOKENS = 61  # no multiple of twice the ranks
WORSE = 1.5  # than bf16 of one rank's whole sequences: other roundings of as many numbers


def _batches():
    """{name: (the batch, what a plain model gets instead)}."""
    ids = prompt(2, TOKENS)
    labels = ids.masked_fill(torch.arange(TOKENS) < torch.tensor([[9], [3]]), -100)
    mask = torch.arange(TOKENS) < torch.tensor([[TOKENS], [40]])
    padded = {"input_ids": ids, "labels": labels.masked_fill(~mask, -100), "attention_mask": mask.long()}
    positions = torch.cat((torch.arange(22), torch.arange(TOKENS - 22))).expand(ids.shape)
    packed = {"input_ids": ids, "labels": labels.masked_fill(positions == 0, -100), "position_ids": positions}
    tree = {"prefix_tree": prefix_tree(list(ids), weights=[torch.full((TOKENS,), 1 / 3)] * 2)}
    rows = {"input_ids": ids, "labels": ids}
    return {"padded": (padded, padded), "packed": (packed, packed), "tree": (tree, rows)}


def _wrapped(kind, model):
    if kind == "FSDP2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    AcceleratorState._reset_state(reset_partial_state=True)
    wrapped = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    return wrapped


def _gradients(model, wrapped, batch, seen=None):
    """(loss, all gradients in a line) of a batch. seen: gets the masks of the layers."""
    if seen is not None:
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda m, a, k: seen.append(k["attention_mask"]), with_kwargs=True)
    loss = wrapped(**batch).loss
    loss.backward()
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return loss.item(), torch.cat([x.flatten() for x in whole])


def _check(kind, family, batch, rows):
    from megatron_tree.integrations.transformers import register_sequence_parallel

    found, seen, rows = {}, [], rows | {"use_cache": False}
    plain = tiny_model(family).train()
    want = _gradients(plain, plain, rows)
    for name in ("whole", "shards"):
        model = tiny_model(family).train()
        if name == "shards":
            model.gradient_checkpointing_enable()
            parallel = register_sequence_parallel(model, loss_tile=7)
            rows = parallel.shard_batch(batch)
        loss, gradients = _gradients(model, _wrapped(kind, model), rows, seen if name == "shards" else None)
        found[name] = abs(loss / want[0] - 1), float((gradients - want[1]).norm())
    assert 0 < found["shards"][1] < WORSE * found["whole"][1] and found["shards"][0] < 2**-8, (kind, family, found)
    assert seen and all(mask is rows["sequence_shard"] for mask in seen)


@pytest.mark.supports("FSDP2 (`fully_shard`)", with_="a bf16 policy; padded, packed, tree; 2 ranks")
@pytest.mark.supports("Accelerate", with_="bf16, DDP; padded, packed, tree; 2 ranks")
@on_ranks(2, env=ADDRESS, fresh=True)
def test_bf16_of_wrappers():
    for kind in ("FSDP2", "Accelerate"):
        for name, (batch, rows) in _batches().items():
            _check(kind, "llama", batch, rows)
            if name == "padded":  # Transformers' recurrent layers go on from one document to the next
                _check(kind, "falcon_h1", batch, rows)
