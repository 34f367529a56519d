"""What every model has to do on several ranks: tokens, logits, losses and gradients are those of the plain model."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_tree.core import comm
from megatron_tree.core.attention.decode import DecodeStep
from megatron_tree.core.cache import CACHE_DTYPES
from megatron_tree.core.cache.files import model_fingerprint
from megatron_tree.integrations import transformers as tree_hf
from megatron_tree.integrations.transformers.infer.engine import generate, share_model
from megatron_tree.integrations.transformers.infer.split_model import split_model
from megatron_tree.integrations.transformers.infer.weight_layout import ROUTERS, SMALL, plan_layout
from support.bound import bound
from support.hf_architectures import assert_logits
from support.hf_models import hf_generate, left_padded, plain, prompt
from support.hf_training import averaged_gradients, gradients

NEW = 6
OF_IMAGES = ("model.vision_tower.", "model.multi_modal_projector.")
LENGTHS = (33, 13)  # of ragged rows, before a step of 4 tokens, which crosses a boundary of Llama 4's chunks of 7


def check_served(model, *, pads: bool = True, page_size: int = 2):
    """On this rank of the default group: `generate`, `model.generate`, left padding unless not pads, ragged rows, and
    no cache."""
    ids, (padded, mask) = prompt(2, 37), left_padded(2, 17)
    want, of_padded = plain(model, ids, NEW), plain(model, padded, NEW, mask)
    # RoBERTa counts from its padding token's number on, but not in Transformers' generate
    counts = any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())
    positions = {"position_ids": torch.arange(ids.shape[1])[None]} if counts else {}
    with torch.no_grad():
        alone = [model(x[None], **{n: p[:, : len(x)] for n, p in positions.items()}).logits[0] for x in ids]

    def new_cache():
        return tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD, page_size=page_size)

    model.set_attn_implementation("tree")
    result = tree_hf.generate(model, ids, cache=new_cache(), max_new_tokens=NEW, chunk_size=16, keep_logits=True)
    found = [
        ("generate", (result.tokens, torch.stack(result.logits, 1)), want),
        ("model.generate", hf_generate(model, ids, NEW, past_key_values=new_cache()), want),
    ]
    if pads:
        of_tree = hf_generate(model, padded, NEW, mask, past_key_values=new_cache())
        found.append(("left padding", of_tree, of_padded))
    for what, (tokens, logits), (want_tokens, want_logits) in found:
        assert_logits(logits, want_logits, what)
        assert torch.equal(tokens, want_tokens), what
    runner = tree_hf.Runner(model, new_cache(), chunk_size=16)
    rows = [runner.add(), runner.add()]
    for row, own, length in zip(rows, ids, LENGTHS):
        runner.prefill(row, own[:length])
    last = torch.stack([own[n : n + 4] for own, n in zip(ids, LENGTHS)])
    for own, truth, n in zip(runner.step(rows, last), alone, LENGTHS):
        assert_logits(own, truth[n : n + 4], "ragged rows")
    with torch.no_grad():
        assert_logits(model(ids, **positions, use_cache=False).logits[0], alone[0], "no cache")


def begin_rows(model, lengths, new_cache, chunk_size):
    """(A runner, its rows, a copy of the second one, their texts, check): rows are prefilled together, and run two
    tokens on. check(logits, row, position, what): they are the plain model's for the text twice in a row."""
    texts = [prompt(1, length, seed=length)[0] for length in lengths]
    with torch.no_grad():
        want = [model(torch.cat((text, text[:4]))[None]).logits[0] for text in texts]
    model.set_attn_implementation("tree")
    runner = tree_hf.Runner(model, new_cache(), chunk_size=chunk_size)

    def check(logits, row, position, what):
        assert_logits(logits, want[row][position], what)

    rows = [runner.add() for _ in texts]
    first = runner.prefill_rows(rows, texts)
    for i, text in enumerate(texts):
        check(first[i], i, len(text) - 1, "prefill_rows")
    logits = runner.step(rows, torch.stack([text[:2] for text in texts]))  # rows of different lengths
    for i, text in enumerate(texts):
        check(logits[i], i, slice(len(text), len(text) + 2), "step")
    return runner, rows, runner.fork(rows[1]), texts, check


