"""Generation with a sharded KV cache: steps of a whole model over a network, compared with one rank and with a ring.

All contenders get the same prompt: Transformers' own model and cache on rank 0 alone ("plain"), and this package with
the given schedules. Times are shown only if all give the same tokens on all ranks, and the same logits up to rounding.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import NamedTuple

import torch

from ...core import comm
from ...core.config import TreeConfig
from ...integrations.transformers import models
from ...integrations.transformers.attention import TreeCache
from ...integrations.transformers.infer.generation import generate
from ...integrations.transformers.infer.runner import Runner
from ..calibrate.kernel_cases import WrongResult
from ..emulate import network_bytes
from .cases import LIMIT_S, Machines, Settings, machines_of, run_cases
from .model import (
    TokenClock,
    cache_shape,
    check_model,
    load_model,
    made_up_plain,
    made_up_row,
    model_text,
    plain_prefill,
)
from .results import Measurement, measurements
from .timing import Meeting, PeakMemory, RankTimes, join

ALLOWED = 1e-3  # difference of a logit from the plain model's, as a fraction of the largest logit


class GenerateCase(NamedTuple):
    """One prompt on some machines."""

    machines: Machines
    seq_len: int
    """Tokens of the prompt."""
    args: argparse.Namespace

    @property
    def label(self) -> str:
        model, new = model_text(self.args), self.args.new_tokens
        return f"{self.machines.label} ranks, {model}, {self.seq_len} tokens, {new} new"

    def load(self):
        """The model on this rank."""
        return load_model(self.args, self.seq_len + self.args.new_tokens)


def run(args: argparse.Namespace) -> None:
    """Check, time, print and write CSV, JSON and PNG into args.out. Raises `WrongResult` before any speed is shown."""
    machines = machines_of(args)
    if args.new_tokens < 2:
        raise ValueError(f"--new-tokens {args.new_tokens}: a time per token needs two at least")
    check_model(args, max(args.prompt_tokens) + args.new_tokens)
    if args.model != "tiny" and args.cache == "made-up":
        cache_shape(models.load_config(models.model_folder(args.model)).get_text_config(decoder=True))
    args.schedules = list(dict.fromkeys(args.schedules))
    how = Settings(tuple(args.schedules), bool(args.emulate), args.latency, args.rate)
    cases = [GenerateCase(one, n, args) for one in machines for n in sorted(set(args.prompt_tokens))]

    def run_case(case: GenerateCase, ranks, topology, path: str) -> list[Measurement]:
        meeting = Meeting(case.machines.ranks, timeout_s=LIMIT_S)
        return _rows(case, ranks.run(on_rank, case, path, meeting, timeout_s=LIMIT_S))

    about = dict(command="generate", model=model_text(args), compute="real", cache=args.cache)
    checked = (
        "all ranks of all contenders gave the plain model's tokens; logits differ by at most {worst} of the largest"
    )
    run_cases(args, about, how, cases, run_case, checked)


class GenerateOutcome(NamedTuple):
    """One rank's outcome of one contender."""

    schedule: str
    measured: RankTimes
    """Of the further tokens."""
    tokens: list[int]
    first_s: float
    """Of the first new token, which runs the prompt's last one."""
    prefill_s: float | None
    held_bytes: int
    error: float | None
    """Largest difference of a logit from the plain model's, as a fraction of the largest logit; on rank 0."""


def _rows(case: GenerateCase, by_rank: list[list[GenerateOutcome]]) -> list[Measurement]:
    """Rows of all contenders. Raises `WrongResult` unless all gave the tokens and the logits of the plain model."""
    machines, args = case.machines, case.args
    base = Measurement(
        machines.label, machines.ranks, case.seq_len, args.model, args.new_tokens, args.cache, compute="real"
    )
    truth, rows = by_rank[0][0], []
    for outcomes in [[truth], *zip(by_rank[0][1:], *by_rank[1:])]:
        one = outcomes[0]
        for rank, outcome in enumerate(outcomes):
            if outcome.tokens != truth.tokens:
                differ = f"rank {rank} generated {outcome.tokens}, the plain model {truth.tokens}"
                raise WrongResult(f"{one.schedule} on {case.label}: {differ}")
        if not one.error <= ALLOWED:
            raise WrongResult(f"{one.schedule} on {case.label}: a logit is off by {one.error:.3g} of the largest one")
        measured = [outcome.measured for outcome in outcomes]
        (row,) = measurements(base._replace(schedule=one.schedule), measured, {}, machines.ranks_per_node)
        held = max(outcome.held_bytes for outcome in outcomes)
        row = row._replace(tokens_per_s=1e3 / row.ms, held_bytes=held, error=one.error)
        if one.prefill_s is not None:
            first_s = one.prefill_s + max(outcome.first_s for outcome in outcomes)
            row = row._replace(prefill_ms=1e3 * one.prefill_s, first_token_ms=1e3 * first_s)
        rows.append(row)
    return rows


