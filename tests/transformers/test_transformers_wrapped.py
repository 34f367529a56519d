"""torch's DDP, FSDP2 and torch.compile around a model that trains on shards: the steps of one rank without them."""

import pytest
import torch

from support.hf_models import prompt, tiny_model
from support.ranks import run_distributed

pytest.importorskip("transformers")

STEPS = 3
LOSS_TILE = 5


def _train(wrap, shard):
    """Losses of some steps, and the model after them."""
    model = tiny_model("llama").train()
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.02, momentum=0.9)  # the gradients' size matters
    losses = []
    for step in range(STEPS):
        batch = {"input_ids": prompt(2, 21, seed=step)}
        batch["labels"] = batch["input_ids"].masked_fill(
            torch.arange(21) < 8, -100
        )  # ranks have other numbers of labels
        loss = wrapped(**shard(batch)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def _wrapped(rank, world, kind):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    from megatron_tree.integrations.transformers import shard_batch, train_on_shards

    def wrap(model):
        train_on_shards(model, loss_tile=LOSS_TILE)
        if kind == "DDP":
            return DistributedDataParallel(model)
        mesh = torch.distributed.init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    want, plain = _train(lambda model: model, lambda batch: batch)
    losses, model = _train(wrap, lambda batch: shard_batch(batch, cp_group=dist.group.WORLD))
    start = tiny_model("llama")
    moved = [float((a - b).abs().max()) for a, b in zip(plain.parameters(), start.parameters(), strict=True)]
    assert max(moved) > 1e-2
    assert losses == pytest.approx(want, abs=2e-5)
    for (name, got), truth in zip(model.named_parameters(), plain.parameters(), strict=True):
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        assert (whole - truth).abs().max() < 1e-5, name


@pytest.mark.parametrize("kind", [
    pytest.param("DDP", marks=pytest.mark.supports("`DistributedDataParallel`", with_="`train_on_shards`; 2 ranks")),
    pytest.param("FSDP2", marks=pytest.mark.supports("FSDP2 (`fully_shard`)", with_="`train_on_shards`; 2 ranks")),
])  # fmt: skip
def test_wrapped(kind):
    run_distributed(_wrapped, 2, kind)


def _compiled(rank, world, autocast):
    import torch._dynamo

    from megatron_tree.integrations import transformers as tree_hf

    mesh, model = torch.distributed.init_device_mesh("cpu", (world,)), tiny_model("llama")
    tree_hf.train_on_shards(model)
    model.train()
    assert tree_hf.TreeCache(model.config, cp_group=mesh).world == world

    def loss_and_grads(run, ids):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            batch = tree_hf.shard_batch({"input_ids": ids, "labels": ids}, cp_group=mesh)
            loss = run(**batch).loss
        loss.backward()
        return [loss.detach(), *(weight.grad.clone() for weight in model.parameters())]

    with torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(model, backend="eager")
        for n in (16, 24):
            ids = prompt(2, n)
            for x, y in zip(loss_and_grads(compiled, ids), loss_and_grads(model, ids), strict=True):
                assert (x - y).abs().max() <= 1e-5 * y.abs().max()
    return loss_and_grads(model, ids)[0].item()


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_model_trains_on_shards(autocast):
    one, two = run_distributed(_compiled, 2, autocast, fresh=True)
    assert one == two
