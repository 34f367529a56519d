"""Decode steps that are captured and replayed give what ordinary steps give. A tape takes the place of a CUDA graph."""

import contextlib
import math
from collections import Counter, OrderedDict
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from megatron_tree import CommError, TreeConfig
from megatron_tree.core import comm
from megatron_tree.core.cache import graph
from megatron_tree.core.cache.graph import check_runner
from megatron_tree.core.comm import collectives, reductions, work
from megatron_tree.integrations.transformers.attention import TreeCache
from megatron_tree.integrations.transformers.infer.runner import Runner
from megatron_tree.tools.bench.device_checks import VOCAB, SmallRunner
from support.graphed import Pair, rows_come_and_go
from support.hf_architectures import SERVED, random_model
from support.hf_models import tiny_model
from support.ranks import largest, run_distributed
from support.tape import Tape, TapedSteps

TRITON = TreeConfig(backend="triton")  # in its interpreter
CASES = {
    "full": {"windows": (None, None)},
    "windows": {"windows": (5, None, 12)},
    "one KV head": {"heads": (4, 1)},
    "int8": {"cache_dtype": "int8"},
    "deterministic": {"config": TreeConfig(deterministic=True)},
    "triton": {"windows": (None, 40), "heads": (2, 1), "page_size": 16, "dtype": torch.float16, "config": TRITON},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("triton", "one KV head"))) for name in CASES]
)
def test_replayed_steps_are_ordinary_steps(name):
    Tape.begin()
    steps = 4 if name == "triton" else 20
    it = Pair.of(**CASES[name])
    assert rows_come_and_go(it, steps) <= (2e-3 if name == "triton" else 1e-5)
    assert Tape.replays > steps and Tape.replays > len(Tape.made_after) > 0, (Tape.replays, Tape.made_after)


def _served_by_tree(model):
    model.set_attn_implementation("tree")
    return Runner(model, TreeCache(model.config, page_size=4))


@pytest.mark.parametrize("family", ["mistral", "deepseek_v3"])
def test_replayed_steps_of_models(family):
    assert rows_come_and_go(Pair([_served_by_tree(tiny_model(family)) for _ in range(2)]), 10) <= 1e-5


NOT_STATIC = {  # what their step does that depends on the host
    **dict.fromkeys(("biogpt", "gpt-sw3", "gpt2", "opt"), "makes a mask of as many tokens"),
    "longcat_flash": "reads how many tokens each expert has",
}


@pytest.mark.slow
def test_replayed_steps_of_all_architectures():
    refused = {}
    for name in SERVED:
        pair = Pair([_served_by_tree(random_model(name)) for _ in range(2)])
        rows = [pair.add(n) for n in (11, 5, 3)]
        try:
            pair.steps(rows, 5)
        except ValueError as error:
            refused[name] = str(error)
        assert pair.worst <= 1e-5, name
    assert set(refused) == set(NOT_STATIC)
    assert all("cuda_graphs=True can't be had for this model" in said for said in refused.values())


@pytest.mark.parametrize("family", ["phi3_longrope", "llama_dynamic"])
def test_models_that_depend_on_the_host(family):
    with pytest.raises(ValueError, match="cuda_graphs=True can't be had: .*rotary embedding depends on the rows'"):
        check_runner(_runner(depends_on_host=_served_by_tree(tiny_model(family)).depends_on_host))


def _on_two_ranks(rank, world, options):
    config = TreeConfig(transport="builtin", check="never")  # gloo's ranks would meet in each call; NCCL's don't
    it = Pair.of(cp_group=dist.group.WORLD, config=config, **options)
    Tape.begin()
    worst, book = rows_come_and_go(it, 40), it.graphed.store.book
    assert all(numbers.capacity <= most + 1 for numbers, most in zip(book.numbers, book.most, strict=True))
    pages = [numbers.capacity for numbers in book.numbers]
    return worst, Tape.made_after, pages, comm.group.GroupState.of(dist.group.WORLD).calls.latest.number


@pytest.mark.parametrize(
    "schedule", ["allgather", *(pytest.param(x, marks=pytest.mark.slow) for x in ("scatter", "allreduce", "two_level"))]
)
def test_all_ranks_capture_in_the_same_steps(schedule):
    """However many pages each of them has; the calls' numbers are the same."""
    found = run_distributed(_on_two_ranks, 2, {"schedule": schedule, "windows": (None, 6)})
    assert largest(worst for worst, *_ in found) <= 1e-5
    assert len({calls for *_, calls in found}) == 1
    assert found[0][1] == found[1][1] and len(found[0][1]) > 3
    assert found[0][2] != found[1][2], "both ranks have as many pages"


