"""Training hybrid models on shards: losses and gradients are those of one rank, also of their recurrent layers."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from support.ranks import run_distributed

pytest.importorskip("transformers")

import megatron_tree.integrations.transformers as tree_hf
from support.hf_architectures import HYBRIDS, random_model
from support.hf_models import prompt

FAST = ("qwen3_next", "falcon_h1", "jamba", "zaya")  # one of each kind of function
LENGTHS = (1, 9, 2, 46, 3, 14, 5)  # of packed documents: one is cut, and some are shorter than a convolution
PADDED = (39, 22)  # tokens of padded rows
LIMIT = 1e-4  # errors of gradients in fp32, relative to their tensor; states live for 80 tokens


def _long_lived(name):
    """A random model whose states live long, so that gradients depend on those of the ranks before."""
    model = random_model(name)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.sub_(4.0)
    return model


def _batches():
    """{name: (the batch, its rows or documents alone)}."""
    ids = prompt(2, 39)
    documents = prompt(1, sum(LENGTHS), seed=3)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    mask = (torch.arange(39) < torch.tensor(PADDED)[:, None]).long()
    return {
        "zigzag": ({"input_ids": ids, "labels": ids}, list(ids)),
        "documents": (
            {"input_ids": documents, "labels": documents.masked_fill(positions == 0, -100), "position_ids": positions},
            list(documents[0].split(LENGTHS)),
        ),
        "padding": (
            {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask},
            [row[:n] for row, n in zip(ids, PADDED)],
        ),
    }


def _gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _alone(name, rows):
    """(loss, gradients) of a batch: the mean over the tokens of rows, run one by one on this rank by Transformers."""
    model, count = _long_lived(name), sum(len(row) - 1 for row in rows)
    total = 0.0
    for row in rows:
        if len(row) > 1:
            logits = model(row[None], use_cache=False).logits[0, :-1].float()
            loss = F.cross_entropy(logits, row[1:], reduction="sum") / count
            loss.backward()
            total += float(loss)
    return total, _gradients(model)


def _training(rank, world, name):
    for what, (batch, rows) in _batches().items():
        want, of_one = _alone(name, rows)
        for recompute in (False, True):
            model = _long_lived(name)
            if recompute:
                model.gradient_checkpointing_enable()
                model.train()  # tiny models have no dropout
            tree_hf.train_on_shards(model)
            loss = model(**tree_hf.shard_batch(batch, cp_group=dist.group.WORLD)).loss
            loss.backward()
            assert float(loss) == pytest.approx(want, rel=2e-5), (what, recompute)
            _check_gradients(model, of_one, f"{what}, {recompute}")


def _check_gradients(model, want, what):
    world = dist.get_world_size()
    largest = max(float(grad.abs().max()) for grad in want.values())
    for name, parameter in model.named_parameters():
        if name in want:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad)
            error = float((grad / world - want[name]).abs().max())
            limit = LIMIT * (float(want[name].abs().max()) + 0.01 * largest)  # sums that cancel out are of no size
            assert error <= limit, f"{what}: {name} {error:.1e} > {limit:.1e}"


def _marks(name):
    with_ = "training on shards; 2 and 4 ranks; zigzag, packed, padded, recomputed"
    supports = pytest.mark.supports(f"`{name}`", with_=with_)
    return [supports] if name in FAST else [supports, pytest.mark.slow]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name), id=name) for name in HYBRIDS])
def test_training(name, world):
    run_distributed(_training, world, name)
