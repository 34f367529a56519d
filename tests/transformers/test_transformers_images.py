"""Prompts with images: tokens and logits are those of Transformers' own generate, with its own cache."""

import pytest
import torch
import torch.distributed as dist

from megatron_tree.inference.generation.requests import Request
from megatron_tree.inference.generation.sampling import SamplingParams
from megatron_tree.inference.generation.scheduler import Scheduler
from megatron_tree.integrations import transformers as tree_hf
from megatron_tree.integrations.transformers.families.images import set_text_attention, text_part_of
from megatron_tree.integrations.transformers.infer.split_model import split_model
from megatron_tree.integrations.transformers.infer.weight_layout import plan_layout
from support.bound import bound
from support.hf_images import CONFIGS, image_model, image_rows, types_of
from support.hf_served import CountingRunner
from support.ranks import on_ranks, run_distributed
from support.scheduling import tokens_of

NEW = 5
IMPLEMENTATIONS = {"text_config": "tree", "vision_config": "sdpa"}
FAST = ("gemma3", "mistral3", "qwen3_5", "qwen3_vl")
GREEDY = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}


def _model(name):
    model = image_model(name, torch.float32)
    model.generation_config.eos_token_id = None
    return model


def _prompt(name):
    """(input_ids [1, n], what a processor returns beside them)."""
    ids, more = image_rows(name)[0]
    return ids[None], {key: x.float() if x.is_floating_point() else x for key, x in more.items()} | types_of(
        name, ids[None]
    )


def _generated(model, ids, inputs, new=NEW, **more):
    found = model.generate(input_ids=ids, **inputs, **GREEDY, max_new_tokens=new, **more)
    return found.sequences[0, ids.shape[1] :], torch.stack(found.logits, 1)[0]


def _new_cache(model):
    return tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD, page_size=2)


def _near(got, want, what):
    error = float((got - want).abs().max() / want.abs().max())
    assert error <= 1e-5, f"{what}: {error:.1e}"


def _steps(runner, row, logits, tokens):
    """Logits of a row's last prompt token, and of the tokens that follow."""
    found = [logits]
    for token in tokens[:-1]:
        found.append(runner.step([row], token.view(1, 1))[0, 0])
    return torch.stack(found)


def _cases():
    fast = [(name, 2) for name in FAST]
    for name in CONFIGS:
        marks = [pytest.mark.supports(f"`{name}`", with_="images: generation; 1, 2 and 4 ranks")]
        for world in (1, 2, 4):
            slow = [] if (name, world) in fast else [pytest.mark.slow]
            yield pytest.param(name, world, marks=marks + slow, id=f"{name}-{world}")


@pytest.mark.parametrize(("name", "world"), [*_cases()])
@on_ranks()
def test_images(world, name):
    model, (ids, inputs) = _model(name), _prompt(name)
    want, other = (_generated(model, ids, inputs | {"pixel_values": sign * inputs["pixel_values"]}) for sign in (1, -1))
    assert (want[1] - other[1]).abs().max() > 0.01 * want[1].abs().max(), "the images do not matter"
    model.set_attn_implementation(IMPLEMENTATIONS)
    tokens, logits = _generated(model, ids, inputs, past_key_values=_new_cache(model))
    _near(logits, want[1], "model.generate")
    assert torch.equal(tokens, want[0])
    for chunk_size in (64, 8):
        runner = tree_hf.Runner(model, _new_cache(model), chunk_size=chunk_size)
        embedded, row = runner.embed(ids[0], inputs), runner.add()
        logits = _steps(runner, row, runner.prefill(row, ids[0], embedded=embedded), want[0])
        _near(logits, want[1], f"Runner, chunk_size={chunk_size}")


def _request(ids, inputs=None, new=NEW):
    return Request(prompt=ids[0], images=inputs, sampling=SamplingParams(max_tokens=new))


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "qwen3_5"])
@on_ranks(2)
def test_requests_with_images(rank, name):
    """Requests with images beside one of text; equal tokens with other images share what is before these only."""
    model = _model(name)
    ids, inputs = _prompt(name)
    others = (inputs | {"pixel_values": torch.randn(inputs["pixel_values"].shape)} for _ in range(20))
    first = _generated(model, ids, inputs)[0]
    other = next(x for x in others if not torch.equal(_generated(model, ids, x)[0], first))
    text = torch.arange(2, 22)[None]
    want = [first, _generated(model, ids, other)[0], _generated(model, text, {})[0]]
    model.set_attn_implementation(IMPLEMENTATIONS)
    runner = CountingRunner(model, _new_cache(model), chunk_size=16)
    scheduler = Scheduler(runner, max_rows=3, max_waiting=8, keep_bytes=1 << 30, heartbeat_s=5.0)
    events = [[] for _ in range(5)]
    if scheduler.is_leader:
        with_images = [_request(ids, inputs), _request(ids, other)]
        asked = [*with_images, _request(text), *with_images]
        for request, found in zip(asked[:3], events):
            scheduler.submit(request, found.append)
    scheduler.run_until_idle()
    first, runner.num_run = runner.num_run, 0
    if scheduler.is_leader:
        for request, found in zip(asked[3:], events[3:]):
            scheduler.submit(request, found.append)
    scheduler.run_until_idle()
    if rank == 0:
        for found, tokens in zip(events, [*want, *want[:2]]):
            assert tokens_of(found) == tokens.tolist()
        if name == "qwen3_vl":  # states and windows can't go back
            assert first >= text.shape[1] + 2 * ids.shape[1] - 4 and runner.num_run < 8, (first, runner.num_run)


