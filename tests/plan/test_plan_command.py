"""`megatron-tree plan`: its tables and JSON, and what it says to wrong options."""

import json
import re
import shlex

import pytest

from megatron_tree.core.plan.command import EXAMPLES, main
from megatron_tree.core.plan.topology import TOPOLOGIES

SMALL = ["--topology", "ethernet", "--nodes", "2", "--ranks-per-node", "2", "--heads", "4", "--seq-len", "8k"]


def planned(capsys, *options):
    """The JSON that the command prints."""
    assert main([*options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_tables_for_all_passes(capsys):
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    for part in ("4 ranks, 2 x 2, on ethernet", "forward ", "backward ", "decode ", "over loopback", "over ethernet"):
        assert part in out
    assert re.search(r"lower bound without a mask: \S+ MB over ethernet; forward \S+ times that, backward", out)
    chosen = [line for line in out.splitlines() if line.startswith("*")]
    assert len(chosen) == 3 and all("  chosen" in line for line in chosen)
    assert sum(line.endswith("fastest") or "fastest, " in line for line in out.splitlines()) == 3
    assert all(f"  {rival}" in out for rival in ("ring", "KV gather", "pure tree", "Ulysses", "a2a+p2p", "all-reduce"))


def test_json_holds_all_candidates(capsys):
    found = planned(capsys, *SMALL)
    assert (found["topology"], found["ranks"]) == ("ethernet", 4) and set(found["reasons"]) == {"training", "decode"}
    for name in ("forward", "backward", "decode"):
        assert [c["chosen"] for c in found[name]].count(True) == 1
        assert [c["time_s"] for c in found[name]] == sorted(c["time_s"] for c in found[name])
        assert all(c["bytes_over_ethernet"] > 0 for c in found[name])
        assert name == "decode" or min(c["bytes_over_ethernet"] for c in found[name]) >= found["least_bytes"] > 0
    assert {rival for c in found["forward"] for rival in c["rivals"]} >= {"ring", "KV gather", "Ulysses"}


@pytest.mark.parametrize(("name", "plain"), [("jvp", "forward"), ("second", "backward")])
def test_passes_with_tangents(capsys, name, plain):
    """Every number that travels has a tangent beside it, and every product two more; a state has mu as well."""
    found, without = (planned(capsys, *SMALL, "--pass", passes)[passes] for passes in (name, plain))
    schedule = lambda c: tuple(c[key] for key in ("schedule", "heads", "grid", "inner"))  # noqa: E731
    same = {schedule(c): c for c in without}
    assert found and {c["heads"] for c in found} == {"1x1"}  # heads are exchanged where ulysses_size says so
    for c in found:
        assert c["compute_s"] == pytest.approx(3 * same[schedule(c)]["compute_s"])
        for level in ("bytes_over_loopback", "bytes_over_ethernet"):
            assert c[level] == pytest.approx(2 * same[schedule(c)][level], rel=2e-3)  # mu has fewer bytes than lse
    assert main([*SMALL, "--pass", name]) == 0
    out = capsys.readouterr().out
    assert f"   {name} " in out and "forward with tangents on" in out and "second-order pass on" in out


def test_documents_that_fit_on_one_rank_send_nothing(capsys):
    """The cast of eight documents of one length over four ranks; others send as much as of one sequence."""
    found = planned(capsys, *SMALL, "--documents", "8x1k", "--pass", "forward")["forward"]
    sent = {c["schedule"]: c["bytes_over_loopback"] + c["bytes_over_ethernet"] for c in found if c["heads"] == "1x1"}
    assert sent["cast"] == 0 < sent["ring"]
    assert next(c for c in found if c["chosen"])["schedule"] == "cast"


@pytest.mark.parametrize(("kv_heads", "each"), [(4, 2), (1, 1)])
def test_tensor_parallel_ranks_share_the_heads(capsys, kv_heads, each):
    """As a user who divides heads and ranks by hand: neighbours are tensor parallel, so a host has half as many."""
    machine = ["--topology", "ethernet", "--nodes", "2", "--seq-len", "8k"]
    whole = ["--ranks-per-node", "4", "--heads", "8", "--kv-heads", str(kv_heads), "--tp", "2"]
    by_hand = ["--ranks-per-node", "2", "--heads", "4", "--kv-heads", str(each)]
    found = [planned(capsys, *machine, *options) for options in (whole, by_hand)]
    assert found[0] == found[1] and found[0]["ranks"] == 4


def test_the_budget(capsys):
    found = planned(capsys, *SMALL, "--pass", "backward")["backward"]
    ring = max(c["peak_bytes"] for c in found if c["schedule"] == "ring")  # others may take more head chunks
    assert main([*SMALL, "--pass", "backward", "--all", "--memory-budget", str(ring - 1)]) == 0
    assert "beyond --memory-budget" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*SMALL, "--kv-heads", "3"], "--kv-heads 3 must divide --heads 4"),
        ([*SMALL, "--tp", "3"], "--tp 3 must divide --heads 4"),
        ([*SMALL, "--tp", "4", "--heads", "12", "--kv-heads", "6"], "--tp 4 and --kv-heads 6: one must divide"),
        ([*SMALL, "--tp", "8", "--heads", "8"], "--tp 8 must divide the 2 x 2 ranks"),
        ([*SMALL, "--documents", "4x1k"], "--documents are packed in one row, for training"),
    ],
)
def test_errors_are_one_line(capsys, options, message):
    assert main(options) == 2
    err = capsys.readouterr().err
    assert err.startswith("megatron-tree plan: ") and err.count("\n") == 1 and re.search(message, err)


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text((TOPOLOGIES / "ethernet.yaml").read_text())
    for line in EXAMPLES.splitlines():
        if line.startswith("  megatron-tree plan "):
            assert main(shlex.split(line)[2:]) == 0
