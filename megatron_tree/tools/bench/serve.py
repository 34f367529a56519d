"""Many requests at once: continuous batching, compared with one padded batch of Transformers' own generate.

Both get the same prompts of different lengths in the same process, in turns. The scheduler's cache stays allocated
between turns, as a server's does. Speeds are shown only if all answers are the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...core import comm
from ...inference.generation.requests import Request
from ...inference.generation.sampling import SamplingParams
from ...inference.generation.scheduler import Scheduler
from ...integrations.transformers.attention import TreeCache
from ...integrations.transformers.infer.runner import Runner
from ..calibrate.kernel_cases import WrongResult
from ..emulate.forked import LocalRanks
from .model import check_model, load_model
from .results import Curve, Panel, Results, metadata
from .timing import Meeting, join

LIMIT_S = 3600.0


class Turn(NamedTuple):
    """All requests answered once, on one rank."""

    cpu_s: float
    """Of all its threads."""
    s: float
    tokens: list[list[int]]
    """By request; on rank 0."""


class ServeTime(NamedTuple):
    """One contender: a line of results.csv. Medians of the turns, of the rank that takes longest."""

    contender: str
    ranks: int
    cpu_s: float
    s: float
    tokens_per_cpu_s: float
    tokens_per_s: float


def run(args: argparse.Namespace) -> None:
    """Answer all requests in turns, compare the answers, print the speeds and write CSV.

    Raises: ValueError for options that contradict each other. WrongResult if an answer differs.
    """
    least, most = args.prompt_tokens
    if not 1 <= least <= most:
        raise ValueError(f"--prompt-tokens {least} {most}: give the least and the most, 1 or more")
    check_model(args, most + args.new_tokens)
    meeting = Meeting(args.ranks, timeout_s=LIMIT_S)
    by_rank = LocalRanks(args.ranks).run(on_rank, args, meeting, timeout_s=LIMIT_S)
    plain, ours = by_rank[0]
    for turn in (*plain, *ours):
        for i, (tokens, right) in enumerate(zip(turn.tokens, plain[0].tokens, strict=True)):
            if tokens != right:
                raise WrongResult(f"request {i}: the scheduler answers {tokens}, the padded batch {right}")
    num_tokens = args.requests * args.new_tokens
    rows = [_row("plain", num_tokens, [plain]), _row("ours", num_tokens, [turns for _, turns in by_rank])]
    shape = f"{args.requests} requests of {least} to {most} + {args.new_tokens} tokens"
    print(f"{args.model}, {shape}: the same tokens in all turns\n")
    print("  contender  ranks   CPU s  tokens/CPU s       s  tokens/s")
    for r in rows:
        speeds = f"{r.cpu_s:>7.3f}  {r.tokens_per_cpu_s:>12.0f} {r.s:>7.3f}  {r.tokens_per_s:>8.0f}"
        print(f"  {r.contender:<9}  {r.ranks:>5} {speeds}")
    ratios = sorted(b.cpu_s / a.cpu_s for a, b in zip(ours, plain, strict=True))
    print(
        f"  plain / ours, CPU time turn by turn: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    results = Results(args.out, metadata("serve", model=args.model, requests=shape))
    results.add(*rows)
    bars = [Curve("tokens/s", [r.contender for r in rows], [r.tokens_per_s for r in rows])]
    results.finish({"results.png": [[Panel("tokens/s", "", bars)]]}, shape)


def _row(contender: str, num_tokens: int, turns: list[list[Turn]]) -> ServeTime:
    """turns: of each rank."""
    cpu_s, s = (max(statistics.median(getattr(t, name) for t in rank) for rank in turns) for name in ("cpu_s", "s"))
    return ServeTime(contender, len(turns), cpu_s, s, num_tokens / cpu_s, num_tokens / s)


def on_rank(args, meeting: Meeting) -> tuple[list[Turn], list[Turn]]:
    """One rank's part: the turns of the plain model, which rank 0 runs alone, and of the scheduler."""
    group = join(timeout_s=LIMIT_S)
    rank, most = comm.group_rank(group), args.prompt_tokens[1]
    model = load_model(args, most + args.new_tokens)
    prompts = _prompts(args, model.config.get_text_config(decoder=True).vocab_size)
    model.set_attn_implementation("tree")
    runner = Runner(model, TreeCache(model.config, cp_group=group))
    scheduler = Scheduler(runner, max_rows=args.requests, max_waiting=args.requests, end_tokens=())
    plain, ours = [], []
    for _ in range(1 + args.turns):
        if rank == 0:
            plain.append(_timed(lambda: _plain(model, prompts, args.new_tokens)))
        meeting.meet(rank)
        ours.append(_timed(lambda: _served(scheduler, prompts, args.new_tokens)))
        meeting.meet(rank)
    return plain[1:], ours[1:]


def _prompts(args, vocab_size: int) -> list[Tensor]:
    """int64 [n] each, the same on every rank."""
    least, most = args.prompt_tokens
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(least, most + 1, (args.requests,), generator=generator)
    return [torch.randint(0, vocab_size, (int(n),), generator=generator) for n in lengths]


def _timed(answer: Callable[[], list[list[int]]]) -> Turn:
    cpu_s, s = time.process_time(), time.perf_counter()
    tokens = answer()
    return Turn(time.process_time() - cpu_s, time.perf_counter() - s, tokens)


@torch.no_grad()
def _plain(model, prompts: list[Tensor], new_tokens: int) -> list[list[int]]:
    """One batch, padded on the left."""
    ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in prompts], batch_first=True, padding_side="left")
    options = dict(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.set_attn_implementation("sdpa")
    try:
        tokens = model.generate(ids, attention_mask=mask, **options)
    finally:
        model.set_attn_implementation("tree")
    return tokens[:, ids.shape[1] :].tolist()


def _served(scheduler: Scheduler, prompts: list[Tensor], new_tokens: int) -> list[list[int]]:
    """By the scheduler, all submitted at once."""
    answers, params = [[] for _ in prompts], SamplingParams(max_tokens=new_tokens)
    if scheduler.is_leader:
        for prompt, tokens in zip(prompts, answers, strict=True):
            scheduler.submit(Request(prompt=prompt, sampling=params), lambda event, to=tokens: to.append(event.token))
    scheduler.run_until_idle()
    return answers
