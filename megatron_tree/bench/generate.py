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
from ..config import DECODE_SCHEDULES, TreeConfig
from ..emulate import network_bytes
from ..integrations.transformers import models, plain
from ..integrations.transformers.attention import TreeCache
from ..integrations.transformers.generation import generate
from ..integrations.transformers.runner import Runner
from ..units import parse_count
from . import runs, session
from .generated import Generated, Outcome, plots, rows_of, table_of
from .ranks import Meeting, PeakMemory, join, progress_bar, shown_by
from .results import WrongResult, results_kept
from .runs import Machines, Settings

SCHEDULES = ("auto", "ring", "allreduce")
ALLOWED = 1e-3  # difference of a logit from the plain model's, as a fraction of the largest logit
LIMIT_S = 3600.0  # of one case: a ring over a slow network is slow
EXAMPLES = """\
examples:
  python -m megatron_tree.bench generate --ranks 2 --prompt-tokens 2k --new-tokens 8
  python -m megatron_tree.bench generate --emulate 4x1 --prompt-tokens 16k 64k --cache made-up   docs/benchmarks.md
  python -m megatron_tree.bench generate --ranks 2 --model smollm2 --prompt-tokens 4k
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
    add("--schedules", nargs="+", choices=DECODE_SCHEDULES, default=SCHEDULES, help="(default: auto ring allreduce)")
    add("--out", type=pathlib.Path, default=pathlib.Path("bench-results/generate"))


def run(args: argparse.Namespace) -> None:
    """Check, time, print and write CSV, JSON and PNG into args.out. Raises `WrongResult` before any speed is shown."""
    machines = runs.machines_of(args)
    if args.new_tokens < 2:
        raise ValueError(f"--new-tokens {args.new_tokens}: a time per token needs two at least")
    if args.model == "tiny" and args.heads % args.kv_heads:
        raise ValueError(f"--kv-heads {args.kv_heads}: must divide --heads {args.heads}")
    if args.model != "tiny":
        _check_model(args)
    how = Settings(tuple(dict.fromkeys(args.schedules)), machines.emulated, args.latency, args.rate)
    shape = (args.layers, args.heads, args.kv_heads, args.head_dim)
    rest = (args.model, shape, args.new_tokens, args.cache, args.prefill_chunk)
    cases = [Case(machines, n, *rest) for n in sorted(set(args.prompt_tokens))]
    about = session.describe_run("generate", how, cache=args.cache)
    title = f"generate, {cases[0].contenders}, cache {args.cache}, {how.network_text}"
    with (
        results_kept(args.out, about, lambda rows: plots(rows, title)) as rows,
        progress_bar(len(cases) * (1 + len(how.schedules)), "contender") as bar,
        session.started(machines, how, 60.0 + LIMIT_S * len(cases), bar) as (ranks, _, path),
    ):
        for case in cases:
            meeting = Meeting(machines.ranks, timeout_s=LIMIT_S)
            found = _checked(case, ranks.run(on_rank, case, how, path, meeting, bar, timeout_s=LIMIT_S))
            rows += found
            bar.update(len(found))
            bar.clear()
            print(table_of(case.label, found), flush=True)


def _check_model(args) -> None:
    config = models.load_config(models.model_folder(args.model)).get_text_config(decoder=True)
    limit, longest = getattr(config, "max_position_embeddings", None), max(args.prompt_tokens) + args.new_tokens
    if limit is not None and longest > limit:
        raise ValueError(f"--prompt-tokens and --new-tokens: {longest} exceed the {limit} positions of {args.model}")
    if args.cache == "made-up":
        plain.cache_shape(config)


def _checked(case: Case, found: list[list[Outcome]]) -> list[Generated]:
    """Rows of all contenders. Raises `WrongResult` unless all gave the tokens and the logits of the plain model."""
    truth = found[0][0]
    for of_ranks in zip(*found):
        name = of_ranks[0].name
        for rank, outcome in enumerate(of_ranks):
            if outcome.tokens is not None and outcome.tokens != truth.tokens:
                raise WrongResult(
                    f"{name} on {case.label}: rank {rank} generated {outcome.tokens}, the plain model {truth.tokens}"
                )
        error = of_ranks[0].error
        if not error <= ALLOWED:
            raise WrongResult(f"{name} on {case.label}: a logit is off by {error:.3g} of the largest one")
    return rows_of(case, found)


def on_rank(case: Case, how: Settings, topology: str, meeting: Meeting, bar) -> list[Outcome]:
    """One rank's part of a case: the outcomes of all contenders, the plain model (on rank 0) first."""
    group = join(timeout_s=LIMIT_S)
    rank = comm.group_rank(group)
    model = case.load()
    vocab = model.config.get_text_config(decoder=True).vocab_size
    prompt = torch.randint(0, vocab, (1, case.seq_len), generator=torch.Generator().manual_seed(1))

    show = shown_by(bar, rank)

    def tokens_of(name):
        return lambda done, total: show(f"{case.seq_len} tokens, {name}: {done} of {total}")

    outcomes = [_plain(case, model, prompt, tokens_of("plain prefill")) if rank == 0 else Outcome("plain")]
    truth = outcomes[0].logits
    meeting.meet(rank)
    model.set_attn_implementation("tree")
    cache = TreeCache(model.config, cp_group=group, tree_config=TreeConfig(topology=topology, timeout_s=LIMIT_S))
    runner = Runner(model, cache, chunk_size=case.chunk)
    held, start = case.seq_len - 1, meeting.most(rank, time.monotonic())[0]
    prefill_s = None
    if case.cache == "made-up":
        cache.rows = [plain.made_up_row(cache, model.config, held, tokens_of("cache"))]
    else:
        cache.rows = [runner.add()]
        runner.prefill(cache.rows[0], prompt[0, :held], progress=tokens_of("prefill"))
        prefill_s = meeting.most(rank, time.monotonic())[0] - start
    # allocates pages for the new tokens, so that they do not count as the first contender's memory
    runner.step(cache.rows, torch.zeros(1, 1 + case.new_tokens, dtype=torch.int64))
    for number, schedule in enumerate(how.schedules, 1):
        show(f"{case.seq_len} tokens, {schedule}", number)
        cache.schedule = schedule
        runner.crop(cache.rows[0], held)
        before = network_bytes()["network"] if case.machines.emulated else 0
        meeting.meet(rank)
        with PeakMemory() as peak, comm.record() as log:
            result = generate(
                model, prompt, cache=cache, max_new_tokens=case.new_tokens, keep_logits=True, chunk_size=case.chunk
            )
        meeting.meet(rank)
        outcome = Outcome(
            schedule,
            tokens=result.tokens[0].tolist(),
            prefill_s=prefill_s,
            step_s=[result.first_token_s, *result.step_s],
            sent_bytes=sum(x.bytes for x in log) / case.new_tokens,
            cache_bytes=cache.nbytes,
            memory_bytes=peak.bytes,
        )
        if case.machines.emulated:
            outcome.node_bytes = (network_bytes()["network"] - before) / case.new_tokens
        if rank == 0:
            outcome.error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(result.logits, truth))
        outcomes.append(outcome)
    outcomes[0].logits = None
    meeting.meet(rank)
    return outcomes


def _plain(case: Case, model, prompt, progress) -> Outcome:
    """Transformers' own model and cache on one rank, while the others wait."""
    start, prefill_s = time.monotonic(), None
    if case.cache == "made-up":
        cache = plain.made_up_plain(model.config, case.seq_len - 1)
    else:
        cache = plain.plain_prefill(model, prompt[0, :-1], case.chunk, progress)
        prefill_s = time.monotonic() - start
    attention, clock = model.config.get_text_config(decoder=True)._attn_implementation, plain.Clock()
    with PeakMemory() as peak:
        tokens, logits = models.plain_generate(
            model,
            prompt,
            max_new_tokens=case.new_tokens,
            eos_token_id=None,
            attn_implementation=attention,
            past_key_values=cache,
            streamer=clock,
        )
    return Outcome(
        "plain",
        tokens=tokens[0].tolist(),
        prefill_s=prefill_s,
        step_s=[after - before for before, after in itertools.pairwise(clock.times)],
        sent_bytes=0,
        cache_bytes=plain.plain_nbytes(cache),
        memory_bytes=peak.bytes,
        error=0.0,
        logits=logits,
    )
