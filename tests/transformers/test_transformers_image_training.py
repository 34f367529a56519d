"""Training models of images and text on sharded sequences: losses and gradients of one rank without tree attention."""

import functools

import pytest
import torch.distributed as dist

from support.ranks import run_distributed

pytest.importorskip("transformers")

from megatron_tree.integrations import transformers as tree_hf
from support.hf_images import CONFIGS, batches, image_model


@functools.cache
def _alone(name, what):
    """(loss, gradients) of rows that Transformers runs one by one on this rank."""
    model, total = image_model(name), 0.0
    _, rows = batches(name, model)[what]
    count = sum(int((row["labels"][:, 1:] != -100).sum()) for row in rows)
    for row in rows:
        loss = model(**row, use_cache=False).loss * int((row["labels"][:, 1:] != -100).sum()) / count
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _trained(rank, world, name):
    limit = 1e-4 if name == "qwen3_5" else 1e-6  # its delta rule computes in fp32, as do losses
    for what in ("one row", "padded", "packed"):
        want, grads = _alone(name, what)
        model = image_model(name)
        tree_hf.train_on_shards(model)
        batch, _ = batches(name, model)[what]
        loss = model(**tree_hf.shard_batch(batch, cp_group=dist.group.WORLD)).loss
        loss.backward()
        assert loss.item() == pytest.approx(want, rel=limit), what
        largest = max(float(grad.abs().max()) for grad in grads.values())
        for weight, parameter in model.named_parameters():
            if weight in grads:
                dist.all_reduce(parameter.grad)
                error = (parameter.grad / world - grads[weight]).abs().max()
                assert error <= limit * (grads[weight].abs().max() + 0.01 * largest), (what, weight, float(error))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_training(name, world):
    run_distributed(_trained, world, name)
