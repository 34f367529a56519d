"""Generation with a sharded KV cache: a whole model's steps, over a network, against one rank and against a ring.

The same prompt for all: Transformers' own model and cache on rank 0 alone ("plain"), and this package with the given
schedules. All must give the same tokens on all ranks, and the same logits up to rounding, before a time is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import platform
import tempfile
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
from ..plan import save_topology
from . import runs, session
from .accelerator import Speed
from .generate_rows import Outcome, plots, rows_of, table
from .progress import Progress
from .ranks import CORES, Meeting, PeakMemory, join
from .report import WrongResult, results_kept
from .runs import Machines, Settings

SCHEDULES = ("auto", "ring", "allreduce")
ALLOWED = 1e-3  # largest difference of a logit from the plain model's, as a share of the largest one
LIMIT_S = 3600.0  # of one case: a ring over a slow network takes its time
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
    """Layers, heads, KV heads and head size of "tiny"."""
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
    add("--model", default="tiny", help="tiny: a Llama of random weights, small beside its cache (the default); "
        "smollm2; or a folder with a Transformers model")  # fmt: skip
    add("--layers", type=runs.positive, default=4, help="of tiny (default: %(default)s)")
    add("--heads", type=runs.positive, default=16, help="of tiny (default: %(default)s)")
    add("--kv-heads", type=runs.positive, default=4, help="of tiny (default: %(default)s)")
    add("--head-dim", type=runs.positive, default=128, help="of tiny (default: %(default)s)")
    add("--prompt-tokens", type=runs.tokens, nargs="+", default=[16384], metavar="N", help="one or several, such as "
        "16k 64k (default: 16k)")  # fmt: skip
    add("--new-tokens", type=runs.positive, default=16, metavar="N", help="(default: %(default)s; at least 2)")
    add("--cache", choices=("prefilled", "made-up"), default="prefilled", help="made-up: random keys and values "
        "instead of a prefill, the same for all; there is no time to the first token then")  # fmt: skip
    add("--prefill-chunk", type=runs.positive, default=2048, metavar="N", help="tokens run at once")
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
    how = Settings(
        schedules=tuple(dict.fromkeys(args.schedules)), emulated=machines.emulated, compute="real",
        speed=Speed(None, None), latency_s=args.latency, rate_bits=args.rate, dilate=1.0, steps=1, budget_s=1.0,
        backend="auto",
    )  # fmt: skip
    shape = (args.layers, args.heads, args.kv_heads, args.head_dim)
    rest = (args.model, shape, args.new_tokens, args.cache, args.prefill_chunk)
    cases = [Case(machines, n, *rest) for n in sorted(set(args.prompt_tokens))]
    about = {
        "command": "generate",
        "network": how.network_text,
        "cache": args.cache,
        "machine": f"{platform.machine()}, {CORES} cores",
        "torch": torch.__version__,
    }
    print("\n".join(f"{name}: {text}" for name, text in about.items()), flush=True)
    title = f"generate, {cases[0].contenders}, cache {args.cache}, {how.network_text}"
    progress = Progress(len(cases) * (1 + len(how.schedules)))
    with results_kept(args.out, about, lambda rows: plots(rows, title)) as rows, contextlib.closing(progress):
        progress.line(f"{machines.label}: calibrating")
        topology = session.calibrated(machines, how)
        print(f"\n{session.describe(topology)}", flush=True)
        with how.start(machines, 60.0 + LIMIT_S * len(cases)) as ranks, tempfile.TemporaryDirectory() as folder:
            path = str(pathlib.Path(folder) / "topology.yaml")
            save_topology(topology, path)
            for case in cases:
                meeting = Meeting(machines.ranks, timeout_s=LIMIT_S)
                found = ranks.run(on_rank, case, how, path, meeting, progress, timeout_s=LIMIT_S)
                rows += _checked(case, found)
                progress.case_done(1 + len(how.schedules))
                print(table(case.label, rows[-len(found[0]) :]), flush=True)


def _check_model(args) -> None:
    config = models.load_config(models.model_folder(args.model)).get_text_config(decoder=True)
    limit, longest = getattr(config, "max_position_embeddings", None), max(args.prompt_tokens) + args.new_tokens
    if limit is not None and longest > limit:
        raise ValueError(f"--prompt-tokens and --new-tokens: {longest} exceed the {limit} positions of {args.model}")
    if args.cache == "made-up":
        plain.cache_shape(config)


def _checked(case: Case, found: list[list[Outcome]]):
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


def on_rank(case: Case, how: Settings, topology: str, meeting: Meeting, progress: Progress) -> list[Outcome]:
    """One rank's part of a case: what every contender gave and took, the plain model (on rank 0) first."""
    group = join(timeout_s=LIMIT_S)
    rank = comm.group_rank(group)
    model = case.load()
    vocab = model.config.get_text_config(decoder=True).vocab_size
    prompt = torch.randint(0, vocab, (1, case.seq_len), generator=torch.Generator().manual_seed(1))

    def tell(name):
        return lambda done, total: progress.say(rank, case, f"{name}: {done} of {total} tokens")

    progress.schedule(rank, case, "plain")
    outcomes = [_plain(case, model, prompt, tell("plain prefill")) if rank == 0 else Outcome("plain")]
    truth = outcomes[0].logits
    meeting.meet(rank)
    model.set_attn_implementation("tree")
    cache = TreeCache(model.config, cp_group=group, tree_config=TreeConfig(topology=topology, timeout_s=LIMIT_S))
    runner = Runner(model, cache, chunk_size=case.chunk)
    held, start = case.seq_len - 1, meeting.most(rank, time.monotonic())[0]
    prefill_s = None
    if case.cache == "made-up":
        cache.rows = [plain.made_up_row(cache, model.config, held, tell("cache"))]
    else:
        cache.rows = [runner.add()]
        runner.prefill(cache.rows[0], prompt[0, :held], progress=tell("prefill"))
        prefill_s = meeting.most(rank, time.monotonic())[0] - start
    # room for the new tokens, so that the first contender's memory is not the pages'
    runner.step(cache.rows, torch.zeros(1, 1 + case.new_tokens, dtype=torch.int64))
    for schedule in how.schedules:
        progress.schedule(rank, case, schedule)
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
    with PeakMemory() as peak:
        result = plain.plain_decode(model, cache, int(prompt[0, -1]), case.new_tokens)
    return Outcome(
        "plain",
        tokens=result.tokens[0].tolist(),
        prefill_s=prefill_s,
        step_s=[result.first_token_s, *result.step_s],
        sent_bytes=0,
        cache_bytes=plain.plain_nbytes(cache),
        memory_bytes=peak.bytes,
        error=0.0,
        logits=result.logits,
    )
