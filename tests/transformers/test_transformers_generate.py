"""A sharded cache gives Transformers models the tokens and logits of the plain model: prefills, layouts, schedules."""

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
from megatron_tree.core.config import DECODE_SCHEDULES
from megatron_tree.integrations.transformers.infer.generation import generate
from support.hf_models import hf_generate, left_padded, plain, prompt, tiny_model
from support.ranks import on_ranks, run_distributed

NEW = 9


def _group(world):
    return dist.group.WORLD if world > 1 else None


def _check(got, want, tolerance=2e-5):
    tokens, logits = got
    assert torch.equal(tokens, want[0]), f"tokens {tokens.tolist()} instead of {want[0].tolist()}"
    scale = want[1].abs().max()
    assert (logits - want[1]).abs().max() <= tolerance * scale, float((logits - want[1]).abs().max() / scale)


def _generated(model, ids, cache, **options):
    options.setdefault("max_new_tokens", NEW)
    result = generate(model, ids, cache=cache, keep_logits=True, **options)
    return (result.tokens, torch.stack(result.logits, 1)), result


def _families(rank, world, family, lengths, prefills):
    model = tiny_model(family)
    attention = "eager" if family == "gpt_oss" else "sdpa"
    for length in lengths:
        for batch in (1, 3) if length == 37 else (1,):
            ids = prompt(batch, length)
            of_hf = tiny_model(family)  # a new one: dynamic rope of Transformers remembers the longest row so far
            of_hf.set_attn_implementation(attention)
            want = plain(of_hf, ids, NEW)
            model.set_attn_implementation("tree")
            for prefill in prefills:
                cache = tree_hf.TreeCache(model.config, cp_group=_group(world), page_size=2)
                got, result = _generated(model, ids, cache, prefill=prefill, chunk_size=16)
                _check(got, want)
                assert result.prefill == prefill
                assert cache.get_seq_length() == length + NEW - 1
    return got


ON_TWO = ("llama", "mistral", "gpt_oss", "deepseek_v3", "gemma3", "phi3_longrope", "gpt2")


@pytest.mark.parametrize(("family", "world"), [("llama", 1), ("llama", 4), ("gemma3", 4), *((f, 2) for f in ON_TWO)])
def test_tokens_and_logits_equal_the_plain_model(family, world):
    # 1 and 3 tokens are fewer than the ranks; 37 is a prime; 55 + 9 fills gpt2's position table to the last row
    lengths = (1, 3, 37, 55) if (family, world) in (("llama", 4), ("gpt2", 2)) else (2, 37)
    results = run_distributed(_families, world, family, lengths, ("sharded", "replicated"))
    for _, logits in results[1:]:
        assert torch.equal(logits, results[0][1]), "ranks differ"


@pytest.mark.parametrize(
    ("family", "world"), [("llama", 1), ("llama", 2), pytest.param("gemma2", 4, marks=pytest.mark.slow)]
)
@on_ranks()
def test_padding_with_generate_and_with_model_generate(world, family):
    model = tiny_model(family)
    if family == "gemma2":
        model.set_attn_implementation("eager")
    ids, mask = left_padded(3, 23)
    want = plain(model, ids, NEW, mask)
    model.set_attn_implementation("tree")
    cache = tree_hf.TreeCache(model.config, cp_group=_group(world), page_size=4)
    _check(hf_generate(model, ids, NEW, mask, past_key_values=cache), want)
    cache = tree_hf.TreeCache(model.config, cp_group=_group(world), page_size=4)
    got, _ = _generated(model, ids, cache, attention_mask=mask, chunk_size=10)
    _check(got, want)
    held = [cache.length(i) for i in range(3)]
    assert held == [int(row.sum()) + NEW - 1 for row in mask], "padding is in the cache"
    cache = tree_hf.TreeCache(model.config, cp_group=_group(world), page_size=4)
    on_the_right = [torch.cat((x[m.bool()], x[~m.bool()])) for x, m in zip(ids, mask, strict=True)]
    mask_right = [torch.cat((m[m.bool()], m[~m.bool()])) for m in mask]
    got, _ = _generated(model, torch.stack(on_the_right), cache, attention_mask=torch.stack(mask_right))
    _check(got, want)


@on_ranks(3)
def test_a_second_turn_continues_the_cache(world):
    model = tiny_model("llama")
    first, more = prompt(2, 19), prompt(2, 11, seed=3)
    answer, _ = plain(model, first, NEW)
    whole = torch.cat((first, answer, more), 1)
    want = plain(model, whole, NEW)
    model.set_attn_implementation("tree")
    for use_model_generate in (False, True):
        cache = tree_hf.TreeCache(model.config, cp_group=_group(world))
        got, _ = _generated(model, first, cache)
        assert torch.equal(got[0], answer)
        assert cache.get_seq_length() == 19 + NEW - 1  # the last token has not been run
        if use_model_generate:
            _check(hf_generate(model, whole, NEW, past_key_values=cache), want)
        else:
            _check(_generated(model, whole, cache)[0], want)