def check_rows(model, folder, page_size=2):
    """Rows of a runner on the default group: run together, copied, cropped, saved and loaded."""

    def new_cache():
        return tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD, page_size=page_size)

    fingerprint = model_fingerprint(model)
    runner, rows, copy, texts, check = begin_rows(model, (3, 29, 12), new_cache, 8)
    for row in (rows[1], copy):
        check(runner.step([row], texts[1][2:3, None])[0, 0], 1, 31, "a row and its copy")
    runner.crop(rows[1], 27)  # in the middle of a page
    check(runner.step([rows[1]], texts[1][27:][None])[0], 1, slice(27, 29), "cropped")
    check(runner.step([copy], texts[1][3:4, None])[0, 0], 1, 32, "the copy of a row that was cropped")
    cache = runner.cache
    cache.rows = [copy, rows[2]]
    held = [torch.cat((texts[1], texts[1][:4])), torch.cat((texts[2], texts[2][:2]))]
    cache.save(folder, held, fingerprint=fingerprint)
    loaded = new_cache()
    assert all(map(torch.equal, loaded.load(folder, fingerprint=fingerprint), held))
    again = tree_hf.Runner(model, loaded)
    again.crop(loaded.rows[0], 30)
    logits = again.step(loaded.rows, torch.stack((texts[1][1:2], texts[2][2:3])))
    check(logits[0, 0], 1, 30, "loaded")
    check(logits[1, 0], 2, 14, "loaded")


class _Counted:
    """Tokens that a model's layers have run on this rank."""

    def __init__(self, model):
        self.tokens = 0
        model.model.layers[0].register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, layer, args, kwargs):
        self.tokens += (args[0] if args else kwargs["hidden_states"]).shape[1]


def _crowd(runner, rank):
    """Let one rank hold so many pages that it gets none of the next prompts."""
    store = runner.store
    rows = [runner.add() for _ in range(24 * store.book.world)]
    for row in rows:
        store.append([row], store.page_size)
    for row in rows:
        if store.book.rows[row].parts[0].rank != rank:
            runner.remove(row)