def on_rank(case: GenerateCase, topology: str, meeting: Meeting) -> list[GenerateOutcome]:
    """One rank's part of a case: the outcomes of the contenders, on rank 0 the plain first."""
    group, args = join(timeout_s=LIMIT_S), case.args
    rank, model = comm.group_rank(group), case.load()
    text = model.config.get_text_config(decoder=True)
    prompt = torch.randint(0, text.vocab_size, (1, case.seq_len), generator=torch.Generator().manual_seed(1))
    outcomes, truth = [], None
    if rank == 0:
        outcome, truth = _plain(case, model, prompt)
        outcomes.append(outcome)
    meeting.meet(rank)
    model.set_attn_implementation("tree")
    config = TreeConfig(topology=topology, timeout_s=LIMIT_S)
    cache = TreeCache(model.config, cp_group=group, tree_config=config)
    contender = GenerateContender(case, group, meeting, rank, model, prompt, truth)
    if args.cache == "made-up":
        cache.rows, prefill_s = [made_up_row(cache, model.config, case.seq_len - 1)], None
    else:
        prefill_s = contender.prefill(Runner(model, cache, chunk_size=args.prefill_chunk))
    outcomes += [contender.outcome(schedule, cache, prefill_s) for schedule in args.schedules]
    meeting.meet(rank)
    return outcomes


class GenerateContender(NamedTuple):
    """What the contenders of a case have in common on one rank."""

    case: GenerateCase
    group: object
    meeting: Meeting
    rank: int
    model: object
    prompt: torch.Tensor
    truth: list[torch.Tensor] | None

    def prefill(self, runner: Runner) -> float:
        """Run the prompt but for its last token as the batch's only row; seconds until the last rank has."""
        start = self.meeting.most(self.rank, time.monotonic())[0]
        runner.cache.rows = [runner.add()]
        runner.prefill(runner.cache.rows[0], self.prompt[0, :-1])
        return self.meeting.most(self.rank, time.monotonic())[0] - start

    def outcome(self, schedule: str, cache: TreeCache, prefill_s: float | None) -> GenerateOutcome:
        """New tokens over a cache that holds the prompt but for its last token."""
        case, new_tokens, held = self.case, self.case.args.new_tokens, self.case.seq_len - 1
        runner, cache.schedule = Runner(self.model, cache, token_group=self.group), schedule
        # allocates pages for the new tokens, so that they do not count as the first contender's memory
        runner.crop(cache.rows[0], held)
        runner.step(cache.rows, torch.zeros(1, 1 + new_tokens, dtype=torch.int64))
        runner.crop(cache.rows[0], held)
        before, network = network_bytes()["network"] if case.machines.emulated else 0, None
        options = dict(cache=cache, max_new_tokens=new_tokens, keep_logits=True, chunk_size=case.args.prefill_chunk)
        self.meeting.meet(self.rank)
        with PeakMemory() as peak, comm.record() as log:
            cpu = time.process_time()
            result = generate(self.model, self.prompt, token_group=self.group, **options)
            cpu = (time.process_time() - cpu) / new_tokens
        self.meeting.meet(self.rank)
        if case.machines.emulated:
            network = (network_bytes()["network"] - before) / new_tokens
        sent, error = sum(x.bytes for x in log) / new_tokens, None
        if self.rank == 0:
            error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(result.logits, self.truth))
        measured = RankTimes({"token": result.step_s}, {"token": sent}, network, peak.bytes, cpu=[cpu])
        tokens = result.tokens[0].tolist()
        return GenerateOutcome(schedule, measured, tokens, result.first_token_s, prefill_s, cache.nbytes, error)


def _plain(case: GenerateCase, model, prompt: torch.Tensor) -> tuple[GenerateOutcome, list[torch.Tensor]]:
    """Transformers' own model and cache on one rank, while the others wait; also returns the logits."""
    args, start, prefill_s = case.args, time.monotonic(), None
    if args.cache == "made-up":
        cache = made_up_plain(model.config, case.seq_len - 1)
    else:
        cache = plain_prefill(model, prompt[0, :-1], args.prefill_chunk)
        prefill_s = time.monotonic() - start
    attention, clock = model.config.get_text_config(decoder=True)._attn_implementation, TokenClock()
    with PeakMemory() as peak:
        cpu = time.process_time()
        tokens, logits = models.plain_generate(
            model,
            prompt,
            max_new_tokens=args.new_tokens,
            eos_token_id=None,
            attn_implementation=attention,
            past_key_values=cache,
            streamer=clock,
        )
        cpu = (time.process_time() - cpu) / args.new_tokens
    first_s, *step_s = (after - before for before, after in itertools.pairwise(clock.times))
    measured = RankTimes({"token": step_s}, {"token": 0}, None, peak.bytes, cpu=[cpu])
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return GenerateOutcome("plain", measured, tokens[0].tolist(), first_s, prefill_s, nbytes, 0.0), logits
