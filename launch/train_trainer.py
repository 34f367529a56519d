"""Train a Hugging Face model with Transformers' Trainer, the sequence sharded over ranks by tree attention.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 launch/train_trainer.py \\
        --output_dir runs/trainer --sp_size 2 --seq_length 256 --max_steps 4 --logging_steps 1 --use_cpu

Every rank runs this file, under DDP; with `--fsdp` on GPUs under FSDP2 and, started by the deepspeed launcher with
`--deepspeed configs/deepspeed/trainer_zero2.json`, under ZeRO. Of a script that you have, one line changes: where
Trainer comes from. `--help` lists the options below and all of TrainingArguments.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field


@dataclass
class Options:
    """What TrainingArguments don't have."""

    model: str = field(default="smollm2", metadata={"help": "smollm2 (a Python package), or a model folder"})
    data_path: str | None = field(
        default=None, metadata={"help": "folder with text; default: the sources of Python's standard library"}
    )
    seq_length: int = field(default=512, metadata={"help": "tokens of a sequence"})
    sequences: int = field(default=256, metadata={"help": "number of sequences to read; every 16th is for evaluation"})
    sp_size: int | None = field(default=None, metadata={"help": "ranks that share a sequence (default: all)"})
    loss_tile: int | None = field(
        default=None,
        metadata={"help": "tokens whose logits are computed at a time, 0: all (default: 256 MiB of them)"},
    )
    mlp_tile: int | None = field(
        default=None, metadata={"help": "tokens that the MLPs compute at a time, and again in the backward"}
    )


def sequences_of(options: Options, tokenizer) -> list[dict]:
    """Blocks of seq_length tokens of the text, one file after the other."""
    import torch

    from megatron_tree.tools.training.data import text_files

    enough, tokens = options.sequences * options.seq_length, []
    for path in text_files(options.data_path):
        tokens += tokenizer(path.read_text(errors="replace")).input_ids + [tokenizer.eos_token_id or 0]
        if len(tokens) >= enough:
            break
    blocks = torch.tensor(tokens[:enough]).split(options.seq_length)
    whole = [block for block in blocks if len(block) == options.seq_length]
    if len(whole) < 16:
        raise ValueError(
            f"--data_path {options.data_path}: {len(tokens):,} tokens are {len(whole)} sequences of "
            f"--seq_length {options.seq_length}; at least 16 are needed"
        )
    return [{"input_ids": block, "labels": block} for block in whole]


def main(argv: list[str]) -> int:
    """Train and evaluate, on this rank; collective over all ranks."""
    import torch
    import torch.distributed as dist

    from megatron_tree.core.comm import Ranks
    from megatron_tree.integrations.transformers import models
    from megatron_tree.integrations.transformers.train.trainer import (
        Trainer,  # instead of: from transformers import Trainer
    )
    from megatron_tree.launching import quiet, together
    from transformers import HfArgumentParser, TrainingArguments

    parser, argv = HfArgumentParser((Options, TrainingArguments)), ["--report_to", "none", *argv]
    options, args = parser.parse_args_into_dataclasses(argv)
    quiet()
    models.hide_progress_bars()
    _ = args.device  # starts the process group
    group = dist.group.WORLD if dist.is_initialized() else None
    try:
        with together(parser.parse_args(argv), Ranks.of(group, limit_s=args.ddp_timeout)):
            folder = models.model_folder(options.model)
            data = sequences_of(options, models.load_tokenizer(folder))
    except ValueError as error:
        print(f"train_trainer.py: {error}", file=sys.stderr)
        return 2
    model = models.load_model(folder, torch.float32).train()
    held_out = data[::16]
    del data[::16]
    tiles = {"loss_tile": options.loss_tile, "mlp_tile": options.mlp_tile}
    trainer = Trainer(
        model=model, args=args, train_dataset=data, eval_dataset=held_out, sp_size=options.sp_size, **tiles
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"eval_loss {found['eval_loss']:.4f} after {trainer.state.global_step} steps", flush=True)
    return 0


if __name__ == "__main__":
    from megatron_tree.launching import explain_missing, leave

    with explain_missing("train_trainer.py"):
        leave(main(sys.argv[1:]))