@pytest.mark.parametrize(
    ("options", "spare"), [({"windows": (5, None)}, 120), (CASES["triton"], 1)], ids=["c", "triton"]
)
def test_a_step_has_the_same_launches_whatever_the_rows_hold(options, spare):
    """Names, numbers, grids, and the addresses of all that the step has not made itself."""
    it = Pair.of(**options)
    it.both("remove", it.add(spare))  # there are enough pages now: they stay where they are
    a, b, c = (it.add(n) for n in (33, 7, 3))
    it.steps([a, b, c], 2)
    (step,), signatures = it.graphed._graphs._steps.values(), []
    for _ in range(3):
        it.steps([c, a, b], 2)
        signatures.append(Tape(lambda: it.graphed._graphs._run(step.inputs)).signature)
    assert signatures[0] == signatures[1] == signatures[2]


class _UsesLengths(SmallRunner):
    """Its model looks at what the host knows."""

    look = staticmethod(lambda forward, x: x)

    def _run(self, forward, tokens, positions, keep):
        return self.look(forward, super()._run(forward, tokens, positions, keep))


LOOKS = {
    "a number": (lambda forward, x: x * (1 + 1e-9 * forward.end), "depends on what the host knows of the rows' length"),
    "one more": (lambda forward, x: x + 1 if forward.end % 2 else x, "operations or"),
    "a read": (lambda forward, x: x * float(x.max()), "makes the host wait for the device"),
    "a list": (lambda forward, x: x + max(x[0, 0].tolist()), "Tensor.tolist makes the host wait for the device"),
    "a new tensor": (
        lambda forward, x: (torch.tensor([1.0], device="meta"), x)[1],
        "tensor of numbers, on meta, makes the host wait",
    ),
    "a choice": (lambda forward, x: x + x[x > 0].sum(), "makes the host wait for the device"),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_model_that_looks_at_lengths_or_values_is_refused(name):
    look, message = LOOKS[name]
    runner = _UsesLengths(page_size=4)
    runner._graphs, row = TapedSteps(runner), runner.add()
    runner.prefill(row, torch.arange(9))
    runner.look = look
    for _ in range(2):
        with pytest.raises(ValueError, match=f"cuda_graphs=True can't be had for this model: .*{message}"):
            runner.step([row], torch.tensor([[1]]))
        assert runner.length(row) == 9
    runner.look = _UsesLengths.look
    assert runner.step([row], torch.tensor([[1]])).shape == (1, 1, VOCAB)


def _runner(**changes):
    """As much of a runner on a GPU as `check_runner` looks at."""
    store = SmallRunner(cache_dtype=changes.pop("cache_dtype", "auto")).store
    store.layers[0].latent = changes.pop("latent", False)
    given = dict(device=torch.device("cuda", 0), schedule="auto", config=TreeConfig(), cp_group=None, token_group=None)
    return SimpleNamespace(**given | {"store": store, "depends_on_host": None} | changes)


def test_what_runs_in_cuda_graphs():
    for runner in (_runner(), _runner(latent=True), _runner(cache_dtype="int8"), _runner(config=TRITON)):
        check_runner(runner)
    refused = {
        "device type 'cpu'": {"device": torch.device("cpu")},
        "schedule='ring'": {"schedule": "ring"},
        "check='always'": {"config": TreeConfig(check="always")},
        "check='finite'": {"config": TreeConfig(check="finite")},
        "backend='reference'": {"config": TreeConfig(backend="reference")},
        "latents in 8 bits": {"latent": True, "cache_dtype": "int8"},
        "the moon": {"depends_on_host": "the moon"},
    }
    for message, changes in refused.items():
        with pytest.raises(ValueError, match=f"cuda_graphs=True can't be had: .*{message}.*leave cuda_graphs out"):
            check_runner(_runner(**changes))
    with pytest.raises(ValueError, match="only a GPU has CUDA graphs"):
        SmallRunner(cuda_graphs=True)


def _refused_on_ranks(rank, world):
    for name in ("cp_group", "token_group"):
        with pytest.raises(ValueError, match="collectives of gloo can't be captured"):
            check_runner(_runner(**{name: dist.group.WORLD}))
    with pytest.raises(CommError, match="a decode step among ranks .*timed out after 0.2 s") as caught:
        comm.wait_until(lambda: False, "a decode step", comm.Ranks.of(dist.group.WORLD, limit_s=0.2))
    return str(caught.value)


def test_a_replayed_step_has_a_time_limit():
    assert len(run_distributed(_refused_on_ranks, 2)) == 2


def test_few_graphs_are_kept(monkeypatch):
    monkeypatch.setattr(graph, "MAX_GRAPHS", 2)
    it = Pair.of()
    rows = [it.add(5) for _ in range(4)]
    for _ in range(2):
        for n in (1, 2, 4):
            it.steps(rows[:n], 3)
            assert len(it.graphed._graphs._steps) <= 2
    assert it.worst <= 1e-5
    for runner in (it.ordinary, it.graphed):
        runner.store.reset()
        assert runner.store.book.numbers[0].capacity == 0
    a = it.both("add")
    it.steps([a], 3)  # the pages are new ones
    assert it.worst <= 1e-5


def test_rows_that_come_and_go_share_few_graphs():
    """Of all lengths from 8k to 64k, in any order: 32 graphs are captured, and none of them again. One for each
    capacity would be captured in 2,500 of the 4,000 steps."""
    steps = graph.GraphedSteps.__new__(graph.GraphedSteps)
    steps._steps, random, new = OrderedDict(), torch.Generator().manual_seed(5), []
    for i in range(4000):
        rows, octave, rest = (int(torch.randint(n, (1,), generator=random)) for n in (7, 3, 1000))
        tokens = 8192 * 2**octave * (1 + rest / 1000)
        pages = graph._quarter_steps(math.ceil(tokens / 16 / 8))
        needed = graph.Capacity(2**rows, graph._power_of_2(math.ceil(tokens)), (pages, min(pages, 10)))
        capacity, is_known = steps._choose(needed)
        assert (
            capacity.rows == needed.rows and capacity.tokens >= needed.tokens and len(steps._steps) <= graph.MAX_GRAPHS
        )
        assert all(n <= m for n, m in zip(needed.pages, capacity.pages)) and capacity.pages[0] <= 2 * needed.pages[0]
        if not is_known:
            steps._steps[capacity] = None
            new.append(i)
    assert len(new) <= graph.MAX_GRAPHS and new[-1] < 1000, new


def _capacities(lengths, *, cut_by_length):
    """Those of one row that has all its pages on one rank."""
    row = SimpleNamespace(version=0, parts=[], runs=[SimpleNamespace(count=lambda: -(-row.length // 16))])
    book = SimpleNamespace(rows={0: row}, windows=(None, 40), page_size=16)
    capacities = graph.Capacities(SimpleNamespace(book=book), cut_by_length=cut_by_length)
    for row.length in lengths:
        row.version = row.length
        found = capacities.of([0])
        assert found.tokens >= row.length and 16 * found.pages[0] >= row.length and found.pages[1] == 4
        yield found


def test_one_graph_is_for_rows_of_all_lengths():
    """Up to 4,096 pages on a rank, then up to 65,536; there are more where keys are cut by the table's width."""
    lengths = (60, 100, 2000, 9000, 30_000, 65_536)
    assert len(set(_capacities(lengths, cut_by_length=True))) == 1
    assert len(set(_capacities(lengths, cut_by_length=False))) == 5
    assert [x.pages[0] for x in _capacities((65_537, 1 << 20), cut_by_length=True)] == [1 << 16] * 2


class _Launches(TorchDispatchMode):
    """Counts the operations that start a kernel on a GPU: views and memory start none, torch's merge is one there, and
    ranks of NCCL do not meet before a collective."""

    def __init__(self, stack):
        super().__init__()
        self.names, self._inside = Counter(), 0
        for module, name in ((reductions.PackedReducer, "merge"), (work, "meet"), (collectives, "meet")):
            stack.enter_context(mock.patch.object(module, name, self._as_one(name, getattr(module, name))))

    def _as_one(self, name, call):
        def run(*args):
            self._inside += 1
            try:
                return call(*args)
            finally:
                self._inside -= 1
                self.names[name] += name != "meet"

        return run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not (self._inside or func.is_view or func._schema.name in NO_KERNEL):
            self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


NO_KERNEL = {"aten::_unsafe_view", "aten::empty", "aten::fill_", "aten::new_empty"}  # tests fill what is empty


def _launches(rank, world, schedule, layers):
    config = TreeConfig(transport="builtin", check="never")
    runner = SmallRunner(cp_group=dist.group.WORLD, schedule=schedule, windows=(None,) * layers, config=config)
    row = runner.add()
    runner.prefill(row, torch.arange(1, 30))
    for _ in range(2):
        runner.step([row], torch.tensor([[3]]))
    with contextlib.ExitStack() as stack, _Launches(stack) as launches:
        runner.step([row], torch.tensor([[3]]))
    return launches.names


@pytest.mark.parametrize(("schedule", "most"), [("allgather", 10), ("scatter", 13), ("allreduce", 19)])
def test_launches_of_an_eager_layer(schedule, most):
    """Beside attention, of two layers, on the rank that stores the token; the model's own are a norm, two products,
    tanh and a sum."""
    one, two = (max(run_distributed(_launches, 2, schedule, n), key=Counter.total) for n in (1, 2))
    layer = two - one
    assert layer["aten::mm"] == 2 and layer.total() <= most, layer
