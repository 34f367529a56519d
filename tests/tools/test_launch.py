"""The launch scripts start real ranks through deepspeed, report failures, and leave no process behind."""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import left

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")

REPO = Path(__file__).resolve().parents[2]
LIMIT = 120

RANK_SCRIPT = """\
import os, signal, subprocess, sys, time
pids = os.path.join(os.path.dirname(__file__), "pids")
os.makedirs(pids, exist_ok=True)
rank, what = os.environ["RANK"], sys.argv[1]
names = "WORLD_SIZE DS_ACCELERATOR OMP_NUM_THREADS GLOO_SOCKET_IFNAME MASTER_ADDR A_VARIABLE"
words = ["rank", rank, *(os.environ.get(n) for n in names.split()), sys.argv[2:]]
os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # one write, or else the ranks' words mix
def note(pid):
    open(os.path.join(pids, str(pid)), "w").close()
note(os.getpid())
if what == "sleep":
    if rank == "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid)
    os.write(1, b"asleep\\n")
    time.sleep(600)
if what == "fail":
    while rank == "2" and len(os.listdir(pids)) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)  # all have spoken
    if rank == "2":
        raise RuntimeError("told to fail")
    time.sleep(600)
"""


def _environment(**variables):
    """As after activating the environment, without what a test run adds."""
    dropped = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "DS_ACCELERATOR", "RANK", "WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**env, "VIRTUAL_ENV": sys.prefix, "DS_ACCELERATOR": "cpu", **variables}


