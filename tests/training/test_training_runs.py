"""The training loop on ranks: equal losses however the sequence is spread; dropout; what is logged."""

import math

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("yaml")
pytest.importorskip("matplotlib")

from megatron_tree.training.report import LOG_NAME
from support.ranks import run_distributed
from support.training_runs import losses, records, train_all, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def run(world, folder, text, runs):
    options = [(folder / name, f"--data-path {text} {more}") for name, more in runs.items()]
    ranks = run_distributed(train_all, world, options, fresh=True, timeout=300)
    assert all(rank == ranks[0] for rank in ranks), "all ranks end alike"
    return dict(zip(runs, ranks[0], strict=True))


SPLIT = "--hierarchical-context-parallel-sizes 2 2"
TREE = ("", "--cp-comm-type tree p2p --grid 2x2", f"--cp-comm-type a2a+tree {SPLIT}")
OTHERS = ("--cp-comm-type p2p", "--cp-comm-type all_gather", "--cp-comm-type a2a", f"--cp-comm-type a2a+p2p {SPLIT}")


@pytest.mark.parametrize("schedules", [TREE, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["tree", "others"])
def test_every_schedule_gives_the_same_losses(tmp_path, text, schedules):
    runs = {"alone": "--micro-batch-size 1"}
    for i, schedule in enumerate(schedules):
        runs[f"cp4_{i}"] = f"--micro-batch-size 4 --context-parallel-size 4 {schedule}"
    outcomes = run(4, tmp_path, text, runs)
    expected = losses(tmp_path / "alone")
    assert sorted(expected) == [1, 2, 3, 4]
    for name in runs:
        assert losses(tmp_path / name) == {n: pytest.approx(expected[n], rel=1e-5, abs=0) for n in expected}, name
        assert outcomes[name].final_loss == pytest.approx(math.fsum(expected.values()) / 4, rel=1e-5)


def test_dropout_is_resumed_with_its_random_states(tmp_path, text):
    dropout = "--attention-dropout 0.2 --hidden-dropout 0.2 --lr-decay-iters 4"
    cp2, kept = "--context-parallel-size 2", tmp_path / "kept"
    runs = {
        "without": cp2,
        "whole": f"{cp2} {dropout}",
        "half": f"{cp2} {dropout} --train-iters 2 --save {kept}",
        "rest": f"{cp2} {dropout} --load {kept}",
        "other": f"{dropout} --load {kept}",
    }
    run(2, tmp_path, text, runs)
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "half") | losses(tmp_path / "rest") == expected
    assert expected[1] != pytest.approx(losses(tmp_path / "without")[1], rel=1e-4)
    assert losses(tmp_path / "other")[3] == pytest.approx(expected[3], rel=0.05)
    note = "dropout starts with fresh random states"
    assert note in (tmp_path / "other.txt").read_text()
    assert note not in (tmp_path / "rest.txt").read_text()


def test_what_is_logged(tmp_path, text):
    runs = {"run": "--context-parallel-size 2 --eval-interval 3 --lr-decay-style linear"}
    (outcome,) = run(2, tmp_path, text, runs).values()
    assert (outcome.iteration, outcome.stopped) == (4, False)
    (start,) = records(tmp_path / "run", "start")
    assert start["options"]["lr_decay_style"] == "linear"
    for step in records(tmp_path / "run"):
        assert step["tokens_per_s"] == pytest.approx(4 * 32 / step["seconds"])
        assert set(step) == {"step", "loss", "grad_norm", "lr", "tokens_per_s", "seconds"}
    assert [record["step"] for record in records(tmp_path / "run", "validation")] == [3, 4]
    assert (tmp_path / "run" / LOG_NAME).read_text().endswith("}\n")
    said = (tmp_path / "run.txt").read_text()
    assert "2 ranks, context parallel 2: tree; data parallel 1" in said
    assert "tokens/s" in said
