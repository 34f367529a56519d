"""`bench documents`: every way to shard packed documents is checked, and what it sends is counted."""

import csv

import pytest

from megatron_tree.bench import command as bench
from megatron_tree.bench import documents
from megatron_tree.layout import spread_documents
from support.assumed_links import assume_links

SMALL = ["documents", "--ranks", "2", "--seq-len", "1024", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
SMALL += ["--dtype", "fp32", "--steps", "3", "--budget", "0.1"]


@pytest.fixture(autouse=True)
def assumed_links(monkeypatch):
    assume_links(monkeypatch, "host")


def test_documents_are_as_many_as_asked_for():
    lengths = documents.lengths_of(8192)
    assert sum(lengths) == 8192 and max(lengths) <= 81 and 160 <= len(lengths) <= 260
    assert lengths == documents.lengths_of(8192)


def test_all_contenders(tmp_path, capfd):
    assert bench.main([*SMALL, "--out", str(tmp_path)]) == 0, capfd.readouterr().err
    rows = {(r["schedule"], r["part"]): r for r in csv.DictReader((tmp_path / "results.csv").open())}
    totals = {name: rows[name, "total"] for name in documents.CONTENDERS}
    assert all(0 < float(total["error"]) <= 1 and float(total["ms"]) > 0 for total in totals.values())
    sent = {name: int(total["sent_bytes"]) for name, total in totals.items()}
    assert sent == {name: int(total["predicted_sent_bytes"]) for name, total in totals.items()}
    assert 3 * sent["auto"] <= min(sent[name] for name in ("ring", "kv_gather", "ulysses", "one_by_one"))


def test_no_speed_of_documents_that_see_others(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(documents, "layout_of", lambda name, lengths, world: spread_documents((sum(lengths),), world))
    assert bench.main([*SMALL, "--schedules", "auto", "--out", str(tmp_path / "out")]) == 1
    assert "auto is wrong" in capfd.readouterr().err


def test_batches_are_refused(tmp_path, capfd):
    assert bench.main([*SMALL, "--batch", "2", "--out", str(tmp_path / "out")]) == 1
    assert "--batch 2: documents are packed in one row" in capfd.readouterr().err
