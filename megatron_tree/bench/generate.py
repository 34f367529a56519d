"""Generation with a sharded KV cache: steps of a whole model over a network, compared with one rank and with a ring.

All contenders get the same prompt: Transformers' own model and cache on rank 0 alone ("plain"), and this package with
the given schedules. Times are shown only if all give the same tokens on all ranks, and the same logits up to rounding.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import time
from typing import NamedTuple

import torch

from .. import comm
from ..config import DECODE_SCHEDULES, QUERIES, WEIGHTS, TreeConfig
from ..emulate import network_bytes
from ..integrations.transformers import baseline, models
from ..integrations.transformers.attention import TreeCache
from ..integrations.transformers.generation import generate
from ..integrations.transformers.layout_choice import choose_layout
from ..integrations.transformers.rope import num_positions
from ..integrations.transformers.runner import Runner
from ..integrations.transformers.split_model import split_model
from ..integrations.transformers.split_rules import plan_layout
from ..units import parse_count
from . import runs, session
from .measure import Measured
from .measurements import Measurement, measurements
from .ranks import Meeting, PeakMemory, join
from .results import WrongResult
from .runs import Machines, Settings

SCHEDULES = ("auto", "ring", "allreduce")
SHARDED = "weights over all"
ALLOWED = 1e-3  # difference of a logit from the plain model's, as a fraction of the largest logit
LIMIT_S = 3600.0  # of one case: a ring over a slow network is slow
EXAMPLES = """\
examples:
  megatron-tree bench generate --ranks 2 --prompt-tokens 2k --new-tokens 8
  megatron-tree bench generate --emulate 4x1 --prompt-tokens 16k 64k --cache made-up   docs/benchmarks.md
  megatron-tree bench generate --ranks 2 --model smollm2 --prompt-tokens 4k
  megatron-tree bench generate --ranks 4 --model smollm2 --prompt-tokens 256 --weights sharded
      --queries split repeated
"""


class Case(NamedTuple):
    """One model and one prompt."""

    machines: Machines
    seq_len: int
    """Tokens of the prompt."""
    model: str
    shape: tuple[int, int, int, int]
    """Layers, heads, KV heads and head_dim of "tiny"."""
    new_tokens: int
    cache: str
    chunk: int
    queries: tuple[str, ...]
    """Ways to compute them with weights over all ranks, each a contender; none: such weights are left out."""

    @property
    def num_layers(self) -> int:
        if self.model == "tiny":
            return self.shape[0]
        return models.load_config(models.model_folder(self.model)).get_text_config(decoder=True).num_hidden_layers

    def load(self):
        """The model, fp32, on this rank."""
        if self.model == "tiny":
            names = ("layers", "heads", "kv_heads", "head_dim")
            positions = self.seq_len + self.new_tokens
            return models.random_llama(**dict(zip(names, self.shape)), positions=positions)
        return models.load_model(models.model_folder(self.model), torch.float32)

    @property
    def contenders(self) -> str:
        """The ranks and the model."""
        layers, heads, kv_heads, head_dim = self.shape
        shape = f" ({layers} layers, {heads}/{kv_heads} heads x {head_dim})" if self.model == "tiny" else ""
        return f"{self.machines.label} ranks, {self.model}{shape}, fp32"

    @property
    def label(self) -> str:
        return f"{self.contenders}, {self.seq_len} tokens, {self.new_tokens} new"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench generate`."""
    runs.add_machines(parser)
    add = parser.add_argument
    add("--model", default="tiny", help="tiny: a Llama with random weights and a long cache (the default); "
        "smollm2; or a folder with a Transformers model")  # fmt: skip
    add("--layers", type=parse_count, default=4, help="of tiny (default: %(default)s)")
    add("--heads", type=parse_count, default=16, help="of tiny (default: %(default)s)")
    add("--kv-heads", type=parse_count, default=4, help="of tiny (default: %(default)s)")
    add("--head-dim", type=parse_count, default=128, help="of tiny (default: %(default)s)")
    add("--prompt-tokens", type=parse_count, nargs="+", default=[16384], metavar="N", help="one or several, such as "
        "16k 64k (default: 16k)")  # fmt: skip
    add("--new-tokens", type=parse_count, default=16, metavar="N", help="(default: %(default)s; at least 2)")
    add("--cache", choices=("prefilled", "made-up"), default="prefilled", help="made-up: random keys and values "
        "instead of a prefill, the same for all; there is no time to the first token then")  # fmt: skip
    add("--prefill-chunk", type=parse_count, default=2048, metavar="N", help="tokens run at once")
    add("--weights", choices=WEIGHTS, default="replicated", help="sharded: one more contender, whose "
        "ranks share the weights as well as the cache")  # fmt: skip
    add("--queries", nargs="+", choices=QUERIES, help="with --weights sharded, a contender for each: in ranks with the "
        "same KV heads, split: each computes some queries, and all are gathered (the default); repeated: each computes "
        "all of them; auto: what is predicted to be faster")  # fmt: skip
    add("--schedules", nargs="+", choices=DECODE_SCHEDULES, default=SCHEDULES, help="(default: auto ring allreduce)")
    add("--out", type=pathlib.Path, default=pathlib.Path("bench-results/generate"))


