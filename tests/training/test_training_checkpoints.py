"""Checkpoints: resumed bit for bit, and in other layouts; never lost by a kill, a full disk or a damaged file."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("yaml")
pytest.importorskip("matplotlib")

from megatron_tree.training.checkpoint_files import (
    MANIFEST,
    TRACKER,
    begin,
    checkpoint_folder,
    fault_of,
    finish,
    newest,
)
from support.ranks import DistributedTestError, run_distributed
from support.training_runs import losses, records, train_all, write_text

# --- files ---


def save(folder, iteration, text="weights", keep=None):
    final = checkpoint_folder(folder, iteration)
    unfinished = begin(final)
    for name in (".metadata", "__0_0.distcp", "common.pt"):
        (unfinished / name).write_text(f"{text} {iteration}")
    finish(final, keep)
    return final


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_taken(tmp_path):
    assert newest(tmp_path) == (None, [])
    saved = [save(tmp_path, iteration) for iteration in (3, 12)]
    assert newest(tmp_path) == (str(saved[1]), [])
    assert fault_of(saved[1]) is None
    (tmp_path / TRACKER).write_text("3\n")
    said = [f"{saved[1]} is ignored: {tmp_path / TRACKER} says 3"]
    assert newest(tmp_path) == (str(saved[0]), said), "the tracker's, though there is a newer one"
    (tmp_path / TRACKER).write_text("2\n")
    with pytest.raises(ValueError, match="no checkpoint in .* can be loaded .*iter_0000012 is ignored.*iter_0000003"):
        newest(tmp_path)
    (tmp_path / TRACKER).unlink()
    assert newest(tmp_path)[0] == str(saved[1])
    (tmp_path / TRACKER).write_text("latest\n")
    with pytest.raises(ValueError, match="holds 'latest' instead of a number"):
        newest(tmp_path)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda c: flip(c / "common.pt"), "common.pt has changed since it was written"),
        (lambda c: truncate(c / "__0_0.distcp"), "__0_0.distcp has 9 bytes instead of 10"),
        (lambda c: (c / ".metadata").unlink(), ".metadata can't be read (No such file or directory)"),
        (lambda c: (c / MANIFEST).unlink(), f"{MANIFEST} can't be read (No such file or directory)"),
        (lambda c: (c / MANIFEST).write_text('{"common.pt": 10}'), f"{MANIFEST} is damaged"),
        (lambda c: flip(c / MANIFEST), f"{MANIFEST} has changed since it was written"),
        (lambda c: truncate(c / MANIFEST) or truncate(c / MANIFEST), f"{MANIFEST} is damaged"),
    ],
)
def test_a_damaged_one_is_passed_over(tmp_path, damage, fault):
    older, newer = (save(tmp_path, iteration) for iteration in (8, 16))
    damage(newer)
    assert newest(tmp_path) == (str(older), [f"warning: checkpoint {newer} is damaged: {fault}"])
    damage(older)
    with pytest.raises(ValueError, match="can be loaded .*iter_0000016 is damaged.*iter_0000008 is damaged"):
        newest(tmp_path)


def test_old_ones_are_deleted(tmp_path):
    for iteration in (1, 2, 3, 30):
        save(tmp_path, iteration)
    save(tmp_path, 20, keep=2)
    assert names(tmp_path) == ["iter_0000003", "iter_0000020", "iter_0000030", TRACKER], "a newer one is not its own"
    assert newest(tmp_path)[0].endswith("iter_0000020")


def _killed_at(folder, iteration, call):
    """Save in a process of its own that is killed before its `call`-th change of the folder. Returns whether it was."""

    def child():
        count = iter(range(1_000_000))

        def deadly(function):
            def called(*args, **kwargs):
                if next(count) == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return called

        os.replace, Path.mkdir, Path.write_text = map(deadly, (os.replace, Path.mkdir, Path.write_text))
        os.unlink, os.rmdir, Path.replace = map(deadly, (os.unlink, os.rmdir, Path.replace))
        save(folder, iteration, "new", keep=2)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    return process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("iteration", [3, 4], ids=["in its place", "the next"])
def test_a_kill_at_any_moment_leaves_a_good_one(tmp_path, iteration):
    """Before every single renaming, writing and deleting: afterwards there is the former checkpoint or the new one, and
    the next save succeeds."""
    seen = set()
    for call in range(100):
        folder = tmp_path / str(call)
        for earlier in (1, 2, 3):
            save(folder, earlier, "old")
        killed = _killed_at(folder, iteration, call)
        good = Path(newest(folder)[0])
        seen.add((good.name, (good / "common.pt").read_text()))
        assert good.name in ("iter_0000003", "iter_0000004")
        assert fault_of(good) is None
        save(folder, 5, keep=1)
        assert names(folder) == ["iter_0000005", TRACKER], "nothing is left lying about"
        if not killed:
            break
    assert call > 10
    assert seen == {("iter_0000003", "old 3"), (f"iter_000000{iteration}", f"new {iteration}")}


def test_what_megatron_lm_names_needs_no_list_of_files(tmp_path):
    """Its `latest_checkpointed_iteration.txt` is written last; "release" are weights alone."""
    folder = checkpoint_folder(tmp_path, 4)
    folder.mkdir()
    for name in (".metadata", "common.pt", "metadata.json"):
        (folder / name).write_text(name)
    with pytest.raises(ValueError, match="iter_0000004 is damaged: files.json can't be read"):
        newest(tmp_path)
    (tmp_path / TRACKER).write_text("4")
    assert newest(tmp_path) == (str(folder), [])
    (folder / "common.pt").unlink()
    with pytest.raises(ValueError, match="iter_0000004 is damaged"):
        newest(tmp_path)
    (tmp_path / TRACKER).write_text("release")
    with pytest.raises(ValueError, match="release is damaged"):
        newest(tmp_path)
    save(tmp_path, None)
    assert (tmp_path / TRACKER).read_text() == "release\n"
    assert newest(tmp_path) == (str(tmp_path / "release"), [])


# --- training ---

SHORT = "--train-iters 6 --eval-iters 0 --seed 7"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def test_resumed_runs_go_on(tmp_path, text):
    """Saved at cp = 4 after 3 of 6 steps: the same layout goes on bit for bit, others within 1e-5."""
    options = f"--data-path {text} {SHORT}"
    cp4, kept = "--context-parallel-size 4", tmp_path / "kept"
    runs = {
        "whole": f"{options} {cp4}",
        "half": f"{options} {cp4} --train-iters 3 --lr-decay-iters 6 --save {kept} --save-interval 2",
        "cp2": f"{options} --context-parallel-size 2 --load {kept}",
        "tp2": f"{options} --context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --load {kept}",
        "pp2": f"{options} --context-parallel-size 2 --pipeline-model-parallel-size 2 --load {kept}",
        "dp4": f"{options} --micro-batch-size 1 --load {kept}",
        "wrong": f"{options} {cp4} --hidden-size 64 --load {kept}",
        "none": f"{options} {cp4} --load {tmp_path / 'absent'}",
        "done": f"{options} {cp4} --train-iters 3 --load {kept}",
        "zero": f"{options} {cp4} --use-distributed-optimizer --load {kept}",
        "same": f"{options} {cp4} --resume --save {kept}",
    }
    ranks = run_distributed(train_all, 4, [(tmp_path / n, run) for n, run in runs.items()], fresh=True, timeout=300)
    assert all(rank == ranks[0] for rank in ranks)
    outcomes = dict(zip(runs, ranks[0], strict=True))
    expected = losses(tmp_path / "whole")
    assert sorted(expected) == list(range(1, 7))
    assert losses(tmp_path / "half") | losses(tmp_path / "same") == expected, "bit for bit"
    for name in ("cp2", "tp2", "pp2", "dp4"):
        assert losses(tmp_path / name) == {n: pytest.approx(expected[n], rel=1e-5, abs=0) for n in range(4, 7)}, name
    assert "hidden_size=64, but" in outcomes["wrong"]
    assert "use_distributed_optimizer=True, but" in outcomes["zero"]
    assert "absent' has no checkpoint: name a folder that --save wrote" in outcomes["none"]
    assert "train_iters=3, but" in outcomes["done"]
    assert "has already done 3" in outcomes["done"]


@pytest.mark.parametrize(
    ("precision", "rel"),
    [pytest.param("--no-bf16", 1e-5, id="fp32", marks=pytest.mark.slow), pytest.param("--bf16", 1e-3, id="bf16")],
)
def test_the_distributed_optimizer(tmp_path, text, precision, rel):
    """Saved at tp = 2, cp = 2 with the distributed optimizer: bit for bit there, at cp = 4 within rounding."""
    options = f"--data-path {text} {SHORT} --train-iters 4 --lr-decay-iters 4 --use-distributed-optimizer {precision}"
    layout, kept = "--tensor-model-parallel-size 2 --context-parallel-size 2", tmp_path / "kept"
    runs = {
        "whole": f"{options} {layout}",
        "half": f"{options} {layout} --train-iters 2 --save {kept}",
        "same": f"{options} {layout} --load {kept}",
        "cp4": f"{options} --context-parallel-size 4 --load {kept}",
    }
    run_distributed(train_all, 4, [(tmp_path / n, run) for n, run in runs.items()], fresh=True, timeout=300)
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "half") | losses(tmp_path / "same") == expected
    assert losses(tmp_path / "cp4") == {step: pytest.approx(expected[step], rel=rel) for step in (3, 4)}


def test_a_damaged_newest_checkpoint_is_named_and_passed_over(tmp_path, text):
    """The ranks take the one before, all of them, and go on as the undisturbed run did."""
    options = f"--data-path {text} {SHORT} --context-parallel-size 2 --train-iters 3"
    kept = tmp_path / "kept"
    ranks = run_distributed(_damaged, 2, tmp_path, options, kept, fresh=True)
    assert ranks[0] == ranks[1]
    expected = losses(tmp_path / "whole")
    for name, fault in (("flipped", "__0_0.distcp has changed since"), ("missing", ".metadata can't be read")):
        assert losses(tmp_path / name) == {step: expected[step] for step in (2, 3)}
        said = (tmp_path / f"{name}.txt").read_text()
        assert f"warning: checkpoint {kept / 'iter_0000002'} is damaged: {fault}" in said
        assert f"continuing from {kept / 'iter_0000001'}" in said
    assert "iter_0000001 is damaged" in ranks[0][-1]


def _damaged(rank, world, folder, options, kept):
    import torch.distributed as dist

    def once(action):
        dist.barrier()
        if rank == 0:
            action()
        dist.barrier()

    newer, older = (checkpoint_folder(kept, iteration) for iteration in (2, 1))
    train_all(rank, world, [(folder / "whole", f"{options} --save {kept} --save-interval 1 --keep-checkpoints 3")])
    once(lambda: (kept / TRACKER).write_text("2\n"))
    once(lambda: flip(newer / "__0_0.distcp"))
    train_all(rank, world, [(folder / "flipped", f"{options} --load {kept}")])
    once(lambda: (newer / ".metadata").unlink())
    train_all(rank, world, [(folder / "missing", f"{options} --load {kept}")])
    once(lambda: (older / "common.pt").unlink())
    return train_all(rank, world, [(folder / "nothing", f"{options} --load {kept}")])


def test_a_kill_during_a_save(tmp_path, text):
    """Both ranks are killed as soon as the second checkpoint's first file appears. The first one is in force; a new run
    takes it and goes on as if nothing had been."""
    options = f"--data-path {text} {SHORT} --context-parallel-size 2 --train-iters 4 --save-interval 2"
    kept = tmp_path / "kept"
    with pytest.raises(DistributedTestError, match="exit code -9"):
        run_distributed(_killed_while_saving, 2, (tmp_path / "killed", f"{options} --save {kept}"), kept, fresh=True)
    assert "iter_0000004.unfinished" in names(kept)
    assert (kept / TRACKER).read_text() == "2\n"
    runs = [
        (tmp_path / "rest", f"{options} --resume --save {kept}"),
        (tmp_path / "whole", options[: -len("--save-interval 2")]),
    ]
    run_distributed(train_all, 2, runs, fresh=True)
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "killed") | losses(tmp_path / "rest") == expected
    assert losses(tmp_path / "rest").keys() == {3, 4}
    assert names(kept) == ["iter_0000002", "iter_0000004", TRACKER]


def _killed_while_saving(rank, world, run, kept):
    def watch():
        unfinished = kept / "iter_0000004.unfinished"
        while not (unfinished.is_dir() and any(unfinished.iterdir())):
            time.sleep(0.0002)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return train_all(rank, world, [run])


# --- a graceful stop ---


def test_a_signal_to_one_rank_stops_all(tmp_path, text):
    """SIGTERM, then SIGUSR1, each to one rank only: all ranks end after the same step, with a checkpoint of it; the run
    that goes on gives the losses of one that was never stopped."""
    options = f"--data-path {text} --context-parallel-size 2 --train-iters 100000 --lr-decay-style constant"
    kept = tmp_path / "kept"
    results = run_distributed(_stopped, 2, tmp_path, f"{options} --save {kept} --resume", fresh=True)
    assert results[0] == results[1]
    first, second = results[0]
    assert first.stopped
    assert second.stopped
    assert second.iteration > first.iteration >= 2
    for name, outcome in (("first", first), ("second", second)):
        said = (tmp_path / f"{name}.txt").read_text()
        assert f"stopped by a signal after step {outcome.iteration} of 100000; continue with --load {kept}" in said
        assert fault_of(checkpoint_folder(kept, outcome.iteration)) is None
    assert "no checkpoint in" in (tmp_path / "first.txt").read_text()
    whole = f"{options} --train-iters {second.iteration}"
    run_distributed(train_all, 2, [(tmp_path / "whole", whole)], fresh=True)
    assert losses(tmp_path / "first") | losses(tmp_path / "second") == losses(tmp_path / "whole")


def _stopped(rank, world, folder, options):
    def watch(name, number):
        with contextlib.suppress(FileNotFoundError):
            while len(records(folder / name)) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), number)
            return
        time.sleep(0.01)
        watch(name, number)

    outcomes = []
    for name, number, place in (("first", signal.SIGTERM, 1), ("second", signal.SIGUSR1, 0)):
        if rank == place:
            threading.Thread(target=watch, args=(name, number), daemon=True).start()
        outcomes += train_all(rank, world, [(folder / name, options)])
    return outcomes
