"""Llama 4's chunked layers, past several chunks: tokens, logits, losses and gradients equal plain Transformers."""

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
from megatron_tree import tree_attn_func
from megatron_tree.core.comm import record
from megatron_tree.core.layout import document_positions, documents_over, spread_documents
from support.hf_architectures import WINDOW, tiny_config
from support.hf_models import left_padded
from support.hf_served import check_served, check_sharded
from support.hf_training import check_trained_batches
from support.ranks import on_ranks, run_distributed
from transformers import AutoModelForCausalLM

CHUNK = WINDOW


def make():
    """Three chunked layers and one without positions, whose queries grow warmer from token 5 on."""
    config = tiny_config("llama4_text")
    assert config.layer_types.count("chunked_attention") == 3 and len(set(config.layer_types)) == 2
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.normal_(std=0.2)
    return model


@pytest.mark.supports("`llama4_text`", with_="left padding, ragged rows; 2 ranks")
@on_ranks(2)
def test_served():
    check_served(make())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.supports("`llama4_text`", with_="training on shards; 2 and 4 ranks; zigzag, packed, padded, recomputed")
@on_ranks()
def test_trained(world):
    check_trained_batches(make)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.supports("`llama4_text`", with_="weights over all ranks; 2 and 4 ranks")
@on_ranks(timeout=200.0)
def test_weights_over_all_ranks(world):
    check_sharded(make())


@pytest.mark.refuses("`llama4_text` in training", when="it is set up: attention_dropout")
def test_dropout_is_refused_in_training():
    model = make()
    model.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="attention_dropout=0.1: in chunked layers"):
        tree_hf.train_on_shards(model)


@pytest.mark.parametrize("lengths", [(64,), (3, 0, 14, 7, 15)])
def test_chunks_are_documents_on_the_same_ranks(lengths):
    layout = spread_documents(lengths, 2)
    chunks = layout.in_chunks(CHUNK)
    assert chunks.shares == layout.shares and chunks.num_rows == layout.num_rows
    for rank in range(2):
        positions, of_chunks = (document_positions(x, rank, 2) for x in (layout, chunks))
        assert torch.equal(positions % CHUNK, of_chunks)


def test_the_ranks_work_in_chunked_layers():
    for size in (1, 7, 100, 512, 1024, 2048, 4096, 9000):
        chunks = documents_over((8192,), (8192,), 4).in_chunks(size)
        work = [sum((2 * s.pos + s.length + 1) * s.length for s in chunks.segments(rank, 4)) for rank in range(4)]
        assert max(work) <= 1.1 * sum(work) / 4, (size, work)


def _traffic(rank, world):
    """Bytes that this rank sends, forward and backward, for chunks that end where pieces of the sequence do."""
    q, k, v = (torch.randn(2, 32, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    layout = documents_over((64,), (64,), world).in_chunks(8)
    with record() as calls:
        tree_attn_func(q, k, v, cp_group=dist.group.WORLD, causal=True, layout=layout).sum().backward()
    return sum(call.bytes for call in calls)


def test_chunks_inside_a_piece_send_nothing():
    assert run_distributed(_traffic, 2) == [0, 0]


def test_padding_without_a_cache_is_refused():
    model = make()
    model.set_attn_implementation("tree")
    ids, mask = left_padded(2, 9)
    with torch.no_grad(), pytest.raises(ValueError, match="padding in chunked layers needs a TreeCache"):
        model(ids, attention_mask=mask, use_cache=False)
