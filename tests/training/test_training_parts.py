"""Parts of launch/train_gpt.py that need no ranks: schedules, options of newer kinds, TensorBoard."""

import argparse
import math
import os
import signal

import numpy as np
import pytest
import torch

pytest.importorskip("yaml")

from megatron_tree.training.arguments import parse_arguments
from megatron_tree.training.check import check_arguments
from support.training_runs import reporter_of


def parse(text):
    return parse_arguments(text.split())


# --- microbatches ---


def test_labels_are_the_next_tokens(monkeypatch):
    pytest.importorskip("megatron.core")
    from megatron_tree.training import step

    class Counting:
        def batch(self, indices):
            return np.stack([np.arange(10 * i, 10 * i + 5) for i in indices])

    monkeypatch.setattr(step.parallel_state, "get_data_parallel_rank", lambda: 1)
    monkeypatch.setattr(step.parallel_state, "get_data_parallel_world_size", lambda: 2)
    monkeypatch.setattr(step, "batch_on_this_cp_rank", lambda batch: batch)
    args = argparse.Namespace(micro_batch_size=1, global_batch_size=4, seq_length=4)
    first, second = step._batches(Counting(), args, 8, torch.device("cpu"))  # samples 8 .. 11, this rank's 9 and 11
    assert first["tokens"].tolist() == [[90, 91, 92, 93]] and first["labels"].tolist() == [[91, 92, 93, 94]]
    assert second["tokens"].tolist() == [[110, 111, 112, 113]] and second["labels"].tolist() == [[111, 112, 113, 114]]
    assert first["position_ids"].tolist() == [[0, 1, 2, 3]] and first["loss_mask"].tolist() == [[1.0] * 4]


# --- learning rate ---


def learning_rates(options):
    """Of every step of a run."""
    pytest.importorskip("megatron.core")
    from megatron_tree.training.model import build_scheduler

    args = parse(f"--lr 1 --min-lr 0.1 --train-iters 20 --global-batch-size 8 {options}")
    check_arguments(args, 1)
    optimizer = argparse.Namespace(param_groups=[{}])
    scheduler = build_scheduler(args, optimizer)
    rates = []
    for _ in range(args.train_iters):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(args.global_batch_size)
    return rates


def expected_rate(style, step, *, warmup=4, decay=16):
    if step <= warmup:
        return step / warmup
    if style == "constant":
        return 1.0
    if step > decay:
        return 0.1
    done = (step - warmup) / (decay - warmup)
    share = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "inverse-square-root": (max(0.1, math.sqrt(warmup / step)) - 0.1) / 0.9,
    }
    return 0.1 + 0.9 * share[style]


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
def test_learning_rates(style):
    options = f"--lr-decay-style {style} --lr-warmup-iters 4 --lr-decay-iters 16"
    assert learning_rates(options) == pytest.approx([expected_rate(style, step) for step in range(20)])


def test_the_default_is_a_cosine_over_the_whole_run():
    rates = learning_rates("")
    assert rates == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * step / 20)) / 2 for step in range(20)])


# --- options ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--lr-warmup-iters 9 --lr-decay-iters 9", "lr_warmup_iters=9 must be less than lr_decay_iters=9"),
        ("--attention-dropout 1", "attention_dropout=1.0 must be at least 0 and less than 1"),
        ("--hidden-dropout -0.1", "hidden_dropout=-0.1 must be at least 0"),
        ("--sequence-parallel", "sequence_parallel has no effect with tensor_model_parallel_size=1"),
        ("--hierarchical-context-parallel-sizes 2 2", "has no effect with cp_comm_type=tree"),
        ("--resume", "resume=True has no effect without --save"),
        ("--keep-checkpoints 3", "keep_checkpoints=3 has no effect without --save"),
        ("--keep-checkpoints 0 --save x", "keep_checkpoints=0 must be positive"),
        ("--resume --save x --load y", "resume and load='y' exclude each other"),
    ],
)
def test_options_are_checked_before_any_communication(options, message):
    with pytest.raises(ValueError, match=message):
        check_arguments(parse(options), 4)


def test_two_level_context_parallelism():
    options = "--context-parallel-size 4 --num-query-groups 2 --cp-comm-type a2a+tree"
    check_arguments(parse(f"{options} --hierarchical-context-parallel-sizes 2 2 --grid 2x1"), 4)
    for more, message in (
        ("", "hierarchical_context_parallel_sizes=none must be two numbers .* cp_comm_type=a2a\\+tree needs them"),
        ("--hierarchical-context-parallel-sizes 2 4", "must be two numbers whose product is context_parallel_size=4"),
        (
            "--hierarchical-context-parallel-sizes 2 2 --grid 2x2",
            "grid=2x2 must have 2 places, .*parallel_sizes=2 2",
        ),
        ("--hierarchical-context-parallel-sizes 2 2 --num-attention-heads 2 --cp-comm-type a2a", "no effect with"),
        (
            "--cp-comm-type a2a --num-attention-heads 6 --num-query-groups 6 --kv-channels 16",
            "cp_comm_type=a2a: 4 ranks can't share 6 query heads evenly",
        ),
        (
            "--cp-comm-type a2a --num-attention-heads 12 --num-query-groups 3 --kv-channels 16",
            "4 ranks can't share 3 KV heads",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            check_arguments(parse(f"{options} {more}"), 4)


# --- reports ---


def test_tensorboard_curves_of_a_resumed_run(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    pytest.importorskip("matplotlib")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = str(tmp_path / "curves")
    for first, last, loss in ((1, 6, 2.0), (5, 8, 1.0)):
        reporter = reporter_of(tmp_path, first, last, tensorboard_dir=folder)
        reporter.event("start", title="a run")
        for step in range(first, last + 1):
            reporter.step(step, loss=loss, grad_norm=None, lr=1e-3, tokens_per_s=5.0, seconds=0.1)
        reporter.validation(last, 3.0)
        reporter.close()
    events = EventAccumulator(folder)
    events.Reload()
    names = {"lm loss", "learning-rate", "iteration-time", "tokens-per-second"}
    assert set(events.Tags()["scalars"]) == names | {"lm loss validation"}
    curve = {event.step: event.value for event in events.Scalars("lm loss")}
    assert curve == {step: 2.0 if step < 5 else 1.0 for step in range(1, 9)}
    assert [event.value for event in events.Scalars("lm loss validation")][-1] == 3.0


def test_tensorboard_that_is_not_installed_is_named(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tensorboard_dir='x' needs the package tensorboard: pip install"):
        check_arguments(parse("--tensorboard-dir x"), 4)


def test_what_a_line_tells(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    reporter = reporter_of(tmp_path, 1, 2, log_interval=1)
    figures = {"lr": 1e-3, "tokens_per_s": 1234.0, "seconds": 0.1}
    reporter.step(1, loss=2.0, grad_norm=1.0, **figures)
    reporter.step(2, loss=2.0, grad_norm=None, **figures)
    reporter.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 1/2  loss 2.0000  grad norm 1.00  lr 1.00e-03  1,234 tokens/s",
        "step 2/2  loss 2.0000  lr 1.00e-03  1,234 tokens/s",
    ]


# --- stopping ---


def test_signals_are_noted_and_handlers_restored():
    pytest.importorskip("megatron.core")
    from megatron_tree.training.loop import StopRequest

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with StopRequest() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGUSR1, "the first"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
