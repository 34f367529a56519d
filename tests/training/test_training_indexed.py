"""Indexed datasets: made by preprocess, blended by Megatron-core, in an order that ranks and resuming share."""

import json
import shutil

import numpy as np
import pytest
import torch.distributed as dist

pytest.importorskip("megatron.core")
pytest.importorskip("yaml")
pytest.importorskip("tqdm")

from megatron_tree.training import preprocess
from megatron_tree.training.arguments import parse_arguments
from megatron_tree.training.data import EOD
from megatron_tree.training.indexed import parse_data_path, parse_split
from support.indexed_data import open_corpus, write_indexed
from support.ranks import run_distributed
from support.training_runs import losses, train_all


@pytest.fixture
def dataset(tmp_path):
    """Prefixes of two indexed datasets, one of them in capitals."""
    return [
        write_indexed(tmp_path, "a", ["tree", "leaf", "root"], 120),
        write_indexed(tmp_path, "b", ["RING", "ROUND"], 60),
    ]


def documents(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return [np.array(tokens) for tokens in IndexedDataset(prefix)]


# --- preprocess ---


def test_text_and_jsonl_become_documents(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.txt").write_text("zwei, größer")
    (tmp_path / "in" / "a.txt").write_text("one")
    (tmp_path / "in" / "empty.txt").write_text("")
    lines = [json.dumps({"body": "three"}), "", json.dumps({"body": "four", "text": 5})]
    (tmp_path / "more.jsonl").write_text("\n".join(lines))
    prefix = str(tmp_path / "out" / "data")
    options = ["--input", str(tmp_path / "in"), str(tmp_path / "more.jsonl"), "--json-key", "body", "--output", prefix]
    assert preprocess.main(options) == 0
    assert "4 documents, 30 tokens, vocabulary 257" in capsys.readouterr().out
    texts = [bytes(tokens[:-1].astype(np.uint8)).decode() for tokens in documents(prefix)]
    assert texts == ["one", "zwei, größer", "three", "four"]
    assert all(tokens[-1] == EOD for tokens in documents(prefix))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"data.bin", "data.idx"}


def test_a_hugging_face_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<end>": 0, "tree": 1, "leaf": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = str(tmp_path / "words")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    (tmp_path / "a.txt").write_text("leaf tree leaf")
    prefix = str(tmp_path / "data")
    options = ["--input", str(tmp_path / "a.txt"), "--tokenizer-model", folder, "--output", prefix]
    assert preprocess.main(options) == 0
    assert [tokens.tolist() for tokens in documents(prefix)] == [[2, 1, 2, 0]]
    args = parse_arguments(["--data-path", prefix, "--tokenizer-model", folder])
    assert args.vocab_size == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--input absent.txt", "input='absent.txt' does not exist"),
        ("--input .", "input='.' holds no file *.txt: name the ending with --suffix"),
        ("--input bad.jsonl", "bad.jsonl:2 has no text under 'text'"),
        ("--input broken.jsonl", "broken.jsonl:1 is not JSON"),
        ("--input deep.jsonl", "deep.jsonl:1 is not JSON"),
        ("--input long.jsonl", "long.jsonl:1 is not JSON"),
        ("--input half.jsonl", "half.jsonl:2: character 1 is an unpaired UTF-16 surrogate"),
        ("--input latin", "latin is not UTF-8 text"),
        ("--input empty", "no file holds any text"),
        ("--input latin --output there", "there.bin exists; delete it or choose another prefix"),
        ("--input empty --tokenizer-model ./folder", "tokenizer_model='./folder' can't be loaded"),
    ],
)
def test_mistakes_are_explained_and_leave_no_files(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"txt": "not"}\n')
    (tmp_path / "broken.jsonl").write_text("{text}\n")
    (tmp_path / "deep.jsonl").write_text('{"text": ' + "[" * 100_000)
    (tmp_path / "long.jsonl").write_text('{"text": "fine", "id": ' + "7" * 5000 + "}\n")
    (tmp_path / "half.jsonl").write_text('{"text": "fine"}\n{"text": "a\\ud83d"}\n')
    (tmp_path / "latin").write_bytes(b"gr\xf6\xdfer")
    (tmp_path / "empty").write_text("")
    (tmp_path / "there.bin").write_text("")
    before = {path.name for path in tmp_path.iterdir()}
    assert preprocess.main(["--output", "out", *options.split()]) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == before


# --- samples ---


def test_an_epoch_has_every_token_once(dataset):
    corpus = open_corpus(f"--data-path {dataset[0]} --vocab-size 257 --split 90,10 --seq-length 16")
    assert corpus.num_documents == 120
    assert corpus.unigram is None
    train, valid = (np.concatenate(part) for part in (documents(dataset[0])[:108], documents(dataset[0])[108:]))
    assert corpus.num_tokens == train.size
    assert len(corpus.train) == (train.size - 1) // 16
    seen = corpus.train.batch(range(len(corpus.train)))
    assert seen.shape == (len(corpus.train), 17)
    missing = np.bincount(train, minlength=257) - np.bincount(seen[:, :-1].ravel(), minlength=257)
    assert missing.min() >= 0
    assert missing.sum() == train.size - 16 * len(corpus.train), "only what fills no sample"
    assert set(corpus.valid.batch([0, 1, 2]).ravel()) <= set(valid)


