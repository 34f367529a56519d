"""Hybrid models: layers with a recurrent state beside attention over a sharded cache, against plain Transformers."""

import functools

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
from megatron_tree.core.cache.files import model_fingerprint
from megatron_tree.inference.generation.scheduler import Scheduler
from megatron_tree.inference.generation.speculation import Speculation
from megatron_tree.tools.bench.model import cache_shape
from support.hf_architectures import HYBRIDS, assert_logits, random_model
from support.hf_models import hf_generate, left_padded, plain, prompt
from support.hf_served import begin_rows
from support.ranks import on_ranks
from support.scheduling import request, serve, tokens_of
from support_matrix import slow_but

NEW = 5
FAST = ("lfm2", "falcon_h1")  # a convolution beside attention layers, and both in one layer
NOT_CONTINUED = ("jamba", "zamba")


def _cache(model, group, **options):
    return tree_hf.TreeCache(model.config, cp_group=group, page_size=2, **options)


@pytest.mark.parametrize("name", slow_but(FAST, HYBRIDS))
@on_ranks(2)
def test_generation(name):
    """All ways to run a batch: in chunks that go on from a state, whole, rows of different lengths, and padded ones."""
    model, ids = random_model(name), prompt(2, 21)
    padded, mask = left_padded(2, 13)
    want, want_padded = plain(model, ids, NEW), plain(model, padded, NEW, mask)
    of_rows = [plain(model, row[seen.bool()][None], NEW) for row, seen in zip(padded, mask)]
    model.set_attn_implementation("tree")
    group = dist.group.WORLD
    options = {"max_new_tokens": NEW, "keep_logits": True}
    for chunk in (8, 64):
        result = tree_hf.generate(model, ids, cache=_cache(model, group), chunk_size=chunk, **options)
        assert torch.equal(result.tokens, want[0]), chunk
        assert result.prefill == "sharded"
        assert_logits(torch.stack(result.logits, 1), want[1], f"chunks of {chunk}")
    result = tree_hf.generate(model, padded, attention_mask=mask, cache=_cache(model, group), **options)
    for row, (tokens, logits) in enumerate(of_rows):
        assert torch.equal(result.tokens[row], tokens[0]), f"row {row} of other lengths"
        assert_logits(torch.stack(result.logits, 1)[row], logits[0], f"row {row} of other lengths")
    for what, (tokens, logits), (all_ids, all_mask) in (
        ("model.generate", want, (ids, None)),
        ("model.generate, padded", want_padded, (padded, mask)),
    ):
        found = hf_generate(model, all_ids, NEW, all_mask, past_key_values=_cache(model, group))
        assert torch.equal(found[0], tokens), what
        assert_logits(found[1], logits, what)


@pytest.mark.parametrize("name", slow_but(["qwen3_next"], HYBRIDS))
@on_ranks(2)
def test_rows(name, tmp_path):
    """Rows of a runner: prefilled together, run together, copied, saved, and as they were after a failure."""
    model = random_model(name)
    fingerprint = model_fingerprint(model)
    new_cache = functools.partial(_cache, model, dist.group.WORLD)
    runner, rows, copy, texts, check = begin_rows(model, (3, 9, 6), new_cache, 4)
    failing = next(layer for layer in reversed(model.model.layers))
    hook = failing.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.step([rows[1]], texts[1][2:3, None])
    hook.remove()
    assert runner.length(rows[1]) == 11
    for row in (rows[1], copy):
        check(runner.step([row], texts[1][2:3, None])[0, 0], 1, 11, "after a failure, and a copy")
    with pytest.raises(ValueError, match=r"recurrent layers have the state of 12 tokens, which can't go back"):
        runner.crop(rows[1], 5)
    assert runner.can_crop(rows[1], 12)
    assert not runner.can_crop(rows[1], 11)
    assert runner.most_at_once(12) == 1
    runner.crop(rows[1], 0)
    check(runner.prefill(rows[1], texts[1]), 1, 8, "a row that began again")
    fresh = runner.add()  # without a state yet, in one pass with rows that have one
    logits = runner.step([fresh, rows[0]], torch.stack((texts[0][:1], texts[0][2:3])))
    check(logits[0, 0], 0, 0, "a new row beside an old one")
    check(logits[1, 0], 0, 5, "an old row beside a new one")

    cache = runner.cache
    cache.rows = [rows[1], rows[2]]
    held = [texts[1], torch.cat((texts[2], texts[2][:2]))]
    cache.save(tmp_path / "saved", held, fingerprint=fingerprint)
    loaded = _cache(model, dist.group.WORLD)
    assert all(map(torch.equal, loaded.load(tmp_path / "saved", fingerprint=fingerprint), held))
    again = tree_hf.Runner(model, loaded)
    logits = again.step(loaded.rows, torch.stack((texts[1][:1], texts[2][2:3])))
    check(logits[0, 0], 1, 9, "loaded")
    check(logits[1, 0], 2, 8, "loaded")
    loaded.store.book.rows[loaded.rows[0]].state = None
    with pytest.raises(ValueError, match="the state of the recurrent layers is missing"):
        again.step(loaded.rows[:1], texts[1][1:2, None])


