"""Rows with shared prefixes as one packed row: losses and gradients of models are those of the separate rows."""

import copy
import functools
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import megatron_tree.integrations.transformers as tree_hf
from megatron_tree import prefix_tree
from megatron_tree.integrations.transformers.architectures import size_of_blocks
from support.hf_architectures import (
    HYBRIDS,
    INDEXED,
    SERVED,
    STATE_SPACE,
    deepseek_v4,
    long_lived_model,
    random_model,
    tiny_config,
)
from support.hf_models import CONFIGS, glm5_next, mistral_large4, tiny_model
from support.prefix_trees import grown
from support.ranks import on_ranks, run_distributed
from support.rounding import assert_near
from support_matrix import slow_but
from transformers import AutoModelForCausalLM

FAMILIES = ("llama", "qwen2", "gpt2", "llama4_text")  # windows; learned positions; chunks and temperatures
FAST_HYBRIDS = ("qwen3_next", "nemotron_h", "lfm2")  # delta rules; Mamba 2; convolutions


def _rows(seed, count=6):
    draw = random.Random(seed)
    rows = grown(draw, count, vocab=3, longest=9)
    weights = [[draw.choice([0, 1, 1, 0.5]) for _ in row] for row in rows]
    return [[token + 5 for token in row] for row in rows], weights


def _model(family):
    """In float64, but for norms and rotary embeddings of all but gpt2; in evaluation: gpt2 has dropout."""
    if family != "llama4_text":
        return tiny_model(family).double().eval()
    torch.manual_seed(1)
    layers = ["chunked_attention", "chunked_attention", "full_attention"]
    config = tiny_config(family, num_hidden_layers=3, layer_types=layers)
    config.attention_chunk_size, config.floor_scale, config.attn_scale = 5, 3, 0.5
    config.no_rope_layers = [1, 0, 1]  # the second sees all tokens, with a temperature by position
    config.layer_types = ["chunked_attention", "full_attention", "chunked_attention"]
    return AutoModelForCausalLM.from_config(config).double().eval()


def _grpo(log_probs, weights):
    """Clipped ratios with an advantage for each row, nonlinear in its log-probabilities. log_probs, weights: [n, s]."""
    advantages = torch.linspace(-1, 1, len(log_probs), dtype=log_probs.dtype)[:, None]
    ratio = torch.exp(log_probs - 0.9 * log_probs.detach())
    each = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * weights
    return -(each.sum(1) / weights.sum(1).clamp(min=1)).mean() + 0.01 * log_probs.sum(1).square().mean()


def _plain(model, rows, weights):
    """(log-probabilities [n, s] of the tokens after each, weights [n, s]) row by row."""
    longest = max(map(len, rows))
    log_probs, of_rows = [], []
    for row, given in zip(rows, weights, strict=True):
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
        values = logits.log_softmax(-1).gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
        counted = torch.tensor(given[1:], dtype=values.dtype)
        log_probs.append(F.pad(values * (counted != 0), (0, longest - len(values))))
        of_rows.append(F.pad(counted, (0, longest - len(values))))
    return torch.stack(log_probs), torch.stack(of_rows)


def _gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


def _averaged(grads):
    if dist.is_initialized() and dist.get_world_size() > 1:
        for grad in grads:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
    return grads


def _trees(rank, world, families, seeds):
    group = dist.group.WORLD if world > 1 else None
    for family in families:
        plain = _model(family)
        model = copy.deepcopy(plain)
        tree_hf.train_on_shards(model)
        for seed in seeds:
            rows, weights = _rows(seed)
            tree = prefix_tree(rows, weights=weights, min_shared=1 + seed % 3)
            shard = tree_hf.shard_batch({"prefix_tree": tree}, cp_group=group)
            log_probs, counted = _plain(plain, rows, weights)
            expected = -(log_probs * counted).sum() / counted.sum()
            loss = model(**shard).loss
            assert_near(loss, expected, length=1000)
            truth = _gradients(plain, expected)
            for mine, grad in zip(_averaged(_gradients(model, loss)), truth, strict=True):
                assert_near(mine, grad, length=1000)

            shard = tree_hf.shard_batch({"prefix_tree": tree}, cp_group=group)
            log_probs, counted = _plain(plain, rows, weights)
            values = tree_hf.token_log_probs(model, shard).log_probs
            mine = tree.next_of_rows(tree_hf.gather_tokens(values, shard))
            assert_near(mine, log_probs, length=1000)
            truth = _gradients(plain, _grpo(log_probs, counted))
            grads = _averaged(_gradients(model, _grpo(mine, tree.row_weights.double())))
            for got, grad in zip(grads, truth, strict=True):
                assert_near(got, grad, length=1000)
    return True


def test_losses_and_gradients_are_those_of_the_rows():
    """Trees that branch at several depths, on one rank: the mean loss, and a loss of the rows' log-probabilities."""
    _trees(0, 1, FAMILIES, range(2))


