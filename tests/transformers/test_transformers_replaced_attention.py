"""BLOOM, CodeGen, Falcon and MPT, whose attention code is replaced: they compute what plain Transformers does."""

import pytest
import torch

from support.ranks import run_distributed

pytest.importorskip("transformers")

import megatron_tree.integrations.transformers as tree_hf
import transformers
from megatron_tree.integrations.transformers.split_rules import plan_layout
from support.hf_architectures import assert_logits, random_model
from support.hf_models import prompt
from support.hf_served import check_served, check_sharded, check_trained
from transformers import AutoModelForCausalLM

SHAPE = dict(vocab_size=131, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, eos_token_id=None)
CASES = {
    "bloom, 6 heads": lambda: transformers.BloomConfig(
        vocab_size=131, hidden_size=48, n_layer=2, n_head=6, eos_token_id=None
    ),
    "codegen, 8 heads": lambda: transformers.CodeGenConfig(
        vocab_size=131, n_embd=64, n_layer=2, n_head=8, n_ctx=64, n_positions=64, rotary_dim=4, eos_token_id=None
    ),
    "falcon, ALiBi": lambda: transformers.FalconConfig(**SHAPE, alibi=True, multi_query=False, bias=True),
    "falcon, rotary, multi_query": lambda: transformers.FalconConfig(**SHAPE, alibi=False, multi_query=True),
    "falcon, rotary, new_decoder_architecture": lambda: transformers.FalconConfig(
        **SHAPE, alibi=False, new_decoder_architecture=True, num_kv_heads=2
    ),
    "mpt, clip_qkv, softmax_scale": lambda: transformers.MptConfig(
        vocab_size=131,
        d_model=48,
        n_layers=2,
        n_heads=6,
        max_seq_len=64,
        use_cache=True,
        eos_token_id=None,
        attn_config=dict(clip_qkv=1.5, softmax_scale=0.2),
    ),
}


def make(case):
    torch.manual_seed(1)
    # in eager Falcon adds ALiBi twice: to the scores, and in the mask
    model = AutoModelForCausalLM.from_config(
        CASES[case](), attn_implementation="sdpa" if case.startswith("falcon") else "eager"
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "emb" not in name and "wte" not in name:
                weight.mul_(4.0)
    return model.eval()


def _served(rank, world, case):
    check_served(make(case))


def _trained(rank, world, case):
    check_trained(lambda: make(case), recomputed=True)


def _sharded(rank, world, case):
    check_sharded(make(case))


def _cases(*fast):
    return [pytest.param(case, marks=[] if case in fast else [pytest.mark.slow]) for case in CASES]


@pytest.mark.parametrize("case", _cases("falcon, ALiBi", "mpt, clip_qkv, softmax_scale"))
def test_served(case):
    run_distributed(_served, 2, case)


@pytest.mark.parametrize("case", _cases("bloom, 6 heads"))
def test_trained(case):
    run_distributed(_trained, 2, case)


@pytest.mark.parametrize("case", _cases("falcon, rotary, multi_query"))
def test_weights_over_all_ranks(case):
    run_distributed(_sharded, 2, case)


@pytest.mark.parametrize("name", ["bloom", "falcon", "gpt_neo", "gptj", "jetmoe"])
def test_ranks_that_do_not_divide_the_heads_are_refused(name):
    model = random_model(name)
    for world in (1, 2, 4):
        plan_layout(model, world, 0)
    with pytest.raises(ValueError, match=r"weights='sharded' can't split .*: start one of \[1, 2, 4\] ranks"):
        plan_layout(model, 3, 0)


def test_other_implementations_run_their_own_code():
    """As without this package, before and after attention "tree" was set."""
    for case in CASES:
        model, ids = make(case), prompt(1, 9)
        before = model.config._attn_implementation
        with torch.no_grad():
            want = model(ids).logits
            model.set_attn_implementation("tree")
            assert_logits(model(ids, use_cache=False).logits, want, case)
            model.set_attn_implementation(before)
            assert torch.equal(model(ids).logits, want), case


def test_a_projection_in_slices_is_refused():
    config = transformers.BloomConfig(pretraining_tp=2, slow_but_exact=True)
    with pytest.raises(ValueError, match="slow_but_exact=True with pretraining_tp=2"):
        tree_hf.TreeCache(config)
