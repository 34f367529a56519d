"""megatron-tree train through the real deepspeed launcher: same losses in every layout, resuming, and failing."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

for package in ("megatron.core", "deepspeed", "yaml", "tqdm", "matplotlib", "psutil"):
    pytest.importorskip(package)

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ("megatron_tree", "train")
RANKS = 2
ITERS = 6
TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --seq-length 64 --micro-batch-size 2 "
    f"--global-batch-size 4 --train-iters {ITERS} --lr-warmup-iters 2 --eval-iters 1 --window-size 40 0 "
    "--softmax-type learnable"
).split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A few files, so that a run starts fast."""
    folder = tmp_path_factory.mktemp("text")
    for path in sorted(ROOT.glob("megatron_tree/*.py")):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def command(folder, text, *options):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    launcher = Path(sys.executable).with_name("deepspeed")
    start = [str(launcher), "--num_gpus", str(RANKS), "--master_port", str(port), "--no_local_rank"]
    start += ["--module", *COMMAND]
    return [sys.executable, *start, *TINY, "--data-path", str(text), "--output-dir", str(folder), *options]


def environment():
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    cpu = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {
        **os.environ,
        **cpu,
        "PYTHONPATH": path,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def launch(folder, text, *options):
    folder.mkdir(exist_ok=True)
    with open(folder / "output.txt", "w") as output:
        done = subprocess.run(
            command(folder, text, *options),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            cwd=folder,
            timeout=800,
        )
    assert not processes_with(str(folder))
    return done.returncode, (folder / "output.txt").read_text()


def processes_with(argument):
    import psutil

    return [p.pid for p in psutil.process_iter(["cmdline"]) if argument in (p.info["cmdline"] or [])]


def losses(folder):
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "event" not in record}


def assert_same_losses(actual, expected, rel=1e-5):
    assert actual == {step: pytest.approx(expected[step], rel=rel, abs=0) for step in actual}


