"""Speculative decoding by Transformers' own generate over a sharded cache: the tokens of plain greedy decoding."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree.integrations.transformers.attention import TreeCache
from support.hf_models import plain, prompt, tiny_model, tree_model
from support.ranks import run_distributed

NEW = 24
SPECULATION = {
    "another model": lambda model: {"assistant_model": tiny_model("llama", seed=7)},
    "the same model": lambda model: {"assistant_model": tiny_model(model.config.model_type.replace("_text", ""))},
    "prompt lookup": lambda model: {"prompt_lookup_num_tokens": 3},
}


def _tokens(rank, world, family, ways, dtype="auto"):
    model = tiny_model(family)
    # a text that repeats itself: prompt lookup finds candidates
    ids = prompt(1, 11).repeat(1, 3)
    want, _ = plain(model, ids, NEW)
    model.set_attn_implementation("tree")
    seen = []
    for way in ways:
        cache = TreeCache(model.config, cp_group=dist.group.WORLD if world > 1 else None, page_size=2, dtype=dtype)
        crops, crop = [], cache.crop
        cache.crop = lambda n, crops=crops, crop=crop: (crops.append(n), crop(n))
        got = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            past_key_values=cache,
            **SPECULATION[way](model),
        )
        assert torch.equal(got[:, ids.shape[1] :], want), way
        assert cache.get_seq_length() <= ids.shape[1] + NEW
        seen.append(sum(crops))
    return seen


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "deepseek_v3"])
def test_speculation_gives_the_plain_tokens(family):
    if family == "llama":
        results = run_distributed(_tokens, 2, family, ("another model", "the same model", "prompt lookup"))
        assert results[0][0] < 0, "no token was ever taken back: nothing was speculated"
    else:
        results = run_distributed(_tokens, 2, family, ("the same model", "prompt lookup"))
    assert all(result == results[0] for result in results)


def test_crop_takes_back_what_came_last_also_beyond_windows():
    model = tree_model("mistral")  # a window of 5
    ids = prompt(1, 40)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits[:, -4:]
        cache = TreeCache(model.config, page_size=2)
        model(ids[:, :36], past_key_values=cache)
        model(ids[:, :4], past_key_values=cache)  # wrong tokens
        cache.crop(-4)
        got = model(ids[:, 36:], past_key_values=cache).logits
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))
        with pytest.raises(ValueError, match="length=35: layers with a window of 5 hold only .*crop to 36 or more"):
            cache.crop(-5)
        assert cache.get_seq_length() == 40, "nothing was taken"


def test_a_run_that_ended_in_the_middle_must_be_taken_back():
    model = tree_model("llama")
    ids = prompt(2, 12)
    cache = TreeCache(model.config)

    def fail(*args):
        raise KeyboardInterrupt

    with torch.no_grad():
        want = model(ids, use_cache=False).logits[:, -2:]
        model(ids[:, :10], past_key_values=cache)
        hook = model.model.layers[1].register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 10:], past_key_values=cache)
        hook.remove()
        with pytest.raises(ValueError, match=r"its 2 tokens are in some layers only.*cache.crop\(-2\)"):
            model(ids[:, 10:], past_key_values=cache)
        cache.crop(-2)
        got = model(ids[:, 10:], past_key_values=cache).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))


def test_a_model_whose_window_is_not_the_cache_s():
    model = tree_model("mistral")
    cache = TreeCache(model.config)
    model.config.sliding_window = 9
    with pytest.raises(ValueError, match="sliding_window=9, but its configuration gives the cache 5"):
        model(prompt(1, 6), past_key_values=cache)
