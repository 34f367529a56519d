"""Prompts of hybrid models over ranks that run their own tokens each, against plain Transformers."""

import copy

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
from support.hf_architectures import HYBRIDS, POOLED, assert_logits, random_model
from support.hf_models import glm5_next, prompt
from support.hf_served import check_prompts
from support.ranks import on_ranks, run_distributed
from support_matrix import slow_but, supported

PAGE, CHUNK = 2, 12
KINDS = ("qwen3_next", "zaya")  # of every kind of function one is fast


def _model(name):
    return glm5_next(index_kpool=PAGE, index_topk=6) if name == "glm5_next" else random_model(name)


def _runner(model, chunk_size=CHUNK):
    cache = tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD, page_size=PAGE)
    return tree_hf.Runner(model, cache, chunk_size=chunk_size)


def _prompts(rank, world, name, folder):
    check_prompts(_model(name), folder, page_size=PAGE)


OWN_TOKENS = "prompts, of which each rank runs its own tokens; 4 ranks"


@pytest.mark.parametrize("name", supported((*HYBRIDS, *POOLED, "glm5_next"), OWN_TOKENS, KINDS))
def test_a_rank_runs_its_own_tokens(name, tmp_path):
    run_distributed(_prompts, 4, name, tmp_path / "saved")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["jamba", pytest.param("zamba", marks=pytest.mark.slow)])
def test_on_one_and_two_ranks(name, world, tmp_path):
    run_distributed(_prompts, world, name, tmp_path / "saved")


@on_ranks(2)
def test_failures():
    """A layer that fails in the middle of a chunk leaves the row as it was before the chunk."""
    model, text = random_model("qwen3_next"), prompt(1, 24)[0]
    with torch.no_grad():
        want = model(text[None]).logits[0]
    model.set_attn_implementation("tree")
    runner = _runner(model)
    row = runner.add()
    runner.prefill(row, text[:12])
    mixer = next(module for module in model.modules() if hasattr(module, "in_proj_qkvz"))
    hook = mixer.out_proj.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.prefill(row, text[12:])
    hook.remove()
    assert runner.length(row) == 12
    assert_logits(runner.prefill(row, text[12:]), want[-1], "after a failure")
    mixer.forward = lambda hidden_states, *args, **kwargs: hidden_states
    with pytest.raises(ValueError, match="did not call causal_conv1d_fn, torch_chunk_gated_delta_rule"):
        runner.prefill(runner.add(), text)


@on_ranks(2)
def test_between_steps_of_training():
    """A model that trains on shards is evaluated over a cache in between, before and after."""
    model, text = random_model("qwen3_next"), prompt(1, 24)[0]
    batch = tree_hf.shard_batch({"input_ids": text[None], "labels": text[None]}, cp_group=dist.group.WORLD)
    with torch.no_grad():
        want = model(text[None]).logits[0]
    model.set_attn_implementation("tree")
    for what in ("before", "after"):
        runner = _runner(model.eval())
        assert_logits(runner.prefill(runner.add(), text), want[-1], f"{what} training")
        tree_hf.train_on_shards(model)
        model.train()(**batch).loss.backward()


def _bf16(rank, world, name):
    """Logits of a prompt in chunks and of a step, per the error of plain Transformers in bf16; on all ranks."""
    model, text = random_model(name).bfloat16(), prompt(1, 41)[0]
    with torch.no_grad():
        plain = model(text[None]).logits[0].float()
        exact = copy.deepcopy(model).float()(text[None]).logits[0]
    model.set_attn_implementation("tree")
    runner = _runner(model)
    row = runner.add()
    found = torch.stack((runner.prefill(row, text[:40]), runner.step([row], text[None, 40:])[0, 0]))
    return float((found - exact[39:]).abs().max() / (plain - exact).abs().max()), found


@pytest.mark.parametrize("name", slow_but(KINDS, HYBRIDS))
def test_bf16(name):
    errors, logits = zip(*run_distributed(_bf16, 4, name))
    assert max(errors) <= 2
    assert all(torch.equal(own[0], logits[0][0]) for own in logits)