@pytest.mark.parametrize("world", [2, 4])
def test_losses_and_gradients_over_ranks(world):
    assert all(run_distributed(_trees, world, FAMILIES[world // 4 :: 2], [world]))


def _check_model(plain, group=None):
    model = copy.deepcopy(plain)
    tree_hf.train_on_shards(model)
    rows, weights = _rows(1)
    tree = prefix_tree(rows, weights=weights, block_size=size_of_blocks(plain.config))
    assert tree.input_ids.shape[1] < sum(map(len, rows))
    log_probs, counted = _plain(plain, rows, weights)
    expected = -(log_probs * counted).sum() / counted.sum()
    truth = _gradients(plain, expected)
    loss = model(**tree_hf.shard_batch({"prefix_tree": tree}, cp_group=group)).loss
    assert_near(loss, expected, length=1000)
    largest = max(grad.abs().max() for grad in truth)
    names = [name for name, _ in plain.named_parameters()]
    for name, mine, grad in zip(names, _averaged(_gradients(model, loss)), truth, strict=True):
        if grad.abs().max() > 1e-5 * largest:  # not biases of keys, whose gradients cancel out
            assert_near(mine, grad, length=10_000, what=name)


@pytest.mark.parametrize("name", slow_but((), [*(name for name in SERVED if name not in FAMILIES), "gemma3n_text"]))
def test_architectures(name):
    _check_model(random_model(name))


@pytest.mark.parametrize("name", slow_but(FAST_HYBRIDS, (*HYBRIDS, *STATE_SPACE)))
def test_recurrent_layers(name):
    """A branch begins with the state, and the rows of its convolutions, where it leaves another."""
    _check_model(long_lived_model(name))


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("qwen3_next", 2),
        ("zaya", 4),
        *(
            pytest.param(name, world, marks=pytest.mark.slow)
            for name in ("qwen3_next", "kimi_linear", "nemotron_h", "lfm2", "jamba")
            for world in (3, 4)
        ),
    ],
)
@on_ranks()
def test_recurrent_layers_over_ranks(name, world):
    _check_model(long_lived_model(name), dist.group.WORLD)


@pytest.mark.parametrize("name", slow_but(("deepseek_v32",), (*INDEXED, "mistral_large4")))
def test_layers_with_an_index(name):
    """A query selects among the tokens before it in its rows."""
    _check_model(mistral_large4() if name == "mistral_large4" else random_model(name))


@pytest.mark.parametrize("name", slow_but(("dots3_note",), INDEXED))
@on_ranks(3)
def test_layers_with_an_index_over_ranks(name):
    _check_model(random_model(name), dist.group.WORLD)


RATES = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
OF_BLOCKS = {
    "deepseek_v4": functools.partial(deepseek_v4, compress_rates=RATES),
    "glm5_next": functools.partial(glm5_next, index_kpool=2, index_topk=6),
    "qwen4_exp_text": functools.partial(random_model, "qwen4_exp_text"),
}


@pytest.mark.parametrize("world", slow_but([2], [1, 2, 4]))
@pytest.mark.parametrize("name", OF_BLOCKS)
@on_ranks()
def test_layers_with_blocks_of_tokens(name, world):
    """Blocks in a shared beginning are shared; where rows part within one, each has its own."""
    _check_model(OF_BLOCKS[name](), dist.group.WORLD)


@pytest.mark.parametrize("checkpointing", [False, True])
@on_ranks(4)
def test_data_and_sequence_parallel(checkpointing):
    """Two sequence groups of two ranks, which get different trees: with DDP, a loss in tiles, and layers that are run
    again in the backward."""
    plain = _model("llama")
    model = copy.deepcopy(plain).train()
    parallel = tree_hf.register_sequence_parallel(model, sp_size=2, loss_tile=3)
    if checkpointing:
        model.gradient_checkpointing_enable()
    wrapped = DistributedDataParallel(model)
    batches = [_rows(seed) for seed in range(2)]
    found = [_plain(plain, *batch) for batch in batches]
    expected = -sum((x * w).sum() for x, w in found) / sum(w.sum() for _, w in found)
    rows, weights = batches[parallel.dp_rank]
    loss = wrapped(**parallel.shard_batch({"prefix_tree": prefix_tree(rows, weights=weights)})).loss
    assert_near(loss, expected, length=1000)
    for mine, grad in zip(_gradients(model, loss), _gradients(plain, expected), strict=True):
        assert_near(mine, grad, length=1000)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("llama_dynamic", "a rotary embedding that differs for rows of 3 and 40 tokens"),
        ("qwen4_exp_text", r"blocks of 2 tokens, and rows of the prefix_tree part after 1: .*block_size=2\)"),
        ("deepseek_v4", r"blocks of 24 tokens, and rows of the prefix_tree part after 1: .*block_size=24\)"),
        ("dropout", "attention dropout=0.1, for which ranges have no mask"),
    ],
)
def test_models_that_take_no_tree(family, message):
    if family == "dropout":
        model = tiny_model("llama").train()
        model.config.attention_dropout = 0.1
    else:
        model = tiny_model(family) if family in CONFIGS else AutoModelForCausalLM.from_config(tiny_config(family))
    tree_hf.train_on_shards(model)
    shard = tree_hf.shard_batch({"prefix_tree": prefix_tree([[5, 5, 7], [5] * 40])}, cp_group=None)
    with pytest.raises(ValueError, match=message):
        model(**shard)


def test_the_mean_loss_does_not_depend_on_the_weights_scale():
    model = tiny_model("llama")
    tree_hf.train_on_shards(model)
    (rows, weights), losses = _rows(0), []
    for scale in (1, 1e-3):
        scaled = [[scale * w for w in given] for given in weights]
        shard = tree_hf.shard_batch({"prefix_tree": prefix_tree(rows, weights=scaled)}, cp_group=None)
        losses.append(model(**shard).loss)
    assert_near(losses[1], losses[0], length=100)


def test_a_batch_is_the_tree_alone():
    tree = prefix_tree([[5, 6], [5, 7]])
    with pytest.raises(ValueError, match="batch has .'labels'. beside prefix_tree"):
        tree_hf.shard_batch({"prefix_tree": tree, "labels": tree.labels}, cp_group=None)
    with pytest.raises(ValueError, match="is a list: it must be what prefix_tree.rows. returned"):
        tree_hf.shard_batch({"prefix_tree": [[5, 6]]}, cp_group=None)
