"""launch/train_hf.py: on ranks that are there already and, slow, by the deepspeed launcher as users run it."""

import contextlib
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.limits import files_of_at_most
from support.processes import free_port
from support.ranks import run_distributed

REPO = Path(__file__).parents[2]
SCRIPT = REPO / "launch" / "train_hf.py"
LAUNCHER = Path(sys.executable).parent / "deepspeed"
ENV = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": f"{REPO}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
}


def _command(text_folder, save, *options):
    port = free_port()
    options = ("--model", "tiny", "--seq-length", 48, "--data-path", text_folder, "--save", save, *options)
    command = [LAUNCHER, "--num_gpus", 2, "--master_port", port, "--no_local_rank", SCRIPT, *options]
    return [str(part) for part in command], os.environ | ENV | {"TORCH_EXTENSIONS_DIR": str(save / "compiled")}


def _losses(text_folder, save, *options):
    """Step -> loss, as a run of two ranks prints them."""
    command, env = _command(text_folder, save, *options)
    done = subprocess.run(command, env=env, cwd=REPO, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (save / "latest").is_file() and not (save / "compiled").exists()
    return _steps(done.stdout)


def _steps(said):
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)/\d+ +loss ([\d.]+)", said)}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for path in sorted(REPO.glob("megatron_tree/*.py"))[:4]:
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def _in_process(rank, world, argv):
    """What this rank prints when it runs the script."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    script, out = runpy.run_path(str(SCRIPT)), io.StringIO()
    args = script["build_parser"]().parse_args(argv)
    script["check_arguments"](args, world)
    with contextlib.redirect_stdout(out):
        script["run"](args)
    return out.getvalue()


def test_it_trains_and_saves(text, tmp_path):
    # the default buckets are gigabytes, which poisoned_empty fills
    zero = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000}}
    (tmp_path / "zero.json").write_text(json.dumps(zero))
    argv = ["--model", "tiny", "--seq-length", "48", "--data-path", str(text), "--save", str(tmp_path / "run")]
    argv += ["--deepspeed-config", str(tmp_path / "zero.json")]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled")}
    said, silent = run_distributed(_in_process, 2, [*argv, "--steps", "4", "--lr", "0.01"], env=env, fresh=True)
    losses = _steps(said)
    assert list(losses) == [1, 2, 3, 4]
    assert losses[4] < losses[1] - 0.1
    assert (tmp_path / "run" / "latest").is_file() and not (tmp_path / "compiled").exists() and not _steps(silent)


def _full(rank, world, argv):
    """Two runs of the script: one step, and another one with a save that fails. Returns this rank's error."""
    _in_process(rank, world, [*argv, "--steps", "1"])
    try:
        with files_of_at_most(20_000):
            _in_process(rank, world, [*argv, "--steps", "2"])
    except Exception as error:
        return type(error).__name__, str(error)


def test_no_space_left(text, tmp_path):
    """The former checkpoint stays, nothing has the new one's name, and what all ranks say names the folder."""
    zero = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000}}
    (tmp_path / "zero.json").write_text(json.dumps(zero))
    save = tmp_path / "run"
    argv = ["--model", "tiny", "--seq-length", "48", "--data-path", str(text), "--save", str(save)]
    argv += ["--deepspeed-config", str(tmp_path / "zero.json")]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled")}
    sentence = f"no space left on {save}: step2.unfinished is not written (File too large)"
    for kind, said in run_distributed(_full, 2, argv, env=env, fresh=True):
        assert kind in ("NotWritten", "CommError") and sentence in said, said
    assert (save / "latest").read_text() == "step1" and (save / "step1").is_dir() and not (save / "step2").exists()


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(text, tmp_path):
    """Killed in the middle, whatever it was doing: the same command gives the losses of a run that was not."""
    options = ("--steps", 8, "--lr", 0.01, "--save-interval", 2)
    (tmp_path / "whole").mkdir()
    whole = _losses(text, tmp_path / "whole", *options)
    assert {path.name for path in (tmp_path / "whole").glob("step*")} == {"step6", "step8"}
    save = tmp_path / "killed"
    save.mkdir()
    (save / "step4").mkdir()  # half written by a run that was killed
    command, env = _command(text, save, *options)
    with subprocess.Popen(command, env=env, cwd=REPO, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        for line in run.stdout:
            if "step     3/8" in line:
                os.killpg(run.pid, signal.SIGKILL)
                break
    kept = int((save / "latest").read_text().removeprefix("step"))
    assert kept in (2, 4, 6)  # 2, unless the signal came late
    rest = _losses(text, save, *options)
    assert rest == pytest.approx({step: loss for step, loss in whole.items() if step > kept}, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--save-interval", "5"), "save_interval=5 needs a folder"),
        (("--deepspeed-config", "absent.json"), "deepspeed_config='absent.json' is not a readable JSON file"),
        (("--deepspeed-config", os.devnull), "is not a readable JSON file"),
    ],
)
def test_options_that_are_refused(options, message):
    script = runpy.run_path(str(SCRIPT))
    with pytest.raises(ValueError, match=message):
        script["check_arguments"](script["build_parser"]().parse_args(options), 4)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_transformers_trainer(text, tmp_path, launcher):
    from support.http_server import byte_model, byte_tokenizer

    byte_model().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    options = (
        "--model",
        tmp_path / "model",
        "--data_path",
        text,
        "--seq_length",
        48,
        "--sequences",
        64,
        "--sp_size",
        2,
    )
    options += ("--output_dir", tmp_path / "out", "--max_steps", 3, "--logging_steps", 1, "--use_cpu")
    port = free_port()
    script = REPO / "launch" / "train_trainer.py"
    if launcher == "deepspeed":
        options += ("--deepspeed", REPO / "configs" / "deepspeed" / "trainer_zero2.json")
        command = [LAUNCHER, "--num_gpus", 2, "--master_port", port, "--no_local_rank"]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", port]
    done = subprocess.run(
        [str(part) for part in (*command, script, *options)],
        env=os.environ | ENV,
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"'loss': '?[\d.]+", done.stdout)) == 3
    assert "after 3 steps" in done.stdout and (tmp_path / "out" / "checkpoint-3").is_dir()
