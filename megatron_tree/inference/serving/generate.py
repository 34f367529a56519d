"""The command generate on one rank: one answer, with figures and, if asked for, a check; or a file of them."""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from ...core import comm
from ...core.comm.wire import share, share_all
from ...core.files import whole_file
from ...integrations.transformers import models
from ...integrations.transformers.infer.generation import check_length
from ...launching import hold_log, start_errors
from ..generation.conversation import Answer
from ..generation.speculation import SpeculationCounts
from .arguments import sampling_params
from .batch import BatchOptions, run_batch
from .images import ImageFile, ImagePrompts
from .messages import chat_text
from .start import WAIT_HOURS, Worker, start

LOG_INTERVAL_S = 10.0  # between lines of progress in a log file


class CheckError(RuntimeError):
    """The sharded generation differs from the plain model's."""


class BatchError(RuntimeError):
    """Some prompts of a file have no answer."""


def run(args: Namespace) -> None:
    """Generate, on this rank; collective over all ranks.

    Raises on every rank: `CheckError` when the check fails, `BatchError` when prompts of a file failed, `StartError`
    for prompts that can't be run and an output that can't be continued.
    """
    of_file = args.prompts is not None
    ready = start(args, (lambda *_: None) if of_file else functools.partial(_prompt, args))
    with comm.monitored("generation"):
        (_run_file if of_file else _run_one)(args, ready)


def _run_file(args: Namespace, ready: Worker) -> None:
    """Answers of a file of prompts."""
    engine = ready.engine
    scheduler = ready.scheduler(engine.new_runner(), max_rows=args.max_rows, max_waiting=2 * args.max_rows)
    about = {"model": args.model, "dtype": str(ready.dtype), "cache_dtype": args.cache_dtype}
    about |= {"sp_size": engine.sp_size, "tp_size": engine.tp_size, "prefill_chunk": args.prefill_chunk}
    options = BatchOptions(input=args.prompts, output=args.output, sampling=sampling_params(args), about=about)
    begun = time.perf_counter()
    with start_errors():  # they come before anything runs
        result = run_batch(scheduler, ready.tokenizer, options)
    if ready.rank == 0:
        print(
            f"{args.output}: {result.finished} answered in {time.perf_counter() - begun:.1f} s, {result.skipped} were "
            f"there, {result.failed} failed",
            flush=True,
        )
        if args.num_speculative_tokens:
            print(f"speculation: {speculation_text(scheduler.speculated)}", flush=True)
    if result.failed:
        raise BatchError(f"{result.failed} prompts have no answer: the same command tries them again")
    dist.barrier(group=ready.ranks.group)


def _prompt(args: Namespace, tokenizer, config) -> tuple[torch.Tensor, dict | None]:
    """(int64 [1, tokens], what the model takes for the images)."""
    images = None
    if args.image:
        prompt, images = _with_images(args, tokenizer, config)
    else:
        text = Path(args.prompt_file).read_text(encoding="utf-8")
        prompt = models.encode_question(tokenizer, text, args.question)
    check_length(config, prompt.shape[1], args.max_new_tokens)
    return prompt, images


def _with_images(args: Namespace, tokenizer, config) -> tuple[torch.Tensor, dict]:
    folder = models.model_folder(args.model)
    if not models.takes_images(config, folder):
        raise ValueError(f"--image: the model {args.model} ({config.model_type}) reads text only: leave images out")
    if not tokenizer.chat_template:
        raise ValueError("--image: the model has no chat template, which says where images are")
    text = Path(args.prompt_file).read_text(encoding="utf-8").rstrip() + "\n\n" if args.prompt_file else ""
    content = [{"type": "image"}] * len(args.image) + [{"type": "text", "text": text + args.question}]
    prompt = chat_text(tokenizer, [{"role": "user", "content": content}])
    tokens, images = ImagePrompts(folder)(prompt, [ImageFile(Path(name).read_bytes()) for name in args.image])
    return torch.tensor([tokens]), images