def run(args: argparse.Namespace) -> None:
    """Check, time, print and write CSV, JSON and PNG into args.out. Raises `WrongResult` before any speed is shown."""
    machines = runs.machines_of(args)
    if args.new_tokens < 2:
        raise ValueError(f"--new-tokens {args.new_tokens}: a time per token needs two at least")
    if args.model == "tiny" and args.heads % args.kv_heads:
        raise ValueError(f"--kv-heads {args.kv_heads}: must divide --heads {args.heads}")
    if args.weights == "sharded" and args.cache == "made-up":
        raise ValueError("--weights sharded runs the prompt itself: leave --cache made-up out")
    if args.queries and args.weights != "sharded":
        raise ValueError(f"--queries {' '.join(args.queries)} is for --weights sharded: add that, or leave it out")
    if args.model != "tiny":
        _check_model(args)
    how = Settings(tuple(dict.fromkeys(args.schedules)), machines.emulated, args.latency, args.rate)
    shape = (args.layers, args.heads, args.kv_heads, args.head_dim)
    queries = tuple(dict.fromkeys(args.queries or ("split",))) if args.weights == "sharded" else ()
    rest = (args.model, shape, args.new_tokens, args.cache, args.prefill_chunk, queries)
    cases = [Case(machines, n, *rest) for n in sorted(set(args.prompt_tokens))]
    checked = (
        "all ranks of all contenders gave the plain model's tokens; logits differ by at most {worst} of the largest"
    )

    def run_case(case: Case, ranks, topology, path: str) -> list[Measurement]:
        meeting = Meeting(machines.ranks, timeout_s=LIMIT_S)
        return _rows(case, ranks.run(on_rank, case, how, path, meeting, timeout_s=LIMIT_S))

    title = f"{cases[0].contenders}, cache {args.cache}"
    session.run_cases(args, "generate", how, cases, run_case, lambda case: LIMIT_S, checked, title, cache=args.cache)


def _check_model(args) -> None:
    config = models.load_config(models.model_folder(args.model)).get_text_config(decoder=True)
    limit, longest = num_positions(config), max(args.prompt_tokens) + args.new_tokens
    if limit is not None and longest > limit:
        raise ValueError(f"--prompt-tokens and --new-tokens: {longest} exceed the {limit} positions of {args.model}")
    if args.cache == "made-up":
        baseline.cache_shape(config)


class Outcome(NamedTuple):
    """One rank's outcome of one contender."""

    schedule: str
    measured: Measured
    """Of the further tokens."""
    tokens: list[int]
    first_s: float
    """Of the first new token, which runs the prompt's last one."""
    prefill_s: float | None
    held_bytes: int
    error: float | None
    """Largest difference of a logit from the plain model's, as a fraction of the largest logit; on rank 0."""


