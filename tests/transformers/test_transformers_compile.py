"""A Transformers model that torch.compile compiles trains on shards as without, also under autocast."""

import pytest
import torch
import torch._dynamo
from torch.distributed.device_mesh import init_device_mesh

import megatron_tree.integrations.transformers as tree_hf
from support.hf_models import CONFIGS, VOCAB
from support.ranks import run_distributed
from transformers import AutoModelForCausalLM


def _trains(rank, world, autocast):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,))
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]())
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
            ids = torch.randint(VOCAB, (2, n))
            for x, y in zip(loss_and_grads(compiled, ids), loss_and_grads(model, ids), strict=True):
                assert (x - y).abs().max() <= 1e-5 * y.abs().max()
    return loss_and_grads(model, ids)[0].item()


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_model_trains_on_shards(autocast):
    one, two = run_distributed(_trains, 2, autocast, fresh=True)
    assert one == two
