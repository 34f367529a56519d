"""What training reads again with bytes flipped or cut: checkpoints, its log. See test_fuzz_files."""

import json

import pytest
import torch
from torch.distributed import checkpoint

from megatron_tree.tools.training.checkpoint import (
    INDEX,
    MANIFEST,
    TRACKER,
    begin,
    check_index,
    checkpoint_folder,
    finish,
    newest,
)
from megatron_tree.tools.training.report import read_log
from support.damage import chances, damaged, examples, reads


@pytest.fixture
def whole(tmp_path):
    """Every byte of two checkpoints in `tmp_path`, by file."""
    for iteration in (2, 4):
        final = checkpoint_folder(tmp_path, iteration)
        folder = begin(final)
        tensors = {"weights": torch.randn(64), "lr": torch.tensor(0.1)}
        checkpoint.save(tensors, checkpoint_id=str(folder), no_dist=True)
        torch.save({"iteration": iteration}, folder / "common.pt")
        finish(final, None)
    return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@examples(24, 200)
def test_checkpoints(tmp_path, whole, seed, count):
    """The newest is taken only with the bytes that were written; else it is named and the one before taken."""
    newer, older = (tmp_path / f"iter_000000{n}" for n in (4, 2))
    for chance in chances(seed, count):
        path = chance.choice([path for path in sorted(whole) if path.parent == newer or path.name == TRACKER])
        path.write_bytes(damaged(whole[path], chance))
        if path.name == INDEX:
            reads(lambda: check_index(newer), newer)
        found = reads(lambda: newest(tmp_path), tmp_path / TRACKER)
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
    assert newest(tmp_path) == (str(newer), [])


@examples(8, 60)
def test_logs(tmp_path, seed, count):
    """Half lines don't keep a run from ending; whole ones count."""
    lines = [{"event": "start", "title": "a run"}, *({"step": n, "loss": 5.0 / n, "lr": 1e-3} for n in range(1, 5))]
    whole = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path = tmp_path / "train.jsonl"
    for chance in chances(seed, count):
        cut = chance.randrange(len(whole))
        path.write_bytes(whole[:cut])
        full = whole[:cut].count(b"\n")
        assert read_log(path) in (lines[:full], lines[: full + 1])
        path.write_bytes(damaged(whole, chance))
        assert len(read_log(path)) <= len(lines) + 64