@pytest.mark.supports("megatron-tree train", with_="layouts give the same losses; checkpoints resume in another layout")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_layouts_agree_and_runs_resume(tmp_path, text):
    tree = tmp_path / "tree"
    code, output = launch(tree, text, "--context-parallel-size", "2", "--save", str(tree / "c"), "--save-interval", "3")
    assert code == 0, output
    expected = losses(tree)
    assert sorted(expected) == list(range(1, ITERS + 1))
    assert f"step {ITERS}/{ITERS}" in output
    assert "byte unigram model" in output
    assert sorted(path.name for path in (tree / "c").iterdir()) == [
        "iter_0000003",
        "iter_0000006",
        "latest_checkpointed_iteration.txt",
    ]

    dense = tmp_path / "dense"
    code, output = launch(dense, text, "--context-parallel-size", "1")
    assert code == 0, output
    assert_same_losses(losses(dense), expected)

    (tree / "c" / "latest_checkpointed_iteration.txt").write_text("3\n")
    same = tmp_path / "same"
    code, output = launch(same, text, "--context-parallel-size", "2", "--load", str(tree / "c"))
    assert code == 0, output
    assert losses(same) == {step: expected[step] for step in range(4, ITERS + 1)}

    other = tmp_path / "other"
    layout = ["--tensor-model-parallel-size", "2", "--load", str(tree / "c")]
    code, output = launch(other, text, *layout)
    assert code == 0, output
    assert_same_losses(losses(other), expected)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_failures_end_the_run(tmp_path, text):
    code, output = launch(tmp_path / "assert", text, "--assert-below-unigram", "9")
    assert code == 1
    assert "is not 9.0 below the byte unigram model's" in output

    code, output = launch(tmp_path / "load", text, "--load", str(tmp_path / "absent"))
    assert code == 1
    assert f"ValueError: load='{tmp_path}/absent' has no checkpoint: name a folder" in output

    code, output = launch(tmp_path / "option", text, "--context-parallel-size", "2", "--seq-length", "62")
    assert code == 2
    assert output.count("seq_length=62 must be a multiple of") == 1, "one rank says it"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_killed_rank_ends_the_run(tmp_path, text):
    options = ["--context-parallel-size", "2", "--train-iters", "100000", "--log-interval", "1"]
    with open(tmp_path / "output.txt", "w") as output:
        run = subprocess.Popen(
            command(tmp_path, text, *options), stdout=output, stderr=subprocess.STDOUT, env=environment(), cwd=tmp_path
        )
    try:
        deadline = time.monotonic() + 500
        while not (tmp_path / "train.jsonl").exists() or not losses(tmp_path):
            assert run.poll() is None, (tmp_path / "output.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        import psutil

        ranks = [p for p in processes_with(str(tmp_path)) if psutil.Process(p).environ().get("RANK") == "1"]
        os.kill(max(ranks), signal.SIGKILL)
        assert run.wait(300) != 0
        assert "rank 0 failed" in (tmp_path / "output.txt").read_text()
        assert not processes_with(str(tmp_path))
    finally:
        run.kill()
        for pid in processes_with(str(tmp_path)):
            os.kill(pid, signal.SIGKILL)


def wait_for_steps(folder, steps, running):
    deadline = time.monotonic() + 500
    while not (folder / "train.jsonl").exists() or len(losses(folder)) < steps:
        assert running()
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_signal_to_one_rank_ends_all_well(tmp_path, text):
    """As a scheduler starts ranks, without a launcher: all end with status 0 and a checkpoint, and the run goes on."""
    place = {**environment(), "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    options = f"--context-parallel-size 2 --lr-decay-iters 9 --save {tmp_path / 'c'} --resume".split()
    start = [sys.executable, "-m", *COMMAND, *TINY, "--data-path", str(text), "--output-dir", str(tmp_path), *options]

    def ranks(*more):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = {"MASTER_PORT": str(s.getsockname()[1])}
        variables = [{**place, **port, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path}
        return [subprocess.Popen([*start, *more], env=env, **pipes) for env in variables]

    run = ranks("--train-iters", "100000")
    try:
        wait_for_steps(tmp_path, 3, lambda: all(rank.poll() is None for rank in run))
        run[1].send_signal(signal.SIGUSR1)
        said = [rank.communicate(timeout=500)[0] for rank in run]
        assert [rank.returncode for rank in run] == [0, 0], said
        done = max(losses(tmp_path))
        assert f"stopped by a signal after step {done} of 100000; continue with --load {tmp_path / 'c'}" in said[0]
        assert (tmp_path / "c" / "latest_checkpointed_iteration.txt").read_text() == f"{done}\n"
        run = ranks("--train-iters", str(done + 2))
        said = [rank.communicate(timeout=500)[0] for rank in run]
        assert [rank.returncode for rank in run] == [0, 0], said
        assert f"continuing from {tmp_path / 'c'}/iter_{done:07d}" in said[0]
        assert sorted(losses(tmp_path)) == list(range(1, done + 3))
    finally:
        for rank in run:
            rank.kill()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sigterm_to_the_launch_script_leaves_a_checkpoint(tmp_path, text):
    """launch/deepspeed_local.sh ends with 143, as after any SIGTERM, but waits for the ranks to save."""
    options = f"--context-parallel-size 2 --train-iters 100000 --save {tmp_path / 'c'}".split()
    script = [
        "bash",
        str(ROOT / "launch" / "deepspeed_local.sh"),
        "-n",
        "2",
        "train",
        *TINY,
        "--data-path",
        str(text),
    ]
    variables = {**environment(), "VIRTUAL_ENV": sys.prefix, "STOP_SECONDS": "100"}
    with open(tmp_path / "output.txt", "w") as output:
        run = subprocess.Popen(
            [*script, "--output-dir", str(tmp_path), *options],
            stdout=output,
            stderr=output,
            env=variables,
            cwd=tmp_path,
        )
    try:
        wait_for_steps(tmp_path, 3, lambda: run.poll() is None)
        run.send_signal(signal.SIGTERM)
        assert run.wait(500) == 143
        said = (tmp_path / "output.txt").read_text()
        assert f"stopped by a signal after step {max(losses(tmp_path))} of 100000" in said
        assert (tmp_path / "c" / "latest_checkpointed_iteration.txt").read_text() == f"{max(losses(tmp_path))}\n"
        assert not processes_with(str(tmp_path))
    finally:
        run.kill()
        for pid in processes_with(str(tmp_path)):
            os.kill(pid, signal.SIGKILL)


def test_without_a_launcher_it_says_how_to_start(monkeypatch, capsys):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    from megatron_tree.training.command import train

    assert train([]) == 2
    assert "WORLD_SIZE, MASTER_PORT not set: start this program with the deepspeed launcher" in capsys.readouterr().err
