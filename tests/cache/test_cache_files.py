"""Saved rows continue on any number of ranks as if they had never been away; what does not fit is refused by all."""

import json
import os
import re
import shutil

import pytest
import torch
import torch.distributed as dist

from support.bound import bound
from support.ranks import run_distributed

pytest.importorskip("transformers")

from megatron_tree.core.cache import files as cache_files
from megatron_tree.core.cache.files import load_rows, model_fingerprint, save_rows
from megatron_tree.integrations.transformers.attention import TreeCache
from megatron_tree.integrations.transformers.infer.generation import generate
from megatron_tree.integrations.transformers.infer.runner import Runner
from megatron_tree.integrations.transformers.infer.split_model import split_model
from megatron_tree.integrations.transformers.infer.weight_layout import plan_layout
from support.hf_models import plain, prompt, tiny_model, tree_model

LENGTH, NEW = 45, 8


def _group(world):
    return dist.group.WORLD if world > 1 else None


def _save(rank, world, folder, family, dtype="auto", page_size=4):
    """A batch of two rows; returns what the cache would have said next."""
    model = tree_model(family)
    cache = TreeCache(model.config, cp_group=_group(world), page_size=page_size, dtype=dtype)
    ids = prompt(2, LENGTH)
    generate(model, ids, cache=cache, max_new_tokens=1, chunk_size=16)
    cache.save(folder, list(ids), fingerprint=model_fingerprint(model))
    return generate(model, torch.cat((ids, ids[:, :3]), 1), cache=cache, max_new_tokens=NEW).tokens


def _load(rank, world, folder, family, dtype="auto", page_size=3):
    model = tree_model(family)
    cache = TreeCache(model.config, cp_group=_group(world), page_size=page_size, dtype=dtype)
    whole, cache_files.CHUNK = cache_files.CHUNK, 16  # tokens read at once: of windows never a whole row
    ids = torch.stack(cache.load(folder, fingerprint=model_fingerprint(model)))
    cache_files.CHUNK = whole
    assert torch.equal(ids, prompt(2, LENGTH))
    loads = cache.store.book.loads
    assert max(loads) - min(loads) <= 1
    for layer in range(3):
        if cache.windows[layer] is not None:
            kind = cache.store.kind_of[layer]
            assert cache.store.num_local(kind) <= 2 * (cache.windows[layer] + page_size)
            assert cache.store.book.numbers[kind].capacity * page_size <= 2 * (cache.windows[layer] + 16 + page_size)
    with pytest.raises(ValueError, match="holds a batch of 2 rows already"):
        cache.load(folder, fingerprint=model_fingerprint(model))
    result = generate(model, torch.cat((ids, ids[:, :3]), 1), cache=cache, max_new_tokens=NEW, keep_logits=True)
    return result.tokens, torch.stack(result.logits, 1)


@pytest.mark.parametrize(
    ("family", "writers", "readers", "dtype"),
    [
        pytest.param("llama", 1, 3, "auto", marks=pytest.mark.slow),
        ("gemma2", 4, 2, "auto"),
        ("mistral", 2, 4, "auto"),
        ("deepseek_v3", 2, 1, "auto"),
        ("gemma3", 2, 1, "fp8"),
    ],
)
def test_the_text_goes_on_on_another_number_of_ranks(tmp_path, family, writers, readers, dtype):
    folder = str(tmp_path / "saved")
    want = run_distributed(_save, writers, folder, family, dtype)[0]
    assert sorted(os.listdir(folder)) == ["cache.json", *(f"rank_{i:05d}.safetensors" for i in range(writers))]
    assert os.listdir(tmp_path) == ["saved"]
    results = run_distributed(_load, readers, folder, family, dtype)
    assert all(torch.equal(tokens, want) for tokens, _ in results)
    if dtype == "auto":
        model = tiny_model(family)
        if family == "gemma2":
            model.set_attn_implementation("eager")
        ids = prompt(2, LENGTH)
        plain_tokens, plain_logits = plain(model, torch.cat((ids, ids[:, :3]), 1), NEW)
        assert torch.equal(want, plain_tokens)
        assert (results[0][1] - plain_logits).abs().max() <= 1e-4 * plain_logits.abs().max()


def _of_head_groups(rank, world, folder, save):
    """Saves or loads with weights over all ranks: 2, 1, or 4 ranks are 2, 1, or 2 head groups."""
    model = tiny_model("llama")
    fingerprint, layout = model_fingerprint(model), plan_layout(model, world, rank)
    model.set_attn_implementation("tree")
    ranks = bound(timeout_s=60.0)
    split_model(model, layout, ranks)
    cache = TreeCache(
        model.config,
        cp_group=ranks.neighbours(layout.heads.size),
        head_shares=layout.heads.shares,
        weights_group=dist.group.WORLD,
        page_size=4 if save else 3,
        dtype="int8",
    )
    ids, options = prompt(2, LENGTH), {"token_group": dist.group.WORLD}
    if save:
        generate(model, ids, cache=cache, max_new_tokens=1, **options)
        cache.save(folder, list(ids), fingerprint=fingerprint)
    else:
        assert torch.equal(torch.stack(cache.load(folder, fingerprint=fingerprint)), ids)
    more = torch.cat((ids, ids[:, :3]), 1)
    result = generate(model, more, cache=cache, max_new_tokens=3, keep_logits=True, **options)
    return result.tokens, torch.stack(result.logits, 1)


