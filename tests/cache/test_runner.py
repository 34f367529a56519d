"""Rows that come, go, fork and are cropped get the logits of the plain model, each as if it were alone."""

import pytest
import torch
import torch.distributed as dist

from support.processes import own_bytes
from support.ranks import largest, run_distributed

pytest.importorskip("transformers")

from megatron_tree.core.cache import attention
from megatron_tree.core.cache.pages import GROWTH
from megatron_tree.integrations.transformers.attention import TreeCache
from megatron_tree.integrations.transformers.infer.runner import Runner
from support.hf_models import VOCAB, prompt, tiny_model, tree_model

FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen3", "gemma3", "phi3")


class Checked:
    """A runner, and the plain model that every logit is compared with: a forward pass over the whole row."""

    def __init__(self, family, world, **options):
        self.plain, model = (tiny_model(family) for _ in range(2))
        self.plain.set_attn_implementation("eager")
        model.set_attn_implementation("tree")
        self.cache = TreeCache(model.config, cp_group=dist.group.WORLD if world > 1 else None, **options)
        self.runner = Runner(model, self.cache)
        self.tokens, self.worst = {}, 0.0
        self._random = torch.Generator().manual_seed(5)

    def draw(self, *shape):
        return torch.randint(1, VOCAB, shape, generator=self._random)

    @torch.no_grad()
    def compare(self, row, logits):
        """logits [n, vocab]: of the row's last n tokens."""
        want = self.plain(self.tokens[row][None], use_cache=False).logits[0].float()
        assert self.runner.length(row) == len(want)
        error = (logits - want[-len(logits) :]).abs().max() / want.abs().max()
        self.worst = largest((self.worst, float(error)))

    def add(self):
        row = self.runner.add()
        self.tokens[row] = torch.zeros(0, dtype=torch.int64)
        return row

    def prefill(self, row, n, chunk_size, **options):
        new = self.draw(n)
        self.runner.chunk_size = chunk_size
        self.tokens[row] = torch.cat((self.tokens[row], new))
        self.compare(row, self.runner.prefill(row, new, **options)[None])

    def step(self, rows, n=1):
        new = self.draw(len(rows), n)
        for row, own in zip(rows, new, strict=True):
            self.tokens[row] = torch.cat((self.tokens[row], own))
        for row, logits in zip(rows, self.runner.step(rows, new), strict=True):
            self.compare(row, logits)

    def prefill_rows(self, rows, lengths):
        new = [self.draw(n) for n in lengths]
        for row, own in zip(rows, new, strict=True):
            self.tokens[row] = torch.cat((self.tokens[row], own))
        for row, logits in zip(rows, self.runner.prefill_rows(rows, new), strict=True):
            self.compare(row, logits[None])

    def crop(self, row, length):
        self.runner.crop(row, length)
        self.tokens[row] = self.tokens[row][:length]

    def fork(self, row):
        copy = self.runner.fork(row)
        self.tokens[copy] = self.tokens[row]
        return copy

    def remove(self, row):
        self.runner.remove(row)
        del self.tokens[row]


