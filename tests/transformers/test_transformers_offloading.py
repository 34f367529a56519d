"""Activations on the host, by torch and by Transformers: the same bits of losses and gradients, and what stays behind.

On CPU ranks the host's copies are no less memory, so what counts is which tensors the hooks of autograd are given.
"""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from megatron_tree import TreeConfig
from megatron_tree.integrations import transformers as tree_hf
from support.hf_architectures import random_model
from support.hf_models import VOCAB
from support.ranks import run_distributed

ROWS, TOKENS = 2, 256
WAYS = {
    "none": {},
    "torch": {"around": True},
    "recompute": {"checkpointing": {}},
    "transformers": {"checkpointing": {"offload": True}},
    "tiles": {"checkpointing": {"offload": True}, "loss_tile": 32, "mlp_tile": 32},
}


class Remaining(saved_tensors_hooks):
    """Bytes of saved tensors that no hooks inside have taken: what would stay on a GPU. Parameters don't count."""

    def __init__(self, model):
        storages, self.storages = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

        def pack(x):
            storage = x.untyped_storage()
            if storage.data_ptr() not in storages:
                self.storages[storage.data_ptr()] = storage.nbytes(), x  # kept, so that its address stays its own
            return x

        super().__init__(pack, lambda x: x)

    @property
    def bytes(self) -> int:
        return sum(n for n, _ in self.storages.values())


def _step(name, config, around=False, checkpointing=None, **tiles):
    """The loss, all gradients, and the bytes that stay."""
    model = random_model(name).train()
    if checkpointing is not None:
        model.activation_checkpointing_enable(**checkpointing)
    tree_hf.train_on_shards(model, **tiles)
    ids = torch.randint(1, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(5))
    batch = tree_hf.shard_batch({"input_ids": ids, "labels": ids}, cp_group=dist.group.WORLD, tree_config=config)
    host = lambda **_: save_on_cpu(pin_memory=False)  # pinned memory needs an accelerator  # noqa: E731
    with mock.patch("transformers.modeling_utils.save_on_cpu", host):
        with (remaining := Remaining(model)), host() if around else contextlib.nullcontext():
            loss = model(**batch).loss
        loss.backward()
    return loss.item(), [p.grad for p in model.parameters()], remaining.bytes


def _ranks(rank, world, name, ulysses_size):
    config = TreeConfig(ulysses_size=ulysses_size, tune=False)
    found = {way: _step(name, config, **options) for way, options in WAYS.items()}
    loss, grads, _ = found["none"]
    for way, (other, others, _) in found.items():
        same = other == loss and all(x is y is None or torch.equal(x, y) for x, y in zip(others, grads, strict=True))
        assert same or way == "tiles", way
    return {way: remaining for way, (_, _, remaining) in found.items()}


@pytest.mark.parametrize("ulysses_size", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_nothing_large_stays(name, ulysses_size):
    for remaining in run_distributed(_ranks, 2, name, ulysses_size):
        print(remaining)
        assert remaining["torch"] < remaining["none"] / 50
        shape = random_model(name).config
        inputs = shape.num_hidden_layers * shape.hidden_size * ROWS * TOKENS // 2 * 4  # of all layers, in fp32
        assert remaining["recompute"] - remaining["transformers"] >= inputs
        assert remaining["tiles"] < remaining["none"] / 10
