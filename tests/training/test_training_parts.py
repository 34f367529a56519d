"""Parts of launch/train_gpt.py that need no ranks: schedules, throughput, options of newer kinds, TensorBoard."""

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
from megatron_tree.training.report import Reporter
from megatron_tree.training.schedule import LR_DECAY_STYLES, build_scheduler
from megatron_tree.training.stop import StopRequest
from megatron_tree.training.throughput import Throughput, flops_per_token, mean_keys, peak_memory, peak_tflops


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
    args = parse(f"--lr 1 --min-lr 0.1 --train-iters 20 --global-batch-size 8 {options}")
    check_arguments(args, 1)
    optimizer = argparse.Namespace(param_groups=[{}])
    scheduler = build_scheduler(args, optimizer)
    rates = []
    for _ in range(args.train_iters):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(args.global_batch_size)
    return rates


def expected_rate(style, step, *, warmup=4, decay=16, last=6):
    if step <= warmup:
        return step / warmup
    if style == "constant":
        return 1.0
    if step > decay:
        return 0.1
    done = (step - warmup) / (decay - warmup)
    in_last = max(0.0, (step - (decay - last)) / last)
    share = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "inverse-square-root": (max(0.1, math.sqrt(warmup / step)) - 0.1) / 0.9,
        "WSD": 1 - in_last,
    }
    return 0.1 + 0.9 * share[style]


@pytest.mark.parametrize("style", LR_DECAY_STYLES)
def test_learning_rates(style):
    options = f"--lr-decay-style {style} --lr-warmup-iters 4 --lr-decay-iters 16"
    if style == "WSD":
        options += " --lr-wsd-decay-iters 6 --lr-wsd-decay-style linear"
    assert learning_rates(options) == pytest.approx([expected_rate(style, step) for step in range(20)])


def test_the_default_is_a_cosine_over_the_whole_run():
    rates = learning_rates("")
    assert rates == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * step / 20)) / 2 for step in range(20)])


# --- throughput ---

MODEL = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 96 --seq-length 48"
)


def count_flops(function):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("window", ["", "--window-size 7 0", "--window-size 7 0 --window-attn-skip-freq 2"])
def test_flops_are_those_of_the_matrix_products(window):
    """Weights: as torch counts them. Attention: two products for every pair of a query and a key that it sees."""
    args = parse(f"{MODEL} {window}")
    width, head, s, vocab = 64, 16, 48, 320
    qkv, out = torch.nn.Linear(width, (4 + 2 * 2) * head), torch.nn.Linear(4 * head, width)
    up, down, logits = torch.nn.Linear(width, 2 * 96), torch.nn.Linear(96, width), torch.nn.Linear(width, vocab)
    inputs = {qkv: width, out: 4 * head, up: width, down: 96, logits: width}
    flops = {layer: count_flops(lambda layer=layer, n=n: layer(torch.zeros(s, n))) for layer, n in inputs.items()}
    weights = 3 * sum(flops[layer] for layer in (qkv, out, up, down)) + flops[logits]
    row, column = torch.arange(s)[:, None], torch.arange(s)[None]
    pairs = 0
    for layer in (1, 2, 3):
        windowed = window and not ("skip" in window and layer % 2 == 0)
        pairs += int(((column <= row) & (column >= row - (7 if windowed else s))).sum())
    expected = 3 * (weights + 2 * 2 * head * 4 * pairs)
    assert s * flops_per_token(args, vocab_size=vocab) == pytest.approx(expected)


def test_causal_attention_counts_half():
    assert mean_keys(parse("--seq-length 4096"), 1) == pytest.approx(4096 / 2, rel=1e-3)


def test_figures_of_a_step():
    args = parse(f"{MODEL} --global-batch-size 4 --micro-batch-size 1 --peak-tflops 0.001")
    speed = Throughput(args, vocab_size=320, world_size=2, device=torch.device("cpu"))
    figures = speed.figures(0.5)
    tflops = 4 * 48 * flops_per_token(args, vocab_size=320) / 0.5 / 2 / 1e12
    memory = figures.pop("memory_gib")
    assert figures == pytest.approx({"tokens_per_s": 384.0, "tflops": tflops, "mfu": tflops / 0.001, "seconds": 0.5})
    assert 0.05 < memory == pytest.approx(peak_memory(torch.device("cpu")) / 2**30, rel=0.1)


