"""`bench generate` and `serve` on real ranks: no speed of a wrong result, bytes as computed."""

import csv
import json

import pytest

pytest.importorskip("transformers")

from megatron_tree.core.attention import decode
from megatron_tree.tools.bench import command as bench
from support.assumed_links import assume_links

LAYERS, KV_HEADS, D = 2, 2, 16
SHAPE_OPTIONS = ["--layers", LAYERS, "--heads", 4, "--kv-heads", KV_HEADS, "--head-dim", D]


@pytest.fixture(autouse=True)
def _assumed_links(monkeypatch):
    assume_links(monkeypatch, "host")


def generate(out, *options):
    """Exit status, and rows by schedule."""
    given = ["generate", "--ranks", 2, *SHAPE_OPTIONS, "--out", out, "--new-tokens", 4, *options]
    status = bench.main(list(map(str, given)))
    rows = csv.DictReader((out / "results.csv").open()) if status == 0 else []
    return status, {r["schedule"]: r for r in rows}


@pytest.mark.parametrize("cache", ["prefilled", "made-up"])
def test_generate(tmp_path, capfd, cache):
    status, rows = generate(tmp_path, "--prompt-tokens", 256, "--cache", cache, "--prefill-chunk", 64)
    said = capfd.readouterr()
    assert status == 0, said.err
    assert said.out.index("gave the plain model's tokens") < said.out.index("ring  ")
    assert list(rows) == ["plain", "auto", "ring", "allreduce"]
    token = LAYERS * 2 * KV_HEADS * D * 4  # bytes in the cache
    assert int(rows["plain"]["held_bytes"]) == (256 + 3) * token
    for name in ("auto", "ring", "allreduce"):
        assert 0 <= int(rows[name]["held_bytes"]) - 256 // 2 * token <= 16 * token
        assert float(rows[name]["error"]) < 1e-3
        assert bool(rows[name].get("first_token_ms")) == (cache == "prefilled")
    # a ring sends positions, too: rows of a paged cache are not equally long
    shard = 256 // 2 * token
    assert shard < int(rows["ring"]["sent_bytes"]) < 1.5 * shard
    assert int(rows["auto"]["sent_bytes"]) < shard / 10
    assert float(rows["auto"]["ratio"]) == 1.0
    assert (tmp_path / "results.png").read_bytes()[:4] == b"\x89PNG"
    assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == 4


def test_a_wrong_token_shows_no_speed(tmp_path, capfd, monkeypatch):
    right = decode.PlannedDecode.run

    def wrong(*args):
        out, lse = right(*args)
        return -out, lse

    monkeypatch.setattr(decode.PlannedDecode, "run", wrong)
    status, _ = generate(tmp_path, "--prompt-tokens", 128, "--cache", "made-up")
    said = capfd.readouterr()
    assert status == 1
    assert "the plain model [" in said.err
    assert "median ms" not in said.out and not (tmp_path / "results.csv").exists()


@pytest.mark.slow
def test_many_requests(tmp_path, capfd, monkeypatch):
    options = ["--requests", 3, "--prompt-tokens", 2, 9, "--new-tokens", 3, "--turns", 1, "--ranks", 2]
    given = list(map(str, ["serve", *options, "--out", tmp_path]))
    assert bench.main(given) == 0, capfd.readouterr().err
    assert "the same tokens in all turns" in capfd.readouterr().out
    plain, ours = csv.DictReader((tmp_path / "results.csv").open())
    assert (plain["contender"], plain["ranks"], ours["contender"], ours["ranks"]) == ("plain", "1", "ours", "2")
    assert all(float(row["tokens_per_cpu_s"]) == pytest.approx(9 / float(row["cpu_s"]), 1e-4) for row in (plain, ours))
    right = decode.PlannedDecode.run
    monkeypatch.setattr(decode.PlannedDecode, "run", lambda *args: (-right(*args)[0], None))
    assert bench.main(given) == 1
    assert "the padded batch [" in capfd.readouterr().err
