"""Prompts of hybrid models over ranks that run their own tokens each, against plain Transformers."""

import copy

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
from megatron_tree.core.cache.files import model_fingerprint
from support.hf_architectures import HYBRIDS, POOLED, assert_logits, random_model
from support.hf_models import glm5_next, prompt
from support.ranks import on_ranks, run_distributed
from support_matrix import slow_but, supported

PAGE, CHUNK = 2, 12
KINDS = ("qwen3_next", "zaya")  # of every kind of function one is fast


def _model(name):
    return glm5_next(index_kpool=PAGE, index_topk=6) if name == "glm5_next" else random_model(name)


def _runner(model, chunk_size=CHUNK):
    cache = tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD, page_size=PAGE)
    return tree_hf.Runner(model, cache, chunk_size=chunk_size)


class _Counted:
    """Tokens that a model's layers have run on this rank."""

    def __init__(self, model):
        self.tokens = 0
        model.get_decoder().layers[0].register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, layer, args, kwargs):
        self.tokens += (args[0] if args else kwargs["hidden_states"]).shape[1]


def _crowd(runner, rank):
    """Let one rank hold so many pages that it gets none of the next prompts."""
    store = runner.store
    rows = [runner.add() for _ in range(24 * store.book.world)]
    for row in rows:
        store.append([row], PAGE)
    for row in rows:
        if store.book.rows[row].parts[0].rank != rank:
            runner.remove(row)


def _prompts(rank, world, name, folder):
    """A prompt in chunks, a next turn that begins within a page, a copy, and what was saved, go on with more tokens."""
    model = _model(name)
    texts = [prompt(1, 61, seed=seed)[0] for seed in (1, 2)]
    texts[1][:43] = texts[0][:43]
    with torch.no_grad():
        want = [model(text[None]).logits[0] for text in texts]
    fingerprint = model_fingerprint(model)
    model.set_attn_implementation("tree")
    runner, counted = _runner(model), _Counted(model)
    row = runner.add()

    def check(logits, i, end, what):
        assert_logits(logits, want[i][end - 1], what)

    check(runner.prefill(row, texts[0][:29]), 0, 29, "chunks")
    assert counted.tokens <= -(-29 // world) + 3 * PAGE, "a rank runs its own tokens"
    check(runner.step([row], texts[0][None, 29:30])[0, 0], 0, 30, "a step")
    check(runner.prefill(row, texts[0][30:43]), 0, 43, "a next turn")
    several = runner.step([row], texts[0][None, 43:47])[0]
    assert_logits(several, want[0][43:47], "several tokens of a row that goes on")
    if world == 1:
        return
    runner.remove(row)
    row = runner.add()
    runner.prefill(row, texts[0][:43])
    copy = runner.fork(row)
    check(runner.prefill(copy, texts[1][43:]), 1, 61, "a copy")
    runner.cache.rows = [row]
    runner.cache.save(folder, [texts[0][:43]], fingerprint=fingerprint)
    again = _runner(model)
    again.cache.load(folder, fingerprint=fingerprint)
    check(again.prefill(again.cache.rows[0], texts[0][43:]), 0, 61, "loaded")
    check(runner.prefill(row, texts[0][43:], sharded=False), 0, 61, "all tokens on all ranks")
    crowded = _runner(model, 60)
    _crowd(crowded, world - 1)
    row, counted.tokens = crowded.add(), 0
    check(crowded.prefill(row, texts[0][:40]), 0, 40, "a rank without tokens")
    shares = crowded.store.book._shares(crowded.store.book.rows[row], 0)
    assert shares[-1] == [] and all(shares[:-1]), shares
    check(crowded.step([row], texts[0][None, 40:41])[0, 0], 0, 41, "a step after it")


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
