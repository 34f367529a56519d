"""`megatron-tree plan`: tables, the CSV, and what it says to wrong options."""

import csv
import json
import re
import shlex

import pytest

from megatron_tree.bench.weights import MODELS
from megatron_tree.plan.command import EXAMPLES, main
from megatron_tree.plan.topology import TOPOLOGIES

SMALL = ["--topology", "ethernet", "--nodes", "2", "--ranks-per-node", "2", "--heads", "4", "--seq-len", "8k"]


def test_tables_for_all_passes(capsys):
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    for part in ("4 ranks, 2 x 2, on ethernet", "forward ", "backward ", "decode ", "over loopback", "over ethernet"):
        assert part in out
    chosen = [line for line in out.splitlines() if line.startswith("*")]
    assert len(chosen) == 3 and all("  chosen" in line for line in chosen)
    assert sum(line.endswith("fastest") or "fastest, " in line for line in out.splitlines()) == 3
    assert "heads over 2 nodes x 2 ranks of a node" in out and out.count(" more: --all") == 2
    assert all(f"  {rival}" in out for rival in ("ring", "KV gather", "pure tree", "Ulysses", "a2a+p2p", "all-reduce"))
    assert "training: forward on " and "\ndecode: " in out
    assert max(len(line) for line in out.splitlines() if line.startswith((" ", "*"))) < 160


