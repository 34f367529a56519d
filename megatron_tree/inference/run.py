"""One run of launch/generate.py on one rank: load, shard, prefill, decode, report and, if asked for, check."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..config import TreeConfig
from ..integrations import deepspeed as tree_deepspeed
from ..integrations import models
from ..integrations.generation import Generation, check_length
from .report import Progress, cache_table, time_figures, time_table, write_json

CHECK_HOURS = 24  # ranks that wait for the plain model are not stuck
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CheckError(RuntimeError):
    """The sharded generation differs from the plain model's."""


def run(args: Namespace) -> None:
    """Generate, on this rank; collective over all ranks. Raises `CheckError` on every rank when the check fails."""
    device = tree_deepspeed.init_distributed(timeout_s=60 * args.distributed_timeout_minutes)
    rank, world = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda *_, **__: None
    waiting = dist.new_group(backend="gloo", timeout=timedelta(hours=CHECK_HOURS))

    models.hide_progress_bars()
    start = time.perf_counter()
    folder = models.model_folder(args.model)
    tokenizer = models.load_tokenizer(folder)
    text = Path(args.prompt_file).read_text(errors="replace")
    input_ids = models.encode_question(tokenizer, text, args.question)
    check_length(models.load_config(folder), input_ids.shape[1], args.max_new_tokens)
    dtype = DTYPES.get(args.dtype) or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    model = models.load_model(folder, dtype)
    plain_attention = model.config.get_text_config(decoder=True)._attn_implementation
    eos = None if args.ignore_eos else model.generation_config.eos_token_id
    engine = tree_deepspeed.init_inference(
        model,
        config=args.deepspeed_config,
        sp_size=args.context_parallel_size,
        tp_size=args.tensor_model_parallel_size,
        dtype=dtype,
        block_size=args.cache_block_size,
        schedule=args.schedule,
        tree_config=TreeConfig(
            backend=args.backend, topology=args.topology, timeout_s=60 * args.distributed_timeout_minutes
        ),
    )
    input_ids = input_ids.to(device)
    dist.barrier(group=waiting)
    say(
        f"{args.model} on {world} ranks ({device.type}, {dtype}): the cache over {engine.sp_size}, the weights over "
        f"{engine.tp_size}; ready after {time.perf_counter() - start:.1f} s"
    )
    say(f"{input_ids.shape[1]:,} tokens: {args.prompt_file}, and: {args.question}\n", flush=True)
    result = tree_deepspeed.generate(
        engine,
        input_ids,
        max_new_tokens=args.max_new_tokens,
        eos_token_id=eos,
        prefill=args.prefill,
        streamer=models.text_streamer(tokenizer) if rank == 0 else None,
        progress=Progress("prefill") if rank == 0 else None,
        keep_logits=args.check and rank == 0,
    )
    figures = time_figures(result, prompt_tokens=input_ids.shape[1], schedule=args.schedule)
    figures["ranks"] = _gather_ranks(rank, result, waiting)
    if rank == 0:
        figures |= {"model": args.model, "dtype": str(dtype), "device": device.type, "sp_size": engine.sp_size}
        figures |= {"tp_size": engine.tp_size, "tokens": result.tokens[0].tolist()}
        figures["text"] = tokenizer.decode(result.tokens[0], skip_special_tokens=True)
        say(f"\n{cache_table(figures['ranks'])}\n\n{time_table(figures)}", flush=True)
    if args.check:
        _check(args, rank, engine, folder, input_ids, result, eos, plain_attention, tokenizer, figures, waiting, dtype)
    if rank == 0 and args.json:
        write_json(args.json, figures)
    dist.barrier(group=waiting)


def _gather_ranks(rank: int, result: Generation, group) -> list[dict]:
    figures = {
        "rank": rank,
        "cached_tokens": result.cache.num_local_tokens,
        "cache_bytes": result.cache.nbytes,
        "prefill_s": result.prefill_s,
    }
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, figures, group=group)
    return ranks


def _check(
    args, rank, engine, folder, input_ids, result, eos, plain_attention, tokenizer, figures, group, dtype
) -> None:
    """Compare with the plain model, which rank 0 runs on all cores while the others wait for its verdict."""
    verdict = [None]
    if rank == 0:
        print(f"\ncheck: the plain model on rank 0 (attn_implementation={plain_attention!r}) ...", flush=True)
        try:
            plain = engine.module if engine.tp_size == 1 else models.load_model(folder, dtype).to(input_ids.device)
            threads = torch.get_num_threads()
            torch.set_num_threads(len(os.sched_getaffinity(0)))
            start = time.perf_counter()
            tokens, logits = models.plain_generate(
                plain,
                input_ids,
                max_new_tokens=args.max_new_tokens,
                eos_token_id=eos,
                attn_implementation=plain_attention,
            )
            torch.set_num_threads(threads)
            verdict = [_compare(result, tokens, logits, tokenizer, figures, time.perf_counter() - start)]
        except Exception as error:
            dist.broadcast_object_list([f"the plain model failed: {error}"], src=0, group=group)
            raise
    dist.broadcast_object_list(verdict, src=0, group=group)
    if verdict[0] is not None:
        raise CheckError(verdict[0])


def _compare(result: Generation, tokens, logits, tokenizer, figures: dict, seconds: float) -> str | None:
    """Print the comparison and add it to the figures; returns what is wrong, or None."""
    equal = torch.equal(tokens, result.tokens)
    same = 0
    while same < min(tokens.shape[1], result.tokens.shape[1]) and torch.equal(tokens[:, same], result.tokens[:, same]):
        same += 1
    pairs = zip(result.logits[: same + 1], logits, strict=False)  # after the first difference the inputs differ, too
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    figures["check"] = {"tokens_equal": equal, "max_logit_difference": difference, "plain_s": seconds}
    figures["check"]["plain_tokens"] = tokens[0].tolist()
    print(f"check: plain model {seconds:.1f} s; largest difference of a logit {difference:.2e}", flush=True)
    if equal:
        print(f"check: all {tokens.shape[1]} tokens are equal", flush=True)
        return None
    for name, row in (("sharded", result.tokens[0]), ("plain", tokens[0])):
        print(f"check: {name:>8}: {row.tolist()}\n{tokenizer.decode(row)!r}", flush=True)
    return f"token {same} of the answer differs from the plain model's (largest logit difference {difference:.2e})"