def test_head_groups_are_saved_and_loaded_on_another_number_of_ranks(tmp_path):
    """int8: numbers that were quantized again, or heads in another order, would show."""
    folders = [str(tmp_path / name) for name in ("of 4", "of 1")]
    tokens, logits = run_distributed(_of_head_groups, 4, folders[0], True)[0]
    run_distributed(_of_head_groups, 1, folders[1], True)
    for readers, folder in ((2, 0), (1, 0), (4, 1)):
        for found, others in run_distributed(_of_head_groups, readers, folders[folder], False):
            assert torch.equal(found, tokens)
            assert (others - logits).abs().max() <= (1e-4 if folder == 0 else 2e-2) * logits.abs().max()


def _rows_of_a_runner(rank, world, folder):
    """Rows of different lengths, one empty, one that shares pages with another; added to a cache that has rows."""
    model = tree_model("llama")
    runner = Runner(model, TreeCache(model.config, cp_group=_group(world), page_size=4))
    a, empty = runner.add(), runner.add()
    first = prompt(1, 21)[0]
    runner.prefill(a, first)
    b = runner.fork(a)
    runner.prefill(b, first[:6])
    rows, tokens = [b, empty, a], [torch.cat((first, first[:6])), first[:0], first]
    options = dict(cp_group=_group(world), fingerprint=model_fingerprint(model))
    save_rows(runner.cache.store, rows, folder, tokens, **options)
    runner.prefill(empty, first[:9])
    new, found = load_rows(runner.cache.store, folder, **options)
    assert all(torch.equal(x, y) for x, y in zip(tokens, found, strict=True))
    one = torch.ones(2, 1, dtype=torch.int64)
    want, got = runner.step([b, a], one), runner.step([new[0], new[2]], one)
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))
    assert runner.length(new[1]) == 0
    with pytest.raises(ValueError, match="exists already"):
        save_rows(runner.cache.store, [], folder, [], **options)
    with pytest.raises(ValueError, match=r"as many as the cache holds: \[22\]"):
        save_rows(runner.cache.store, [a], folder + "2", [first], **options)


def test_rows_of_a_runner(tmp_path):
    run_distributed(_rows_of_a_runner, 2, str(tmp_path / "saved"))


def _refused(rank, world, folder, changes):
    """What a cache says when it loads; afterwards it holds nothing."""
    family, seed, dtype = changes.get("family", "llama"), changes.get("seed", 1), changes.get("dtype", "auto")
    model = tree_model(family, seed)
    cache = TreeCache(model.config, cp_group=_group(world), dtype=dtype)
    with pytest.raises(ValueError) as error:
        cache.load(folder, fingerprint=model_fingerprint(model))
    assert (cache.store.book.rows, cache.rows, cache.get_seq_length()) == ({}, [], 0)
    return str(error.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files") / "saved"
    run_distributed(_save, 2, str(folder), "llama")
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 2}, "is of another model.*fingerprint="),
        ({"family": "mistral"}, "is of another model.*windows="),
        ({"dtype": "int8"}, "is of another model.*stored='auto', here 'torch.int8'"),
    ],
)
def test_another_model_is_refused(saved, changes, message):
    said = run_distributed(_refused, 2, str(saved), changes)
    assert said[0] == said[1]
    assert_matches(message, said[0])


def assert_matches(pattern, text):
    assert re.search(pattern, text, re.S), text


def _damage(folder, what):
    path = folder / "rank_00001.safetensors"
    if what == "a bit":
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    elif what == "missing":
        path.unlink()
    elif what == "no description":
        (folder / "cache.json").unlink()
    elif what == "another format":
        about = json.loads((folder / "cache.json").read_text())
        (folder / "cache.json").write_text(json.dumps(about | {"format": 99}))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a bit", "rank_00001.safetensors is damaged: its sha256"),
        ("missing", "rank_00001.safetensors is missing"),
        ("no description", "cache.json does not exist.*an incomplete one"),
        ("another format", "format 99, this version reads format 3"),
    ],
)
def test_damaged_files_are_refused_on_all_ranks(saved, tmp_path, what, message):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    _damage(folder, what)
    for text in run_distributed(_refused, 2, str(folder), {}, timeout=60):
        assert_matches(message, text)


def _interrupted(rank, world, folder):
    """One rank can't write: no folder, all are told, and the next save succeeds."""
    model = tree_model("llama")
    cache = TreeCache(model.config, cp_group=_group(world))
    ids = prompt(1, 20)
    generate(model, ids, cache=cache, max_new_tokens=1)
    write = cache_files._write

    def full(path, *args):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    cache_files._write = full if rank == 1 else write
    try:
        with pytest.raises(ValueError, match="No space left on device"):
            cache.save(folder, list(ids), fingerprint="x")
    finally:
        cache_files._write = write
    assert not os.path.exists(folder)
    cache.save(folder, list(ids), fingerprint="x")
    cache.reset()
    assert torch.equal(cache.load(folder, fingerprint="x")[0], ids[0])


def test_a_save_that_fails_leaves_no_folder(tmp_path):
    run_distributed(_interrupted, 2, str(tmp_path / "saved"), timeout=60)
    assert os.listdir(tmp_path) == ["saved"]


def _different_tokens(rank, world, folder):
    model = tree_model("llama")
    cache = TreeCache(model.config, cp_group=_group(world))
    ids = prompt(1, 20)
    generate(model, ids, cache=cache, max_new_tokens=1)
    if rank == 1:
        ids[0, 3] += 1
    with pytest.raises(ValueError, match="digest of tokens"):
        cache.save(folder, list(ids), fingerprint="x")


def test_ranks_that_give_different_tokens(tmp_path):
    run_distributed(_different_tokens, 2, str(tmp_path / "saved"), timeout=60)
    assert not (tmp_path / "saved").exists()