@pytest.mark.refuses("`gemma3` with images, weights='sharded'", when="Runner.embed: their tokens see each other")
def test_images_whose_tokens_see_each_other_want_whole_weights():
    run_distributed(_sharded, 2, "gemma3")


@pytest.mark.slow
@on_ranks(2)
def test_an_answer_that_lost_its_row_embeds_its_images_again(rank):
    model, (ids, inputs) = _model("qwen3_vl"), _prompt("qwen3_vl")
    want = _generated(model, ids, inputs, 90)[0].tolist()
    model.set_attn_implementation(IMPLEMENTATIONS)
    runner = tree_hf.Runner(model, _new_cache(model), chunk_size=16, capacity_tokens=230)
    scheduler = Scheduler(runner, max_rows=3, max_waiting=8, heartbeat_s=5.0)
    events = [[], []]
    if scheduler.is_leader:
        for found in events:
            scheduler.submit(_request(ids, inputs, 90), found.append)
    scheduler.run_until_idle()
    if rank == 0:
        assert scheduler.preemptions and [tokens_of(found) for found in events] == [want, want]


def _sharded(rank, world, name):
    model, (ids, inputs) = _model(name), _prompt(name)
    want = _generated(model, ids, inputs)
    set_text_attention(model, "tree")
    layout = plan_layout(model, world, rank)
    if name == "gemma3":
        cache = tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD, head_shares=layout.heads.shares)
        runner = tree_hf.Runner(model, cache, token_group=dist.group.WORLD)
        with pytest.raises(ValueError, match="images can't be run with weights='sharded'"):
            runner.embed(ids[0], inputs)
        return
    whole = [n for n, _ in model.named_parameters() if n not in layout.pieces and n not in layout.from_first_rank]
    assert any("vis" in n for n in whole) and not any("language_model" in n and "norm" not in n for n in whole)
    ranks = bound(timeout_s=60.0)
    group = ranks.neighbours(layout.heads.size)
    split_model(model, layout, ranks)
    gathering = model.weight_gathering
    for forced in (False, True) if gathering is not None else (None,):
        if gathering is not None:
            gathering.forced = forced
        cache = tree_hf.TreeCache(model.config, cp_group=group, head_shares=layout.heads.shares, page_size=2)
        runner = tree_hf.Runner(model, cache, token_group=dist.group.WORLD, chunk_size=16)
        embedded, row = runner.embed(ids[0], inputs), runner.add()
        logits = _steps(runner, row, runner.prefill(row, ids[0], embedded=embedded), want[0])
        _near(logits, want[1], f"forced={forced}")


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("qwen3_vl", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("qwen3_vl", 4), ("qwen3_5", 2), ("mistral3", 4))),
    ],
)
def test_weights_of_the_text_part_over_all_ranks(name, world):
    run_distributed(_sharded, world, name)


def test_files_of_a_cache_do_not_keep_positions_of_images(tmp_path):
    model, (ids, inputs) = _model("qwen3_vl"), _prompt("qwen3_vl")
    set_text_attention(model, "tree")
    cache = tree_hf.TreeCache(model.config)
    runner = tree_hf.Runner(model, cache)
    cache.rows = [runner.add()]
    runner.prefill(cache.rows[0], ids[0], embedded=runner.embed(ids[0], inputs))
    with pytest.raises(ValueError, match="positions that files don't keep"):
        cache.save(tmp_path, [ids[0]], fingerprint="")


@on_ranks(2)
def test_ranks_with_other_images(rank):
    model, (ids, inputs) = _model("qwen3_vl"), _prompt("qwen3_vl")
    set_text_attention(model, "tree")
    with pytest.raises(ValueError, match="the ranks' input_ids differ"):
        _generated(model, ids + (torch.arange(ids.shape[1]) == 0) * rank, inputs, past_key_values=_new_cache(model))
    inputs["pixel_values"] = (1 + rank) * inputs["pixel_values"]
    runner = tree_hf.Runner(model, _new_cache(model))
    with pytest.raises(ValueError, match="digest of tokens and images"):
        runner.embed(ids[0], inputs)


def test_what_images_need_is_said():
    model, (ids, inputs) = _model("gemma3"), _prompt("gemma3")
    model.set_attn_implementation(IMPLEMENTATIONS)
    with pytest.raises(ValueError, match="need a TreeCache"):
        model(input_ids=ids, **inputs, use_cache=False)
    cache = tree_hf.TreeCache(model.config)
    runner = tree_hf.Runner(model, cache, chunk_size=8)
    embedded = runner.embed(ids[0], inputs)
    inside = int(embedded.joined.nonzero()[0]) + 1
    with pytest.raises(ValueError, match="end inside of an image"):
        runner.prefill(runner.add(), ids[0, :inside], embedded=embedded)
    with pytest.raises(ValueError, match="can't embed a prompt"):
        runner.embed(ids[0], inputs | {"pixel_values": inputs["pixel_values"][:1]})
    model.set_attn_implementation("tree")
    with pytest.raises(ValueError, match='"vision_config": "sdpa"'):
        runner.embed(ids[0], inputs)
    text = image_model("llava", torch.float32).model.language_model
    with pytest.raises(ValueError, match="takes no images"):
        text_part_of(text)
