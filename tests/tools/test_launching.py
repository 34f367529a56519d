"""No log line stands inside a streamed answer; ranks start together, with the same options, or not at all."""

import argparse
import errno
import io
import logging
import os
import sys

import pytest
import torch
import torch.distributed as dist

from megatron_tree import launching
from megatron_tree.core import log as package_log
from megatron_tree.core.comm import Ranks
from megatron_tree.core.errors import TreeError
from megatron_tree.core.log import logger
from megatron_tree.launching import hold_log, together
from support.ranks import run_distributed


@pytest.fixture
def log(monkeypatch):
    """What the package's logger prints."""
    stream = io.StringIO()
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(stream)])
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()
    yield stream
    logger.manager._clear_cache()


def test_log_lines_wait_for_the_end_of_an_answer(log):
    with hold_log():
        logger.warning("a rank is gone")
        assert log.getvalue() == "a rank is gone\n"
        logger.info("a schedule")
        log.write("the answer\n")
    logger.info("afterwards")
    assert log.getvalue() == "a rank is gone\nthe answer\na schedule\nafterwards\n"


def test_ctrl_c_is_told_once(monkeypatch, capsys):
    def load():
        raise KeyboardInterrupt

    ends, parser = [], lambda: launching.new_parser("x", "", "")
    monkeypatch.setattr(launching, "leave", ends.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        launching.run_script("megatron-tree x", [], parser, lambda *_: None, load, choices=False)
    assert ends == [130, 130] and capsys.readouterr().err == "megatron-tree x: stopped by Ctrl-C\n"


def test_what_all_ranks_raise_rank_0_tells_first(monkeypatch, capsys):
    def load():
        raise TreeError("the cache is full")

    waits, parser = [], lambda: launching.new_parser("x", "", "")
    monkeypatch.setattr(launching, "leave", lambda status: sys.exit(status))
    monkeypatch.setattr(launching.time, "sleep", waits.append)  # the launcher ends those that wait
    for rank, times in (("0", 0), ("1", 1)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            launching.run_script("megatron-tree x", [], parser, lambda *_: None, load, choices=False)
        assert len(waits) == times
        assert capsys.readouterr().err == f"rank {rank} failed: TreeError: the cache is full\n"


def test_failures_whose_text_is_enough_have_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr(launching, "leave", lambda status: None)
    for error, said in (
        (TreeError("the cache is full"), "rank 1 failed: TreeError: the cache is full\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "rank 1 failed: [Errno 32] Broken pipe\n"),
        (OSError(errno.ENOSPC, "No space left"), "rank 1 failed: [Errno 28] No space left\n"),
    ):
        launching.exit_after_failure(1, error)
        assert capsys.readouterr().err == said


def test_a_terminal_is_told_at_once_that_ranks_load(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    parser, load = lambda: launching.new_parser("x", "", ""), lambda: (lambda args: None, ())
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert launching.run_script("megatron-tree x", [], parser, lambda *_: None, load, choices=False) == 0
    assert capsys.readouterr().err == "megatron-tree x: loading on 2 ranks ...\n"


def _together(rank, world, options, errors):
    """What this rank raises where ranks have these options, and raise these errors."""
    args, error = argparse.Namespace(**options[rank]), errors.get(rank)
    try:
        with together(args, Ranks.of(dist.group.WORLD, limit_s=30.0)):
            if error is not None:
                raise error
    except Exception as error:
        return type(error).__name__, str(error)
    return None


SAME = [{"lr": 0.1, "config": None}, {"lr": 0.1, "config": "lr.yaml"}, {"lr": 0.1, "api_keys": "secret"}]


def test_options_that_differ_end_all_ranks():
    assert run_distributed(_together, 3, SAME, {}) == [None] * 3
    options = [SAME[0], {"lr": 0.1, "max_rows": 8}, {"lr": 0.2, "api_keys": "secret"}]
    said = "the ranks were started with different options: --lr is 0.1 on rank 0 and 0.2 on rank 2; "
    said += "--max-rows is nothing on rank 0 and 8 on rank 1"
    assert run_distributed(_together, 3, options, {}) == [("ValueError", said)] * 3


def test_what_one_rank_raises_all_raise():
    missing = FileNotFoundError(2, "No such file or directory", "tokenizer.json")
    cases = {
        ("ValueError", "port 80 is taken"): ValueError("port 80 is taken"),
        ("ValueError", str(missing)): missing,
        ("TreeError", "rank 2 failed: MemoryError: none is left"): MemoryError("none is left"),
    }
    for others, error in cases.items():
        own = type(error).__name__, str(error)
        assert run_distributed(_together, 3, SAME, {2: error}) == [others, others, own]


def test_one_process_alone_compares_nothing():
    with together(argparse.Namespace(lr=1), Ranks.of(None)):
        pass
    with pytest.raises(ValueError, match="alone"), together(argparse.Namespace(lr=1), Ranks.of(None)):
        raise ValueError("alone")


@pytest.mark.parametrize(
    ("ranks", "threads", "said"),
    [
        (4, 1, "4 ranks share 2 cores and wait for one another: start 2 for the best speed\n"),
        (2, 2, "2 ranks of 2 threads share 2 cores: set OMP_NUM_THREADS=1\n"),
        (2, 1, ""),
        (None, 2, ""),  # a launcher that does not tell
    ],
)
def test_ranks_that_are_too_many_for_the_cores(ranks, threads, said, log, monkeypatch):
    """Once, with what to do."""
    monkeypatch.setattr(package_log, "_said", set())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    for _ in range(2):
        with together(argparse.Namespace(), Ranks.of(None)):
            pass
    assert log.getvalue() == said
