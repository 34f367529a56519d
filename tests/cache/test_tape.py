"""Decode steps of CPU ranks that are written down on a tape and replayed give what ordinary steps give."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from megatron_tree import TreeConfig
from megatron_tree.core import tape
from megatron_tree.core.cache import graph
from megatron_tree.core.kernels.native import product
from megatron_tree.core.tape import Tape
from megatron_tree.integrations.transformers.infer.engine import generate, share_model
from megatron_tree.tools.bench.device_checks import SmallRunner
from support.graphed import Pair, rows_come_and_go
from support.hf_models import tiny_model
from support.ranks import largest, on_ranks
from support.rounding import assert_near


class Recorded(Pair):
    """Two runners over the same rows, one of which replays its steps."""

    def __init__(self, **options):
        super().__init__([SmallRunner(page_size=4, **options) for _ in range(2)])
        self.graphed = SmallRunner(page_size=4, record_steps=True, **options)


@pytest.fixture
def tapes(monkeypatch):
    """The tapes that are made in a test."""
    made = []
    monkeypatch.setattr(graph, "Tape", lambda *args, **options: made.append(Tape(*args, **options)) or made[-1])
    return made


CASES = {
    "full": {"windows": (None, None)},
    "windows": {"windows": (5, None, 12)},
    "one KV head": {"heads": (4, 1)},
    "int8": {"cache_dtype": "int8"},
    "bf16": {"dtype": torch.bfloat16},
    "deterministic": {"config": TreeConfig(deterministic=True)},
}


@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_are_ordinary_steps(name, tapes, monkeypatch):
    if name == "full":
        monkeypatch.setattr(tape, "JOIN_AT", 1)
    it = Recorded(**CASES[name])
    assert rows_come_and_go(it, 20) <= (2e-2 if name == "bf16" else 1e-5)
    assert len(tapes) >= 3, "the pages have moved"
    if name == "full":
        assert not any(isinstance(done, tape._Operation) for x in tapes for done in x._done), "called from Python"


def test_a_growing_row_is_seldom_written_down_anew(tapes):
    runner = SmallRunner(page_size=4, record_steps=True)
    row, token = runner.add(), torch.ones(1, 1, dtype=torch.int64)
    runner.prefill(row, torch.arange(1, 31))
    for _ in range(100):
        runner.step([row], token)
    assert len(tapes) == 3, "the pages' number, one that no row has included, exceeds 8, 16 and 32"
    assert {len(pages.k) for pages in runner.store.layers} == {64}


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["auto", "scatter", "allgather"])
def test_all_ranks_write_down_in_the_same_steps(schedule, monkeypatch):
    """Where one rank's pages move all ranks' do."""
    made = []
    monkeypatch.setattr(graph, "Tape", lambda *args, **options: made.append(Tape(*args, **options)) or made[-1])
    it = Recorded(cp_group=dist.group.WORLD, windows=(None, 6), schedule=schedule)
    assert rows_come_and_go(it, 20) <= 1e-5
    counts = [None, None]
    dist.all_gather_object(counts, len(made))
    assert min(counts) >= 2 and counts[0] == counts[1]


@on_ranks(2)
@pytest.mark.parametrize("weights", ["sharded", "replicated"])
def test_generation(weights, monkeypatch):
    monkeypatch.setattr(tape, "JOIN_AT", 4)
    engine, found = share_model(tiny_model("llama"), weights=weights), []
    prompt = torch.randint(3, 60, (1, 19), generator=torch.Generator().manual_seed(4))
    for record in (False, True):
        result = generate(engine, prompt, max_new_tokens=24, keep_logits=True, record_steps=record)
        found.append((result.tokens.tolist(), torch.stack(result.logits)))
    assert found[0][0] == found[1][0]
    assert largest(((found[0][1] - found[1][1]).abs().max() / found[0][1].abs().max()).flatten().tolist()) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_down(dtype, monkeypatch):
    """Results go to the same memory again; views need nothing, and what is not known to take its result's place is
    copied there. Numbers stay what they are: neither dtypes nor bits change."""
    monkeypatch.setattr(tape, "JOIN_AT", 2)
    x, table, pages = torch.randn(3, 4).to(dtype), torch.randn(5, 4).to(dtype), torch.zeros(6, 4).to(dtype)
    slots = torch.tensor([1, 4])

    def step():
        rows = torch.nn.functional.embedding(slots, table)
        pages[slots] = rows
        best, at = (x @ table.t()).topk(2)
        zeros = torch.zeros(2)
        zeros += best.flatten()[:2]
        halves, unseen = slots * 0.3 + slots * 2 // 3, torch.where(rows > 0.1, rows, 0.7).sum()
        scaled = (x.t() * 0.1 + 1e-3).contiguous().t() / (x.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt()
        x_of_slots = pages[:, slots[:1] % 4] * halves[0] + unseen / 3
        parts = best, at, zeros.expand(3, 2), x.view(4, 3).t()[:, :1], scaled, x_of_slots[:3], halves.expand(3, 2)
        return torch.cat([part.float() for part in parts], 1)

    tape_of_step = Tape(step)
    result = tape_of_step.logits
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for tensor in (x, table):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        slots.copy_(torch.randperm(5, generator=generator)[:2])
        pages.zero_()
        tape_of_step.replay()
        again, stored = result.clone(), pages.clone()
        pages.zero_()
        assert torch.equal(again, step()) and torch.equal(stored, pages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operation", ["mm", "addmm"])
def test_products_with_weights_are_launched(operation, dtype, monkeypatch):
    """Unless their layout is for torch; rows that are widened, or lie apart, are copied by every replay."""
    launched, bias = [], torch.randn(3).to(dtype) if operation == "addmm" else None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(product, "launch", lambda *call: launched.append(call) or tape.launch(*call))
    x, weights = torch.zeros(2, 16).to(dtype), torch.randn(3, 8).to(dtype)

    def step():
        rows = x[:, :8]
        linear = torch.nn.functional.linear(rows, weights, bias)
        return linear + torch.ops.aten.mm(rows.flip(0).t().contiguous().t(), weights.t()) + (rows @ x[:, 8:].t()).sum()

    with_products = Tape(step, product.PRODUCTS)
    for _ in range(2):
        x.copy_(torch.randn(2, 16))
        with_products.replay()
        assert_near(with_products.logits, want := step(), 16)
    assert len(launched) == 3
    for parameter in filter(torch.is_tensor, (weights, bias)):
        parameter.data = torch.zeros_like(parameter)
        others = [torch.full_like(parameter, float("nan")) for _ in range(100)]  # in memory that is free, if any is
    with_products.replay()
    assert_near(with_products.logits, want, 16)
    del others


def test_launches_are_written_down_only():
    said = []
    with_launch = Tape(lambda: (tape.launch(said.append, 1), torch.ones(1))[1])
    assert said == []
    with_launch.replay()
    with_launch.replay()
    tape.launch(said.append, 2)
    assert said == [1, 1, 2]


def test_what_can_not_be_written_down():
    refused = {
        "schedule='ring' sends messages": {"schedule": "ring"},
        "check='always' looks at every call": {"config": TreeConfig(check="always")},
        "deterministic='ranks' reads lengths": {"config": TreeConfig(deterministic="ranks")},
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=f"record_steps=True can't be had: .*{message}.*leave record_steps out"):
            SmallRunner(record_steps=True, **options)
    with pytest.raises(ValueError, match="record_steps='yes'"):
        SmallRunner(record_steps="yes")


class Sender(SmallRunner):
    def _run(self, *args, **options):
        logits = super()._run(*args, **options)
        dist.all_reduce(logits)
        return logits


@on_ranks(2)
def test_ranks_that_send_by_themselves_are_refused():
    runner = Sender(record_steps=True, cp_group=dist.group.WORLD)
    row = runner.add()
    runner.prefill(row, torch.arange(9))
    with pytest.raises(ValueError, match=r"can't be had for this model: its ranks send .* \(c10d::allreduce_\)"):
        runner.step([row], torch.tensor([[1]]))


@on_ranks(2)
def test_ranks_without_memory_are_refused():
    runner = SmallRunner(record_steps=True, cp_group=dist.group.WORLD, config=TreeConfig(transport="direct"))
    row = runner.add()
    runner.prefill(row, torch.arange(9))
    with pytest.raises(ValueError, match="record_steps=True can't be had for this model: its ranks share no memory"):
        runner.step([row], torch.tensor([[1]]))
    assert runner.length(row) == 9
