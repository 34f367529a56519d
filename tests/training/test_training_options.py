"""Options of megatron-tree train: from files and the command line, and what is refused before any rank talks."""

import pytest

pytest.importorskip("megatron.core")

from megatron_tree import TreeConfig
from megatron_tree.training.arguments import check_arguments, parse_arguments
from megatron_tree.training.model import tree_config


def test_command_line_wins_over_file_wins_over_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("lr: 1e-3\nseq-length: 256\ncp_comm_type: [tree, p2p]\ngrid: 2x1\nbf16: true\nresume: false\n")
    args = parse_arguments(["--config", str(file), "--seq-length", "128", "--no-bf16", "--num-layers", "2"])
    assert (args.lr, args.seq_length, args.cp_comm_type, args.grid) == (1e-3, 128, ["tree", "p2p"], (2, 1))
    assert (args.bf16, args.resume) == (False, False)
    assert (args.min_lr, args.ffn_hidden_size, args.num_query_groups) == (1e-4, 352, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sequence_length: 3", "sequence_length=3: unrecognized arguments: --sequence-length=3"),
        ("seq_length: long", "seq_length='long': argument --seq-length: invalid int value: 'long'"),
        ("seq_length: {a: 1}", "must be a value or a list of values"),
        ("lr: true", "lr=True: argument --lr: expected one argument"),
        ("grid: 4", "grid=4: argument --grid: '4' is not a grid: write AxB"),
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


SPLIT = "--context-parallel-size 4 --num-query-groups 2 --cp-comm-type a2a+tree --hierarchical-context-parallel-sizes"


@pytest.mark.refuses(
    "megatron-tree train: options that do not fit each other or the ranks", when="before any rank talks"
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--context-parallel-size 4 --seq-length 100", r"seq_length=100 must be a multiple of 8 \(2 \* context"),
        ("--context-parallel-size 3 --seq-length 96", "4 ranks were started"),
        ("--tensor-model-parallel-size 4 --num-query-groups 2", "num_query_groups=2 must be a multiple of 4 .tensor"),
        ("--num-query-groups 3", r"num_attention_heads=8 must be a multiple of 3 \(num_query_groups"),
        ("--global-batch-size 6", r"global_batch_size=6 must be a multiple of 16 \(micro_batch_size \* data-parallel"),
        ("--context-parallel-size 4 --grid 2x1", "grid=2x1 must have one place for each of the 4 ranks of the tree"),
        (f"{SPLIT} 2 2 --grid 2x2", "grid=2x2 must have one place for each of the 2 ranks"),
        (f"{SPLIT} 2 4", "hierarchical_context_parallel_sizes=2 4 with cp_comm_type=a2a.tree: .* product is context"),
        ("--cp-comm-type a2a+tree --context-parallel-size 4", "hierarchical_context_parallel_sizes=none with cp_comm"),
        ("--hierarchical-context-parallel-sizes 2 2", "sizes=2 2 with cp_comm_type=tree: a2a.tree and a2a.p2p, and"),
        ("--topology moon", "topology 'moon' is unknown: name one of "),
        (
            "--context-parallel-size 2 --cp-comm-type tree p2p",
            r"Megatron-core: .* should equal to .* layers",
        ),
        ("--sequence-parallel", "Megatron-core: Cannot use sequence parallelism without tensor parallelism"),
        ("--lr-warmup-iters 200", "lr_warmup_iters=200 must be less than lr_decay_iters=200"),
        ("--clip-grad -1", "clip_grad=-1.0 must not be negative"),
        ("--save-interval 5", "save_interval=5 has no effect without --save"),
        ("--finetune", "finetune=True has no effect without --load"),
        ("--resume --save x --load y", "resume and load='y' exclude each other"),
        ("--data-path absent", "data_path='absent' is not a folder of text files: name one, or .* run Megatron-LM's"),
        ("--vocab-size 256", "vocab_size=256 must be at least 257, the tokens of bytes and end of document"),
    ],
)
def test_options_are_checked_before_any_communication(options, message):
    with pytest.raises(ValueError, match=message):
        check_arguments(parse_arguments(options.split()), 4)


def test_what_fits_is_taken(pytestconfig):
    check_arguments(parse_arguments(f"{SPLIT} 2 2 --grid 2x1".split()), 4)
    check_arguments(parse_arguments(["--config", str(pytestconfig.rootpath / "configs/train/quickstart.yaml")]), 4)


def test_options_win_over_the_file_of_tree_attention(tmp_path, monkeypatch):
    (tmp_path / "tree.yaml").write_text("grid: 2x2\nbackend: reference\nhead_chunks: 2\ntimeout_s: 5\n")
    monkeypatch.setenv("MEGATRON_TREE_CONFIG", str(tmp_path / "tree.yaml"))
    args = parse_arguments(["--context-parallel-size", "4", "--grid", "4x1", "--distributed-timeout-minutes", "2"])
    check_arguments(args, 4)
    assert tree_config(args) == TreeConfig(grid=(4, 1), backend="reference", head_chunks=2, timeout_s=120.0)


def test_a_tokenizer_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match="tokenizer_model='.*' is no folder with one of tokenizer.json"):
        parse_arguments(["--tokenizer-model", str(tmp_path)])