def check_prompts(model, folder, page_size):
    """On all ranks of the default group, which run their own tokens: a prompt in chunks, a next turn that begins within
    a page, a copy, and what was saved, go on with more tokens."""
    world = dist.get_world_size()

    def new_runner(chunk_size=6 * page_size):
        cache = tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD, page_size=page_size)
        return tree_hf.Runner(model, cache, chunk_size=chunk_size)

    texts = [prompt(1, 61, seed=seed)[0] for seed in (1, 2)]
    texts[1][:43] = texts[0][:43]
    with torch.no_grad():
        want = [model(text[None]).logits[0] for text in texts]
    fingerprint = model_fingerprint(model)
    model.set_attn_implementation("tree")
    runner, counted = new_runner(), _Counted(model)
    row = runner.add()

    def check(logits, i, end, what):
        assert_logits(logits, want[i][end - 1], what)

    check(runner.prefill(row, texts[0][:29]), 0, 29, "chunks")
    assert counted.tokens <= -(-29 // world) + 3 * page_size, "a rank runs its own tokens"
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
    again = new_runner()
    again.cache.load(folder, fingerprint=fingerprint)
    check(again.prefill(again.cache.rows[0], texts[0][43:]), 0, 61, "loaded")
    check(runner.prefill(row, texts[0][43:], sharded=False), 0, 61, "all tokens on all ranks")
    crowded = new_runner(60)
    _crowd(crowded, world - 1)
    row, counted.tokens = crowded.add(), 0
    check(crowded.prefill(row, texts[0][:40]), 0, 40, "a rank without tokens")
    shares = crowded.store.book._shares(crowded.store.book.rows[row], 0)
    assert shares[-1] == [] and all(shares[:-1]), shares
    check(crowded.step([row], texts[0][None, 40:41])[0, 0], 0, 41, "a step after it")


def check_eight_bits(model, dtype, limit):
    """A cache in 8 bits, whose index keys are not: near to the plain model, and the same on any number of ranks."""
    ids, found = prompt(2, 37), []
    want = plain(model, ids, 1)[1]
    model.set_attn_implementation("tree")
    for group in (None, dist.group.WORLD):
        cache = tree_hf.TreeCache(model.config, cp_group=group, page_size=2, dtype=dtype)
        result = tree_hf.generate(model, ids, cache=cache, max_new_tokens=3, chunk_size=8, keep_logits=True)
        found.append(torch.stack(result.logits, 1))
        assert cache.store.layers[0].k.dtype == CACHE_DTYPES[dtype]
        assert cache.store.layers[0].index_k.dtype == torch.float32
    assert_logits(found[1], found[0], "ranks")
    assert float((found[0][:, :1] - want).abs().max() / want.abs().max()) < limit


@torch.no_grad()
def check_no_cache(model, refused):
    """Evaluation without a cache, and what is said of padding there."""
    ids = prompt(2, 21)
    want = model(ids, use_cache=False).logits
    model.set_attn_implementation("tree")
    assert_logits(model(ids, use_cache=False).logits, want, "no cache")
    with pytest.raises(ValueError, match=refused):
        model(ids, attention_mask=torch.arange(21).expand(2, -1) > 2, use_cache=False)


class CountingRunner(tree_hf.Runner):
    """Counts the tokens of prompts that are run, and notes the lengths of those that run together."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.num_run, self.together = 0, []

    def prefill(self, row, tokens, **options):
        self.num_run += len(tokens)
        return super().prefill(row, tokens, **options)

    def prefill_rows(self, rows, prompts):
        self.num_run += sum(map(len, prompts))
        self.together.append(list(map(len, prompts)))
        return super().prefill_rows(rows, prompts)


def traffic_of_a_step(model, ids, cache):
    """(Bytes that this rank sends in a step after a prompt and a step, keys that each layer selects on all ranks.)"""
    model.set_attn_implementation("tree")
    runner = tree_hf.Runner(model, cache, chunk_size=64)
    row = runner.add()
    runner.prefill(row, ids[0])
    runner.step([row], ids[:, :1])  # ranks compare what they do once
    read, decode = [], DecodeStep.decode

    def counted(self, q, cache, *args, **kwargs):
        read.append(int((cache.selected >= 0).sum()))
        return decode(self, q, cache, *args, **kwargs)

    with comm.record() as log, mock.patch.object(DecodeStep, "decode", counted):
        runner.step([row], ids[:, :1])
    read = torch.tensor(read)
    dist.all_reduce(read)
    return sum(x.bytes for x in log), read.tolist()


def check_trained(make, **more):
    """Loss and gradients of a sequence that the ranks share. make() -> the model, the same each time, in evaluation
    mode, since dropout would differ. more: of the batch."""
    batch = {"input_ids": prompt(2, 21), "labels": prompt(2, 21)} | more
    model = make()
    want = model(**batch, use_cache=False).loss
    want.backward()
    grads = gradients(model)
    model = make()
    tree_hf.train_on_shards(model)
    got = model(**tree_hf.shard_batch(batch, cp_group=dist.group.WORLD)).loss
    got.backward()
    assert abs(float(got - want)) < 2e-5 * float(want)
    largest = max(float(g.abs().max()) for g in grads.values())
    found = averaged_gradients(model)
    for n, grad in grads.items():
        assert float((found[n] - grad).abs().max()) <= 1e-4 * largest, n


def check_sharded(model, page_size=2):
    """Tokens and logits of a model whose weights all ranks share; a prompt runs whole on all ranks, or shared out."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ids = prompt(1, 45)
    want = plain(model, ids, 3)
    model.set_attn_implementation("tree")
    layout = plan_layout(model, world, rank)
    for name, parameter in model.named_parameters():
        whole = parameter.dim() == 1 or name in layout.from_first_rank or name.startswith(OF_IMAGES)
        whole = whole or {*ROUTERS, *SMALL} & set(name.split("."))
        assert whole or layout.pieces[name].shape(parameter.shape).numel() <= 0.75 * parameter.numel(), name
    ranks = bound(timeout_s=60.0)
    group = ranks.neighbours(layout.heads.size)
    split_model(model, layout, ranks)
    options = {"token_group": dist.group.WORLD, "chunk_size": 34, "keep_logits": True}
    of_cache = {"cp_group": group, "head_shares": layout.heads.shares, "page_size": page_size}
    for model.weight_gathering.forced in (False, True):
        options |= {"cache": tree_hf.TreeCache(model.config, **of_cache)}
        result = tree_hf.generate(model, ids, max_new_tokens=3, **options)
        assert_logits(torch.stack(result.logits, 1), want[1], f"generate, forced={model.weight_gathering.forced}")
        assert torch.equal(result.tokens, want[0])


def check_engine(whole, folder, shares, more=()):
    """Tokens, logits and bytes of a model in memory and of one in files, whose weights all ranks share; a row goes on
    in another cache, from the files of the ranks' parts.

    shares: how many ranks have different weights. more: names of parts that are on every rank, beside the usual ones.
    """
    ids, names = prompt(1, 45), {*SMALL, *ROUTERS, *more}
    want = plain(whole, ids, 3)
    whole.save_pretrained(folder / "model")  # on the first rank
    dist.barrier()
    for source in (whole, folder / "model"):
        engine = share_model(source, weights="sharded", page_size=2, prefill_chunk=34)
        small = sum(p.numel() for n, p in engine.module.named_parameters() if names & set(n.split(".")))
        assert engine.weight_bytes <= engine.model_bytes / shares + 4 * small + 4096  # norms
        result = generate(engine, ids, max_new_tokens=3, keep_logits=True)
        assert_logits(torch.stack(result.logits, 1), want[1], type(source).__name__)
        assert torch.equal(result.tokens, want[0])
    check_saved_rows(engine, ids, want, folder / "rows")


def check_saved_rows(engine, ids, want, folder):
    """A row that is saved and loaded goes on as the plain model, of which want has tokens and logits."""
    cache, options = engine.new_cache(), {"fingerprint": "of this model"}
    with torch.no_grad():
        engine.module(ids, past_key_values=cache)
    cache.save(folder, [ids[0]], **options)
    again = engine.new_cache()
    assert torch.equal(again.load(folder, **options)[0], ids[0])
    runner = tree_hf.Runner(engine.module, again, token_group=dist.group.WORLD)
    assert_logits(runner.step(again.rows, want[0][:, :1])[0, 0], want[1][0, 1], "loaded")