def _rows(rank, world, family):
    it = Checked(family, world, page_size=4)
    a, b = it.add(), it.add()
    it.prefill(a, 50, 7)
    it.prefill(b, 23, 64)
    it.step([a, b])
    it.step([b, a])
    c = it.add()
    it.prefill(c, 90, 1000)  # long enough for the kernels of prefills, on one rank too
    it.step([c, a, b], 4)  # speculation: four at once, then one, four and three of them stay
    it.crop(c, len(it.tokens[c]) - 3)
    it.crop(b, len(it.tokens[b]) - 1)
    it.step([c, b, a])
    d = it.fork(a)
    it.step([d, a])
    it.remove(b)
    e = it.add()
    it.prefill(e, 3, 1000)
    it.prefill(a, 31, 16)  # more of a row that has been decoded
    it.prefill(d, 11, 1000, sharded=False)
    it.step([e, c, d, a])
    f, g = it.add(), it.add()
    it.prefill_rows([f, g, e], [5, 11, 1])  # in one pass, one after another; one row continues
    it.step([f, e, a, g])
    it.remove(f)
    it.remove(g)
    it.remove(a)
    it.step([d, e], 2)
    held = it.cache.store.book.loads
    assert sum(held) == sum(-(-len(tokens) // 4) for tokens in it.tokens.values())
    return it.worst


# 4 ranks are more than the two KV heads
@pytest.mark.parametrize(("family", "world"), [*((family, 2) for family in FAMILIES), ("llama", 1), ("gemma3", 4)])
def test_every_row_has_the_logits_of_the_plain_model(family, world):
    assert largest(run_distributed(_rows, world, family)) <= 1e-4


def test_long_chunks_on_one_rank_are_prefills(monkeypatch):
    seen = []
    monkeypatch.setattr(attention, "tree_prefill", lambda q, *rest, **options: seen.append(q.shape[1]) or q)
    it = Checked("llama", 1)
    row, layers = it.add(), len(it.cache.store.layers)
    for n in (31, 32, 5):
        it.runner.prefill(row, it.draw(n))
    it.runner.step([row], it.draw(1, 40))
    it.runner.step([row, it.add()], it.draw(2, 40))
    assert seen == [32] * layers + [40] * layers


def test_prompts_that_are_run_together_are_packed():
    it, seen = Checked("llama", 1), []
    note = lambda module, args, options: seen.append(tuple(options["input_ids"].shape))  # noqa: E731
    it.runner.model.register_forward_pre_hook(note, with_kwargs=True)
    it.prefill_rows([it.add() for _ in range(3)], [5, 11, 1])
    assert seen == [(1, 17)] and it.worst <= 1e-4


def _many_steps(rank, world, family):
    model = tree_model(family, positions=2048)
    cache = TreeCache(model.config, cp_group=dist.group.WORLD if world > 1 else None)
    runner = Runner(model, cache)
    row = runner.add()
    logits = runner.prefill(row, prompt(1, 20)[0])
    seen = {}
    for step in range(1, 501):
        logits = runner.step([row], logits.flatten()[-VOCAB:].argmax().view(1, 1))
        if step in (100, 500):
            seen[step] = cache.store.allocated_bytes, own_bytes()
    per_token = 3 * 2 * 2 * 8 * 4  # layers, k and v, KV heads, head_dim, fp32
    window = cache.windows[0]
    tokens = 520 / world + 16 if window is None else window + 2 * 16
    assert seen[500][0] <= (1 + 1 / GROWTH) * (tokens + 16) * per_token
    assert cache.nbytes <= tokens * per_token
    return seen[500][1] - seen[100][1]


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "mistral"])
def test_many_steps_cost_the_memory_of_their_tokens(family):
    (grown,) = run_distributed(_many_steps, 1, family)
    assert grown < 16 << 20  # the tokens themselves are 0.2 MB


class Broken(RuntimeError):
    pass


def _failing(rank, world, family):
    it = Checked(family, world, page_size=4)
    a = it.add()
    it.prefill(a, 22, 1000)
    b = it.fork(a)

    def fail(*args):
        raise Broken

    for layer in (0, 2):
        hook = it.runner.model.model.layers[layer].register_forward_hook(fail)
        loads = list(it.cache.store.book.loads)
        with pytest.raises(Broken):
            it.runner.step([b, a], it.draw(2, 3))
        with pytest.raises(Broken):
            it.runner.prefill(b, it.draw(40))
        with pytest.raises(Broken):
            it.runner.prefill(it.runner.add(), it.draw(5))
        hook.remove()
        assert it.cache.store.book.loads == loads
        assert it.runner.length(a) == it.runner.length(b) == len(it.tokens[a])
        it.step([a, b], 2)
        it.tokens[b] = it.tokens[b].clone()
        it.crop(a, len(it.tokens[a]) - 1)
        it.crop(b, len(it.tokens[b]) - 1)
        it.step([b])
        it.step([a])
    it.prefill(b, 40, 16)
    it.step([b, a])
    return it.worst


