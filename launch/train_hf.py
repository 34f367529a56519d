"""Train a Hugging Face model with DeepSpeed ZeRO, the sequence sharded over ranks by tree attention.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 4 --no_local_rank launch/train_hf.py --sp-size 2

Every rank runs this file. `--help` lists the options; docs/deepspeed.md explains them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

CONFIG = Path(__file__).parents[1] / "configs" / "deepspeed" / "train_zero1.json"
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--config", help="YAML file with any of these options; the command line wins")
    add(
        "--model", default="smollm2", help="smollm2 (a Python package), a model folder, or tiny (bytes, random weights)"
    )
    add("--data-path", help="folder with text; default: the sources of Python's standard library")
    add("--seq-length", type=int, default=512, help="tokens per sequence")
    add("--micro-batch-size", type=int, default=1, help="sequences per data-parallel rank and forward pass")
    add("--steps", type=int, default=20, help="number of the last step")
    add("--lr", type=float, default=1e-4, help="of AdamW, if the DeepSpeed configuration has no optimizer")
    add("--seed", type=int, default=1234, help="of the order of the text, and of tiny's weights")
    add("--sp-size", type=int, help="ranks that share a sequence (default: all); the others are data parallel")
    add("--ulysses-size", type=int, help="of these, ranks that exchange heads (default: the planner chooses)")
    add("--loss-tile", type=int, help="tokens whose logits are computed at a time, 0: all (default: 256 MiB of logits)")
    add("--mlp-tile", type=int, help="tokens that the MLPs compute at a time, and again in the backward (default: all)")
    add("--deepspeed-config", default=str(CONFIG), help="JSON: ZeRO stage, bf16, clipping, accumulation, ...")
    add("--save", help="folder for checkpoints; the newest one in it is continued")
    add("--save-interval", type=int, help="steps between checkpoints (default: one at the end); two are kept")
    return parser


def check_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Raises: ValueError that names the option. Reads the DeepSpeed configuration."""
    from megatron_tree.core.files import read_deepspeed_config

    for name in ("seq_length", "micro_batch_size", "steps", "save_interval"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"{name}={getattr(args, name)} must be 1 or more")
    if args.save_interval is not None and not args.save:
        raise ValueError(f"save_interval={args.save_interval} needs a folder: give --save, too")
    args.deepspeed_config = read_deepspeed_config("deepspeed_config", args.deepspeed_config)
    args.deepspeed_config["train_micro_batch_size_per_gpu"] = args.micro_batch_size


def load(args: argparse.Namespace):
    """(model, PackedText) on the CPU; tokens are bytes for tiny, else those of the model's tokenizer."""
    import numpy as np
    import torch

    import transformers
    from megatron_tree.integrations.transformers import models
    from megatron_tree.tools.training.data import VOCAB_SIZE, PackedText, load_text, text_files

    if args.model == "tiny":
        torch.manual_seed(args.seed)
        config = transformers.LlamaConfig(**TINY, vocab_size=VOCAB_SIZE, max_position_embeddings=args.seq_length)
        text = load_text(args.data_path, seq_length=args.seq_length, seed=args.seed)
        return transformers.AutoModelForCausalLM.from_config(config), text
    models.hide_progress_bars()
    folder = models.model_folder(args.model)
    tokenizer = models.load_tokenizer(folder)
    tokens: list[int] = []
    enough = 64 * args.seq_length * args.micro_batch_size  # this is a demonstration: it goes round in a small corpus
    for path in text_files(args.data_path):
        tokens += tokenizer(path.read_text(errors="replace")).input_ids + [tokenizer.eos_token_id or 0]
        if len(tokens) > enough:
            break
    text = PackedText(tokens=np.array(tokens, dtype=np.int32), seq_length=args.seq_length, seed=args.seed)
    return models.load_model(folder, torch.float32).train(), text


def start(args: argparse.Namespace, model):
    """(DeepSpeed's engine, the ranks' positions, the last step that is done already)."""
    import torch

    import deepspeed
    from megatron_tree import TreeConfig
    from megatron_tree.integrations.deepspeed.training import register_sequence_parallel

    parallel = register_sequence_parallel(
        model,
        sp_size=args.sp_size,
        tree_config=TreeConfig(ulysses_size=args.ulysses_size),
        loss_tile=args.loss_tile,
        mlp_tile=args.mlp_tile,
    )
    optimizer = None if "optimizer" in args.deepspeed_config else torch.optim.AdamW(model.parameters(), lr=args.lr)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=model.parameters(),
        mpu=parallel,
        config=args.deepspeed_config,
    )
    if not args.save or not Path(args.save, "latest").is_file():
        return engine, parallel, 0
    _, state = engine.load_checkpoint(args.save)  # the one that "latest" names
    return engine, parallel, state["step"]


def run(args: argparse.Namespace) -> None:
    """Train, on this rank; collective over all ranks."""
    import torch
    import torch.distributed as dist

    from megatron_tree import TreeConfig
    from megatron_tree.core import comm
    from megatron_tree.integrations.deepspeed.inference import init_distributed
    from megatron_tree.integrations.deepspeed.training import save_checkpoint
    from megatron_tree.launching import together
    from megatron_tree.tools.training.data import microbatch_indices

    device = init_distributed()
    with together(args, comm.Ranks.of(dist.group.WORLD, config=TreeConfig())):
        model, text = load(args)
    with comm.monitored("the start"):
        engine, parallel, first = start(args, model)
    say = print if parallel.dp_rank == parallel.sp_rank == 0 else lambda *_, **__: None
    say(
        f"{args.model} on {parallel.dp_size} data-parallel x {parallel.sp_size} sequence ranks ({device.type}), ZeRO "
        f"{engine.zero_optimization_stage()}: {engine.train_batch_size()} sequences of {args.seq_length} tokens a step",
        flush=True,
    )
    sizes = {"micro_batch_size": args.micro_batch_size, "global_batch_size": engine.train_batch_size()}
    ranks = {"dp_rank": parallel.dp_rank, "dp_size": parallel.dp_size}
    for step in range(first, args.steps):
        began, total = time.perf_counter(), 0.0
        with comm.monitored(f"step {step + 1}"):
            for indices in microbatch_indices(step * engine.train_batch_size(), **sizes, **ranks):
                ids = torch.from_numpy(text.batch(indices)[:, :-1]).to(device)
                loss = engine(**parallel.shard_batch({"input_ids": ids, "labels": ids})).loss
                engine.backward(loss)
                engine.step()
                total += loss.item() / engine.gradient_accumulation_steps()
        seconds = time.perf_counter() - began
        tokens = engine.train_batch_size() * args.seq_length / seconds
        say(f"step {step + 1:>5}/{args.steps}  loss {total:.6f}  {tokens:,.0f} tokens/s", flush=True)
        if args.save and (step + 1 == args.steps or (args.save_interval and (step + 1) % args.save_interval == 0)):
            with comm.monitored(f"the save after step {step + 1}"):
                save_checkpoint(engine, args.save, step + 1)
            say(f"saved in {args.save}", flush=True)


def main(argv: list[str]) -> int:
    from megatron_tree.launching import run_script

    return run_script("train_hf.py", argv, build_parser, check_arguments, lambda: (run, ()))


if __name__ == "__main__":
    from megatron_tree.launching import explain_missing, leave

    with explain_missing("train_hf.py"):
        leave(main(sys.argv[1:]))
