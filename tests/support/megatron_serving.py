"""A GPTModel served by MegatronRunner against the same model on one rank, run over the whole text for every token."""

import dataclasses

import torch

from megatron_tree.integrations import megatron as tree
from support.megatron_models import VOCAB, build_model, megatron, reference_of
from support.ranks import largest, run_distributed

PAGE, CHUNK = 2, 10
PROMPTS = (21, 9, 3)


class FullForwards:
    """What the scenario calls of a runner, without a cache: every row is run from its first token."""

    def __init__(self, model):
        self.model, self.rows = model, {}

    def add(self):
        self.rows[len(self.rows)] = torch.empty(0, dtype=torch.int64)
        return len(self.rows) - 1

    def length(self, row):
        return len(self.rows[row])

    def crop(self, row, length):
        self.rows[row] = self.rows[row][:length]

    def fork(self, row):
        copy = self.add()
        self.rows[copy] = self.rows[row].clone()
        return copy

    def remove(self, row):
        self.rows[row] = None

    @torch.no_grad()
    def prefill(self, row, tokens, **options):
        text = self.rows[row] = torch.cat((self.rows[row], tokens))
        logits = self.model(text[None], torch.arange(len(text))[None], None, runtime_gather_output=True)
        self.last = logits[0].float()
        return self.last[-1]

    def step(self, rows, tokens):
        found = []
        for row, new in zip(rows, tokens, strict=True):
            self.prefill(row, new)
            found.append(self.last[-len(new) :])
        return torch.stack(found)


def text_of(length, seed):
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def scenario(runner):
    """{what: logits} of prompts in chunks, greedy steps of rows of any lengths, speculation, forks, and new rows."""
    found = {}
    rows = [runner.add() for _ in PROMPTS]
    logits = torch.stack([runner.prefill(row, text_of(n, n)) for row, n in zip(rows, PROMPTS, strict=True)])
    found["prompts"] = logits
    for i in range(3):
        logits = runner.step(rows, logits.argmax(-1)[:, None])[:, -1]
        found[f"step {i}"] = logits
    pair = rows[:2]
    lengths = [runner.length(row) for row in pair]
    drafted = torch.cat((logits[:2].argmax(-1)[:, None], torch.full((2, 2), 5)), 1)
    found["three tokens"] = runner.step(pair, drafted)
    for row, length in zip(pair, lengths, strict=True):
        runner.crop(row, length + 1)
    found["after a crop"] = logits = runner.step(pair, found["three tokens"][:, 0].argmax(-1)[:, None])
    fork = runner.fork(rows[1])
    found["both after a fork"] = runner.step([fork, rows[1]], torch.tensor([[7], [11]]))
    runner.remove(rows[0])
    late = runner.add()
    found["a late row"] = runner.prefill(late, text_of(12, 12), sharded=False)
    found["more of its prompt"] = runner.prefill(late, text_of(10, 13))
    found["the rest"] = runner.step([late, rows[2], fork], torch.tensor([[1], [2], [3]]))
    return found


def served(case, **options):
    """A MegatronRunner over the model of a case. Inside of `megatron(...)`."""
    return tree.MegatronRunner(build_model(case).eval(), page_size=PAGE, chunk_size=CHUNK, **options)


def compare(rank, world, cases, options):
    """[{what: relative error}] of every case, and whether all greedy tokens are equal."""
    results = []
    for case in cases:
        plain = dataclasses.replace(reference_of(case), tree=False)
        with megatron(tp=case.tp, pp=1, cp=1):
            expected = scenario(FullForwards(build_model(plain).eval()))
        with megatron(tp=case.tp, pp=1, cp=case.cp):
            got = scenario(served(case, **options))
        errors = {name: float((x - got[name]).abs().max() / x.abs().max()) for name, x in expected.items()}
        equal = all(torch.equal(x.argmax(-1), got[name].argmax(-1)) for name, x in expected.items())
        results.append((errors, equal))
    return results


def check(world, cases, *, tolerance=1e-4, same_tokens=True, options=None):
    """Logits of every case equal those of full forwards on one rank, relative to the largest."""
    for results in run_distributed(compare, world, cases, options or {}, timeout=200.0):
        for case, (errors, equal) in zip(cases, results, strict=True):
            assert largest(errors.values()) <= tolerance, f"{errors} in {case}"
            assert equal or not same_tokens, case
