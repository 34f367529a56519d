"""Options of megatron-tree train: from files and the command line, and what is refused before any rank talks."""

import importlib.util

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("yaml")

from megatron_tree import TreeConfig
from megatron_tree.training.arguments import check_arguments, parse_arguments
from megatron_tree.training.model import tree_config


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
    assert (args.min_lr, args.ffn_hidden_size, args.num_query_groups) == (1e-4, 352, 8)


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
        ("cp_comm_type: ring", "cp_comm_type='ring' must be one of 'tree'"),
        ("window_size: wide", "'wide' is no pair of whole numbers, for instance 16,0"),
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
    "megatron-tree train: options that do not fit each other or the ranks", when="before any rank talks"
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--context-parallel-size 4 --seq-length 100",
            "seq_length=100 must be a multiple of 2 \\* context_parallel_size = 8",
        ),
        ("--context-parallel-size 3 --seq-length 96", "4 ranks were started"),
        ("--window-size 3", r"window_size=\(3,\) must be two numbers, LEFT,RIGHT"),
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
        ("--head-chunks 3", "head_chunks=3 must divide the 8 KV heads of a rank"),
        ("--topology moon", "topology 'moon' is unknown: name one of "),
        ("--context-parallel-size 4 --grid 2x2 --cp-comm-type p2p", "grid=2x2 has no effect with cp_comm_type=p2p"),
        (
            "--context-parallel-size 2 --cp-comm-type tree p2p",
            r"cp_comm_type \(2\) should equal to .* layers \(4\)",
        ),
        ("--lr-warmup-iters 200", "lr_warmup_iters=200 must be less than train_iters=200"),
        ("--min-lr 1", "min_lr=1.0 must not exceed"),
        ("--train-iters 0", "train_iters=0 must be positive"),
        ("--clip-grad -1", "clip_grad=-1.0 must not be negative"),
        ("--save-interval 5", "no effect without --save"),
        ("--lr-warmup-iters 9 --lr-decay-iters 9", "lr_warmup_iters=9 must be less than lr_decay_iters=9"),
        ("--attention-dropout 1", "attention_dropout=1.0 must be at least 0 and less than 1"),
        ("--hidden-dropout -0.1", "hidden_dropout=-0.1 must be at least 0"),
        ("--sequence-parallel", "sequence_parallel has no effect with tensor_model_parallel_size=1"),
        ("--hierarchical-context-parallel-sizes 2 2", "has no effect with cp_comm_type=tree"),
        ("--resume", "resume=True has no effect without --save"),
        ("--keep-checkpoints 3", "keep_checkpoints=3 has no effect without --save"),
        ("--keep-checkpoints 0 --save x", "keep_checkpoints=0 must be positive"),
        ("--resume --save x --load y", "resume and load='y' exclude each other"),
        ("--data-path absent", "data_path='absent' is not a folder of text files: name one, or .* run Megatron-LM's"),
        ("--vocab-size 256", "vocab_size=256 must be at least 257, the tokens of bytes and end of document"),
        ("--kv-channels 7", "kv_channels=7 must be even"),
        ("--finetune", "finetune=True has no effect without --load"),
        ("--hidden-size 100", "hidden_size=100 must be a multiple of 2 \\* num_attention_heads = 16"),
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


@pytest.mark.parametrize("written", ["16,0", "(16,0)", "16 0"])
def test_windows_are_written_as_in_megatron_lm(written, tmp_path):
    assert parse_arguments(["--window-size", *written.split()]).window_size == (16, 0)
    (tmp_path / "c.yaml").write_text(f"window_size: {written if ' ' not in written else '[16, 0]'}")
    assert parse_arguments(["--config", str(tmp_path / "c.yaml")]).window_size == (16, 0)


def test_options_win_over_the_file_of_tree_attention(tmp_path, monkeypatch):
    (tmp_path / "tree.yaml").write_text("grid: 2x2\nbackend: reference\nhead_chunks: 2\ntimeout_s: 5\n")
    monkeypatch.setenv("MEGATRON_TREE_CONFIG", str(tmp_path / "tree.yaml"))
    args = parse_arguments(["--context-parallel-size", "4", "--grid", "4x1", "--distributed-timeout-minutes", "2"])
    check_arguments(args, 4)
    assert tree_config(args) == TreeConfig(grid=(4, 1), backend="reference", head_chunks=2, timeout_s=120.0)
    (tmp_path / "other.yaml").write_text("shedule: ring\n")
    monkeypatch.setenv("MEGATRON_TREE_CONFIG", str(tmp_path / "other.yaml"))
    with pytest.raises(ValueError, match="unknown key 'shedule': choose from schedule, grid"):
        check_arguments(args, 4)


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    text = capsys.readouterr().out
    assert "deepspeed --num_gpus 4" in text
    assert "--context-parallel-size" in text


@pytest.mark.parametrize("options", ["--data-path 0.3 a 0.7 b", "--split 949,50,1", "--merge-file x", "--fp16"])
def test_options_of_megatron_lm_are_sent_there(options, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(options.split())
    assert "other options run Megatron-LM's pretrain_gpt.py with bash launch/megatron_lm.sh" in capsys.readouterr().err


def test_two_level_context_parallelism():
    options = "--context-parallel-size 4 --num-query-groups 2 --cp-comm-type a2a+tree"
    check_arguments(parse_arguments(f"{options} --hierarchical-context-parallel-sizes 2 2 --grid 2x1".split()), 4)
    for more, message in (
        ("", "hierarchical_context_parallel_sizes=none must be two numbers .* cp_comm_type=a2a\\+tree needs them"),
        ("--hierarchical-context-parallel-sizes 2 4", "must be two numbers whose product is context_parallel_size=4"),
        (
            "--hierarchical-context-parallel-sizes 2 2 --grid 2x2",
            "grid=2x2 must have 2 places, .*parallel_sizes=2 2",
        ),
        ("--hierarchical-context-parallel-sizes 2 2 --num-attention-heads 2 --cp-comm-type a2a", "no effect with"),
        (
            "--cp-comm-type a2a --num-attention-heads 3 --num-query-groups 3 --hidden-size 96",
            "cp_comm_type=a2a: 4 ranks can't share 3 query heads; take 3 ranks or fewer",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            check_arguments(parse_arguments(f"{options} {more}".split()), 4)


def test_a_tokenizer_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match="tokenizer_model='.*' is no folder with one of tokenizer.json"):
        parse_arguments(["--tokenizer-model", str(tmp_path)])


def test_tensorboard_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tensorboard_dir='x' needs the package tensorboard: pip install"):
        check_arguments(parse_arguments(["--tensorboard-dir", "x"]), 4)