def _rows(case: Case, found: list[list[Outcome | None]]) -> list[Measurement]:
    """Rows of all contenders. Raises `WrongResult` unless all gave the tokens and the logits of the plain model."""
    truth, rows = found[0][0], []
    base = Measurement(
        case.machines.label, case.machines.ranks, case.seq_len, case.model, case.new_tokens, case.cache, compute="real"
    )
    for of_ranks in zip(*found):
        one, took_part = of_ranks[0], [outcome for outcome in of_ranks if outcome]
        for rank, outcome in enumerate(took_part):
            if outcome.tokens != truth.tokens:
                differ = f"rank {rank} generated {outcome.tokens}, the plain model {truth.tokens}"
                raise WrongResult(f"{one.schedule} on {case.label}: {differ}")
        if not one.error <= ALLOWED:
            raise WrongResult(f"{one.schedule} on {case.label}: a logit is off by {one.error:.3g} of the largest one")
        (row,) = measurements(
            base._replace(schedule=one.schedule),
            [outcome.measured for outcome in took_part],
            {},
            ranks_per_node=case.machines.ranks_per_node,
        )
        prefill, first = one.prefill_s, max(outcome.first_s for outcome in took_part)
        row = row._replace(
            tokens_per_s=1e3 / row.ms,
            held_bytes=max(outcome.held_bytes for outcome in took_part),
            error=one.error,
        )
        if rows:
            row = row._replace(layer_us=1e3 * (row.ms - rows[0].ms) / case.num_layers)
        if prefill is not None:
            row = row._replace(prefill_ms=1e3 * prefill, first_token_ms=1e3 * (prefill + first))
        rows.append(row)
    return rows


def on_rank(case: Case, how: Settings, topology: str, meeting: Meeting) -> list[Outcome | None]:
    """One rank's part of a case: the outcomes of all contenders, the plain model (on rank 0) first."""
    group = join(timeout_s=LIMIT_S)
    rank = comm.group_rank(group)
    model = case.load()
    vocab = model.config.get_text_config(decoder=True).vocab_size
    prompt = torch.randint(0, vocab, (1, case.seq_len), generator=torch.Generator().manual_seed(1))

    outcome, truth = _plain(case, model, prompt) if rank == 0 else (None, None)
    outcomes = [outcome]
    meeting.meet(rank)
    model.set_attn_implementation("tree")
    cache = TreeCache(model.config, cp_group=group, tree_config=TreeConfig(topology=topology, timeout_s=LIMIT_S))
    runner = Runner(model, cache, chunk_size=case.chunk)
    held, prefill_s = case.seq_len - 1, None
    if case.cache == "made-up":
        cache.rows = [baseline.made_up_row(cache, model.config, held)]
    else:
        prefill_s = _prefill(runner, prompt[0, :held], meeting, rank)
    contender = _Contender(case, group, meeting, rank, model, prompt, truth)
    outcomes += [contender.outcome(schedule, schedule, cache, prefill_s) for schedule in how.schedules]
    for number, queries in enumerate(case.queries):
        if number:  # the model was cut in place
            contender = contender._replace(model=None)
            model = case.load()
            model.set_attn_implementation("tree")
            contender = contender._replace(model=model)
        outcomes.append(contender.outcome_of_sharded(queries, cache.tree_config))
    meeting.meet(rank)
    return outcomes


def _prefill(runner: Runner, tokens, meeting: Meeting, rank: int) -> float:
    """Run a prompt as the batch's only row; seconds until the last rank has."""
    start = meeting.most(rank, time.monotonic())[0]
    runner.cache.rows = [runner.add()]
    runner.prefill(runner.cache.rows[0], tokens)
    return meeting.most(rank, time.monotonic())[0] - start


