"""The files of checkpoints: never lost by a kill, a full disk or a damaged file."""

import multiprocessing
import os
import shutil
import signal
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from megatron_tree.tools.training.checkpoint import (
    MANIFEST,
    TRACKER,
    begin,
    checkpoint_folder,
    fault_of,
    finish,
    load_checkpoint,
    newest,
)


def save(folder, iteration, text="weights", keep=None):
    final = checkpoint_folder(folder, iteration)
    unfinished = begin(final)
    for name in (".metadata", "__0_0.distcp", "common.pt"):
        (unfinished / name).write_text(f"{text} {iteration}")
    finish(final, keep)
    return final


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_that_the_tracker_allows_is_taken(tmp_path):
    assert newest(tmp_path) == (None, [])
    older, newer = (save(tmp_path, iteration) for iteration in (3, 12))
    tracker = tmp_path / TRACKER
    assert tracker.read_text() == "12\n"
    assert newest(tmp_path) == (str(newer), [])
    tracker.write_text("3\n")
    assert newest(tmp_path) == (str(older), [])
    tracker.write_text("2\n")
    with pytest.raises(ValueError, match="can be loaded .none up to iter_0000002.: restore one, or write an iteration"):
        newest(tmp_path)
    tracker.write_text("latest\n")
    with pytest.raises(ValueError, match="holds 'latest' instead of a number"):
        newest(tmp_path)
    tracker.unlink()
    assert newest(tmp_path) == (str(newer), [])


def test_a_run_over_another_ones_checkpoints_says_so(tmp_path):
    args = Namespace(resume=False, load=None, save=str(tmp_path))
    assert load_checkpoint(None, args, digest="") == (0, 0, [])
    save(tmp_path, 3)
    (note,) = load_checkpoint(None, args, digest="")[2]
    assert note == f"{tmp_path} has checkpoints of another run, which this one overwrites: --resume continues it"


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda c: (c / ".metadata").unlink(), ".metadata can't be read (No such file or directory)"),
        (lambda c: (c / MANIFEST).unlink(), f"{MANIFEST} can't be read (No such file or directory)"),
        (lambda c: (c / MANIFEST).write_text('{"common.pt": '), f"{MANIFEST} is damaged"),
    ],
)
def test_a_damaged_one_is_passed_over(tmp_path, damage, fault):
    older, newer = (save(tmp_path, iteration) for iteration in (8, 16))
    (tmp_path / TRACKER).unlink()
    damage(newer)
    assert newest(tmp_path) == (str(older), [f"warning: checkpoint {newer} is damaged: {fault}"])
    damage(older)
    with pytest.raises(ValueError, match="can be loaded .*iter_0000016 is damaged.*iter_0000008 is damaged"):
        newest(tmp_path)


def test_old_ones_are_deleted(tmp_path):
    for iteration in (1, 2, 3, 30):
        save(tmp_path, iteration)
    save(tmp_path, 20, keep=2)
    assert names(tmp_path) == ["iter_0000003", "iter_0000020", "iter_0000030", TRACKER], "a newer one is kept"
    assert newest(tmp_path)[0].endswith("iter_0000020")


def _killed_at(folder, iteration, call):
    """Save in another process, which is killed before its `call`-th change of the folder. Returns whether it was."""

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
    seen, before = set(), tmp_path / "before"
    for earlier in (1, 2, 3):
        save(before, earlier, "old")
    for call in range(100):
        folder = tmp_path / str(call)
        shutil.copytree(before, folder)
        killed = _killed_at(folder, iteration, call)
        good = Path(newest(folder)[0])
        seen.add((good.name, (good / "common.pt").read_text()))
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