def _run_one(args: Namespace, ready: Worker) -> None:
    """The answer to one question about a text."""
    rank, engine, (prompt, images) = ready.rank, ready.engine, ready.prepared
    say = print if rank == 0 else lambda *_, **__: None
    about = ", ".join([*args.image, *([args.prompt_file] if args.prompt_file else [])])
    say(f"{prompt.shape[1]:,} tokens: {about}, and: {args.question}\n", flush=True)
    params = sampling_params(args).with_seed()  # only rank 0's counts
    conversation = ready.conversation()
    with hold_log():  # until the answer is complete
        result = conversation.answer(
            prompt[0].tolist(),
            params,
            on_text=lambda text: print(text, end="", flush=True),
            progress=progress_bar("prefill") if rank == 0 else None,
            keep_logits=args.check,
            images=images,
        )
        cut = result.finish_reason == "length"
        say(f"\n[cut at --max-new-tokens {args.max_new_tokens}]" * cut, flush=True)
    figures, cache = time_figures(result), conversation.runner.cache
    local = {"rank": rank, "cached_tokens": cache.num_local_tokens, "cache_bytes": cache.nbytes}
    local |= {"weight_bytes": engine.weight_bytes}
    figures["ranks"] = share_all(local, ready.ranks)
    if rank == 0:
        if args.num_speculative_tokens:
            figures["speculation"] = conversation.speculated._asdict()
        figures |= {"model": args.model, "dtype": str(ready.dtype), "device": ready.device.type}
        figures |= {"cache_dtype": args.cache_dtype, "sp_size": engine.sp_size, "tp_size": engine.tp_size}
        figures |= {"weights": args.weights, "model_bytes": engine.model_bytes}
        figures |= {"temperature": params.temperature, "seed": params.seed if params.temperature else None}
        figures |= {"tokens": result.tokens, "text": result.text, "finish_reason": result.finish_reason}
        say(f"\n{memory_table(figures['ranks'], engine.model_bytes)}\n\n{time_table(figures)}", flush=True)
    if args.check:
        _check(args, ready, result, figures)
    if rank == 0 and args.json:
        with whole_file(Path(args.json)) as part:
            part.write_text(json.dumps(figures, indent=2) + "\n")
    dist.barrier(group=ready.ranks.group)


def _check(args: Namespace, ready: Worker, result: Answer, figures: dict) -> None:
    """Compare with the plain model, which rank 0 runs on all cores while the others wait for its verdict."""
    verdict, ranks = None, comm.Ranks.of(ready.ranks.group, limit_s=3600.0 * WAIT_HOURS)
    if ready.rank == 0:
        attention, engine = ready.engine.plain_attention, ready.engine
        print(f"\ncheck: the plain model on rank 0 (attn_implementation={attention!r}) ...", flush=True)
        try:
            plain = engine.module if engine.tp_size == 1 else models.load_model(ready.folder, ready.dtype)
            threads = torch.get_num_threads()
            torch.set_num_threads(len(os.sched_getaffinity(0)))
            begun = time.perf_counter()
            tokens, logits = models.plain_generate(
                plain.to(ready.device),
                ready.prepared[0].to(ready.device),
                **{name: x.to(ready.device) for name, x in (ready.prepared[1] or {}).items()},
                max_new_tokens=args.max_new_tokens,
                eos_token_id=list(ready.end_tokens) or None,
                attn_implementation=attention,
            )
            torch.set_num_threads(threads)
            verdict = _compare(result, tokens[0], logits, ready.tokenizer, figures, time.perf_counter() - begun)
        except Exception as error:
            share(f"the plain model failed: {error}", ranks)
            raise
    verdict = share(verdict, ranks)
    if verdict is not None:
        raise CheckError(verdict)


