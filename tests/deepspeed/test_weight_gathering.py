"""Prefill with sharded weights where each rank runs its own tokens: results, bytes, memory, order, failures."""

import time

import pytest
import torch

from megatron_tree.core import comm
from megatron_tree.core.cache.gathered import num_words
from megatron_tree.core.errors import CommError
from megatron_tree.integrations import deepspeed as tree_deepspeed
from support.hf_models import prompt, tiny_model
from support.ranks import largest, on_ranks, run_distributed

TOKENS = 229
BLOCK = 2


@torch.no_grad()
def _engine(family, dtype=torch.float32, **options):
    model = tiny_model(family).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # one that is missing, or added twice, shows
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    want = model(prompt(1, TOKENS + 1)).logits[0]
    return tree_deepspeed.init_inference(model, weights="sharded", page_size=BLOCK, **options), want


def _run(engine, forced, **options):
    """(logits of the last prompt token and of one more, operations of the prefill)"""
    engine.module.weight_gathering.forced = forced
    runner, ids = engine.new_runner(**options), prompt(1, TOKENS + 1)
    row = runner.add()
    with comm.record() as sent:
        last = runner.prefill(row, ids[0, :TOKENS])
    return torch.stack((last, runner.step([row], ids[:, TOKENS:])[0, 0])), sent


def _forms(rank, world, families):
    found = {}
    for family in families:
        engine, want = _engine(family, prefill_chunk=200, split_latents="deepseek" in family or None)
        pieces = {name: (p, p.data_ptr()) for name, p in engine.module.named_parameters()}
        for forced in (True, False, None):  # 200 tokens and 29
            logits, sent = _run(engine, forced)
            error = float((logits - want[-2:]).abs().max() / want.abs().max())
            found[family, forced] = error, sum(x.bytes for x in sent)
        assert pieces == {name: (p, p.data_ptr()) for name, p in engine.module.named_parameters()}
        plans = [engine.module.weight_gathering.plan(n) for n in (200, 29)]
        found[family, "plan"] = tuple(plan.shares_tokens for plan in plans), any(plans[0].gathers)
    return found


def _check_forms(world, families):
    results = run_distributed(_forms, world, families, fresh=True, timeout=280)
    for family in families:
        sent = {}
        for forced in (True, False, None):
            errors, counts = zip(*(found[family, forced] for found in results))
            assert largest(errors) < 5e-6, (family, forced)
            sent[forced] = sum(counts)
        assert sent[None] < sent[False] and sent[None] <= sent[True], (family, sent)
        shares, gathers = results[0][family, "plan"]
        # DeepSeek-V3's latents move, too, if all ranks run all tokens
        assert shares == (True, family == "deepseek_v3"), (family, shares)
        assert gathers == (family != "mixtral")  # its experts' tokens move


@pytest.mark.parametrize(("world", "families"), [(4, ("deepseek_v3",)), (2, ("smollm2", "mixtral"))])
def test_logits_of_all_forms_and_the_chosen_one_sends_least(world, families):
    _check_forms(world, families)


@on_ranks(2, fresh=True)
def test_one_layer_is_whole_and_the_next_one_is_under_way(world):
    """By layer while its MLP runs: the bytes of parameters beyond the pieces, and layers whose gathers have begun."""
    engine, _ = _engine("llama")
    model, own, seen = engine.module, engine.module.weight_gathering, []
    weights = [[*layer.attention, *layer.feed_forwards[0].weights] for layer in own.layers]
    (message,) = {(world - 1) * 4 * num_words(parts, world) for parts in weights}
    beyond = sum(4 * p.shape.numel() - model.get_parameter(p.name).nbytes for p in weights[0])
    held = sum(p.nbytes for p in model.parameters())

    def look(module, args):
        gathers = sum(x == comm.Sent("all_gather", world, message) for x in sent)
        seen.append((sum(p.nbytes for p in model.parameters()) - held, gathers))

    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(look)
    own.forced, runner = True, engine.new_runner()
    with comm.record() as sent:
        runner.prefill(runner.add(), prompt(1, TOKENS)[0])
    assert seen == [(beyond, 2), (beyond, 3), (beyond, 3)], (seen, beyond)


def _a_rank_fails(rank, world):
    engine, _ = _engine("llama", prefill_chunk=200)
    model = engine.module

    def fail(module, args):
        raise RuntimeError("no memory")

    if rank == 1:  # the next layer's weights are on their way
        model.model.layers[1].mlp.register_forward_pre_hook(fail)
    shapes, start = {name: p.shape for name, p in model.named_parameters()}, time.monotonic()
    with pytest.raises(RuntimeError if rank == 1 else CommError) as error:
        _run(engine, True)
    assert time.monotonic() - start < 60  # of a limit of 600
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    return str(error.value)


def test_a_rank_that_fails_ends_the_others_waits():
    messages = run_distributed(_a_rank_fails, 4, fresh=True, timeout=100)
    assert all("no memory" in message for message in messages), messages
