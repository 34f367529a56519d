"""A model with NeMo Automodel's context-parallel hooks and sharder over two ranks against every document alone."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from support.ranks import on_ranks

pytest.importorskip("transformers")
pytest.importorskip("nemo_automodel", reason="needs nemo-automodel")

from nemo_automodel.components.distributed.context_parallel.sharder import ContextParallelSharder
from nemo_automodel.components.distributed.context_parallel.utils import attach_context_parallel_hooks

from megatron_tree import TreeConfig
from megatron_tree.integrations.automodel import use_tree_attention
from support.hf_models import prompt, tiny_model

DOCUMENTS = (5, 16, 3)
LENGTHS = (13, 20)  # of the rows of a padded batch


def _loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def _packed(ids, labels):
    """One row of documents, and [(ids, labels)] of each alone."""
    batch = {"input_ids": ids.view(1, -1)[:, : sum(DOCUMENTS)], "labels": labels.view(1, -1)[:, : sum(DOCUMENTS)]}
    batch["position_ids"] = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    return batch, list(zip(batch["input_ids"].split(DOCUMENTS, 1), batch["labels"].split(DOCUMENTS, 1), strict=True))


def _padded(ids, labels):
    mask = torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]
    batch = {"input_ids": ids, "labels": labels.masked_fill(~mask, -100), "attention_mask": mask.long()}
    return batch, [(ids[i : i + 1, :n], labels[i : i + 1, :n]) for i, n in enumerate(LENGTHS)]


@on_ranks(2, fresh=True)
def test_documents_and_padding_that_automodel_shards_give_what_each_gives_alone(world):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    text = prompt(2, 21)
    for make in (_packed, _padded):
        batch, alone = make(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        plain, model = tiny_model("llama").double().train(), tiny_model("llama").double().train()
        truth = sum(_loss(plain(input_ids=ids).logits, labels) for ids, labels in alone)
        truth.backward()

        model.gradient_checkpointing_enable({"use_reentrant": False})
        attach_context_parallel_hooks(model)  # as Automodel does while it builds a model
        use_tree_attention(model, mesh["cp"], tree_config=TreeConfig(backend="reference"))
        context, sharded = ContextParallelSharder(model, mesh, batch).shard(batch)
        labels = sharded.pop("labels")
        with context():
            loss = _loss(model(**sharded).logits, labels)
        loss.backward()
        dist.all_reduce(total := loss.detach().clone())
        torch.testing.assert_close(total, truth.detach(), rtol=1e-6, atol=0)
        right = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            dist.all_reduce(parameter.grad)
            error, scale = (float(x.abs().max()) for x in (parameter.grad - right[name].grad, right[name].grad))
            assert error <= 2e-5 * scale, (name, error, scale)  # Transformers computes norms in fp32