def _compare(result: Answer, tokens, logits, tokenizer, figures: dict, seconds: float) -> str | None:
    """Print the comparison and add it to the figures; returns what is wrong, or None."""
    plain, same = tokens.tolist(), 0
    while same < min(len(plain), len(result.tokens)) and plain[same] == result.tokens[same]:
        same += 1
    pairs = zip(result.logits[: same + 1], logits, strict=False)  # after the first difference the inputs differ, too
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    figures["check"] = {"tokens_equal": plain == result.tokens, "max_logit_difference": difference, "plain_s": seconds}
    figures["check"]["plain_tokens"] = plain
    print(f"check: plain model {seconds:.1f} s; largest difference of a logit {difference:.2e}", flush=True)
    if plain == result.tokens:
        print(f"check: all {len(plain)} tokens are equal", flush=True)
        return None
    for name, answer in (("sharded", result.tokens), ("plain", plain)):
        print(f"check: {name:>8}: {answer}\n{tokenizer.decode(answer)!r}", flush=True)
    return f"token {same} of the answer differs from the plain model's (largest logit difference {difference:.2e})"


def progress_bar(what: str) -> Callable[[int, int], None]:
    """Called as show(done, total), shows progress on stderr: a bar on a terminal, elsewhere a line now and then."""
    bar = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            style = {"dynamic_ncols": True, "leave": False}
            if not sys.stderr.isatty():
                style = {"bar_format": "{desc}: {n_fmt} of {total_fmt}", "mininterval": LOG_INTERVAL_S}
            bar = tqdm(desc=what, total=total, file=sys.stderr, **style)
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show


def memory_table(ranks: list[dict[str, Any]], model_bytes: int) -> str:
    """What every rank holds of the cache and of a model of model_bytes; `ranks` has one entry for each rank."""
    whole = sum(r["cache_bytes"] for r in ranks)
    lines = [
        f"{'rank':>6} {'cached tokens':>14} {'cache bytes':>14} {'of the whole':>13} {'weight bytes':>15} "
        f"{'of the whole':>13}"
    ]
    for r in ranks:
        lines.append(
            f"{r['rank']:>6} {r['cached_tokens']:>14,} {r['cache_bytes']:>14,} {r['cache_bytes'] / whole:>12.1%} "
            f"{r['weight_bytes']:>15,} {r['weight_bytes'] / model_bytes:>13.1%}"
        )
    return "\n".join(lines)


def time_table(figures: dict[str, Any]) -> str:
    """The times of one generation; `figures` as from `time_figures`."""
    steps, speculation = figures["new_tokens"] - 1, figures.get("speculation")
    prompt, seconds = figures["prompt_tokens"], figures["prefill_s"]
    lines = [
        f"prompt               {prompt:,} tokens",
        f"prefill              {seconds:.2f} s ({prompt / seconds:,.0f} tokens/s)",
        f"time to first token  {figures['first_token_s']:.2f} s",
    ]
    if steps:
        median, longest = 1e3 * figures["token_median_s"], 1e3 * figures["token_max_s"]
        lines.append(
            f"per token            {median:.1f} ms median, {longest:.1f} ms at most "
            f"({speculation['steps'] if speculation else steps} steps)"
        )
    if speculation:
        lines.append(f"speculation          {speculation_text(SpeculationCounts(**speculation))}")
    return "\n".join(lines)


def speculation_text(numbers: SpeculationCounts) -> str:
    """What speculation came to, in a line."""
    each = (numbers.steps + numbers.accepted) / max(numbers.steps, 1)
    return f"{numbers.accepted:,} of {numbers.drafted:,} drafted tokens were right, {each:.2f} tokens per step"


def time_figures(result) -> dict[str, Any]:
    """Sizes and times of an `Answer`, ready for JSON."""
    steps = result.step_s
    return {
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.tokens),
        "prefill_s": result.prefill_s,
        "first_token_s": result.first_token_s,
        "token_median_s": statistics.median(steps) if steps else None,
        "token_max_s": max(steps) if steps else None,
        "token_s": steps,
    }
