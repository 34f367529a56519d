"""The two programs of docs/derivatives.md: on four ranks they give what one rank has with torch's own attention."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron_tree import TreeConfig, shard_positions, tree_attn_func
from support.ranks import run_distributed

TOKENS, WIDTH, HEADS, KV_HEADS, WORDS = 24, 32, 4, 2, 17


class Block(nn.Module):
    """A layer of a transformer; attend(q, k, v) of [b, s, h, d]."""

    def __init__(self, attend):
        super().__init__()
        self.attend, d = attend, WIDTH // HEADS
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.back = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * d), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (HEADS + 2 * KV_HEADS, -1))
        x = x + self.back(self.attend(*qkv.split((HEADS, KV_HEADS, KV_HEADS), 2)).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Velocity(nn.Module):
    """u(z, r, t) of tokens z [b, s, WIDTH]."""

    def __init__(self, attend):
        super().__init__()
        self.of_time = nn.Linear(2, WIDTH)
        self.blocks = nn.Sequential(Block(attend), Block(attend))

    def forward(self, z, r, t):
        return self.blocks(z + torch.sin(self.of_time(torch.stack((r, t), -1)))[:, None])


class TinyGpt(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks, self.head = nn.Sequential(Block(attend), Block(attend)), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


def dense(causal):
    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        s = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
        return (s.softmax(-1) @ v).transpose(1, 2)

    return attend


def mean_flow_loss(model, z, velocity, r, t):
    """The sum over this rank's tokens [b, s/p, d]."""
    tangents = (velocity, torch.zeros_like(r), torch.ones_like(t))
    u, change = torch.func.jvp(model, (z, r, t), tangents)
    target = velocity - (t - r)[:, None, None] * change.detach()
    return ((u - target) ** 2).sum()


def hessian_vector_product(loss, parameters, vector, cp_group):
    """loss(): the sum over this rank's tokens. Gradients of replicated parameters are sums over cp_group."""
    gradients = torch.autograd.grad(loss(), parameters, create_graph=True)
    product = torch.autograd.grad(gradients, parameters, vector)
    if cp_group is not None:
        for x in product:
            dist.all_reduce(x, group=cp_group)
    return product


def _model(kind, attend):
    torch.manual_seed(0)
    return kind(attend).double()


def _assert_equal(found, truth):
    for x, want in zip(found, truth, strict=True):
        assert (x - want).abs().max() <= 1e-11 * want.abs().max().clamp(min=1)


def _mean_flow(rank, world, config):
    g = torch.Generator().manual_seed(1)
    z, velocity = (torch.randn(2, TOKENS, WIDTH, generator=g, dtype=torch.float64) for _ in range(2))
    r, t = torch.tensor([0.1, 0.3]).double(), torch.tensor([0.7, 0.4]).double()
    rows = shard_positions(TOKENS, rank, world, "zigzag")

    def attend(q, k, v):
        return tree_attn_func(q, k, v, cp_group=dist.group.WORLD, causal=False, config=config)

    model, plain = _model(Velocity, attend), _model(Velocity, dense(causal=False))
    loss = mean_flow_loss(model, z[:, rows], velocity[:, rows], r, t)
    loss.backward()
    truth = mean_flow_loss(plain, z, velocity, r, t)
    truth.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    for x in found:
        dist.all_reduce(x)
    _assert_equal(found, [truth.detach(), *(p.grad for p in plain.parameters())])
    return True


def _hvp(rank, world, config):
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(WORDS, (2, TOKENS + 1), generator=g)
    rows = shard_positions(TOKENS, rank, world, "zigzag")

    def attend(q, k, v):
        return tree_attn_func(q, k, v, cp_group=dist.group.WORLD, config=config)

    def product(model, rows, cp_group):
        def loss():
            labels = tokens[:, 1:][:, rows]
            return F.cross_entropy(model(tokens[:, :-1][:, rows]).flatten(0, 1), labels.flatten(), reduction="sum")

        g, parameters = torch.Generator().manual_seed(3), list(model.parameters())
        vector = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in parameters]
        return hessian_vector_product(loss, parameters, vector, cp_group)

    truth = product(_model(TinyGpt, dense(causal=True)), slice(None), None)
    _assert_equal(product(_model(TinyGpt, attend), rows, dist.group.WORLD), truth)
    return True


@pytest.mark.parametrize("config", [TreeConfig(), TreeConfig(ulysses_size=2)], ids=["auto", "heads"])
@pytest.mark.parametrize("program", [_mean_flow, _hvp])
def test_four_ranks_equal_one(program, config):
    assert all(run_distributed(program, 4, config))
