"""The pieces of launch/train_gpt.py that need no ranks: text, options, log."""

import json
import math

import numpy as np
import pytest

pytest.importorskip("yaml")

from megatron_tree.training.arguments import parse_arguments
from megatron_tree.training.check import check_arguments
from megatron_tree.training.data import EOD, PackedText, load_corpus, microbatch_indices
from megatron_tree.training.distributed import launched_rank
from megatron_tree.training.report import LOG_NAME, PLOT_NAME, read_log
from support.training_runs import reporter_of

# --- text ---


def write_documents(folder, texts):
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


def test_documents_are_packed_and_separated(tmp_path):
    texts = {f"d/{i}.py": bytes([65 + i]) * (5 + i) for i in range(4)}
    write_documents(tmp_path, texts | {"empty.py": b"", "note.txt": b"no", "site-packages/x.py": b"no"})
    corpus = load_corpus(tmp_path, seq_length=4, seed=3, valid_fraction=0.25)
    assert corpus.num_documents == 4
    train, valid = (
        bytes(np.where(t.tokens == EOD, 0, t.tokens).astype(np.uint8)).split(b"\0")
        for t in (corpus.train, corpus.valid)
    )
    assert (len(train), len(valid)) == (4, 2), "documents end in EOD"
    assert sorted(train[:-1] + valid[:-1]) == sorted(texts.values())
    again = load_corpus(tmp_path, seq_length=4, seed=3, valid_fraction=0.25)
    assert again.digest == corpus.digest
    assert load_corpus(tmp_path, seq_length=4, seed=4, valid_fraction=0.25).digest != corpus.digest


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
    with pytest.raises(ValueError, match="is not a folder"):
        load_corpus(tmp_path / "absent", seq_length=4, seed=0)
    write_documents(tmp_path, {"a.py": b"abc"})
    with pytest.raises(ValueError, match="1 files"):
        load_corpus(tmp_path, seq_length=4, seed=0)
    write_documents(tmp_path, {"b.py": b"abc"})
    with pytest.raises(ValueError, match="4 tokens of text don't fill one sample of seq_length=4"):
        load_corpus(tmp_path, seq_length=4, seed=0)


@pytest.mark.parametrize(("dp_size", "micro"), [(1, 2), (1, 8), (2, 2), (4, 1), (4, 2)])
def test_a_global_batch_is_the_same_in_every_layout(dp_size, micro):
    sizes = {"micro_batch_size": micro, "global_batch_size": 8, "dp_size": dp_size}
    ranks = [[i for batch in microbatch_indices(24, dp_rank=r, **sizes) for i in batch] for r in range(dp_size)]
    assert {len(rank) for rank in ranks} == {8 // dp_size}
    assert sorted(i for rank in ranks for i in rank) == list(range(24, 32))


# --- options ---


def test_command_line_wins_over_file_wins_over_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "lr: 1e-3\nseq-length: 256\ncp_comm_type: [tree, p2p]\ngrid: 2x1\nbf16: true\nwindow_size: [8, 0]\n"
    )
    args = parse_arguments(["--config", str(file), "--seq-length", "128", "--no-bf16", "--num-layers", "2"])
    assert (args.lr, args.seq_length, args.cp_comm_type, args.grid, args.bf16) == (
        1e-3,
        128,
        ["tree", "p2p"],
        (2, 1),
        False,
    )
    assert args.window_size == (8, 0)
    assert (args.min_lr, args.ffn_hidden_size, args.num_query_groups, args.kv_channels) == (1e-4, 352, 8, 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sequence_length: 3", "unknown option 'sequence_length'"),
        ("seq_length: long", "seq_length='long' must be of type int"),
        ("seq_length: [1, 2]", "must be a single value"),
        ("bf16: 1", "bf16=1 must be true or false"),
        ("lr: true", "lr=True is not a switch"),
        ("grid: 4", "grid=4: '4' is not a grid: write AxB"),
        ("softmax_type: sink", "must be one of 'vanilla'"),
        ("window_size: 3", "must be a list of 2"),
        ("- lr", "must contain options"),
    ],
)
def test_bad_files_are_named(tmp_path, text, message):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse_arguments(["--config", str(file)])


def test_absent_file_is_named():
    with pytest.raises(ValueError, match="config='absent.yaml' does not exist"):
        parse_arguments(["--config", "absent.yaml"])


