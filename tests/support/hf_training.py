"""Training on shards: every kind of batch, whose losses and gradients are those of one rank's plain model; the largest
tensor."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_tree.integrations import transformers as tree_hf
from support.hf_models import prompt

LENGTHS = (1, 9, 2, 46, 3, 14, 5)  # of packed documents: one is cut, and some are shorter than a convolution
PADDED = (39, 22)  # tokens of padded rows
LIMIT = 1e-4  # errors of gradients in fp32, relative to their tensor; states live for 80 tokens


def _packed(lengths):
    """(A batch of packed documents, the documents.)"""
    ids, positions = prompt(1, sum(lengths), seed=3), torch.cat([torch.arange(n) for n in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}, list(ids[0].split(lengths))


def _batches():
    """{name: (the batch, its rows or documents alone)}."""
    ids = prompt(2, 39)
    mask = (torch.arange(39) < torch.tensor(PADDED)[:, None]).long()
    return {
        "zigzag": ({"input_ids": ids, "labels": ids}, list(ids)),
        "documents": _packed(LENGTHS),
        "some ranks have only padding": _packed((6, 4)),
        "padding": (
            {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask},
            [row[:n] for row, n in zip(ids, PADDED)],
        ),
    }


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def averaged_gradients(model):
    """{name: gradient of every parameter, the mean over all ranks}; on some there may be none, as of an expert that no
    token of the shard chose."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dist.all_reduce(found[name])
        found[name] /= dist.get_world_size()
    return found


def _alone(make, rows):
    """(loss, gradients) of a batch: the mean over the tokens of rows, run one by one on this rank by Transformers."""
    model, count = make(), sum(len(row) - 1 for row in rows)
    total = 0.0
    for row in rows:
        if len(row) > 1:
            logits = model(row[None], use_cache=False).logits[0, :-1].float()
            loss = F.cross_entropy(logits, row[1:], reduction="sum") / count
            loss.backward()
            total += float(loss)
    return total, gradients(model)


def check_trained_batches(make, recomputes=(False, True)):
    """On this rank of the default group: batches of all kinds, with and without gradient checkpointing. make() -> the
    model, the same each time."""
    for what, (batch, rows) in _batches().items():
        want, of_one = _alone(make, rows)
        for recompute in recomputes:
            model = make()
            if recompute:
                model.gradient_checkpointing_enable()
                model.train()  # tiny models have no dropout
            tree_hf.train_on_shards(model)
            loss = model(**tree_hf.shard_batch(batch, cp_group=dist.group.WORLD)).loss
            loss.backward()
            assert float(loss) == pytest.approx(want, rel=2e-5), (what, recompute)
            _check_gradients(model, of_one, f"{what}, {recompute}")


def _check_gradients(model, want, what):
    largest, found = max(float(grad.abs().max()) for grad in want.values()), averaged_gradients(model)
    for name, grad in want.items():
        error = float((found[name] - grad).abs().max())
        limit = LIMIT * (float(grad.abs().max()) + 0.01 * largest)  # sums that cancel out are of no size
        assert error <= limit, f"{what}: {name} {error:.1e} > {limit:.1e}"


class LargestTensor(TorchDispatchMode):
    """The largest number of elements of a tensor that an operation made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(made) if isinstance(x, torch.Tensor) and not x.is_meta]
        self.elements = max(self.elements, *sizes, 0)
        return made
