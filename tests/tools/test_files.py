"""Files that are whole or not there, and the sentence that says why not; every writer of the package is one of them."""

import argparse
import ast
import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megatron_tree.core.files import NotWritten, append, whole_file, whole_folder, writing
from megatron_tree.core.plan import default_topology, save_topology
from megatron_tree.inference.serving.batch import Output
from megatron_tree.tools.training.report import LOG_NAME, Reporter
from support.limits import files_of_at_most

REPO = Path(__file__).resolve().parents[2]
LARGE = "x" * 5000
LIMIT = 4096


def _fail_half_way(path):
    with whole_file(path) as part:
        part.write_text("hal")
        raise RuntimeError("half way")


def test_a_file_keeps_its_text_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="half way"):
        _fail_half_way(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with whole_file(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_written_to_as_it_is(tmp_path):
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    link.symlink_to(target)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        for path in (pipe, link, link):
            with whole_file(path) as part:
                part.write_text("new")
        assert pipe.is_fifo() and reader.read() == "new"
    assert link.is_symlink() and target.read_text() == "new" and len(list(tmp_path.iterdir())) == 3


def _sentence(path, act):
    """What act() says when it can't write."""
    with pytest.raises(NotWritten) as caught, files_of_at_most(LIMIT):
        act()
    text = str(caught.value)
    assert text == f"no space left on {path.parent}: {path.name} is not written (File too large)"


def _write_file(path):
    with whole_file(path) as part:
        part.write_text(LARGE)


def _write_folder(path):
    with whole_folder(path) as part:
        (part / "small").write_text("small")
        (part / "large").write_text(LARGE)


def test_nothing_half_written_is_left_where_there_is_no_space(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    _sentence(path, lambda: _write_file(path))
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    fd = os.open(path, os.O_RDWR | os.O_APPEND)
    _sentence(path, lambda: append(fd, LARGE.encode(), path))
    append(fd, b" and new", path)
    os.close(fd)
    assert path.read_text() == "old and new"
    _sentence(tmp_path / "folder", lambda: _write_folder(tmp_path / "folder"))
    assert list(tmp_path.iterdir()) == [path]
    _write_folder(tmp_path / "folder")
    assert (tmp_path / "folder" / "large").read_text() == LARGE


def test_what_libraries_say_of_it_is_understood(tmp_path):
    weights, path = {"a": torch.zeros(10_000)}, tmp_path / "weights"

    def write(save):
        with writing(path):
            save()

    for save in (
        lambda: torch.save(weights, path),
        lambda: torch.save(weights, path, _use_new_zipfile_serialization=False),
        lambda: safetensors.torch.save_file(weights, path),
        lambda: path.write_text(LARGE),
    ):
        path.unlink(missing_ok=True)
        _sentence(path, lambda save=save: write(save))


def _raise(error, *others):
    with writing(Path("folder/file"), *others):
        raise error


def test_other_faults_and_other_errors():
    denied = PermissionError(13, "Permission denied", "folder/file")
    with pytest.raises(NotWritten, match=r"^folder can't be written to: file is not written \(Permission denied\)$"):
        _raise(denied)
    with pytest.raises(NotWritten, match=r"\(KeyError: 'a'\)$"):
        _raise(KeyError("a"), KeyError)
    for error in (ValueError("a"), ConnectionResetError(104, "reset"), RuntimeError("Connection closed by peer")):
        with pytest.raises(type(error)) as caught:
            _raise(error)
        assert caught.value is error


def test_logs_and_topologies(tmp_path):
    args = argparse.Namespace(output_dir=tmp_path / "run", save=None, train_iters=3)
    log = tmp_path / "run" / LOG_NAME
    reporter = Reporter(args, first_step=1, enabled=True)
    reporter.event("start", options={})
    _sentence(log, lambda: reporter.event("start", options=LARGE))
    assert [json.loads(line)["event"] for line in log.read_text().splitlines()] == ["start"]
    cluster = tmp_path / "cluster.yaml"
    with pytest.raises(NotWritten, match="no space left on"), files_of_at_most(100):
        save_topology(default_topology("gloo"), cluster)
    assert not cluster.exists()


def test_a_batch_goes_on_where_it_had_no_space_left(tmp_path):
    path, header = tmp_path / "out.jsonl", {"sampling": {"seed": 3}}
    output = Output(str(path), header)
    output.begin()
    output.append({"id": 1})
    whole = path.read_bytes()
    _sentence(path, lambda: output.append({"id": 2, "text": LARGE}))
    output.close()
    assert path.read_bytes() == whole
    again = Output(str(path), header)
    assert again.done == {"1"}
    again.close()


WRITERS = {"write_text", "write_bytes", "savefig", "save_pretrained", "save_model", "save_file"}
GUARDS = {"whole_file", "whole_folder", "writing", "_writing"}
ELSEWHERE = {
    "tools/emulate/forked.py", "tools/emulate/network.py",  # files of this process, and the kernel's
    "tools/bench/timing.py",
    "tools/bench/results.py", "core/cache/files.py",  # in a function that is called in such a context
    "integrations/transformers/models.py",  # a lock
}  # fmt: skip


def _name(node):
    return getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""


def _writes(node):
    if _name(node) != "open":
        return _name(node) in WRITERS
    modes = (x.value for x in node.args if isinstance(x, ast.Constant))
    return any(isinstance(mode, str) and len(mode) < 4 and set(mode) & set("wxa+") for mode in modes)


def _unguarded(node, guarded=False):
    """Lines that write a file outside of the contexts of files.py."""
    if isinstance(node, ast.With):
        guarded = guarded or any(_name(item.context_expr) in GUARDS for item in node.items)
    if not guarded and _writes(node):
        yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from _unguarded(child, guarded)


def test_every_writer_is_whole_or_says_why_not():
    package = REPO / "megatron_tree"
    paths = [path for path in package.rglob("*.py") if str(path.relative_to(package)) not in ELSEWHERE]
    found = {str(path): [*_unguarded(ast.parse(path.read_text()))] for path in (*paths, *REPO.glob("launch/*.py"))}
    assert not {path: lines for path, lines in found.items() if lines}