@on_ranks(3)
def test_every_schedule_and_page_size(world):
    model = tiny_model("llama")
    ids = prompt(2, 29)
    want = plain(model, ids, NEW)
    model.set_attn_implementation("tree")
    for schedule in DECODE_SCHEDULES:
        cache = tree_hf.TreeCache(model.config, cp_group=_group(world), schedule=schedule)
        _check(_generated(model, ids, cache)[0], want)
    for page_size in (1, 64):
        cache = tree_hf.TreeCache(model.config, cp_group=_group(world), page_size=page_size)
        _check(_generated(model, ids, cache, chunk_size=11)[0], want)


@on_ranks(2)
def test_beam_search(world):
    model = tiny_model("llama")
    ids, mask = left_padded(2, 17)
    options = {"attention_mask": mask, "max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    want = model.generate(ids, **options)
    model.set_attn_implementation("tree")
    model.generation_config.use_cache = False  # as in files of models that were trained
    cache = tree_hf.TreeCache(model.config, cp_group=_group(world), page_size=2)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), want)


@on_ranks(2)
def test_options_that_need_another_cache_are_refused(world):
    """Options with which `generate` runs the model beside the cache, before it does."""
    model, ids = tiny_model("llama"), prompt(1, 9)
    model.set_attn_implementation("tree")
    for options, message in (
        ({"guidance_scale": 1.5}, "guidance_scale=1.5: generate would run the model over a second cache"),
        ({"assistant_early_exit": 1}, "assistant_early_exit=1"),
    ):
        cache = tree_hf.TreeCache(model.config, cp_group=_group(world))
        with pytest.raises(ValueError, match=message):
            model.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False, **options)
        assert cache.get_seq_length() == 0
    cache = tree_hf.TreeCache(model.config, cp_group=_group(world))
    model.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False, guidance_scale=1.0)


@on_ranks(2)
def test_crop_reset_and_batch_operations(world):
    model = tiny_model("llama")
    ids = prompt(2, 21)
    want = plain(model, ids, NEW)
    model.set_attn_implementation("tree")
    cache = tree_hf.TreeCache(model.config, cp_group=_group(world), page_size=2)
    assert cache.batch_size == -1
    _generated(model, ids, cache)
    cache.crop(-(cache.get_seq_length() - 15))
    assert cache.get_seq_length() == 15
    assert cache.batch_size == 2
    _check(_generated(model, ids, cache)[0], want)
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes, cache.num_local_tokens) == (0, 0, 0)
    _check(_generated(model, ids, cache)[0], want)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    got, _ = _generated(model, torch.cat((ids, want[0]), 1)[[1, 1]], cache)
    assert torch.equal(got[0][0], got[0][1])


@on_ranks(2)
def test_end_tokens(world):
    model = tiny_model("llama")
    ids = prompt(3, 13)
    free, _ = plain(model, ids, NEW)
    end = [int(free[0, 2]), int(free[1, 4])]
    want, _ = plain(model, ids, NEW, eos_token_id=end, pad_token_id=end[0])
    after = plain(model, torch.cat((ids, want, prompt(3, 4, seed=5)), 1), NEW)
    model.set_attn_implementation("tree")
    cache = tree_hf.TreeCache(model.config, cp_group=_group(world))
    result = generate(model, ids, cache=cache, max_new_tokens=NEW, eos_token_id=end)
    assert torch.equal(result.tokens, want)
    assert len(result.step_s) == want.shape[1] - 1
    assert 0 < result.prefill_s <= result.first_token_s
    assert result.logits == []
    # a row that has ended is not run: the cache lacks what was only padded, and the next turn runs it
    lengths = [next(i for i, token in enumerate(row, 1) if token in end or i == want.shape[1]) for row in want.tolist()]
    assert len(set(lengths)) > 1
    assert [cache.length(i) for i in range(3)] == [13 + n - 1 for n in lengths]
    whole = torch.cat((ids, want, prompt(3, 4, seed=5)), 1)
    _check(_generated(model, whole, cache)[0], after)
    cache = tree_hf.TreeCache(model.config, cp_group=_group(world))
    logits = torch.stack(_generated(model, ids, cache, eos_token_id=end)[1].logits, 1)
    assert [int(row.isfinite().all(-1).sum()) for row in logits] == lengths


def test_bf16_stays_close_to_fp32():
    model = tiny_model("llama")
    ids = prompt(2, 33)
    with torch.no_grad():
        want = model(ids).logits[:, -1]
        plain_error = (model.bfloat16()(ids).logits[:, -1].float() - want).abs().max()
        model.set_attn_implementation("tree")
        cache = tree_hf.TreeCache(model.config)
        got = generate(model, ids, cache=cache, max_new_tokens=1, keep_logits=True).logits[0]
    assert (got - want).abs().max() <= 2 * plain_error + 1e-3


def test_forward_and_gradients_without_a_cache():
    model = tiny_model("qwen2")
    ids, mask = left_padded(2, 23)
    results = []
    for attention in ("eager", "tree"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        logits = model(ids, use_cache=False).logits
        logits.float().pow(2).mean().backward()
        with torch.no_grad():
            masked = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        results.append((logits.detach(), masked, [p.grad.clone() for p in model.parameters()]))
    (want, want_masked, want_grads), (got, got_masked, got_grads) = results
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * float(want.abs().max()))
    torch.testing.assert_close(got_masked, want_masked, rtol=0, atol=2e-5 * float(want.abs().max()))
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-5 * float(b.abs().max()))
