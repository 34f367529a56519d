"""Llama 4's chunked layers over a sharded cache, past several chunks: tokens and logits equal plain Transformers."""

import pytest
import torch

from support.ranks import run_distributed

pytest.importorskip("transformers")

import megatron_tree.integrations.transformers as tree_hf
import transformers
from support.hf_models import left_padded
from support.hf_served import check_served
from transformers import AutoModelForCausalLM

CHUNK = 7


def make():
    """Three chunked layers and one without positions, whose queries grow warmer from token 5 on."""
    config = transformers.Llama4TextConfig(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=16,
        intermediate_size_mlp=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        attention_chunk_size=CHUNK,
        floor_scale=5,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        max_position_embeddings=128,
    )
    assert config.layer_types.count("chunked_attention") == 3 and len(set(config.layer_types)) == 2
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.normal_(std=0.2)
    return model


def _served(rank, world):
    check_served(make())


@pytest.mark.supports("`llama4_text`", with_="left padding, ragged rows; 2 ranks")
def test_served():
    run_distributed(_served, 2)


@pytest.mark.refuses("`llama4_text` in training", when="it is set up: chunked_attention")
def test_refused_in_training():
    with pytest.raises(ValueError, match="chunked_attention layers"):
        tree_hf.train_on_shards(make())


def test_padding_without_a_cache_is_refused():
    model = make()
    model.set_attn_implementation("tree")
    ids, mask = left_padded(2, 9)
    with torch.no_grad(), pytest.raises(ValueError, match="padding in chunked layers needs a TreeCache"):
        model(ids, attention_mask=mask, use_cache=False)
