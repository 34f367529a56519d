"""Parts of megatron-tree train that need no ranks: text, microbatches, learning rates, reports."""

import argparse
import math

import numpy as np
import pytest
import torch

from megatron_tree.tools.training import loop
from megatron_tree.tools.training.arguments import parse_arguments
from megatron_tree.tools.training.data import EOD, PackedText, load_text, microbatch_indices
from megatron_tree.tools.training.model import build_scheduler
from megatron_tree.tools.training.report import LOG_NAME, PLOT_NAME, Reporter, read_log

# --- text ---


def write_documents(folder, texts):
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


def test_documents_are_packed_and_separated(tmp_path):
    texts = {f"d/{i}.txt": bytes([65 + i]) * (5 + i) for i in range(4)}
    write_documents(tmp_path, texts | {"empty.txt": b"", "site-packages/x.py": b"no"})
    text = load_text(tmp_path, seq_length=4, seed=3)
    documents = bytes(np.where(text.tokens == EOD, 0, text.tokens).astype(np.uint8)).split(b"\0")
    assert documents.pop() == b"", "the last one ends in EOD, too"
    assert sorted(documents) == sorted(texts.values())
    assert load_text(tmp_path, seq_length=4, seed=3).digest() == text.digest()
    assert load_text(tmp_path, seq_length=4, seed=4).digest() != text.digest()


def test_every_epoch_uses_every_sample_once():
    text = PackedText(tokens=np.arange(33, dtype=np.int16), seq_length=4, seed=1)
    assert len(text) == 8
    epochs = [[tuple(text.sample(8 * epoch + i)) for i in range(8)] for epoch in (0, 1)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(epoch) == [tuple(range(i, i + 5)) for i in range(0, 32, 4)]
    assert [tuple(text.sample(i)) for i in range(8)] == epochs[0], "going back gives the same"


def test_unigram_entropy():
    tokens = np.array([7] * 8 + [9] * 4 + [EOD] * 4, dtype=np.int16)
    assert PackedText(tokens=tokens, seq_length=2, seed=0).unigram_entropy() == pytest.approx(1.5 * math.log(2))


def test_too_little_text_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no file with text in"):
        load_text(tmp_path, seq_length=4, seed=0)
    write_documents(tmp_path, {"b.py": b"abc"})
    with pytest.raises(ValueError, match="4 tokens of text don't fill one sample of --seq-length 4"):
        load_text(tmp_path, seq_length=4, seed=0)


@pytest.mark.parametrize(("dp_size", "micro"), [(1, 2), (1, 8), (2, 2), (4, 1), (4, 2)])
def test_a_global_batch_is_the_same_in_every_layout(dp_size, micro):
    sizes = {"micro_batch_size": micro, "global_batch_size": 8, "dp_size": dp_size}
    ranks = [[i for batch in microbatch_indices(24, dp_rank=r, **sizes) for i in batch] for r in range(dp_size)]
    assert {len(rank) for rank in ranks} == {8 // dp_size}
    assert sorted(i for rank in ranks for i in rank) == list(range(24, 32))


def test_labels_are_the_next_tokens(monkeypatch):
    class Counting:
        def batch(self, indices):
            return np.stack([np.arange(10 * i, 10 * i + 5) for i in indices])

    monkeypatch.setattr(loop.parallel_state, "get_data_parallel_rank", lambda: 1)
    monkeypatch.setattr(loop.parallel_state, "get_data_parallel_world_size", lambda: 2)
    monkeypatch.setattr(loop, "batch_on_this_cp_rank", lambda batch: batch)
    args = argparse.Namespace(micro_batch_size=1, global_batch_size=4, seq_length=4)
    first, second = loop._batches(Counting(), args, 8, torch.device("cpu"))  # this rank's of 8 .. 11: 9, 11
    assert first["tokens"].tolist() == [[90, 91, 92, 93]] and first["labels"].tolist() == [[91, 92, 93, 94]]
    assert second["tokens"].tolist() == [[110, 111, 112, 113]] and second["labels"].tolist() == [[111, 112, 113, 114]]
    assert first["position_ids"].tolist() == [[0, 1, 2, 3]] and first["loss_mask"].tolist() == [[1.0] * 4]


# --- learning rate ---


def test_learning_rates():
    options = "--lr-warmup-iters 4 --lr-decay-iters 16 --lr 1 --train-iters 20"
    args, optimizer = parse_arguments(options.split()), argparse.Namespace(param_groups=[{}])
    scheduler, rates = build_scheduler(args, optimizer), []
    for _ in range(args.train_iters):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(args.global_batch_size)
    decay = [0.1 + 0.45 * (1 + math.cos(math.pi * step / 12)) for step in range(13)]
    assert rates == pytest.approx([0.0, 0.25, 0.5, 0.75, *decay, 0.1, 0.1, 0.1])


# --- reports ---


def report(folder, first, last, loss, enabled=True):
    args = argparse.Namespace(output_dir=str(folder), save=None, train_iters=last)
    reporter = Reporter(args, first_step=first, enabled=enabled)
    reporter.event("start", title="a run", unigram_loss=3.0)
    for step in range(first, last + 1):
        reporter.step(step, loss=loss, grad_norm=1.0 if step % 2 else None, lr=1e-3, tokens_per_s=1234.0, seconds=0.1)
    reporter.close()


def test_a_resumed_run_replaces_the_steps_it_did_again(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report(tmp_path, 1, 6, 2.0)
    report(tmp_path, 5, 8, 1.0)
    steps = [record for record in read_log(tmp_path / LOG_NAME) if "event" not in record]
    assert [(record["step"], record["loss"]) for record in steps] == [(i, 2.0 if i < 5 else 1.0) for i in range(1, 9)]
    assert (tmp_path / PLOT_NAME).read_bytes().startswith(b"\x89PNG")
    assert set(steps[0]) == {"step", "loss", "grad_norm", "lr", "tokens_per_s", "seconds"}
    capsys.readouterr()
    report(tmp_path / "other_rank", 1, 2, 1.0, enabled=False)
    assert capsys.readouterr().out == "" and not (tmp_path / "other_rank").exists()


def test_of_two_runs_with_one_log_the_second_is_refused(tmp_path):
    args = argparse.Namespace(output_dir=str(tmp_path), save=str(tmp_path / "save"), train_iters=2)
    first = Reporter(args, first_step=1, enabled=True)
    first.event("start")
    with pytest.raises(ValueError, match=f"--output-dir '{tmp_path}' is being written to by another run: name another"):
        report(tmp_path, 1, 2, 1.0)
    assert [record["event"] for record in read_log(tmp_path / LOG_NAME)] == ["start"]
    other = argparse.Namespace(output_dir=str(tmp_path / "other"), save=args.save, train_iters=2)
    with pytest.raises(ValueError, match=f"--save '{args.save}' is being written to by another run: name another"):
        Reporter(other, first_step=1, enabled=True)
    first.close()
    Reporter(other, first_step=1, enabled=True).close()
    report(tmp_path, 2, 2, 1.0)


def test_a_run_without_matplotlib_ends_well(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report(tmp_path, 1, 2, 1.0)
    assert "matplotlib is not installed" in capsys.readouterr().out and not (tmp_path / PLOT_NAME).exists()
    assert read_log(tmp_path / LOG_NAME)