def test_peaks(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert peak_tflops(parse("--bf16"), cpu) is None
    assert "mfu" not in Throughput(parse(""), vocab_size=320, world_size=1, device=cpu).figures(1.0)
    for name, peak in (
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("AMD Instinct MI300X", 1307.4),
        ("Voodoo 2", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_tflops(parse("--bf16"), gpu) == peak, name
        assert peak_tflops(parse(""), gpu) is None, "fp32: which unit computes is not known"
        assert peak_tflops(parse("--peak-tflops 5"), gpu) == 5.0


# --- options ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--lr-decay-style WSD", "lr_decay_style=WSD needs lr_wsd_decay_iters between 1 and lr_decay_iters"),
        ("--lr-wsd-decay-iters 5", "lr_wsd_decay_iters=5 has no effect with lr_decay_style=cosine"),
        ("--lr-warmup-iters 9 --lr-decay-iters 9", "lr_warmup_iters=9 must be less than lr_decay_iters=9"),
        ("--fp16 --bf16", "bf16 and fp16 exclude each other"),
        ("--loss-scale 8", "loss_scale=8.0 has no effect without fp16"),
        (
            "--fp16 --min-loss-scale 8 --initial-loss-scale 4",
            "min_loss_scale=8.0 must not exceed initial_loss_scale=4.0",
        ),
        ("--attention-dropout 1", "attention_dropout=1.0 must be at least 0 and less than 1"),
        ("--hidden-dropout -0.1", "hidden_dropout=-0.1 must be at least 0"),
        ("--sequence-parallel", "sequence_parallel has no effect with tensor_model_parallel_size=1"),
        ("--num-virtual-stages-per-pipeline-rank 2", "has no effect with pipeline_model_parallel_size=1"),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
            "num_layers=4 must be a multiple of pipeline_model_parallel_size=2 \\* num_virtual",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8",
            "needs microbatches in multiples of pipeline_model_parallel_size=2; global_batch_size=8 makes 1",
        ),
        ("--hierarchical-context-parallel-sizes 2 2", "has no effect with cp_comm_type=tree"),
        ("--resume", "resume=True has no effect without --save"),
        ("--keep-checkpoints 3", "keep_checkpoints=3 has no effect without --save"),
        ("--keep-checkpoints 0 --save x", "keep_checkpoints=0 must be positive"),
        ("--resume --save x --load y", "resume and load='y' exclude each other"),
        ("--peak-tflops 0", "peak_tflops=0.0 must be positive"),
    ],
)
def test_options_are_checked_before_any_communication(options, message):
    with pytest.raises(ValueError, match=message):
        check_arguments(parse(options), 4)


def test_two_level_context_parallelism():
    options = "--context-parallel-size 4 --num-query-groups 2 --cp-comm-type a2a+tree"
    check_arguments(parse(f"{options} --hierarchical-context-parallel-sizes 2 2 --grid 2x1"), 4)
    for more, message in (
        ("", "cp_comm_type=a2a\\+tree needs hierarchical_context_parallel_sizes"),
        ("--hierarchical-context-parallel-sizes 2 4", "must be two numbers whose product is context_parallel_size=4"),
        ("--hierarchical-context-parallel-sizes 2 2 --grid 2x2", "grid=2x2 has 4 places, but the second of hier"),
        ("--hierarchical-context-parallel-sizes 2 2 --num-attention-heads 2 --cp-comm-type a2a", "no effect with"),
        (
            "--cp-comm-type a2a --num-attention-heads 6 --num-query-groups 6 --kv-channels 16",
            "cp_comm_type=a2a with context_parallel_size=4: 4 ranks can't share 6 query heads evenly",
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
        reporter = Reporter(
            str(tmp_path), first_step=first, last_step=last, unigram=None, log_interval=0, tensorboard_dir=folder,
            enabled=True,
        )  # fmt: skip
        reporter.header(title="a run")
        for step in range(first, last + 1):
            reporter.step(step, loss=loss, grad_norm=None, lr=1e-3, tokens_per_s=5.0, tflops=0.5, seconds=0.1, mfu=0.25)
        reporter.validation(last, 3.0)
        reporter.close()
    events = EventAccumulator(folder)
    events.Reload()
    names = {"lm loss", "learning-rate", "throughput", "iteration-time", "tokens-per-second", "mfu"}
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
    reporter = Reporter(str(tmp_path), first_step=1, last_step=2, unigram=None, log_interval=1, enabled=True)
    reporter.header(title="a run")
    figures = {"lr": 1e-3, "tokens_per_s": 1234.0, "mfu": 0.419}
    reporter.step(1, loss=2.0, grad_norm=1.0, loss_scale=64.0, skipped=False, **figures)
    reporter.step(2, loss=2.0, grad_norm=None, loss_scale=32.0, skipped=True, **figures)
    reporter.close()
    first, second = capsys.readouterr().out.splitlines()
    assert "grad norm 1.00" in first
    assert "1,234 tokens/s  MFU 41.9 %" in first
    assert second.endswith("skipped: overflow at loss scale 32")


# --- stopping ---


def test_signals_are_noted_and_handlers_restored():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with StopRequest() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGUSR1, "the first"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