def _start(*command, cwd=REPO, **variables):
    return subprocess.Popen(
        ["bash", *map(str, command)],
        cwd=cwd,
        env=_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # where the tests run in the background SIGINT is ignored, and a shell can't trap what it inherits as ignored
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def _finish(process):
    try:
        output, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, output


def _run(*command, **options):
    return _finish(_start(*command, **options))


def _pids(folder):
    return [int(name) for name in os.listdir(folder / "pids")]


@pytest.fixture
def rank_script(tmp_path):
    path = tmp_path / "rank.py"
    path.write_text(RANK_SCRIPT)
    return path


def _ranks_said(output):
    return sorted(re.findall(r"rank .*\]", output))


def test_local_starts_the_ranks_and_a_failing_one_ends_all(rank_script):
    words = ("launch/deepspeed_local.sh", "-n", 3, rank_script, "fail", "a b", "--name", "1")
    status, output = _run(*words, A_VARIABLE="x")
    assert status != 0 and "told to fail" in output
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert _ranks_said(output) == [f"rank {r} 3 cpu {threads} lo 127.0.0.1 x ['a b', '--name', '1']" for r in range(3)]
    assert not left(_pids(rank_script.parent))


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_leaves_nothing_behind(rank_script, number):
    """Even a rank that ignores SIGTERM goes, and its child in a session of its own."""
    process, asleep = _start("launch/deepspeed_local.sh", "-n", 2, rank_script, "sleep"), 0
    for line in process.stdout:
        asleep += line.strip() == "asleep"
        if asleep == 2:
            break
    pids = _pids(rank_script.parent)
    assert len(pids) == 3 and len(left(pids, 0.0)) == 3
    process.send_signal(number)
    status, _ = _finish(process)
    assert status == 128 + number
    assert not left(pids)


@pytest.mark.slow
def test_hostfile_with_a_command_on_every_node(rank_script):
    """--node-rank: two "nodes" of two ranks form one world of four."""
    hostfile = rank_script.with_name("hosts")
    hostfile.write_text("# two nodes\nnode-a slots=2\nnode-b slots=2\n")
    common = ("launch/deepspeed_hostfile.sh", "--hostfile", hostfile, "--master-addr", "127.0.0.1", "--node-rank")
    nodes = [_start(*common, node, rank_script, "end", GLOO_SOCKET_IFNAME="lo") for node in (0, 1)]
    results = [_finish(node) for node in nodes]
    assert [status for status, _ in results] == [0, 0], results
    said = _ranks_said("".join(output for _, output in results))
    assert said == [f"rank {r} 4 cpu 1 lo 127.0.0.1 None []" for r in range(4)]


def _programs(folder, **texts):
    """PATH with stand-ins for programs before all others."""
    (folder / "bin").mkdir()
    for name, text in texts.items():
        (folder / "bin" / name).write_text("#!/usr/bin/env bash\n" + text)
        (folder / "bin" / name).chmod(0o755)
    return f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"


# Starts the "nodes" here, in an environment as bare as a remote shell's.
PDSH = """\
while [[ "$1" == -* ]]; do case "$1" in -w) hosts="$2"; shift 2 ;; -f) shift 2 ;; *) shift ;; esac; done
n=0; jobs=()
for host in ${hosts//,/ }; do command="$*"
    env -i HOME="$HOME" PATH=/usr/bin:/bin bash -c "${command//%n/$n}" & jobs+=($!); n=$((n + 1))
done; status=0; for job in "${jobs[@]}"; do wait "$job" || status=$?; done; exit $status
"""


@pytest.mark.slow
def test_hostfile_over_ssh_passes_the_environment(rank_script):
    folder = rank_script.parent
    (folder / "hosts").write_text("node-a slots=1\nnode-b slots=2\n")
    path = _programs(folder, ssh="echo 127.0.0.1\n", pdsh=PDSH)
    words = ("launch/deepspeed_hostfile.sh", "--hostfile", folder / "hosts", "--export", "A_VARIABLE", rank_script)
    status, output = _run(*words, "end", PATH=path, GLOO_SOCKET_IFNAME="eth7", A_VARIABLE='two "$words"')
    assert status == 0, output
    assert _ranks_said(output) == [f'rank {r} 3 cpu 1 eth7 127.0.0.1 two "$words" []' for r in range(3)]


# Stand-ins for Slurm: scontrol knows two nodes, srun starts two tasks on each of them, here.
SCONTROL = '[ "$*" = "show hostnames node[1-2]" ] && printf "127.0.0.1\nnode2\n"\n'
SRUN = """\
[ "$1" = --kill-on-bad-exit=1 ] && shift
status=0
jobs=()
for task in 0 1 2 3; do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) SLURM_NTASKS=4 "$@" &
    jobs+=($!)
done
trap 'kill -TERM "${jobs[@]}"' TERM
for job in "${jobs[@]}"; do wait -n || { status=$? && kill "${jobs[@]}" 2>/dev/null; }; done
exit $status
"""


@pytest.fixture
def slurm(tmp_path):
    """Variables of a job of four ranks on two nodes."""
    path = _programs(tmp_path, scontrol=SCONTROL, srun=SRUN)
    job = {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "3"}
    return {**job, "SLURM_SUBMIT_DIR": str(REPO), "PATH": path}


def test_slurm_starts_a_rank_for_each_task_and_passes_a_failure_on(rank_script, slurm):
    """As sbatch does: from a copy of the script in another place."""
    copy = shutil.copy(REPO / "launch" / "slurm_train.sh", rank_script.parent / "slurm_script")
    status, output = _run(copy, rank_script, "fail", "a b", cwd=rank_script.parent, A_VARIABLE="x", **slurm)
    assert status not in (0, 2) and "told to fail" in output
    assert "4 ranks on node[1-2], rendezvous at 127.0.0.1:20123" in output
    assert _ranks_said(output) == [f"rank {r} 4 cpu 3 None 127.0.0.1 x ['a b']" for r in range(4)]
    assert not left(_pids(rank_script.parent))
    elsewhere = {**slurm, "SLURM_SUBMIT_DIR": str(rank_script.parent)}
    status, output = _run(copy, rank_script, cwd=rank_script.parent, **elsewhere)
    assert status == 1
    assert "submit from the repository's folder" in output


BAD_LINES = ["node-0", "slots=8", "node-0 slots=0", "node-0 slots=-1", "node-0 slots=08", "node-0 slots=2.5",
    "node-0 slots=gpu", "node-0 slots = 8", "node-0 SLOTS=8", "node-0:8", "node-0 slots=8 max_slots=9",
    " node-0 slots=8", "-oProxyCommand=x slots=1", "a/b slots=1", "a;b slots=1", "n\u00f6de slots=1",
    "\ufeffnode-0 slots=8", "node-0 slots=999999", "a slots=1\rb slots=2"]  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_of_a_hostfile_is_shown(line, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text(f"# nodes\nnode-1 slots=2\n{line}\n", newline="")
    status, output = _run("launch/deepspeed_hostfile.sh", "--hostfile", hosts, "generate")
    shown = line.replace("\r", "\n")  # by Python's reading of the output
    assert status == 1 and f"error: {hosts}, line 3: '{shown}' is not 'HOST slots=RANKS'" in output


@pytest.mark.parametrize(
    ("text", "message"),
    [("", " names no host"), ("# node-0 slots=8\n\n", " names no host"), ("a\0 slots=1\n", " has NUL characters"),
     ("a slots=1\nb slots=1\na slots=2", " lists the host a more than once")],
)  # fmt: skip
def test_a_hostfile_without_a_job_is_explained(text, message, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text(text)
    status, output = _run("launch/deepspeed_hostfile.sh", "--hostfile", hosts, "generate")
    assert status == 1 and f"error: {hosts}{message}" in output


def test_no_environment_is_explained(tmp_path):
    status, output = _run("launch/deepspeed_local.sh", "generate", VIRTUAL_ENV=str(tmp_path))
    assert status == 1
    assert "run 'bash launch/setup.sh' first" in output


# quickstart.sh itself, with a stand-in for the launcher and the two jobs: they are tested where they are.
DEEPSPEED = """\
while [ "$1" != megatron_tree ]; do shift; done
if [ "$2" = train ]; then
    [ -z "${FAILURE:-}" ] || { echo "$FAILURE" && exit 7; }
    echo "${@:3}" | tee runs/quickstart/train.jsonl >runs/quickstart/loss.png
else
    echo {} >"${@: -1}"
fi
"""


def test_quickstart_does_both_jobs_and_names_a_failing_one(tmp_path):
    venv, out = tmp_path / "venv", tmp_path / "runs" / "quickstart"
    shutil.copytree(REPO / "launch", tmp_path / "launch")
    (tmp_path / "launch" / "setup.sh").write_text("echo nothing to install\n")
    venv.mkdir()
    _programs(venv, deepspeed=DEEPSPEED)
    (venv / "bin" / "python").symlink_to(sys.executable)
    quickstart = ("launch/quickstart.sh", "--ranks", 2)
    status, output = _run(*quickstart, cwd=tmp_path, VIRTUAL_ENV=str(venv))
    assert status == 0, output
    assert {path.name for path in out.iterdir()} == {
        "train.jsonl", "loss.png", "generate.json", "training.log", "generation.log",
    }  # fmt: skip
    assert (out / "loss.png").read_text() == "--config configs/train/quickstart.yaml --context-parallel-size 2\n"
    summary = output[output.index("== done") :]
    assert re.search(r"training: \d+ s\n +generation: \d+ s\n", summary)
    assert "generate.json" in summary
    shutil.copy(venv / "bin" / "deepspeed", venv / "bin" / "nproc")  # executable
    shutil.copy(venv / "bin" / "deepspeed", venv / "bin" / "nvidia-smi").write_text("exit 1\n")
    for cores, ranks in ((1, 2), (3, 2), (4, 4)):
        (venv / "bin" / "nproc").write_text(f"#!/usr/bin/env bash\necho {cores}\n")
        status, output = _run(*quickstart[:1], "--train-only", cwd=tmp_path, VIRTUAL_ENV=str(venv))
        assert status == 0 and f"== training on {ranks} ranks: " in output, output
    status, output = _run(*quickstart, cwd=tmp_path, VIRTUAL_ENV=str(venv), FAILURE="no cake left")
    assert status == 7
    assert "no cake left" in output and 'quickstart failed in the step "training" (exit status 7)' in output
    assert "generation" not in output
