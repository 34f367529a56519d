"""Ranks that fail in the middle of a model's pass, catch it and go on: logits are right for the row's text on the rank
that got them, or there is an error.

Every rank runs a script of prompts, steps, forks and crops that all know. In some passes a rank fails ahead of a
module.

    TREE_FUZZ_SESSIONS=200 TREE_FUZZ_SEED=7 python -m pytest tests/transformers/test_fuzz_steps.py -m slow
"""

import os
import random

import pytest
import torch
import torch.distributed as dist

from megatron_tree import CommError, TreeConfig
from megatron_tree.integrations.transformers.attention import TreeCache
from megatron_tree.integrations.transformers.infer.runner import Runner
from support.hf_models import prompt, tiny_model
from support.ranks import run_distributed

SEED = int(os.environ.get("TREE_FUZZ_SEED", "0"))
SESSIONS = int(os.environ.get("TREE_FUZZ_SESSIONS", "20"))  # of the slow tests, for each transport and number of ranks
LENGTH = 8  # operations of a session
LIMIT_S = 20.0
ROWS = 3
PLACES = ("embed_tokens", "layers.0.self_attn", "layers.0.mlp", "layers.1.self_attn", "layers.1.mlp", "norm")
TRANSPORTS = ("auto", "direct", "builtin")
# the failure; or that another rank is in another operation, or in none any more, since an earlier failure
TOLD = ("no room", "step.positions", "crop", "different arguments: rank", "did not call")


def make_script(world, rng):
    """(operations, failures as (rank, operation, place))."""
    operations = []
    for _ in range(LENGTH):
        row = rng.randrange(ROWS)
        operations.append(
            rng.choice(
                (
                    ("step", rng.sample(range(ROWS), rng.randint(1, ROWS)), rng.choice((1, 1, 2))),
                    ("prefill", row, rng.choice((1, 5, 16 * world, 40))),
                    ("crop", row, rng.randint(1, 4)),
                    ("fork", row, rng.randrange(ROWS)),
                )
            )
        )
    failures = [
        (rng.randrange(world), rng.randrange(LENGTH - 1), rng.choice(PLACES)) for _ in range(rng.choice((1, 2)))
    ]
    return operations, failures


class Session:
    """One rank's rows: in the cache, and the texts that they should hold."""

    def __init__(self, model, plain, group, transport):
        config = TreeConfig(transport=transport, timeout_s=LIMIT_S)
        self.runner, self.plain = Runner(model, TreeCache(model.config, cp_group=group, tree_config=config)), plain
        self.rows = [self.runner.add() for _ in range(ROWS)]
        self.texts = list(prompt(ROWS, 20))
        for i, row in enumerate(self.rows):
            self._check([i], self.runner.prefill(row, self.texts[i])[None, None])

    def act(self, number, kind, *options):
        """Whether logits came, which were right."""
        if kind == "fork":
            source, to = options
            if source != to:
                self.runner.remove(self.rows[to])
                self.rows[to], self.texts[to] = self.runner.fork(self.rows[source]), self.texts[source]
            return False
        if kind == "crop":
            i, count = options
            self.texts[i] = self.texts[i][:-count]
            self.runner.crop(self.rows[i], len(self.texts[i]))
            return False
        which, n = options if kind == "step" else ([options[0]], options[1])
        new = prompt(len(which), n, seed=100 + number)
        if kind == "step":
            logits = self.runner.step([self.rows[i] for i in which], new)
        else:
            logits = self.runner.prefill(self.rows[which[0]], new[0])[None, None]
        for i, own in zip(which, new, strict=True):
            self.texts[i] = torch.cat((self.texts[i], own))
        self._check(which, logits)
        return True

    @torch.no_grad()
    def _check(self, which, logits):
        for i, of_row in zip(which, logits, strict=True):
            want = self.plain(self.texts[i][None], use_cache=False).logits[0, -len(of_row) :]
            error = float((of_row - want).abs().max() / want.abs().max())
            assert error < 1e-4, f"row {i} of {len(self.texts[i])} tokens: {error:.1e}"


def _run(rank, world, transport, seeds):
    model, plain, found = tiny_model("llama"), tiny_model("llama"), []
    model.set_attn_implementation("tree")
    for seed in seeds:
        operations, failures = make_script(world, random.Random(seed))
        session = Session(model, plain, dist.new_group(range(world)), transport)
        dist.barrier()
        for number, operation in enumerate(operations):
            hooks = [_fails_before(model, place) for r, at, place in failures if (r, at) == (rank, number)]
            try:
                found.append(session.act(number, *operation))
            except (ValueError, CommError, MemoryError) as error:
                found.append(f"{type(error).__name__}: {error}")
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, operation {number} of {operations}, {failures}") from error
            for hook in hooks:
                hook.remove()
        dist.barrier()  # of the default group: all are done
    return sum(x is True for x in found), [x for x in found if isinstance(x, str)]


def _fails_before(model, place):
    def fail(*_):
        raise MemoryError("no room")

    return model.model.get_submodule(place).register_forward_pre_hook(fail)


def judge(world, transport, seeds):
    right, errors = zip(*run_distributed(_run, world, transport, seeds, timeout=60.0 * (2 + len(seeds))))
    assert all(right) and all(errors), (right, errors)
    told = [text for texts in errors for text in texts if not text.startswith("MemoryError")]
    assert all(any(reason in text for reason in TOLD) for text in told), told


@pytest.mark.parametrize(("world", "transport"), [(2, "auto"), (2, "direct"), (3, "builtin")])
def test_logits_are_right_or_an_error(world, transport):
    judge(world, transport, [f"{SEED} {world} {i}" for i in range(3)])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_logits_are_right_or_an_error_whatever_happens(world, transport):
    judge(world, transport, [f"{SEED} {world} slow {i}" for i in range(SESSIONS)])