@pytest.mark.refuses(
    "launch/train_gpt.py: options that do not fit each other or the ranks", when="before any rank talks"
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--context-parallel-size 4 --seq-length 100",
            "seq_length=100 must be a multiple of 2 \\* context_parallel_size = 8",
        ),
        ("--context-parallel-size 3 --seq-length 96", "4 ranks were started"),
        (
            "--tensor-model-parallel-size 4 --num-attention-heads 6",
            "num_attention_heads=6 must be a multiple of tensor",
        ),
        ("--tensor-model-parallel-size 4 --num-query-groups 2", "num_query_groups=2 must be a multiple of tensor"),
        ("--num-query-groups 3", "num_attention_heads=8 must be a multiple of num_query_groups=3"),
        ("--pipeline-model-parallel-size 4 --num-layers 6", "num_layers=6 must be a multiple of pipeline"),
        (
            "--global-batch-size 6",
            "global_batch_size=6 must be a multiple of micro_batch_size=4 \\* data-parallel size 4",
        ),
        (
            "--context-parallel-size 4 --grid 2x1",
            "grid=2x1 must have 4 places, one for each rank of the tree",
        ),
        ("--grid 2x1", "grid=2x1 has no effect with context_parallel_size=1"),
        ("--context-parallel-size 4 --grid-backward 2x1", "grid_backward=2x1 must have 4 places"),
        ("--head-groups 3", "head_groups=3 must divide the 8 KV heads of a rank"),
        ("--topology moon", "topology 'moon' is unknown: name one of "),
        ("--context-parallel-size 4 --grid 2x2 --cp-comm-type p2p", "grid=2x2 has no effect with cp_comm_type=p2p"),
        ("--cp-comm-type ring", "cp_comm_type=ring is unknown"),
        ("--cp-comm-type tree p2p", "cp_comm_type has 2 entries"),
        ("--lr-warmup-iters 200", "lr_warmup_iters=200 must be less than train_iters=200"),
        ("--min-lr 1", "min_lr=1.0 must not exceed"),
        ("--train-iters 0", "train_iters=0 must be positive"),
        ("--clip-grad -1", "clip_grad=-1.0 must not be negative"),
        ("--recompute-granularity full", "recompute_method must be"),
        ("--save-interval 5", "no effect without --save"),
    ],
)
def test_options_are_checked_before_any_communication(options, message):
    with pytest.raises(ValueError, match=message):
        check_arguments(parse_arguments(options.split()), 4)


def test_shipped_configurations_fit_four_ranks(pytestconfig):
    files = sorted((pytestconfig.rootpath / "configs" / "train").glob("*.yaml"))
    assert files
    for file in files:
        check_arguments(parse_arguments(["--config", str(file)]), 4)


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    text = capsys.readouterr().out
    assert "deepspeed --num_gpus 4" in text
    assert "--context-parallel-size" in text


def test_missing_launcher_is_explained():
    with pytest.raises(ValueError, match="LOCAL_RANK, WORLD_SIZE not set: start this script by the launcher"):
        launched_rank({"RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"})


# --- log ---


def report(folder, first, last, loss):
    reporter = reporter_of(folder, first, last)
    reporter.event("start", title="a run", unigram_loss=3.0)
    for step in range(first, last + 1):
        reporter.step(step, loss=loss, grad_norm=1.0, lr=1e-3, tokens_per_s=10.0, seconds=0.1)
    reporter.validation(last, loss)
    reporter.close()


def test_log_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report(tmp_path, 1, 40, 2.5)
    lines = capsys.readouterr().out.splitlines()
    assert 10 <= len([line for line in lines if line.startswith("step")]) <= 13
    records = [json.loads(line) for line in (tmp_path / LOG_NAME).read_text().splitlines()]
    assert records[0]["event"] == "start"
    assert set(records[1]) == {"step", "loss", "grad_norm", "lr", "tokens_per_s", "seconds"}
    assert (tmp_path / PLOT_NAME).read_bytes().startswith(b"\x89PNG")


def test_resumed_run_replaces_the_steps_it_did_again(tmp_path):
    pytest.importorskip("matplotlib")
    report(tmp_path, 1, 6, 2.0)
    report(tmp_path, 5, 8, 1.0)
    steps = [record for record in read_log(tmp_path / LOG_NAME) if "event" not in record]
    assert [(record["step"], record["loss"]) for record in steps] == [(i, 2.0 if i < 5 else 1.0) for i in range(1, 9)]


def test_other_ranks_are_silent(tmp_path, capsys):
    reporter = reporter_of(tmp_path / "x", 1, 2, log_interval=1, enabled=False)
    reporter.step(1, loss=2.0, grad_norm=1.0, lr=1e-3, tokens_per_s=10.0, seconds=0.1)
    reporter.close()
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "x").exists()
