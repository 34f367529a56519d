"""`compare_with_one_rank`: a right step has no difference; six faults, each is found where it was planted."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron_tree import TreeConfig, shard_positions, tree_attn_func
from megatron_tree.tools.doctor.compare import compare_with_one_rank
from support.ranks import on_ranks

TOKENS, WIDTH, HEADS = 256, 32, 4
LAYOUT = "zigzag"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, options):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        if options.pop("loses gradients", False):
            k, v = k.detach(), v.detach()
        return self.o(tree_attn_func(q, k, v, **options).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(), nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x, options):
        x = x + self.attention(x, dict(options))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 50)

    def forward(self, tokens, positions, options, of_block=None):
        x = self.tokens(tokens) + self.places(positions)
        for i, block in enumerate(self.blocks):
            x = block(x, options | ((of_block or {}).get(i) or {}))
        return self.head(x)


def _compared(rank, world, **fault):
    """The comparison of a step whose sharded form has a fault."""
    torch.manual_seed(0)
    model, group = Model(), dist.group.WORLD
    tokens = torch.randint(50, (2, TOKENS))
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    labels[:, :40] = -100  # a prompt
    positions = shard_positions(TOKENS, rank, world, LAYOUT)
    config = TreeConfig(deterministic="ranks")

    def step(rows, cp_group, labels, parts, fault):
        options = dict(cp_group=cp_group, layout=LAYOUT, config=config) | fault.get("options", {})
        places = torch.arange(len(rows)) if fault.get("positions begin anew") else rows
        logits = model(tokens[:, rows], places, options, fault.get("of_block"))
        total = F.cross_entropy(logits.flatten(0, 1), labels[:, rows].flatten(), ignore_index=-100, reduction="sum")
        loss = total / (labels != -100).sum() if not fault.get("own mean") else total / (labels[:, rows] != -100).sum()
        (loss * parts if not fault.get("own mean") else loss).backward()
        loss = loss.detach().clone()
        if parts > 1:
            dist.all_reduce(loss)
            loss = loss / parts if fault.get("own mean") else loss
        return loss

    given = F.pad(labels[:, 1:], (0, 1), value=-100) if fault.get("labels shifted twice") else labels
    rows = torch.arange(TOKENS) if fault.get("nothing is sharded") else positions
    group_of_step = None if fault.get("nothing is sharded") else group
    return compare_with_one_rank(
        model,
        lambda: step(torch.arange(TOKENS), None, labels, 1, {}),
        lambda: step(rows, group_of_step, given, world, fault),
        positions=positions,
        cp_group=group,
    )


@pytest.mark.parametrize("world", [2, 4])
@on_ranks(timeout=120)
def test_a_right_step_has_no_difference(rank, world):
    found = _compared(rank, world)
    assert found.values is None, str(found.values)
    # up to the loss there is no sum over ranks, so a difference of bits is one of the dense layers' products
    assert found.bits is None or found.bits.error < 1e-6


@on_ranks(2, timeout=120)
def test_a_step_of_transformers(rank):
    """Every layer's output has the same bits if torch's products of fewer rows have; the loss is a sum over ranks."""
    pytest.importorskip("transformers")
    from megatron_tree.integrations.transformers.train.batch_shards import shard_batch
    from megatron_tree.integrations.transformers.train.train_on_shards import train_on_shards
    from support.hf_models import VOCAB, tiny_model

    model = tiny_model("llama", positions=512).train()
    train_on_shards(model)
    ids, group = torch.randint(VOCAB, (2, 288)), dist.group.WORLD

    def step(cp_group):
        shard = shard_batch(
            dict(input_ids=ids, labels=ids), cp_group=cp_group, tree_config=TreeConfig(deterministic="ranks")
        )
        loss = model(**shard).loss
        loss.backward()
        return loss

    positions = shard_positions(288, rank, 2)
    found = compare_with_one_rank(model, lambda: step(None), lambda: step(group), positions=positions, cp_group=group)
    assert found.values is None, str(found.values)
    assert found.bits is None or found.bits.error < 1e-6, str(found.bits)


FAULTS = {
    "attention to this rank's shard only": (dict(options=dict(cp_group=None)), "output of blocks.0.attention.o"),
    "the whole sequence on every rank": ({"nothing is sharded": True}, "output of tokens"),
    "the layout of a mask is another one": (
        dict(of_block={1: dict(layout="contiguous")}),
        "output of blocks.1.attention.o",
    ),
    "positions begin anew on every rank": ({"positions begin anew": True}, "output of places"),
    "labels are shifted twice": ({"labels shifted twice": True}, "loss"),
    "a gradient is lost": (dict(of_block={1: {"loses gradients": True}}), "gradient at blocks.1.attention.qkv"),
    "a window ends a token early": (dict(options=dict(window_size=(200, 0))), "output of blocks.0.attention.o"),
    "every rank divides by its own tokens": ({"own mean": True}, "loss"),
}


@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2, timeout=120)
def test_a_fault_is_found_where_it_is(rank, fault):
    planted, where = FAULTS[fault]
    found = _compared(rank, 2, **planted).values
    assert found is not None and found.where == where, str(found)
    if where == "output of blocks.0.attention.o":
        assert found.position > 0, str(found)  # what comes first sees the same
    if "window" in fault:
        assert found.position == 201, str(found)


@on_ranks(2, timeout=60)
def test_bad_arguments(rank):
    model = nn.Linear(2, 2)
    steps = dict(alone=lambda: torch.zeros(()), sharded=lambda: torch.zeros(()), cp_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="gradients='max' must be 'mean' or 'sum'"):
        compare_with_one_rank(model, positions=torch.arange(2), gradients="max", **steps)
    with pytest.raises(ValueError, match="positions end at 1, but the ranks hold 4 tokens"):
        compare_with_one_rank(model, positions=torch.arange(2), **steps)
    steps["alone"] = lambda: model(torch.zeros(2)).sum() if rank else torch.zeros(())
    with pytest.raises(ValueError, match="runs other modules on some ranks"):
        compare_with_one_rank(nn.Sequential(model), positions=torch.arange(2) * 2 + rank, **steps)
