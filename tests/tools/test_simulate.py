"""`bench simulate`: its files, the formulas in the planner's costs, and the tables that the docs show."""

import csv
from pathlib import Path

import pytest

from megatron_tree.bench import paper, pays, predictions, simulate
from megatron_tree.bench.command import main
from megatron_tree.plan import load_topology

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_files_of_the_paper(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(simulate, "RANKS", (8, 64))
    assert main(["simulate", "paper", "--out", str(tmp_path / "out"), "--topology", "gb200_nvl72"]) == 0
    out = capsys.readouterr().out
    assert "simulated, not measured" in out and "Llama 3.1 8B, 8 x dgx_h100" in out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"simulate.csv", "simulate-latency.png", "simulate-memory.png", "simulate-scale.png"}
    assert all((tmp_path / "out" / name).stat().st_size > 5_000 for name in names)
    rows = list(csv.DictReader((tmp_path / "out" / "simulate.csv").open()))
    assert {row["part"] for row in rows} == {"latency", "memory", "volume", "tables", "decode", "training"}
    assert {row["topology"] for row in rows if row["part"] == "training"} == {"gb200_nvl72"}


def test_volume_and_memory_are_the_papers():
    """Our states travel in fp32; a ring makes p - 1 shifts, and holds one shard more because it keeps the cache."""
    for row in simulate.volume():
        if row.schedule == "allreduce":
            assert row.sent_bytes == pytest.approx(row.published * 4 / paper.BYTES_PER_WORD)
        if row.schedule == "ring":
            assert row.sent_bytes == pytest.approx(row.published * (row.ranks - 1) / row.ranks)
    published = {}
    for row in simulate.memory():
        published[row.case, row.seq_len, row.schedule] = row.published
        if row.schedule != "auto":
            factor = 1.5 if row.schedule == "ring" else 1.0
            assert row.memory_bytes == pytest.approx(factor * row.published, rel=1e-3)
    for hidden, gap in paper.MEMORY_GAP_MB.items():
        ring, tree = (published[f"hidden {hidden}", paper.MEMORY_SEQ_LEN, s] for s in ("ring", "allreduce"))
        assert (ring - tree) / 1e6 == pytest.approx(gap, rel=0.01)


def test_where_it_pays(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pays, "RANKS", {"dgx_h100": (8, 64)})
    monkeypatch.setattr(pays, "TOKENS", (1 << 15, 1 << 20))
    assert main(["simulate", "pays", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"pays.csv", "pays-dgx_h100.png"}
    rows = list(csv.DictReader((tmp_path / "pays.csv").open()))
    by_case = {(row["case"], int(row["ranks"]), int(row["seq_len"])): row for row in rows}
    assert len(by_case) == len(rows) == 2 * 2 * 2
    for (case, ranks, seq_len), row in by_case.items():
        auto = float(row["auto_s"])
        rivals = {rival: row[f"{rival}_s"] for rival in ("ring", "ulysses", "a2a_p2p")}
        assert all(auto <= 1.01 * float(x) * (1 + 1e-4) for x in rivals.values() if x)
        assert [rival for rival, x in rivals.items() if not x] == [{8: "a2a_p2p", 64: "ulysses"}[ranks]]
        alone = predictions.training(load_topology("dgx_h100"), ranks, predictions.SHAPES[case], seq_len, "ring")
        assert float(row["ring_s"]) == pytest.approx(alone.forward.cost.time_s + alone.backward.cost.time_s, rel=1e-4)
        if (ranks, seq_len) != (8, 1 << 15):  # there it takes 1.03 to 1.07 times as long as its compute
            assert (auto <= pays.HIDDEN * float(row["compute_s"])) == (seq_len == 1 << 20)
    row = by_case["MHA", 64, 1 << 15]
    ring, inside = (float(row[name]) / float(row["auto_s"]) for name in ("ring_s", "a2a_p2p_s"))
    assert ring > 20 and f" {ring:.0f}     -   {inside:.1f} |" in capsys.readouterr().out


def test_bytes_between_nodes_equal_the_formulas():
    """docs/design.md, section 2, and the statistics, one fp32 word each: in bytes of a token, head_dim 128, bf16."""
    d, word, stat = 128, 2, 4
    for row in predictions.crossings():
        h, k, nodes, world = row.num_heads, row.num_heads_kv, row.nodes, row.nodes * row.ranks
        tokens = predictions.LONG / world
        kv = tokens * 2 * k * d * word
        assert row.ring == pytest.approx((3 * (world - 1) + 1) * kv * nodes / world)
        grids = [(a, nodes // a) for a in range(1, nodes + 1) if nodes % a == 0]
        forward = min((a - 1) * (2 * h * d * word + h * stat) + (b - 1) * 2 * k * d * word for a, b in grids)
        backward = min((a - 1) * (3 * h * d * word + 2 * h * stat) + (b - 1) * 4 * k * d * word for a, b in grids)
        assert row.grid == pytest.approx(tokens * (forward + backward))
        u = row.u
        assert row.heads_across == pytest.approx(tokens * (u - 1) / u * (4 * d * word * (h + max(k, u)) + h * stat))
        if k > 1:
            assert row.heads_across < 0.5 * row.grid < 0.5 * row.ring


def test_docs_show_what_is_simulated(tmp_path, capsys):
    assert main(["simulate", "bytes", "prompts", "weights", "--out", str(tmp_path)]) == 0
    tables = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    planner, published = ((DOCS / name).read_text() for name in ("planner.md", "paper.md"))
    assert len(tables) == 9 + 8 + 14 and all(line in planner for line in tables)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("bytes-between-nodes.csv", "bytes-of-prompts.csv", "weights.csv")
    }
    for row in predictions.prompts():
        assert row.least <= row.chosen <= 1.01 * row.least <= 1.01 * row.ends
    for line in paper.TABLES:
        assert f"{line.tree[0]:.2f} ± {line.tree[1]:.2f} | {line.ring[0]:.2f} ± {line.ring[1]:.2f}" in published