@pytest.mark.parametrize(("family", "world"), [("llama", 1), ("gemma2", 2), ("deepseek_v3", 2)])
def test_a_failing_model_takes_its_tokens_back(family, world):
    assert largest(run_distributed(_failing, world, family)) <= 1e-4


def test_what_the_runner_refuses():
    it = Checked("llama", 1)
    a, b = it.add(), it.add()
    it.prefill(a, 5, 1000)
    one = torch.ones(2, 1, dtype=torch.int64)
    for rows, tokens, message in (
        ([a, a], one, "rows=.*once"),
        ([a, 99], one, "rows=.*99"),
        ([a], one, r"\[2, 1\]"),
        ([a, b], one.int(), "tokens must be int64.*int32"),
        ([a, b], one[:, :0], r"tokens must be int64.*\[2, 0\]"),
        ([a, b], one.expand(2, 252), "256 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            it.runner.step(rows, tokens)
    for tokens, message in (
        (one, r"\[2, 1\]"),
        (one[0, :0], r"tokens must be int64"),
        (one[0].float(), "float32"),
        ([1, 2], r"tokens must be int64 \[tokens\], got \[1, 2\]"),
        (one[0] - 2, "tokens hold -1, the model has 0 to"),
        (one[0] * 10**6, "tokens hold 1000000, the model has 0 to"),
    ):
        with pytest.raises(ValueError, match=message):
            it.runner.prefill(a, tokens)
    with pytest.raises(ValueError, match="between 0 and the 5"):
        it.runner.crop(a, 6)
    it.runner.capacity_tokens = 64
    assert it.runner.free_tokens == 48
    for options, message in (({"chunk_size": 0}, "chunk_size=0"), ({"capacity_tokens": -1}, "capacity_tokens=-1")):
        with pytest.raises(ValueError, match=message):
            Runner(it.runner.model, it.cache, **options)


def _disagreeing(rank, world):
    it = Checked("llama", world)
    row = it.add()
    tokens = it.draw(9)
    if rank == 1:
        tokens[3] += 1
    with pytest.raises(ValueError, match="digest") as error:
        it.runner.prefill(row, tokens)
    assert it.runner.length(row) == 0
    return str(error.value)


def test_ranks_with_different_prompts_are_told():
    said = run_distributed(_disagreeing, 2)
    assert said[0] == said[1]


MODES = (torch.inference_mode, torch.no_grad)


def _in_modes(rank, world, family, options, modes):
    """Prompts, steps, a fork and a crop in turns under both modes."""
    checked = Checked(family, world, **options)
    rows = []
    for i, (n, chunk) in enumerate(((45, 20), (33, 64))):
        with modes[i % 2]():
            rows.append(checked.add())
            checked.prefill(rows[-1], n, chunk)
    for i in range(4):
        with modes[i % 2]():
            checked.step(rows)
    with modes[1]():
        rows.append(checked.fork(rows[0]))
        checked.step([rows[2]])
    with modes[0]():
        if checked.runner.can_crop(rows[0], 30):
            checked.crop(rows[0], 30)
        checked.step(rows, 3 if checked.runner.most_at_once(33) != 1 else 1)
    with modes[1]():
        checked.prefill(rows[1], 20, 64)
        checked.step(rows)
    return checked.worst


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("modes", [MODES, MODES[::-1]], ids=["inference mode first", "no_grad first"])
@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("llama", {"dtype": "int8"}), ("deepseek_v3", {}), ("gpt_oss", {}), ("falcon_h1", {})],
    ids=str,
)
def test_rows_that_are_run_in_inference_mode_and_outside_of_it(family, options, modes, world):
    limit = 0.15 if options else 2e-4
    assert largest(run_distributed(_in_modes, world, family, options, modes)) < limit