class _Contender(NamedTuple):
    """What the contenders of a case have in common on one rank."""

    case: Case
    group: object
    meeting: Meeting
    rank: int
    model: object
    prompt: torch.Tensor
    truth: list[torch.Tensor] | None

    def outcome_of_sharded(self, queries: str, config: TreeConfig) -> Outcome:
        """`outcome` with the model's weights over all ranks, after the prompt has been run in this way, too."""
        case, group, rank, model = self.case, self.group, self.rank, self.model
        layout = plan_layout(model, case.machines.ranks, rank, repeat_queries=queries == "repeated")
        options = {"device": model.device, "dtype": model.dtype, "config": config}
        layout = choose_layout(layout, model, group, queries=queries, **options)
        split_model(model, layout, group, timeout_s=LIMIT_S)
        neighbours = comm.neighbours(group, layout.heads.size, timeout_s=LIMIT_S)
        cache = TreeCache(model.config, cp_group=neighbours, head_shares=layout.heads.shares, tree_config=config)
        runner = Runner(model, cache, token_group=group, chunk_size=case.chunk)
        prefill_s = _prefill(runner, self.prompt[0, : case.seq_len - 1], self.meeting, rank)
        found = "repeated" if layout.repeats_queries else "split"
        name = SHARDED if found == "split" else f"{SHARDED}, queries repeated"
        name += " (auto)" * (queries == "auto")
        return self.outcome(name, "auto", cache, prefill_s)

    def outcome(self, name: str, schedule: str, cache: TreeCache, prefill_s: float | None) -> Outcome:
        """New tokens over a cache that holds the prompt but for its last token."""
        case, meeting, rank, held = self.case, self.meeting, self.rank, self.case.seq_len - 1
        runner, cache.schedule = Runner(self.model, cache, token_group=self.group), schedule
        # allocates pages for the new tokens, so that they do not count as the first contender's memory
        runner.crop(cache.rows[0], held)
        runner.step(cache.rows, torch.zeros(1, 1 + case.new_tokens, dtype=torch.int64))
        runner.crop(cache.rows[0], held)
        before, network = network_bytes()["network"] if case.machines.emulated else 0, None
        options = dict(cache=cache, max_new_tokens=case.new_tokens, keep_logits=True, chunk_size=case.chunk)
        meeting.meet(rank)
        with PeakMemory() as peak, comm.record() as log:
            cpu = time.process_time()
            result = generate(self.model, self.prompt, token_group=self.group, **options)
            cpu = (time.process_time() - cpu) / case.new_tokens
        meeting.meet(rank)
        if case.machines.emulated:
            network = (network_bytes()["network"] - before) / case.new_tokens
        sent, error = sum(x.bytes for x in log) / case.new_tokens, None
        if rank == 0:
            error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(result.logits, self.truth))
        times = [result.first_token_s, *result.step_s]
        return _outcome(name, result.tokens, times, sent, network, peak, cpu, prefill_s, cache.nbytes, error)


def _plain(case: Case, model, prompt) -> tuple[Outcome, list[torch.Tensor]]:
    """Transformers' own model and cache on one rank, while the others wait; also returns the logits."""
    start, prefill_s = time.monotonic(), None
    if case.cache == "made-up":
        cache = baseline.made_up_plain(model.config, case.seq_len - 1)
    else:
        cache = baseline.plain_prefill(model, prompt[0, :-1], case.chunk)
        prefill_s = time.monotonic() - start
    attention, clock = model.config.get_text_config(decoder=True)._attn_implementation, baseline.Clock()
    with PeakMemory() as peak:
        cpu = time.process_time()
        tokens, logits = models.plain_generate(
            model,
            prompt,
            max_new_tokens=case.new_tokens,
            eos_token_id=None,
            attn_implementation=attention,
            past_key_values=cache,
            streamer=clock,
        )
        cpu = (time.process_time() - cpu) / case.new_tokens
    times = [after - before for before, after in itertools.pairwise(clock.times)]
    return _outcome("plain", tokens, times, 0, None, peak, cpu, prefill_s, baseline.plain_nbytes(cache), 0.0), logits


def _outcome(schedule: str, tokens, times: list[float], sent: float, network, peak, cpu: float, *rest) -> Outcome:
    measured = Measured({"token": times[1:]}, {"token": sent}, network, peak.bytes, cpu=[cpu])
    return Outcome(schedule, measured, tokens[0].tolist(), times[0], *rest)
