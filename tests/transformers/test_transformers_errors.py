"""What attention "tree" and its cache don't support is a ValueError on every rank, never a wrong result."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
import transformers
from megatron_tree.core import log
from megatron_tree.integrations.transformers.infer.generation import generate
from support.hf_models import SHAPE, prompt, tiny_model, tree_model
from support.ranks import on_ranks, run_distributed
from support.refusals import refused_with


@pytest.fixture
def model():
    return tree_model("llama")


def test_masks_that_are_not_padding(model):
    ids = prompt(2, 6)
    cache = tree_hf.TreeCache(model.config)
    with pytest.raises(ValueError, match=r"attention_mask \[2, 1, 6, 6\].*takes \[batch, slots\]"):
        model(ids, attention_mask=torch.ones(2, 1, 6, 6, dtype=torch.bool), past_key_values=cache)
    cache.reset()
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask \[2, 1\] must be .* = \[2, 7\].*6 cached and 1 new"):
        model(ids[:, :1], attention_mask=torch.ones(2, 1), past_key_values=cache)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)
    with pytest.raises(ValueError, match="packed sequences"):
        model(ids, position_ids=packed, use_cache=False)


def test_attention_that_is_not_causal_and_other_options(model):
    ids = prompt(1, 6)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match="without a causal mask"):
        model(ids, use_cache=False)
    q = torch.zeros(1, 4, 5, 8)
    module = torch.nn.Module()
    for options, message in (
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"position_bias": q}, "position_bias"),
        ({"output_attentions": True}, "output_attentions"),
    ):
        with pytest.raises(ValueError, match=message):
            tree_hf.tree_attention(module, q, q, q, None, **options)


def test_other_caches(model):
    ids = prompt(1, 6)
    with pytest.raises(ValueError, match="TreeCache"):  # Transformers' default cache
        model.generate(ids, max_new_tokens=3, do_sample=False)
    static = transformers.StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(ValueError, match="TreeCache"):
        model(ids, past_key_values=static)


def test_caches_of_other_models_and_texts(model):
    ids = prompt(1, 6)
    with pytest.raises(ValueError, match=r"layer 2 has no place in this TreeCache, .* in layers \[0, 1\]"):
        model(ids, past_key_values=tree_hf.TreeCache(tiny_model("gpt2").config))
    with pytest.raises(ValueError, match=r"call model.set_attn_implementation\('tree'\)"):
        tiny_model("llama")(ids, past_key_values=tree_hf.TreeCache(model.config))
    with pytest.raises(ValueError, match="model is a Sequential: pass the Transformers model itself"):
        generate(torch.nn.Sequential(model), ids, cache=tree_hf.TreeCache(model.config), max_new_tokens=1)
    cache = tree_hf.TreeCache(model.config)
    generate(model, ids, cache=cache, max_new_tokens=3)
    other = torch.cat((ids[:, :4], prompt(1, 9, seed=7)), 1)
    with pytest.raises(ValueError, match=r"another text in row 0 .* from token 4 on: .* cache.crop\(-4\)"):
        generate(model, other, cache=cache, max_new_tokens=3)
    cache.crop(-4)
    tokens = generate(model, other, cache=cache, max_new_tokens=3).tokens
    assert torch.equal(tokens, tiny_model("llama").generate(other, max_new_tokens=3, do_sample=False)[:, 13:])


def test_padding_can_not_be_trained(model):
    mask = torch.tensor([[0, 1, 1, 1]])
    with pytest.raises(ValueError, match="not differentiable"):
        model(prompt(1, 4), attention_mask=mask, use_cache=False)


def test_a_batch_without_labels_is_said(monkeypatch, caplog):
    monkeypatch.setattr(log, "_said", set())
    ids = prompt(1, 6)
    for labels, times in ((ids, 0), (torch.full_like(ids, -100), 1)):
        tree_hf.shard_batch({"input_ids": ids, "labels": labels}, cp_group=None)
        assert [x.message.partition(":")[0] for x in caplog.records] == ["a batch has no labels"] * times


def test_models_that_the_cache_does_not_fit():
    shared = transformers.LlamaConfig(**SHAPE)
    shared.num_kv_shared_layers = 1
    with pytest.raises(ValueError, match="share their keys and values"):
        tree_hf.TreeCache(shared)
    with pytest.raises(ValueError, match="decoder-only"):
        tree_hf.TreeCache(transformers.T5Config())
    config = transformers.LlamaConfig(**SHAPE)
    for options, message in (({"schedule": "tree"}, "schedule='tree'"), ({"page_size": 0}, "page_size=0")):
        with pytest.raises(ValueError, match=message):
            tree_hf.TreeCache(config, **options)


def test_generate(model):
    ids = prompt(1, 6)
    cache = tree_hf.TreeCache(model.config)
    for bad in (ids[0], ids[:, :0], ids.int()):
        with pytest.raises(ValueError, match=r"input_ids must be int64 \[batch, tokens\]"):
            generate(model, bad, cache=cache, max_new_tokens=1)
    generate(model, ids, cache=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match="cache holds 1 rows and input_ids 2"):
        generate(model, prompt(2, 20), cache=cache, max_new_tokens=2)
    ragged = torch.tensor([[1, 1, 0, 1, 1, 1]])
    for options, message in (
        ({}, "holds 7 tokens of row 0 and input_ids 6"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prefill": "tree"}, "prefill='tree'"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, ids, cache=cache, **{"max_new_tokens": 1, **options})
    cache.reset()
    for mask in (ragged, torch.zeros_like(ragged)):
        with pytest.raises(ValueError, match="padding goes on the left or the right"):
            generate(model, ids, cache=cache, max_new_tokens=1, attention_mask=mask)
    with pytest.raises(ValueError, match=r"attention_mask \[1, 5\] must have the shape"):
        generate(model, ids, cache=cache, max_new_tokens=1, attention_mask=ragged[:, :5])
    with pytest.raises(ValueError, match="chunk_size=0"):
        generate(model, ids, cache=cache, max_new_tokens=1, chunk_size=0)
    with pytest.raises(ValueError, match=r"6 prompt tokens and max_new_tokens=251 exceed the model's 256 positions"):
        generate(model, ids, cache=cache, max_new_tokens=251)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attn_implementation is 'sdpa'"):
        generate(model, ids, cache=cache, max_new_tokens=1)


def test_crop_beyond_the_cache(model):
    cache = tree_hf.TreeCache(model.config)
    model(prompt(1, 6), past_key_values=cache)
    for tokens in (1, -7):
        with pytest.raises(ValueError, match=f"tokens_to_remove={tokens}"):
            cache.crop(tokens)


def test_what_a_cache_is_not_for_names_what_is(model):
    cache = tree_hf.TreeCache(model.config)
    model(prompt(1, 6), past_key_values=cache)
    for copies in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match=r"copy.deepcopy.*batch_repeat_interleave\(n\), fork\(\) of a Runner"):
            copies(cache)
    with pytest.raises(ValueError, match=r"a batch of 1 rows, not 2: call reset\(\)"):
        model(prompt(2, 1), past_key_values=cache)
    cache.batch_repeat_interleave(2)
    model(prompt(2, 1), past_key_values=cache)
    assert cache.get_seq_length() == 7


def _message(rank, world, what):
    model = tree_model("llama")
    cache = tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD)
    options = {"max_new_tokens": 2}
    ids = prompt(1, 12)
    if (what == "prompt" and rank == 1) or (what == "replicated" and rank == 1):
        ids[0, 5] += 1
    elif what == "length" and rank == 2:
        ids = ids[:, :9]
    elif what == "one rank refuses" and rank == 1:
        options["max_new_tokens"] = 1000
    elif what == "padding":
        options["attention_mask"] = torch.tensor([[0] + [1] * 5 + [0] + [1] * 5])
    if what == "replicated":
        options["prefill"] = "replicated"
    try:
        if what == "seed":
            torch.manual_seed(rank)
            model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=True, temperature=9.0)
        generate(model, ids, cache=cache, **options)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("prompt", "digest of input_ids"),
        ("replicated", "digest of input_ids"),
        ("length", "input_ids="),
        ("one rank refuses", "exceed the model's 256 positions"),
        ("padding", "2 runs of tokens in row 0"),
        ("seed", "the ranks' input_ids differ"),
    ],
)
def test_every_rank_gets_the_error(what, message):
    for said in run_distributed(_message, 3, what, timeout=60):
        assert message in (said or ""), said


def _outsider(rank, world):
    group = dist.new_group([0, 1])
    try:
        tree_hf.TreeCache(tiny_model("llama").config, cp_group=group)
    except ValueError as error:
        return str(error)
    return None


def test_a_rank_outside_the_group():
    said = run_distributed(_outsider, 3)
    assert said[:2] == [None, None]
    assert "rank 2 is not a member" in said[2]


@on_ranks(2)
def test_shards_that_are_cut():
    """Shards that are cut or lack something, and logits_to_keep, on every rank, before anything is sent; the loss of
    whole ones."""
    model, ids = tiny_model("llama").train(), prompt(2, 30)
    parallel = tree_hf.register_sequence_parallel(model, loss_tile=7)
    shard = parallel.shard_batch({"input_ids": ids, "labels": ids})
    names = ("input_ids", "position_ids", "attention_mask", "labels")
    n = shard["input_ids"].shape[1]
    changes = [
        ({name: shard[name][:, 1:]}, f"{{'{name}': [2, {n - 1}]}}, but the shard has [2, {n}]") for name in names
    ]
    changes += [
        ({name: shard[name][:1] for name in names}, f"'input_ids': [1, {n}], 'position_ids': [1, {n}]"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(2, 1, 32)}, "'inputs_embeds': [2, 1, 32]"),
        ({"input_ids": torch.cat((ids, ids), 1)}, "'input_ids': [2, 60]"),
        ({"position_ids": None}, "'position_ids': None"),
        ({"attention_mask": None}, "'attention_mask': None"),
        ({"logits_to_keep": 3}, "logits_to_keep=3: the last tokens of a shard are not those of its rows"),
        ({"logits_to_keep": torch.tensor([3])}, "logits_to_keep=tensor([3])"),
        ({"logits_to_keep": 1, "labels": None}, "logits_to_keep=1"),
    ]
    for change, message in changes:
        with refused_with(message):
            model(**shard | change)
    positional = [shard.pop(name) for name in ("input_ids", "attention_mask", "position_ids")]
    (loss,) = model(*positional, **shard, logits_to_keep=0, return_dict=False)
    want = tiny_model("llama")(ids, labels=ids).loss.item()
    assert loss.item() == pytest.approx(want, rel=1e-6)
