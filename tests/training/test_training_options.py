"""Options of megatron-tree train: from files and the command line, and what is refused before any rank talks."""

import pytest

from megatron_tree.tools.training.arguments import MODEL_FILE, check_arguments, parse_arguments, write_model


def test_command_line_wins_over_file_wins_over_defaults(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("lr: 1e-3\nseq-length: 256\ncp_comm_type: p2p\nbf16: true\nresume: false\n")
    args = parse_arguments(["--config", str(file), "--seq-length", "128", "--no-bf16", "--num-layers", "2"])
    assert (args.lr, args.seq_length, args.cp_comm_type, args.bf16, args.resume) == (1e-3, 128, "p2p", False, False)
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size, args.num_query_groups) == (2, 128, 352, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sequence_length: 3", "sequence_length=3: unrecognized arguments: --sequence-length=3"),
        ("seq_length: long", "seq_length='long': argument --seq-length: invalid int value: 'long'"),
        ("seq_length: {a: 1}", "must be a value or a list of values"),
        ("lr: true", "lr=True: argument --lr: expected one argument"),
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
        ("--context-parallel-size 4 --seq-length 100", r"--seq-length 100 must be a multiple of 8 \(2 \* --context"),
        ("--context-parallel-size 3 --seq-length 96", "4 ranks were started"),
        ("--tensor-model-parallel-size 4 --num-query-groups 2", "--num-query-groups 2 must be a multiple of 4 .--te"),
        ("--num-query-groups 3", r"--num-attention-heads 8 must be a multiple of 3 \(--num-query-groups"),
        ("--global-batch-size 6", r"--global-batch-size 6 must be a multiple of 16 \(--micro-batch-size \* data"),
        ("--sequence-parallel", "Megatron-core: Cannot use sequence parallelism without tensor parallelism"),
        ("--lr-warmup-iters 200", "--lr-warmup-iters 200 must be less than --lr-decay-iters 200"),
        ("--clip-grad -1", "--clip-grad -1.0 must not be negative"),
        ("--save-interval 5", "--save-interval 5 has no effect without --save"),
        ("--resume", "--resume has no effect without --save"),
        ("--load x", "--load 'x' has no model.yaml: name a folder that --save or megatron-tree convert wrote"),
        ("--data-path absent", "--data-path 'absent' is not a folder of text files: name one, or .* run Megatron-LM's"),
    ],
)
def test_options_are_checked_before_any_communication(options, message):
    with pytest.raises(ValueError, match=message):
        check_arguments(parse_arguments(options.split()), 4)


def test_the_quickstart_fits(pytestconfig):
    check_arguments(parse_arguments(["--config", str(pytestconfig.rootpath / "configs/train/quickstart.yaml")]), 4)


def test_the_model_is_that_of_the_checkpoint(tmp_path):
    """What is loaded says its model, so that the command line need not; a folder to save to says it once it has one."""
    start, new = tmp_path / "start", tmp_path / "new"
    start.mkdir(), new.mkdir()
    write_model(parse_arguments(["--num-layers", "3", "--num-query-groups", "2"]), start)
    for options in (f"--load {start}", f"--resume --save {start}", f"--resume --save {new} --load {start}"):
        args = parse_arguments([*options.split(), "--num-layers", "3"])
        assert (args.num_layers, args.num_query_groups) == (3, 2)
        with pytest.raises(ValueError, match="--num-layers 2, but the model to load has 3: leave it out"):
            parse_arguments([*options.split(), "--num-layers", "2"])
    assert parse_arguments(["--resume", "--save", str(new)]).num_layers == 4
    text = (start / MODEL_FILE).read_text()
    for wrong, message in (
        (
            text.replace("vocab_size: 257", "vocab_size: 256"),
            "vocab_size=256 must be at least 257, the tokens of bytes",
        ),
        (text.replace("num_layers: 3", "num_layers: x"), "model.yaml: num_layers='x' must be of type int"),
        (text.replace("num_layers: 3", "layers: 3"), "model.yaml must hold num_layers, "),
        (
            text.replace("tokenizer_model: null", f"tokenizer_model: {new}"),
            "tokenizer_model='.*' is no folder with one",
        ),
    ):
        (start / MODEL_FILE).write_text(wrong)
        with pytest.raises(ValueError, match=message):
            check_arguments(parse_arguments(["--load", str(start)]), 4)
