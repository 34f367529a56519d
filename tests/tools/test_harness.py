"""The harness of the distributed tests itself: results, failures, time-outs, and that no process stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import support_matrix
from support.processes import left
from support.ranks import DistributedTestError, run_distributed
from support.rounding import assert_near, error

TESTS = Path(__file__).resolve().parents[1]


def _sum_of_ranks(rank, world, scale):
    x = torch.full((3,), float(rank) * scale)
    dist.all_reduce(x)
    return x


def _pid(rank, world):
    return os.getpid()


def _raise_on(rank, world, bad):
    if rank == bad:
        raise KeyError(f"told to fail on rank {rank}")
    dist.barrier()


def _die_on(rank, world, bad):
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _sleep_on(rank, world, ranks, pid_folder):
    open(os.path.join(pid_folder, str(os.getpid())), "w").close()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.path.join(pid_folder, str(child.pid)), "w").close()
    if rank in ranks:
        time.sleep(600)
    child.kill()


def _facts(rank, world):
    x = torch.ones(2)
    poisoned = all(bool(t.isnan().all()) for t in (torch.empty(2), torch.empty_like(x), x.new_empty(2, 2)))
    return os.environ.get("A_VARIABLE"), dist.get_debug_level().name, poisoned, torch.rand(3).tolist()


def test_workers_are_kept_and_fresh_ones_are_not():
    assert [x.tolist() for x in run_distributed(_sum_of_ranks, 2, 2.0)] == [[2.0] * 3] * 2
    kept = run_distributed(_pid, 2)
    assert run_distributed(_pid, 2) == kept
    fresh = run_distributed(_pid, 2, fresh=True)
    assert not set(fresh) & set(kept)
    assert not left(fresh)
    assert left(kept, 0.0) == kept


def test_a_rank_that_fails_or_dies_is_named():
    before = run_distributed(_pid, 2)
    with pytest.raises(DistributedTestError, match="rank 1 of 2 failed") as error:
        run_distributed(_raise_on, 2, 1)
    assert "told to fail on rank 1" in str(error.value) and "in _raise_on" in str(error.value)
    assert not left(before)
    again = run_distributed(_pid, 2)
    assert not set(again) & set(before)
    with pytest.raises(DistributedTestError, match=r"rank 0 of 2 failed:\nthe process died, exit code -9"):
        run_distributed(_die_on, 2, 0)
    assert not left(again)


def test_time_out_names_the_ranks_and_kills_everything(tmp_path):
    start = time.monotonic()
    with pytest.raises(DistributedTestError, match=r"timed out after 3 s; .*\[1\]") as error:
        run_distributed(_sleep_on, 2, (1,), str(tmp_path), timeout=3)
    assert time.monotonic() - start < 100
    assert error.value.unfinished == (1,)
    assert "in _sleep_on" in str(error.value)
    pids = [int(name) for name in os.listdir(tmp_path)]
    assert len(pids) == 4
    assert not left(pids)


def test_ranks_get_the_calls_environment_poisoned_memory_and_one_seed():
    env = {"A_VARIABLE": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    first, second = run_distributed(_facts, 2, env=env)
    assert first == second and first[:3] == ("1", "DETAIL", True)
    assert run_distributed(_facts, 2) == [(None, "OFF", True, first[3])] * 2
    assert torch.empty(2).isnan().all() and torch.empty(2, dtype=torch.int64).dtype == torch.int64


@pytest.mark.slow
def test_no_worker_survives_a_killed_session(tmp_path):
    (tmp_path / "job.py").write_text("import os\ndef pid(rank, world):\n    return os.getpid()\n")
    script = tmp_path / "session.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})\n"
        "import job\n"
        "from support import ranks\n"
        "if __name__ == '__main__':\n"
        "    print(*ranks.run_distributed(job.pid, 2), flush=True)\n"
        "    time.sleep(600)\n"
    )
    session = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        pids = [int(pid) for pid in session.stdout.readline().split()]
        assert len(left(pids, 0.0)) == 2
    finally:
        session.kill()
        session.wait()
    assert not left(pids)


def test_rounding_is_told_from_errors():
    x = torch.randn(100)
    assert_near(x * (1 + 2e-7), x, 100)
    for wrong in (x * (1 + 1e-4), x.where(x < x.max(), float("nan")), x.where(x < x.max(), float("inf"))):
        with pytest.raises(AssertionError, match=r"out: an error of \S+ of the largest entry, allowed is 4\.77e-06"):
            assert_near(wrong, x, 100, "out")
    assert error(torch.full((3,), float("-inf")), torch.full((3,), float("-inf"))) == error(x[:0], x[:0]) == 0.0


def test_quick_names_tests_that_exist_and_are_fast(request):
    """pytest stops at a name that it does not find, and "make quick" selects nothing by that of a slow test."""
    collected = request.config.stash[support_matrix.COLLECTED]
    named = [line for line in (TESTS / "quick.txt").read_text().splitlines() if "::" in line]
    files = {TESTS.parent / line.partition("::")[0] for line in named}
    if any("::" in argument for argument in request.config.args) or not files <= {test.path for test in collected}:
        pytest.skip("this session was asked for other tests than those of tests/quick.txt")
    fast = [test for test in collected if not test.get_closest_marker("slow")]
    names = {test.nodeid.removesuffix(f"@{test.path.stem}") for test in fast}  # pytest-xdist appends the group
    assert named
    assert set(named) <= names | {name.partition("[")[0] for name in names}
