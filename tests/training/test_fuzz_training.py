"""What training reads again with bytes flipped or cut: checkpoints, its log. See test_fuzz_files."""

import json

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("matplotlib")

from megatron_tree.training.checkpoint_files import MANIFEST, TRACKER, newest
from megatron_tree.training.checkpoint_safety import INDEX, check_index
from megatron_tree.training.report import read_log
from support.damage import chances, damaged, examples, reads
from support.ranks import run_distributed
from support.training_runs import train_all, write_text


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run with two checkpoints, and every byte of them."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "text")
    options = f"--data-path {text} --save {folder / 'kept'} --save-interval 2 --context-parallel-size 2"
    run_distributed(train_all, 2, [(folder / "run", options)], fresh=True)
    return folder, {path: path.read_bytes() for path in (folder / "kept").rglob("*") if path.is_file()}


@examples(24, 200)
def test_checkpoints(trained, seed, count):
    """The newest is taken only with the bytes that were written; else it is named and the one before taken."""
    folder, whole = trained
    newer, older = (folder / "kept" / f"iter_000000{n}" for n in (4, 2))
    for chance in chances(seed, count):
        path = chance.choice([path for path in sorted(whole) if path.parent == newer or path.name == TRACKER])
        path.write_bytes(damaged(whole[path], chance))
        if path.name == INDEX:
            reads(lambda: check_index(newer), newer)
        found = reads(lambda: newest(folder / "kept"), folder / "kept" / TRACKER)
        if found is not None:
            taken, said = found
            if taken == str(newer):
                assert all(p.read_bytes() == whole[p] for p in whole if p.name not in (MANIFEST, TRACKER))
            elif path.name == TRACKER:
                assert taken == str(older)
            else:
                assert taken == str(older) and str(newer) in said[0]
                assert path.name == MANIFEST or f"{path.name} " in said[0]
        path.write_bytes(whole[path])
    assert newest(folder / "kept") == (str(newer), [])


@examples(8, 60)
def test_logs(trained, tmp_path, seed, count):
    """Half lines don't keep a run from ending; whole ones count."""
    folder, _ = trained
    whole = (folder / "run" / "train.jsonl").read_bytes()
    lines = [json.loads(line) for line in whole.splitlines()]
    path = tmp_path / "train.jsonl"
    for chance in chances(seed, count):
        cut = chance.randrange(len(whole))
        path.write_bytes(whole[:cut])
        full = whole[:cut].count(b"\n")
        assert read_log(path) in (lines[:full], lines[: full + 1])
        path.write_bytes(damaged(whole, chance))
        assert len(read_log(path)) <= len(lines) + 64
