"""An error on one rank, between two calls of a model's pass, that a program catches: right results or an error."""

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
from megatron_tree import CommError, TreeConfig
from megatron_tree.integrations.transformers.attention import TreeCache
from megatron_tree.integrations.transformers.infer.runner import Runner
from megatron_tree.integrations.transformers.infer.split_model import split_model
from megatron_tree.integrations.transformers.infer.weight_layout import plan_layout
from megatron_tree.integrations.transformers.train import loss as log_probs
from megatron_tree.integrations.transformers.train.sequence_parallel import register_sequence_parallel
from support.bound import bound
from support.hf_models import SHAPE, prompt
from support.ranks import on_ranks, run_distributed
from transformers import AutoModelForCausalLM, LlamaConfig

VICTIM, ROWS, HELD = 0, 3, 40
TRANSPORTS = ("auto", *(pytest.param(x, marks=pytest.mark.slow) for x in ("direct", "builtin")))
PLACES = ("layers.0.self_attn", "layers.1.self_attn", "layers.0.mlp", "norm")
KV_HEADS = {"replicated": 2, "sharded": 3, "head groups": 2}
"""With 3 of them two ranks share the cache and have some query heads each; with 2 each rank has a cache of its own."""


def make_model(kv_heads):
    torch.manual_seed(1)
    heads = {"num_attention_heads": 2 * kv_heads, "num_key_value_heads": kv_heads, "hidden_size": 16 * kv_heads}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE | heads)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in layer.parameters():
                weight.mul_(4.0)
    return model


def fail_once(model, place, fails=lambda: True):
    """An error as that of an allocation, ahead of a module, as soon as `fails()`."""

    def fail(*_):
        if fails():
            hook.remove()
            raise MemoryError("no room")

    hook = model.model.get_submodule(place).register_forward_pre_hook(fail)


