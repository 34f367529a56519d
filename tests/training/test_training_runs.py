"""The training loop on ranks: equal losses in every layout; resumed, damaged, killed and stopped runs."""

import contextlib
import fcntl
import math
import os
import shutil
import signal
import threading
import time

import pytest

pytest.importorskip("matplotlib")

from megatron_tree.tools.training.checkpoint import MANIFEST, TRACKER, checkpoint_folder, fault_of
from megatron_tree.tools.training.report import LOG_NAME
from support.limits import files_of_at_most
from support.ranks import run_distributed
from support.training_runs import losses, records, train_all, write_text

CP2, TP2 = "--context-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"
ZERO = "--use-distributed-optimizer --bf16"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(the folder of all runs, {name: its outcome}), one after another in two ranks that are started once."""
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder / "text")
    ranks = run_distributed(_all_runs, 2, folder, fresh=True, timeout=200)
    assert ranks[0] == ranks[1], "all ranks end alike"
    return folder, ranks[0]


def _all_runs(rank, world, folder):
    import torch.distributed as dist

    outcomes = {}

    def trained(name, more):
        run = (folder / name, f"--data-path {folder / 'text'} --seed 7 {more}")
        (outcomes[name],) = train_all(rank, world, [run])

    def once(action):
        dist.barrier()
        if rank == 0:
            action()
        dist.barrier()

    def copied(source, *targets):
        once(lambda: [shutil.copytree(folder / source, folder / target) for target in targets])

    saved = f"--resume --save {folder}/saved"
    trained("whole", f"{CP2} --save {folder / 'kept'} --save-interval 2 --keep-checkpoints 3")
    trained("ring", f"{CP2} --cp-comm-type p2p --micro-batch-size 4")
    trained("alone", "")
    copied("kept", "saved_flipped", "saved_nothing", "saved_killed")
    once(lambda: _kill_the_second_save(folder / "saved_killed"))
    copied("saved_killed", "saved_tp2", "saved_dp2", "saved_refused", "saved_full")
    with files_of_at_most(20_000):
        trained("full", f"{CP2} {saved}_full")
    trained("killed", f"{CP2} {saved}_killed")
    trained("tp2", f"{TP2} {saved}_tp2")
    trained("dp2", f"{saved}_dp2")
    once(lambda: _flip(folder / "saved_flipped", 4))
    trained("flipped", f"{CP2} {saved}_flipped")
    once(lambda: [_flip(folder / "saved_nothing", iteration) for iteration in (2, 4)])
    trained("nothing", f"{CP2} {saved}_nothing")
    for name, options in (
        ("other model", "--hidden-size 64"),
        ("other seed", "--seed 8"),
        ("optimizer", "--use-distributed-optimizer"),
        ("done", "--train-iters 2 --lr-decay-iters 4"),
    ):
        trained(name, f"{CP2} {saved}_refused {options}")
    trained("weights", f"{CP2} --load {folder / 'kept'} --train-iters 1 --lr-warmup-iters 0")
    trained("absent", f"{CP2} --load {folder / 'absent'}")
    with open(folder / "whole" / LOG_NAME) as log:
        once(lambda: fcntl.flock(log, fcntl.LOCK_EX))
        trained("taken", f"{CP2} --output-dir {folder / 'whole'}")

    trained("zero", f"{CP2} {ZERO}")
    trained("zero_half", f"{CP2} {ZERO} --train-iters 2 --lr-decay-iters 4 --save {folder / 'saved_zero'}")
    copied("saved_zero", "saved_zero_tp2")
    trained("zero_same", f"{CP2} {ZERO} {saved}_zero")
    trained("zero_tp2", f"{TP2} {ZERO} {saved}_zero_tp2")

    endless = f"{CP2} --train-iters 100000 {saved}_stopped"
    for name, number, place in (("first", signal.SIGTERM, 1), ("second", signal.SIGUSR1, 0)):
        if rank == place:
            threading.Thread(target=_stop, args=(folder / name, number), daemon=True).start()
        trained(name, endless)
    trained("unstopped", f"{CP2} --train-iters {outcomes['second'].iteration} --lr-decay-iters 100000")
    return outcomes


def _kill_the_second_save(saved):
    """Leave what a kill before the end of the second save leaves."""
    newest = checkpoint_folder(saved, 4)
    (newest / MANIFEST).unlink()
    newest.rename(newest.with_name(newest.name + ".unfinished"))
    (saved / TRACKER).write_text("2\n")


def _flip(saved, iteration):
    file = checkpoint_folder(saved, iteration) / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[::-1])


def _stop(folder, number):
    """Send this process a signal after two steps of a run."""
    done = 0
    while done < 2:
        time.sleep(0.01)
        with contextlib.suppress(FileNotFoundError):
            done = len(records(folder))
    os.kill(os.getpid(), number)


def assert_same(folder, expected, rel=1e-5):
    """A run's losses are those of another one at the same steps."""
    actual = losses(folder)
    assert actual and actual == {n: pytest.approx(expected[n], rel=rel, abs=0) for n in actual}, folder


