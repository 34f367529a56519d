"""The learning rate over the steps of a run."""

from __future__ import annotations

import argparse
from typing import Any

LR_DECAY_STYLES = {
    "constant": "lr throughout",
    "linear": "a line from lr down to min_lr",
    "cosine": "half a cosine from lr down to min_lr",
    "inverse-square-root": "lr * sqrt(lr_warmup_iters / step), not below min_lr",
    "WSD": "lr, then down to min_lr in the last lr_wsd_decay_iters (warm-up, stable, decay)",
}


def check_schedule(args: argparse.Namespace) -> None:
    """Raises: ValueError for options that contradict each other, or have no effect."""
    warmup, decay, style = args.lr_warmup_iters, args.lr_decay_iters, args.lr_decay_style
    if warmup >= decay:
        name = "lr_decay_iters" if decay != args.train_iters else "train_iters"
        raise ValueError(f"lr_warmup_iters={warmup} must be less than {name}={decay}")
    if args.min_lr > args.lr:
        raise ValueError(f"min_lr={args.min_lr} must not exceed lr={args.lr}")
    last = args.lr_wsd_decay_iters
    if style == "WSD" and (last is None or not 0 < last <= decay - warmup):
        raise ValueError(
            f"lr_decay_style=WSD needs lr_wsd_decay_iters between 1 and lr_decay_iters - lr_warmup_iters = "
            f"{decay - warmup}, not {last}"
        )
    if style != "WSD" and last is not None:
        raise ValueError(f"lr_wsd_decay_iters={last} has no effect with lr_decay_style={style}")


def build_scheduler(args: argparse.Namespace, optimizer: Any) -> Any:
    """Megatron-core's OptimizerParamScheduler: linear warm-up, then `lr_decay_style`. It counts samples, as Megatron-LM
    does; a resumed run follows its own options, not the checkpoint's."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    batch = args.global_batch_size
    wsd = {}
    if args.lr_decay_style == "WSD":
        wsd = {"wsd_decay_steps": args.lr_wsd_decay_iters * batch, "lr_wsd_decay_style": args.lr_wsd_decay_style}
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * batch,
        lr_decay_steps=args.lr_decay_iters * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        **wsd,
    )
