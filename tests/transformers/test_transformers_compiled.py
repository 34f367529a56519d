"""torch.compile around a model that trains on shards: the steps of one rank without it."""

import pytest
import torch._dynamo

from megatron_tree.integrations import transformers as tree_hf
from support.hf_models import prompt, tiny_model
from support.ranks import run_distributed


def _compiled(rank, world, autocast):
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