@pytest.mark.parametrize("name", slow_but(["lfm2"], HYBRIDS))
@on_ranks(2)
def test_batches_of_transformers_own_generate(name):
    """Transformers' own generate: beams, a cache that is continued, and a run that fails in the middle."""
    model, ids = random_model(name), prompt(2, 9)
    want, beams = plain(model, ids, 2 * NEW), plain(model, ids, NEW, num_beams=3)
    model.set_attn_implementation("tree")
    cache = _cache(model, dist.group.WORLD)
    assert torch.equal(hf_generate(model, ids, NEW, past_key_values=cache, num_beams=3)[0], beams[0])
    cache.reset()
    model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    whole = torch.cat((ids, want[0][:, :NEW]), 1)
    hook = model.model.layers[-1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(whole[:, -1:], past_key_values=cache)
    hook.remove()
    with pytest.raises(ValueError, match=r"ended before all layers had run.*crop\(-1\)"):
        model(whole[:, -1:], past_key_values=cache)
    cache.crop(-1)
    tokens, logits = hf_generate(model, whole, NEW, past_key_values=cache)
    assert torch.equal(tokens, want[0][:, NEW:])
    assert_logits(logits, want[1][:, NEW:], "continued")
    with pytest.raises(ValueError, match="can't go back"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens remove tokens|not supported with stateful models"):
        hf_generate(model, ids[:1], NEW, past_key_values=_cache(model, dist.group.WORLD), prompt_lookup_num_tokens=2)
    with pytest.raises(
        (ValueError, RuntimeError), match="a batch of 2 rows, not 1|Sizes of tensors"
    ):  # zaya joins first
        model(ids[:1], past_key_values=cache)


@pytest.mark.parametrize("name", NOT_CONTINUED)
def test_a_scan_that_begins_anew_is_not_given_several_tokens(name):
    model, ids = random_model(name), prompt(1, 9)
    model.set_attn_implementation("tree")
    cache = _cache(model, None)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="go on with one token at a time.*not with 2"):
            model(ids[:, :2], past_key_values=cache)


def test_served_together():
    """Answers of a scheduler don't depend on other rows; several answers of one prompt copy its state."""
    model = random_model("lfm2")
    requests = [request(length, NEW) for length in (5, 9, 5)] + [request(7, NEW, n=2)]
    want = [plain(model, r.prompt[None], NEW)[0][0].tolist() for r in requests]
    model.set_attn_implementation("tree")
    runner = tree_hf.Runner(model, _cache(model, None), chunk_size=8)
    events = serve(Scheduler(runner, max_rows=4, max_waiting=8, keep_bytes=1 << 20), requests)
    for found, own in zip(events, want, strict=True):
        assert tokens_of(found) == own
    assert tokens_of(events[-1], 1) == want[-1]


def test_speculation_is_refused():
    model = random_model("lfm2")
    model.set_attn_implementation("tree")
    runner = tree_hf.Runner(model, _cache(model, None))
    with pytest.raises(ValueError, match="--num-speculative-tokens.*recurrent layers"):
        Scheduler(runner, max_rows=1, max_waiting=1, speculation=Speculation(2))


def test_what_knows_keys_and_values_only():
    config = random_model("bamba").config
    with pytest.raises(ValueError, match="recurrent layers: a synthetic cache is not supported"):
        cache_shape(config)


def test_tensor_parallelism_of_deepspeed_is_refused():
    pytest.importorskip("deepspeed")
    from megatron_tree.integrations import deepspeed as tree_deepspeed

    with pytest.raises(ValueError, match="recurrent layers, which DeepSpeed's tensor parallelism does not split"):
        tree_deepspeed.init_inference(random_model("bamba"), tp_size=2)
