"""Variants of a GPTModel's attention on several ranks against the same model on one."""

import dataclasses
from unittest import mock

import pytest
import torch

from megatron_tree import TreeConfig
from support import megatron_models
from support.megatron_models import Case, check, forward_backward, reference_of, schedules, transformer_config


def options(**extra):
    return tuple(extra.items())


QK_NORM = options(qk_layernorm=True)
GATE = options(attention_output_gate=True)
WIDE = options(kv_channels=288)
MTP = options(mtp_num_layers=2, mtp_loss_scaling_factor=0.3)
NO_Q_LORA = options(q_lora_rank=None)


@pytest.mark.supports("qk_layernorm", with_="cp = 2")
@pytest.mark.supports("attention_output_gate", with_="cp = 2")
@pytest.mark.supports("head_dim above 256 (kv_channels)", with_="288; cp = 2")
def test_what_is_around_attention():
    cases = [Case(cp=2, extra=extra) for extra in (QK_NORM, GATE, WIDE)]
    check(2, [*cases, Case(cp=2, batch=1, extra=QK_NORM + GATE + WIDE)])


@pytest.mark.supports("multi-latent attention (MLA)", with_="cp = 2; with and without q_lora_rank")
def test_multi_latent_attention():
    kinds = [NO_Q_LORA, QK_NORM, options(rope_type="yarn")]
    kinds += [options(recompute_granularity="selective", recompute_modules=["mla_up_proj", "core_attn"])]
    cases = [Case(cp=2, mla=True, extra=extra) for extra in kinds]
    check(2, cases + [Case(cp=2, mla=True, **schedule) for schedule in schedules(2)])


@pytest.mark.supports("multi-token prediction (mtp_num_layers)", with_="two layers; cp = 2; also with MLA")
def test_multi_token_prediction():
    check(2, [Case(cp=2, mla=mla, extra=MTP) for mla in (False, True)])


@pytest.mark.supports("multimodal rotary embeddings (mrope)", with_="cp = 2")
def test_multimodal_positions():
    check(2, [Case(cp=2, positions="mrope", extra=options(mrope_section=[1, 1, 2]))])


@pytest.mark.supports("cp_comm_type a2a (Ulysses)", with_="more and fewer KV heads than ranks; cp = 4")
def test_ulysses():
    heads = [{"num_heads_kv": n} for n in (2, 8, 1)] + [{"mla": True}, {"extra": QK_NORM + GATE + WIDE}]
    check(4, [Case(cp=4, cp_comm_type="a2a", **kind) for kind in heads])


@pytest.mark.supports("hierarchical_context_parallel_sizes, cp_comm_type a2a+tree and a2a+p2p", with_="[2, 2]")
def test_ulysses_and_tree():
    kinds = [{"num_heads_kv": n} for n in (8, 2, 1)] + [{"mla": True}]
    kinds += [{"extra": options(window_size=(5, 0), softmax_type="learnable")}]
    cases = [Case(cp=4, cp_sizes=(2, 2), cp_comm_type="a2a+tree", **kind) for kind in kinds]
    check(4, [*cases, Case(cp=4, cp_sizes=(2, 2), cp_comm_type="a2a+p2p")])


GEMMA = options(num_layers=4, window_size=(7, 0), window_attn_skip_freq=4) + QK_NORM  # three windows, then one without
GPT_OSS = options(window_size=(3, 0), window_attn_skip_freq=2, softmax_type="learnable", num_moe_experts=4)


@pytest.mark.supports(
    "sliding windows (window_size, window_attn_skip_freq)", with_="models like Gemma 3 and GPT-OSS; cp = 4"
)
def test_models_with_windows():
    """The planner casts the keys of window layers and plans the others' grids; experts and sinks as in these models."""
    models = [{"num_heads_kv": 4, "extra": GEMMA}, {"num_heads_kv": 1, "extra": GPT_OSS}]
    cast = {"tree_config": TreeConfig(schedule="cast", ulysses_size=1)}
    check(4, [Case(cp=4, **model, **how) for model in models for how in ({}, cast)])


def seeded(case):
    """`forward_backward` from the same random state."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(5)
    return forward_backward(case)


def with_tree_attention(case):
    return dataclasses.replace(reference_of(case), tree=True)


@pytest.mark.supports("attention_dropout", with_="the same mask in recomputation")
def test_dropout():
    """The reference is tree attention on one rank."""
    dropout, full = options(attention_dropout=0.2), options(recompute_granularity="full", recompute_method="uniform")
    core = options(recompute_granularity="selective", recompute_modules=["core_attn"])
    kinds = [*schedules(2), {"mla": True, "extra": core}]
    kinds += [{"extra": full + options(recompute_num_layers=1)}, {"cp_comm_type": "a2a"}]
    cases = [Case(cp=2, **{**kind, "extra": dropout + kind.get("extra", ())}) for kind in kinds]
    check(2, cases, run=seeded, reference=with_tree_attention)
    with pytest.raises(AssertionError, match="is off by"):  # there are masks: Megatron's own attention draws others
        check(2, cases[:1], run=seeded)


SOFTCAP = 0.5


def capped(case):
    """`forward_backward` of a model whose configuration has the softcap of Gemma 2, which Megatron-core lacks."""
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax

    plain = FusedScaleMaskSoftmax.forward

    def configured(case, **options):
        config = transformer_config(case, **options)
        config.attn_logit_softcapping = SOFTCAP
        return config

    def softmax(self, scores, *args):
        return plain(self, SOFTCAP * torch.tanh(scores / SOFTCAP), *args)

    with (
        mock.patch.object(megatron_models, "transformer_config", configured),
        mock.patch.object(FusedScaleMaskSoftmax, "forward", softmax),
    ):
        return forward_backward(case)


@pytest.mark.supports("logit softcap (attn_logit_softcapping)", with_="a config that has the field; cp = 2")
def test_softcap():
    check(2, [Case(cp=2, **kind) for kind in ({}, {"cp_comm_type": "p2p"}, {"mla": True})], run=capped)


@pytest.mark.supports("a cp_comm_type for each layer", with_="with windows, sinks and multi-token prediction; cp = 4")
def test_everything_at_once():
    """A window in one layer, learnable sinks, normalized queries and keys, an output gate, wide heads, MTP, a list."""
    mixed = options(window_size=(5, 0), window_attn_skip_freq=[1, 0, 1], softmax_type="learnable") + QK_NORM + GATE
    mixed += options(kv_channels=288, mtp_num_layers=1)
    # multi-token prediction has no entry in the list: Megatron builds its layer with the last one
    check(4, [Case(cp=4, install=True, cp_comm_type=kinds, extra=mixed) for kinds in (("p2p", "tree"),)])