def test_documents_that_fit_on_one_rank_send_nothing(capsys):
    """The cast of eight documents of one length over four ranks; others send as much as of one sequence."""
    assert main([*SMALL, "--documents", "8x1k", "--pass", "forward", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["forward"]
    sent = {c["schedule"]: c["bytes_over_loopback"] + c["bytes_over_ethernet"] for c in found if c["heads"] == "1x1"}
    assert sent["cast"] == 0 < sent["ring"]
    assert next(c for c in found if c["chosen"])["schedule"] == "cast"


@pytest.mark.parametrize("name", ["forward", "backward", "decode"])
def test_one_pass(capsys, name):
    assert main([*SMALL, "--pass", name]) == 0
    out = capsys.readouterr().out
    assert sum(line.startswith("*") for line in out.splitlines()) == 1 and f"   {name} " in out


def test_own_heads_send_half_of_scatter(capsys):
    sent = []
    for options in ([], ["--own-heads"]):
        assert main([*SMALL, "--pass", "decode", "--json", *options]) == 0
        scatter = next(c for c in json.loads(capsys.readouterr().out)["decode"] if c["schedule"] == "scatter")
        sent.append(scatter["bytes_over_loopback"] + scatter["bytes_over_ethernet"])
    assert sent[1] == sent[0] / 2 > 0


@pytest.mark.parametrize(("kv_heads", "each"), [(4, 2), (1, 1)])
def test_tensor_parallel_ranks_share_the_heads(capsys, kv_heads, each):
    """As a user who divides heads and ranks by hand: neighbours are tensor parallel, so a host has half as many."""
    machine = ["--topology", "ethernet", "--nodes", "2", "--seq-len", "8k", "--json"]
    whole = ["--ranks-per-node", "4", "--heads", "8", "--kv-heads", str(kv_heads), "--tp", "2"]
    by_hand = ["--ranks-per-node", "2", "--heads", "4", "--kv-heads", str(each)]
    found = []
    for options in (whole, by_hand):
        assert main([*machine, *options]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] and found[0]["ranks"] == 4


def test_pins(capsys):
    pins = ["--pass", "forward", "--grid", "2x2", "--head-chunks", "2"]
    assert main([*SMALL, *pins]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("*")]
    assert "grid 2x2" in line and "in 2 head chunks" in line


def test_the_budget_marks_what_is_too_large(capsys, tmp_path):
    call = [*SMALL, "--pass", "backward", "--csv", str(tmp_path / "plan.csv")]
    assert main([*call, "--head-chunks", "1"]) == 0
    largest = max(int(row["peak_bytes"]) for row in csv.DictReader((tmp_path / "plan.csv").open()))
    capsys.readouterr()
    assert main([*call, "--head-chunks", "1", "--all", "--memory-budget", str(largest - 1)]) == 0
    assert "beyond --memory-budget" in capsys.readouterr().out


def test_csv_holds_all_candidates(capsys, tmp_path):
    assert main([*SMALL, "--csv", str(tmp_path / "plan.csv"), "--all"]) == 0
    rows = list(csv.DictReader((tmp_path / "plan.csv").open()))
    printed = [line for line in capsys.readouterr().out.splitlines() if re.search(r" [mu]?s  ", line)]
    assert len(rows) == len(printed)
    for name in ("forward", "backward", "decode"):
        mine = [row for row in rows if row["pass"] == name]
        assert [row["chosen"] for row in mine].count("1") == 1
        assert [float(row["time_s"]) for row in mine] == sorted(float(row["time_s"]) for row in mine)
        assert all(float(row["bytes_over_ethernet"]) > 0 for row in mine)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.csv"]


def test_many_nodes_give_few_lines(capsys):
    """The chosen one, the fastest, and the five rivals: not dozens of grids that take as long."""
    assert main(["--topology", "dgx_h100", "--nodes", "16", "--seq-len", "1M", "--pass", "forward"]) == 0
    short = [line for line in capsys.readouterr().out.splitlines() if re.search(r" [mu]?s  ", line)]
    assert 5 <= len(short) <= 7 and sum(line.startswith("*") for line in short) == 1
    assert main(["--topology", "dgx_h100", "--nodes", "16", "--seq-len", "1M", "--pass", "forward", "--all"]) == 0
    whole = [line for line in capsys.readouterr().out.splitlines() if re.search(r" [mu]?s  ", line)]
    assert len(whole) > 100 and {line.split("  ")[1] for line in short} <= {line.split("  ")[1] for line in whole}


def test_json_holds_all_candidates(capsys, tmp_path):
    assert main([*SMALL, "--json", "--csv", str(tmp_path / "plan.csv")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["topology"], found["ranks"]) == ("ethernet", 4) and set(found["reasons"]) == {"training", "decode"}
    rows = list(csv.DictReader((tmp_path / "plan.csv").open()))
    assert len(rows) == sum(len(found[name]) for name in ("forward", "backward", "decode"))
    for name in ("forward", "backward", "decode"):
        mine = [row for row in rows if row["pass"] == name]
        assert [row["chosen"] == "1" for row in mine] == [c["chosen"] for c in found[name]]
        assert [float(row["time_s"]) for row in mine] == [c["time_s"] for c in found[name]]
        assert [row["grid"] for row in mine] == [c["grid"] or "" for c in found[name]]
    assert {rival for c in found["forward"] for rival in c["rivals"]} >= {"ring", "KV gather", "Ulysses"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "nonsense"], "topology 'nonsense' is unknown: name one of dgx_h100"),
        (["--topology", "laptop", "--nodes", "2"], "describes a single host, but the group's ranks are on 2 hosts"),
        ([*SMALL, "--kv-heads", "3"], "--kv-heads 3 must divide --heads 4"),
        ([*SMALL, "--tp", "3"], "--tp 3 must divide --heads 4"),
        ([*SMALL, "--tp", "4", "--heads", "12", "--kv-heads", "6"], "--tp 4 and --kv-heads 6: one must divide"),
        ([*SMALL, "--tp", "8", "--heads", "8"], "--tp 8 must divide the 2 x 2 ranks"),
        ([*SMALL, "--tp", "2", "--model", "config.json"], "--model plans every way to share the weights"),
        ([*SMALL, "--grid", "4x4"], r"grid=\(4, 4\) has 16 cells but cp_group has 4 ranks"),
        ([*SMALL, "--memory-budget", "1"], "memory_budget=1 bytes is too small"),
        (
            [*SMALL, "--schedule", "scatter"],
            "--schedule scatter does not apply to the forward: choose auto, grid, cast, ring",
        ),
        ([*SMALL, "--documents", "4x1k"], "--documents are packed in one row, for training"),
        ([*SMALL, "--csv", "/nowhere/plan.csv"], "No such file or directory"),
    ],
)
def test_errors_are_one_line(capsys, options, message):
    assert main(options) == 1
    err = capsys.readouterr().err
    assert err.startswith("plan: ") and err.count("\n") == 1 and re.search(message, err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seq-len", "many"], "'many' must be a positive integer, for instance 16, 128k or 1M"),
        (["--seq-len", "0"], "'0' must be a positive integer"),
        (["--nodes", "1.5"], "'1.5' must be a positive integer"),
        (["--memory-budget", "2XB"], "'2XB' must be a positive number of bytes, for instance 500MB or 2GiB"),
        (["--grid", "4by4"], "'4by4' must be two integers, for instance 4x16"),
        (["--grid", "0x4"], "'0x4' must be two positive integers"),
        (["--documents", "4k"], "'4k' is not COUNTxTOKENS,..., for instance 200x2k,1x128k"),
        ([], "--topology"),
    ],
)
def test_wrong_values(capsys, options, message):
    with pytest.raises(SystemExit):
        main([*(SMALL if options else []), *options])
    assert message in capsys.readouterr().err


def test_help_and_its_examples(capsys, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert EXAMPLES.splitlines()[1] in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text((TOPOLOGIES / "ethernet.yaml").read_text())
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(MODELS["Llama 3.1 70B"]))
    for line in EXAMPLES.splitlines():
        if line.startswith("  megatron-tree plan "):
            assert main(shlex.split(line)[2:]) == 0
