"""The training loop on ranks: equal losses in every layout; resumed, damaged, killed and stopped runs."""

import contextlib
import math
import os
import signal
import threading
import time

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("matplotlib")

from megatron_tree.training.checkpoint_files import TRACKER, checkpoint_folder, fault_of
from support.ranks import DistributedTestError, run_distributed
from support.training_runs import losses, records, train_all, write_text

SPLIT = "--hierarchical-context-parallel-sizes 2 2"
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
TP2 = "--tensor-model-parallel-size 2"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def run(world, folder, text, runs):
    """{name: outcome} of runs, given as {name: options}, one after another in ranks that are started once."""
    options = [(folder / name, f"--data-path {text} {more}") for name, more in runs.items()]
    ranks = run_distributed(train_all, world, options, fresh=True, timeout=300)
    assert all(rank == ranks[0] for rank in ranks), "all ranks end alike"
    return dict(zip(runs, ranks[0], strict=True))


def assert_same(folder, expected, rel=1e-5):
    """A run's losses are those of another one at the same steps."""
    actual = losses(folder)
    assert actual and actual == {n: pytest.approx(expected[n], rel=rel, abs=0) for n in actual}, folder


# --- four ranks ---


@pytest.fixture(scope="module")
def four(tmp_path_factory, text):
    """(folder of the runs, {name: outcome}) of all runs on four ranks."""
    folder = tmp_path_factory.mktemp("four")
    short, kept = "--eval-iters 0 --seed 7", folder / "kept"
    runs = {
        "whole": f"{short} {CP4}",
        "mixed": f"{short} {CP4} --cp-comm-type tree p2p --grid 2x2",
        "heads": f"{short} {CP4} --cp-comm-type a2a+tree {SPLIT} --micro-batch-size 4",
        "alone": f"{short} --micro-batch-size 1",
        "half": f"{short} {CP4} --train-iters 2 --lr-decay-iters 4 --save {kept} --save-interval 2",
        "cp2": f"{short} {CP2} --load {kept}",
        "tp2": f"{short} {CP2} {TP2} --sequence-parallel --load {kept}",
        "pp2": f"{short} {CP2} --pipeline-model-parallel-size 2 --load {kept}",
        "dp4": f"{short} --micro-batch-size 1 --load {kept}",
        "wrong": f"{short} {CP4} --hidden-size 64 --load {kept}",
        "none": f"{short} {CP4} --load {folder / 'absent'}",
        "done": f"{short} {CP4} --train-iters 2 --lr-decay-iters 4 --load {kept}",
        "optimizer": f"{short} {CP4} --use-distributed-optimizer --load {kept}",
        "same": f"{short} {CP4} --resume --save {kept}",
    }

    zero, sharded = f"{short} --use-distributed-optimizer --bf16", folder / "sharded"
    runs |= {
        "zero_whole": f"{zero} {TP2} {CP2}",
        "zero_half": f"{zero} {TP2} {CP2} --train-iters 2 --lr-decay-iters 4 --save {sharded}",
        "zero_same": f"{zero} {TP2} {CP2} --load {sharded}",
        "zero_cp4": f"{zero} {CP4} --load {sharded}",
    }
    return folder, run(4, folder, text, runs)


@pytest.mark.supports("megatron-tree train", with_="layouts give the same losses; checkpoints resume in another layout")
def test_every_schedule_gives_the_same_losses(four):
    folder, outcomes = four
    expected = losses(folder / "alone")
    assert sorted(expected) == [1, 2, 3, 4]
    for name in ("whole", "mixed", "heads"):
        assert_same(folder / name, expected)
        assert outcomes[name].final_loss == pytest.approx(math.fsum(expected.values()) / 4, rel=1e-5)


def test_resumed_runs_go_on(four):
    """Saved at cp = 4 after 2 of 4 steps: the same layout goes on bit for bit, others within 1e-5."""
    folder, outcomes = four
    expected = losses(folder / "whole")
    assert losses(folder / "half") | losses(folder / "same") == expected, "bit for bit"
    for name in ("cp2", "tp2", "pp2", "dp4"):
        assert_same(folder / name, expected)
        assert sorted(losses(folder / name)) == [3, 4]
    assert "hidden_size=64, but" in outcomes["wrong"]
    assert "use_distributed_optimizer=True, but" in outcomes["optimizer"]
    assert "absent' has no checkpoint: name a folder that --save wrote" in outcomes["none"]
    assert "train_iters=2, but" in outcomes["done"] and "has already done 2" in outcomes["done"]


def test_the_distributed_optimizer(four):
    """Saved at tp = 2, cp = 2 in bf16: bit for bit there, at cp = 4 within rounding."""
    folder, _ = four
    expected = losses(folder / "zero_whole")
    assert losses(folder / "zero_half") | losses(folder / "zero_same") == expected
    assert_same(folder / "zero_cp4", expected, rel=1e-3)


# --- two ranks ---