@pytest.fixture
def alone():
    """A process group of one rank, which Megatron's blended datasets ask for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_blends_follow_their_weights(dataset, alone):
    options = "--vocab-size 257 --train-iters 25 --eval-iters 0 --data-path"
    rows = open_corpus(f"{options} 3 {dataset[0]} 1 {dataset[1]}").train.batch(range(100))
    capitals = ((rows >= ord("A")) & (rows <= ord("Z"))).any(axis=1)
    assert capitals.sum() == 25
    with pytest.raises(ValueError, match="train_iters=100000 needs 400000 samples, but data_path without weights"):
        open_corpus(f"{options} {dataset[0]} {dataset[1]} --train-iters 100000")


def test_the_digest_tells_data_and_order_apart(dataset, tmp_path):
    options = f"--data-path {dataset[0]} --vocab-size 257"
    first = open_corpus(options)
    assert open_corpus(options).digest == first.digest, "from the cache"
    assert open_corpus(f"{options} --train-iters 5").digest == first.digest, "the same epoch, longer"
    for change in ("--seed 5", "--split 80,20", "--train-iters 1000", "--seq-length 16"):
        assert open_corpus(f"{options} {change}").digest != first.digest, change
    for ending in (".bin", ".idx"):
        (tmp_path / f"a{ending}").unlink()
    write_indexed(tmp_path, "a", ["XYZ"], 120)
    other = open_corpus(options)
    assert other.digest != first.digest
    assert other.num_tokens == len(np.concatenate(documents(dataset[0])[:114])), "no order of the former files is used"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--data-path absent --vocab-size 9",
            "data_path='absent' is not a folder of text, and absent.idx does not exist",
        ),
        ("--data-path 0.5 {a} 0.5", "data_path='0.5' is not a folder of text, and 0.5.idx does not exist"),
        ("--data-path 0 {a} 1 {b}", "give prefixes alone, or each with a positive weight"),
        ("--data-path {a}", "give the number of tokens by --vocab-size or --tokenizer-model"),
        ("--data-path {a} --vocab-size 257 --split half", "split='half' must be three numbers like 949,50,1"),
        ("--data-path {a} --vocab-size 257 --split 0,1,1", "split='0,1,1' must be three numbers"),
        ("--data-path {a} --vocab-size 257 --assert-below-unigram", "assert_below_unigram=0.5 needs a folder of text"),
        ("--split 90,10", "split=90,10 has no effect on text"),
        ("--vocab-size 300", "vocab_size=300, but text is trained on as bytes"),
        ("--data-path {a} --vocab-size 257 --split 1,0,0", "leaves 0 tokens of {a} for validation"),
        ("--data-path {a} --vocab-size 257 --seq-length 1000000", "less than a sample of seq_length=1000000"),
    ],
)
def test_options_that_do_not_fit_the_data(dataset, options, message):
    names = dict(zip("ab", dataset, strict=True))
    with pytest.raises(ValueError) as error:
        open_corpus(options.format(**names))
    assert message.format(**names) in str(error.value)


def test_damaged_files_are_named(dataset, tmp_path):
    options = f"--data-path {dataset[0]} --vocab-size 257"
    with pytest.raises(ValueError, match="vocab_size=50, but the data hold token"):
        open_corpus(options.replace("257", "50")).train.batch([0])
    open_corpus(options)
    for order in (tmp_path / "index-cache").glob("*train-shuffle_index.npy"):
        order.write_bytes(order.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"index-cache': .* the one that is there is damaged .*: delete the folder"):
        open_corpus(options)
    shutil.rmtree(tmp_path / "index-cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/x': the order can't be written there"):
        open_corpus(f"{options} --data-cache-path {tmp_path / 'file' / 'x'}")
    data, index = (tmp_path / f"a{ending}" for ending in (".bin", ".idx"))
    whole = data.read_bytes()
    data.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match=r"a.bin holds \d+ bytes, but .*a.idx describes"):
        open_corpus(options)
    data.write_bytes(whole)
    index.write_bytes(index.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"a\.idx is damaged"):
        open_corpus(options)


def test_prefixes_and_splits():
    assert parse_split("949,50,1") == pytest.approx([0.949, 0.05, 0.001])
    assert parse_split("3") == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="'no/such' is not a folder of text"):
        parse_data_path(["no/such"])


# --- training ---


def test_ranks_and_resumed_runs_see_the_same_samples(tmp_path, dataset):
    """One rank, context parallelism, data parallelism, and a resumed run: the same losses."""
    text = f"--data-path 2 {dataset[0]} 1 {dataset[1]} --vocab-size 257 --train-iters 6 --lr-decay-iters 6"
    kept = tmp_path / "kept"
    runs = {
        "cp": f"{text} --context-parallel-size 2",
        "dp": text,
        "half": f"{text} --train-iters 3 --save {kept} --context-parallel-size 2",
        "rest": f"{text} --load {kept} --context-parallel-size 2",
        "other": f"{text.replace(' 2 ', ' 3 ')} --load {kept}",
    }
    outcomes = run_distributed(train_all, 2, [(tmp_path / n, options) for n, options in runs.items()], fresh=True)
    assert [type(outcome).__name__ for outcome in outcomes[0]] == ["Outcome"] * 4 + ["str"], outcomes[0]
    assert "the training data, or their order, are not those that" in outcomes[0][4]
    assert outcomes[0] == outcomes[1]
    expected = losses(tmp_path / "cp")
    assert sorted(expected) == [1, 2, 3, 4, 5, 6]
    assert losses(tmp_path / "dp") == {step: pytest.approx(loss, rel=1e-5) for step, loss in expected.items()}
    assert losses(tmp_path / "half") | losses(tmp_path / "rest") == expected