def test_a_disk_without_space_keeps_the_former_checkpoint(runs):
    folder, outcomes = runs
    saved = folder / "saved_full"
    assert outcomes["full"] == (f"no space left on {saved}: iter_0000004.unfinished is not written (File too large)")
    assert (saved / TRACKER).read_text() == "2\n" and fault_of(checkpoint_folder(saved, 2)) is None
    assert not checkpoint_folder(saved, 4).exists()


@pytest.mark.supports("megatron-tree train", with_="layouts give the same losses; checkpoints resume in another layout")
def test_every_schedule_gives_the_same_losses(runs):
    folder, outcomes = runs
    expected = losses(folder / "alone")
    assert sorted(expected) == [1, 2, 3, 4]
    for name in ("whole", "ring"):
        assert_same(folder / name, expected)
        assert outcomes[name].final_loss == pytest.approx(math.fsum(expected.values()) / 4, rel=1e-5)


def test_resumed_runs_go_on(runs):
    """Killed at cp = 2 while it saved step 4, so step 2 is in force: the same layout goes on bit for bit, others within
    1e-5. They take the model's options from the checkpoint, and what can't be continued is refused."""
    folder, outcomes = runs
    expected = losses(folder / "whole")
    assert losses(folder / "killed") == {step: expected[step] for step in (3, 4)}, "bit for bit"
    names = sorted(path.name for path in (folder / "saved_killed").iterdir())
    assert names == ["iter_0000002", "iter_0000004", TRACKER, "model.yaml"]
    for name in ("tp2", "dp2"):
        assert_same(folder / name, expected)
        assert sorted(losses(folder / name)) == [3, 4]
    assert outcomes["other model"] == "--hidden-size 64, but the model to load has 32: leave it out"
    assert "--seed 8, but" in outcomes["other seed"]
    assert "--use-distributed-optimizer, but" in outcomes["optimizer"]
    assert "train_iters=2, but" in outcomes["done"] and "has already done 2" in outcomes["done"]


def test_weights_start_a_new_run(runs):
    folder, outcomes = runs
    first = losses(folder / "whole")
    assert losses(folder / "weights").keys() == {1}
    assert losses(folder / "weights")[1] < first[1] - 0.01, "it goes on from the trained weights"
    assert "the run starts at iteration 0" in (folder / "weights.txt").read_text()
    assert "absent' has no model.yaml: name a folder that --save or megatron-tree convert wrote" in outcomes["absent"]


def test_a_log_that_another_run_writes_is_left_alone(runs):
    folder, outcomes = runs
    assert outcomes["taken"] == f"--output-dir '{folder / 'whole'}' is being written to by another run: name another"
    assert sorted(losses(folder / "whole")) == [1, 2, 3, 4]


def test_a_damaged_newest_checkpoint_is_named_and_passed_over(runs):
    """The ranks take the one before, all of them, and go on as the undisturbed run did."""
    folder, outcomes = runs
    said = (folder / "flipped.txt").read_text()
    assert "iter_0000004 is damaged: __0_0.distcp has changed since" in said
    assert f"continuing from {folder / 'saved_flipped' / 'iter_0000002'}" in said
    assert losses(folder / "flipped") == {step: losses(folder / "whole")[step] for step in (3, 4)}
    assert "iter_0000002 is damaged" in outcomes["nothing"]


def test_the_distributed_optimizer(runs):
    """In bf16: resumed bit for bit in the same layout, within rounding in another."""
    folder, _ = runs
    expected = losses(folder / "zero")
    assert losses(folder / "zero_half") | losses(folder / "zero_same") == expected
    assert_same(folder / "zero_tp2", expected, rel=1e-3)


def test_a_signal_to_one_rank_stops_all(runs):
    """SIGTERM, then SIGUSR1, each to one rank only: all ranks end after the same step, with a checkpoint of it; the run
    that goes on gives the losses of one that was never stopped."""
    folder, outcomes = runs
    first, second = outcomes["first"], outcomes["second"]
    assert first.stopped and second.stopped
    assert second.iteration > first.iteration >= 2
    for name in ("first", "second"):
        step, kept = outcomes[name].iteration, folder / "saved_stopped"
        said = (folder / f"{name}.txt").read_text()
        assert f"stopped by a signal after step {step} of 100000; continue with --resume" in said
        assert fault_of(checkpoint_folder(kept, step)) is None
    assert "no checkpoint in" in (folder / "first.txt").read_text()
    assert losses(folder / "first") | losses(folder / "second") == losses(folder / "unstopped")