def attempt(job):
    """What it returns, or its error in words."""
    try:
        return job()
    except (ValueError, CommError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"


class Checked:
    """A runner whose results are compared with the plain model's, on whatever the row holds on this rank."""

    def __init__(self, transport, weights="replicated"):
        self.plain, self.model = (make_model(KV_HEADS[weights]) for _ in range(2))
        self.model.set_attn_implementation("tree")
        world, shares = dist.group.WORLD, None
        if weights != "replicated":
            layout = plan_layout(self.model, dist.get_world_size(), dist.get_rank())
            split_model(self.model, layout, bound(transport=transport, timeout_s=60.0))
            shares = layout.heads.shares
        group = None if weights == "head groups" else world
        config = TreeConfig(transport=transport, timeout_s=60.0)
        cache = TreeCache(self.model.config, cp_group=group, head_shares=shares, tree_config=config)
        self.runner = Runner(self.model, cache, token_group=world)
        self.texts = {self.runner.add(): ids for ids in prompt(ROWS, HELD)}
        for row, text in self.texts.items():
            self._check(row, text, self.runner.prefill(row, text))
        self.step(0)  # now all know it

    def step(self, row):
        """ "right", or the error in words. A wrong result is an `AssertionError`."""
        new = torch.tensor([1 + len(self.texts[row]) % 7])
        logits = attempt(lambda: self.runner.step([row], new[None])[0, 0])
        if isinstance(logits, str):
            return logits
        self.texts[row] = torch.cat((self.texts[row], new))
        self._check(row, self.texts[row], logits)
        return "right"

    @torch.no_grad()
    def _check(self, row, text, logits):
        want = self.plain(text[None], use_cache=False).logits[0, -1]
        error = (logits - want).abs().max() / want.abs().max()
        assert error < 1e-4, f"row {row} of {len(text)} tokens: {error:.1e}"


def _goes_on(rank, world, transport, weights, place):
    """One rank's step of row 0 fails; it goes on with row 1, as does the other, which knows nothing."""
    checked = Checked(transport, weights)
    dist.barrier()
    if rank == VICTIM:
        fail_once(checked.model, place)
    return [checked.step(row) for row in (0, 1, 2, 0)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("weights", KV_HEADS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_step_that_one_rank_leaves(transport, weights, place):
    said = run_distributed(_goes_on, 2, transport, weights, place)
    assert said[VICTIM][0] == "MemoryError: no room", said
    for calls in said:
        told = [text for text in calls if f"rank {VICTIM} " in text and "no room" in text]
        assert told and "right" not in calls[2:], said


def _batch_runs(rank, world, transport, place):
    """The same of a model that is called with the cache alone, by a loop that removes what a failed run has left."""
    plain, model = make_model(2), make_model(2)
    model.set_attn_implementation("tree")
    config = TreeConfig(transport=transport, timeout_s=60.0)
    cache = TreeCache(model.config, cp_group=dist.group.WORLD, tree_config=config)
    text, said = prompt(1, HELD), []

    @torch.no_grad()
    def run(ids):
        logits = model(ids, past_key_values=cache).logits[0, -1]
        want = plain(torch.cat((text, ids), 1), use_cache=False).logits[0, -1]
        assert (logits - want).abs().max() < 1e-4 * want.abs().max(), f"after {text.shape[1]} tokens"
        return "right"

    attempt(lambda: model(text, past_key_values=cache))
    dist.barrier()
    if rank == VICTIM:
        fail_once(model, place)
    for _ in range(5 + (rank == VICTIM and place == PLACES[0])):  # there it does one again
        ids = torch.tensor([[1 + text.shape[1] % 7]])
        said.append(attempt(lambda ids=ids: run(ids)))
        if said[-1] == "right":
            text = torch.cat((text, ids), 1)
        elif cache.get_seq_length() > text.shape[1]:
            cache.crop(text.shape[1] - cache.get_seq_length())
    return said


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_run_over_the_batch_that_one_rank_leaves(transport, place):
    said = run_distributed(_batch_runs, 2, transport, place)
    assert said[VICTIM][0] == "MemoryError: no room", said
    if place == PLACES[0]:  # nothing was stored or sent: the rank does it again
        assert said[VICTIM][1:] == ["right"] * 5 and said[1] == ["right"] * 5, said
    else:
        assert all("right" not in calls[2:] for calls in said), said


@pytest.mark.parametrize(("world", "sp_size"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("how", ["training", "evaluation"])
@pytest.mark.parametrize("place", ["layers.0.self_attn", "layers.1.self_attn", "norm"])
@on_ranks()
def test_a_batch_that_one_rank_leaves_out(rank, world, sp_size, how, place):
    """One rank leaves a batch out, for want of memory in the forward; all go on with the next one."""
    model, right = make_model(2), make_model(2)
    batches = [{"input_ids": prompt(2, 24, seed), "labels": prompt(2, 24, seed)} for seed in range(4)]
    parallels = [register_sequence_parallel(x, sp_size=sp_size) for x in (right, model)]

    def run(model, parallel, batch):
        with torch.set_grad_enabled(how == "training"):
            loss = model(**parallel.shard_batch(batch)).loss
            if how == "training":
                model.zero_grad()
                loss.backward()
        return float(loss.detach())

    truth = [run(right, parallels[0], batch) for batch in batches]
    dist.barrier()
    said = []
    for number, batch in enumerate(batches):
        if (rank, number) == (VICTIM, 1):
            fail_once(model, place)
        said.append(attempt(lambda batch=batch: run(model, parallels[1], batch)))
        assert isinstance(said[-1], str) or said[-1] == pytest.approx(truth[number], rel=1e-5), (number, said)
    assert [isinstance(x, str) for x in said] == [False, True, True, True], said
    assert "no room" in said[1] and (rank == VICTIM or f"rank {VICTIM} failed" in said[1]), said


@on_ranks(2)
def test_a_program_that_agrees_on_its_own_on_what_to_leave_out(rank):
    """A program that tells the other ranks by itself of a failure behind all collectives: then no rank goes on."""
    model = make_model(2)
    tree_hf.train_on_shards(model)
    for_tile, kept = log_probs.TokenValues.for_tile, []

    def fail(*_):
        raise MemoryError("no room")

    for number in (0, 1, 0):
        batch = {"input_ids": prompt(1, 24, number), "labels": prompt(1, 24, number)}
        if (rank, len(kept)) == (VICTIM, 1):
            log_probs.TokenValues.for_tile = fail
        shard = tree_hf.shard_batch(batch, cp_group=dist.group.WORLD)
        values = attempt(lambda shard=shard: log_probs.token_log_probs(model, shard).log_probs)
        log_probs.TokenValues.for_tile = for_tile
        failed = torch.tensor(isinstance(values, str))
        dist.all_reduce(failed)
        kept.append(None if failed else values)
    assert kept[1] is None and torch.equal(kept[0], kept[2])