@pytest.fixture(scope="module")
def two(tmp_path_factory, text):
    """The folder of all runs on two ranks, and what they ended with."""
    folder = tmp_path_factory.mktemp("two")
    saving = f"--data-path {text} {CP2} --seed 7 --eval-iters 0 --save-interval 2 --save {folder / 'cut'}"
    with pytest.raises(DistributedTestError, match="exit code -9"):
        run_distributed(_killed_while_saving, 2, (folder / "killed", saving), folder / "cut", fresh=True)
    ranks = run_distributed(_two_ranks, 2, folder, f"--data-path {text} {CP2}", saving, fresh=True, timeout=200)
    assert ranks[0] == ranks[1]
    return folder, ranks[0]


def _killed_while_saving(rank, world, run, kept):
    """Kills itself as soon as the second checkpoint's first file appears."""

    def watch():
        unfinished = kept / "iter_0000004.unfinished"
        while not (unfinished.is_dir() and any(unfinished.iterdir())):
            time.sleep(0.0002)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return train_all(rank, world, [run])


def _two_ranks(rank, world, folder, options, saving):
    import torch.distributed as dist

    outcomes = {}

    def trained(name, more, base=options):
        (outcomes[name],) = train_all(rank, world, [(folder / name, f"{base} {more}")])

    def once(action):
        dist.barrier()
        if rank == 0:
            action()
        dist.barrier()

    once(lambda: (folder / "cut_before").write_text(f"{sorted(path.name for path in (folder / 'cut').iterdir())}"))
    trained("rest", "--resume", saving)
    trained("whole", f"--save {folder / 'kept'} --keep-checkpoints 3", saving)

    load = f"--seed 7 --eval-iters 0 --load {folder / 'kept'}"
    newer, older = (checkpoint_folder(folder / "kept", iteration) for iteration in (4, 2))
    once(lambda: (newer / "__0_0.distcp").write_bytes((newer / "__0_0.distcp").read_bytes()[::-1]))
    trained("flipped", load)
    once(lambda: (older / "common.pt").unlink())
    trained("nothing", load)

    dropout = "--attention-dropout 0.2 --hidden-dropout 0.2 --lr-decay-iters 4"
    trained("dropout", f"{dropout} --eval-interval 3")
    trained("dropout_half", f"{dropout} --train-iters 2 --save {folder / 'dropout_kept'}")
    trained("dropout_rest", f"{dropout} --load {folder / 'dropout_kept'}")

    endless = f"--train-iters 100000 --lr-decay-style constant --save {folder / 'stopped'} --resume"
    for name, number, place in (("first", signal.SIGTERM, 1), ("second", signal.SIGUSR1, 0)):
        if rank == place:
            threading.Thread(target=_stop, args=(folder / name, number), daemon=True).start()
        trained(name, endless)
    trained("unstopped", f"--lr-decay-style constant --train-iters {outcomes['second'].iteration}")
    return outcomes


def _stop(folder, number):
    """Send this process a signal after two steps of a run."""
    done = 0
    while done < 2:
        time.sleep(0.01)
        with contextlib.suppress(FileNotFoundError):
            done = len(records(folder))
    os.kill(os.getpid(), number)


def test_a_kill_during_a_save(two):
    """The first checkpoint stays in force; a new run takes it and goes on as if nothing had been."""
    folder, _ = two
    assert "iter_0000004.unfinished" in (folder / "cut_before").read_text()
    assert losses(folder / "rest").keys() == {3, 4}
    assert losses(folder / "killed") | losses(folder / "rest") == losses(folder / "whole")
    assert sorted(path.name for path in (folder / "cut").iterdir()) == ["iter_0000002", "iter_0000004", TRACKER]


def test_a_damaged_newest_checkpoint_is_named_and_passed_over(two):
    """The ranks take the one before, all of them, and go on as the undisturbed run did."""
    folder, outcomes = two
    said = (folder / "flipped.txt").read_text()
    assert "iter_0000004 is damaged: __0_0.distcp has changed since" in said
    assert f"continuing from {folder / 'kept' / 'iter_0000002'}" in said
    assert losses(folder / "flipped") == {step: losses(folder / "whole")[step] for step in (3, 4)}
    assert "iter_0000002 is damaged" in outcomes["nothing"]


def test_dropout_is_resumed(two):
    folder, _ = two
    assert losses(folder / "dropout_half") | losses(folder / "dropout_rest") == losses(folder / "dropout")
    assert losses(folder / "dropout")[1] != pytest.approx(losses(folder / "unstopped")[1], rel=1e-4)


def test_a_signal_to_one_rank_stops_all(two):
    """SIGTERM, then SIGUSR1, each to one rank only: all ranks end after the same step, with a checkpoint of it; the run
    that goes on gives the losses of one that was never stopped."""
    folder, outcomes = two
    first, second = outcomes["first"], outcomes["second"]
    assert first.stopped and second.stopped
    assert second.iteration > first.iteration >= 2
    for name in ("first", "second"):
        step, kept = outcomes[name].iteration, folder / "stopped"
        said = (folder / f"{name}.txt").read_text()
        assert f"stopped by a signal after step {step} of 100000; continue with --load {kept}" in said
        assert fault_of(checkpoint_folder(kept, step)) is None
    assert "no checkpoint in" in (folder / "first.txt").read_text()
    assert losses(folder / "first") | losses(folder / "second") == losses(folder / "unstopped")
