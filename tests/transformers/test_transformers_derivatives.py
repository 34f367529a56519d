"""Tangents and second derivatives of a Transformers model on shards."""

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
from megatron_tree import TreeConfig, shard_positions
from support.hf_models import prompt, tiny_model
from support.ranks import on_ranks

TOKENS = 16


def _randn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _shard(world, ids):
    batch = {"input_ids": ids, "labels": ids}
    config = TreeConfig(backend="reference")
    return tree_hf.shard_batch(batch, cp_group=dist.group.WORLD if world > 1 else None, tree_config=config)


def _hessian_vector_product(model, batch):
    """Mean over the ranks, as data parallelism averages gradients."""
    parameters = list(model.parameters())
    vector = [_randn(p.shape, i) for i, p in enumerate(parameters)]
    gradients = torch.autograd.grad(model(**batch).loss, parameters, create_graph=True)
    product = torch.autograd.grad(gradients, parameters, vector)
    for x in product:
        dist.all_reduce(x, op=dist.ReduceOp.SUM)
        x /= dist.get_world_size()
    return product


def _tangent(model, batch, embeddings, direction):
    """Of the logits along a direction of the embeddings."""
    inputs = {name: x for name, x in batch.items() if name not in ("input_ids", "labels")}
    logits = lambda x: model(inputs_embeds=x, **inputs).logits  # noqa: E731
    return torch.func.jvp(logits, (embeddings,), (direction,))[1]


def _assert_equal(found, truth):
    """Transformers computes norms and the loss in fp32."""
    assert (found - truth).abs().max() <= 2e-5 * truth.abs().max(), float(
        (found - truth).abs().max() / truth.abs().max()
    )


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@on_ranks(2)
def test_on_shards(rank, world, family):
    ids, rows = prompt(2, TOKENS), shard_positions(TOKENS, rank, world, "zigzag")
    plain, model = tiny_model(family).double().train(), tiny_model(family).double().train()
    plain.set_attn_implementation("eager")
    tree_hf.train_on_shards(model)
    batch = _shard(world, ids)
    whole = {"input_ids": ids, "labels": ids}
    for x, want in zip(_hessian_vector_product(model, batch), _hessian_vector_product(plain, whole), strict=True):
        _assert_equal(x, want)
    embeddings = plain.get_input_embeddings()(ids).detach()
    direction = _randn(embeddings.shape, 7)
    want = _tangent(plain, {}, embeddings, direction)[:, rows]
    _assert_equal(_tangent(model, batch, embeddings[:, rows], direction[:, rows]), want)
