"""Rotary embeddings that depend on a row's length (longrope, dynamic NTK): every row as if it were alone, at once."""

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
from support.hf_models import SWITCH, hf_generate, plain, prompt, tiny_model, tree_model
from support.hf_training import averaged_gradients
from support.ranks import on_ranks

NEW = 8
FAMILIES = ("phi3_longrope", "llama_dynamic")
# of prompts: never beyond the switch, to it exactly, over it by the answer, beyond it
LENGTHS = (9, SWITCH - NEW + 1, SWITCH - 3, SWITCH + 1)


def _alone(family, ids):
    """(tokens [1, n], logits [1, n, vocab]) of a row by Transformers alone; dynamic NTK remembers rows: a new model."""
    return plain(tiny_model(family), ids[None], NEW)


def _close(got, want):
    assert (got - want).abs().max() <= 2e-5 * want.abs().max(), float((got - want).abs().max())


def _ragged(side):
    rows = [prompt(1, n, seed=n)[0] for n in LENGTHS]
    options = {"batch_first": True, "padding_side": side}
    ids = torch.nn.utils.rnn.pad_sequence(rows, **options)
    return rows, ids, torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], **options)


def _cache(model, world):
    return tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD if world > 1 else None, page_size=2)


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(3)
def test_every_row_as_if_alone(world, family):
    rows, ids, mask = _ragged("left")
    want = [_alone(family, row) for row in rows]
    model = tree_model(family)
    for chunk, prefill in ((7, "sharded"), (2048, "sharded"), (7, "replicated")):
        options = {"chunk_size": chunk, "prefill": prefill, "max_new_tokens": NEW, "keep_logits": True}
        result = tree_hf.generate(model, ids, attention_mask=mask, cache=_cache(model, world), **options)
        for i, (tokens, logits) in enumerate(want):
            assert torch.equal(result.tokens[i], tokens[0]), (chunk, prefill, LENGTHS[i])
            _close(torch.stack([x[i] for x in result.logits]), logits[0])
    got, logits = hf_generate(model, ids, NEW, mask, past_key_values=_cache(model, world))
    for i, row in enumerate(want):
        assert torch.equal(got[i], row[0][0]), LENGTHS[i]
        _close(logits[i], row[1][0])
    for row, (tokens, logits) in list(zip(rows, want, strict=True))[2:]:
        cache = _cache(model, world)
        got = hf_generate(model, row[None], NEW, past_key_values=cache)
        assert torch.equal(got[0], tokens)
        _close(got[1], logits)
        assert cache.get_seq_length() == len(row) + NEW - 1, "not in the cache that was given"


@on_ranks(2)
def test_a_row_that_passes_the_switch_in_both_directions(world):
    """Longer, shorter and longer again: the row is run again when it passes the switch, in both directions."""
    model, reference = (tiny_model("phi3_longrope") for _ in range(2))
    model.set_attn_implementation("tree")
    text = prompt(1, SWITCH + 12)[0]
    runner = tree_hf.Runner(model, _cache(model, world), chunk_size=7)
    row = runner.add()

    def check(logits, tokens):
        with torch.no_grad():
            _close(logits, reference(tokens[None], use_cache=False).logits[0, -1])

    check(runner.prefill(row, text[: SWITCH - 1]), text[: SWITCH - 1])
    copy = runner.fork(row)
    for n in (SWITCH, SWITCH + 1, SWITCH + 2):
        check(runner.step([row], text[None, n - 1 : n])[0, -1], text[:n])
    check(runner.step([copy], text[None, :1])[0, -1], torch.cat((text[: SWITCH - 1], text[:1])))
    runner.crop(row, SWITCH - 4)
    check(runner.prefill(row, text[:2]), torch.cat((text[: SWITCH - 4], text[:2])))
    check(runner.prefill(row, text[:9]), torch.cat((text[: SWITCH - 4], text[:2], text[:9])))
    both = runner.step([row, copy], text[None, :1].expand(2, 1))
    check(both[1, -1], torch.cat((text[: SWITCH - 1], text[:1], text[:1])))


@on_ranks(2)
def test_a_second_turn_passes_the_switch(world, tmp_path):
    model = tiny_model("phi3_longrope")
    first, more = prompt(1, SWITCH - 10), prompt(1, 15, seed=5)
    answer, _ = plain(model, first, NEW)
    whole = torch.cat((first, answer, more), 1)
    want, _ = plain(model, whole, NEW)
    model.set_attn_implementation("tree")
    for turn in (tree_hf.generate, None):
        cache = _cache(model, world)
        hf_generate(model, first, NEW, past_key_values=cache)
        cache.save(tmp_path / str(turn is None), [whole[0, : cache.get_seq_length()]], fingerprint="tiny")
        again = _cache(model, world)
        again.load(tmp_path / str(turn is None), fingerprint="tiny")
        for held in (cache, again):
            if turn is None:
                got, _ = hf_generate(model, whole, NEW, past_key_values=held)
            else:
                got = turn(model, whole, cache=held, max_new_tokens=NEW).tokens
            assert torch.equal(got, want)


def test_a_loop_of_ones_own_past_the_switch():
    model = tree_model("phi3_longrope")
    cache, ids = _cache(model, 1), prompt(1, SWITCH + 1)
    with torch.no_grad():
        model(ids[:, :SWITCH], past_key_values=cache)
        with pytest.raises(ValueError, match="another rotary embedding.* cache.reset"):
            model(ids[:, SWITCH:], past_key_values=cache)
        cache.reset()
        got = model(ids, past_key_values=cache).logits[:, -1]
        model.set_attn_implementation("sdpa")
        _close(got, model(ids).logits[:, -1])


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2)
def test_training_on_shards(family):
    """Losses and gradients of rows on both sides of the switch, and of packed documents, as if each were alone."""
    lengths = (13, SWITCH, SWITCH + 1, 40)
    rows = [prompt(1, n, seed=n)[0] for n in lengths]
    want_loss, grads, count = 0.0, None, sum(n - 1 for n in lengths)
    for row in rows:
        model = tiny_model(family).train()
        loss = model(row[None], labels=row[None], use_cache=False).loss * (len(row) - 1) / count
        loss.backward()
        own = [p.grad for p in model.parameters()]
        want_loss, grads = want_loss + loss.item(), own if grads is None else [a + b for a, b in zip(grads, own)]
    pad = torch.nn.utils.rnn.pad_sequence
    padded = {
        "input_ids": pad(rows, batch_first=True),
        "labels": pad(rows, batch_first=True, padding_value=-100),
        "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
    }
    packed = {
        "input_ids": torch.cat(rows)[None],
        "labels": torch.cat([torch.cat((row.new_tensor([-100]), row[1:])) for row in rows])[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
    }
    for batch in (padded, packed):
        model = tiny_model(family).train()
        tree_hf.train_on_shards(model)
        loss = model(**tree_hf.shard_batch(batch, cp_group=dist.group.WORLD)).loss
        loss.backward()
        assert abs(loss.item() - want_loss) < 1e-5 * want_loss
        for got, want in zip(averaged_gradients(model).values(), grads, strict=True):
            assert (got - want).abs().max() <= 2e-4 * want.abs().max() + 1e-7
