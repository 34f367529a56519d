"""What is installed is pinned; what is read is never run; what listens is known, and on the interface asked for."""

import ast
import importlib.metadata
import io
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.pins import pinned, requirements

psutil = pytest.importorskip("psutil")

REPO = Path(__file__).resolve().parents[2]
SOURCES = [*sorted((REPO / "megatron_tree").rglob("*.py")), *sorted((REPO / "launch").glob("*.py"))]

# --- dependencies ---


def test_what_is_installed_for_us_has_the_version_that_is_pinned():
    """All that our requirements bring in, however far down. Torch pins its own CUDA libraries."""
    pins, waiting, wrong, seen = pinned(), [(r.name, frozenset(r.extras)) for r in requirements()], set(), set()
    if "tensorboard" not in {canonicalize_name(d.metadata["Name"]) for d in importlib.metadata.distributions()}:
        pytest.skip("not the environment that launch/setup.sh makes")
    while waiting:
        name, extras = waiting.pop()
        name = canonicalize_name(name)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        public = found.version.partition("+")[0]
        if not name.startswith(("nvidia-", "cuda-")) and pins.get(name) != f"=={public}":
            wrong.add(f"{name} {found.version}, pinned {pins.get(name)}")
        for requirement in map(Requirement, found.requires or []):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                waiting.append((requirement.name, frozenset(requirement.extras)))
    assert not wrong
    assert len(seen) > 40


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_audit_fails_if_nothing_can_be_looked_up(tmp_path):
    """As behind a mirror. Without --strict pip-audit then ends with 0. Stand-ins for it and for python3 -m venv."""
    audit, asked, python3 = tmp_path / "pip-audit", tmp_path / "asked", tmp_path / "python3"
    audit.write_text(f'#!/bin/sh\necho "$@" >>"{asked}"\ncase " $* " in *" --strict "*) exit 1 ;; esac\n')
    links = f'ln -s "{shutil.which("true")}" "$3/bin/pip"\nln -s "{audit}" "$3/bin/pip-audit"\n'
    python3.write_text(f'#!/bin/sh\nmkdir -p "$3/bin"\n{links}')
    for program in (audit, python3):
        program.chmod(0o755)
    text = (REPO / "Makefile").read_text()
    (tmp_path / "lenient").write_text(text.replace("--strict", ""))
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    for makefile, fails in ((REPO / "Makefile", True), (tmp_path / "lenient", False)):  # the second is the control
        done = subprocess.run(["make", "-f", makefile, "audit"], cwd=REPO, env=env, capture_output=True, text=True)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        (*_, options) = asked.read_text().splitlines()
        assert (REPO / options.split("-r ")[1].split()[0]).samefile(REPO / "constraints.txt")


# --- safe loading ---

UNPICKLERS = {"pickle", "_pickle", "marshal", "dill", "joblib", "shelve", "cloudpickle"}
MAY_UNPICKLE = {
    "megatron_tree/emulate/forked.py": "results of this process's own forks, in memory that nobody else can open",
    "megatron_tree/training/checkpoint_safety.py": "an unpickler that knows a few record types only",
}
OBJECT_COLLECTIVES = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv|isend|irecv)_object(_list)?s?$")
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
YAML_LOADERS = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load"}


def _dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _unsafe(text, may_unpickle=False):
    """(line, what) of everything in a source that may run what it reads."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if not may_unpickle and UNPICKLERS & {name.partition(".")[0] for name in names}:
                yield node.lineno, f"imports {names}"
        if not isinstance(node, ast.Call):
            continue
        name, last = _dotted(node.func), _dotted(node.func).rpartition(".")[2]
        options = {word.arg: getattr(word.value, "value", word.value) for word in node.keywords}
        if name in ("eval", "exec", "compile", "__import__") or name in SHELLS | YAML_LOADERS:
            yield node.lineno, f"calls {name}"
        if name == "torch.load" and options.get("weights_only") is not True:
            yield node.lineno, "torch.load without weights_only=True"
        if options.get("allow_pickle", False) is not False or options.get("shell", False) is not False:
            yield node.lineno, f"{name} with allow_pickle or shell"
        if options.get("trust_remote_code", False) is not False:
            yield node.lineno, f"{name} with trust_remote_code"
        if OBJECT_COLLECTIVES.match(last):
            yield node.lineno, f"{name} unpickles what comes off the network"
        safe = options.get("use_safetensors") is True or "gguf_file" in options
        if last == "from_pretrained" and ".AutoModel" in f".{name}" and not safe:
            yield node.lineno, f"{name} without use_safetensors=True"


def test_nothing_that_is_read_is_run():
    found = []
    for path in SOURCES:
        name = path.relative_to(REPO).as_posix()
        found += [f"{name}:{line} {what}" for line, what in _unsafe(path.read_text(), name in MAY_UNPICKLE)]
    assert not found


def test_the_check_sees_what_is_unsafe():
    lines = [
        "import pickle",
        "from dill import loads",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "yaml.load(f, Loader)",
        "np.load(f, allow_pickle=True)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "dist.all_gather_object(out, x)",
        "dist.broadcast_object_list(out)",
        "AutoModelForCausalLM.from_pretrained(f)",
        "AutoConfig.from_pretrained(f, trust_remote_code=True)",
    ]
    assert [line for line, _ in _unsafe("\n".join(lines))] == list(range(1, len(lines) + 1))
    fine = (
        "model.eval()\ntorch.load(f, weights_only=True)\nAutoModelForCausalLM.from_pretrained(f, use_safetensors=True)"
    )
    assert not list(_unsafe(fine))


class _Evil:
    """A pickle of it runs a command when it is read."""

    def __init__(self, made):
        self.made = made

    def __reduce__(self):
        return os.system, (f"touch {self.made}",)


def test_checkpoints_of_others_run_nothing(tmp_path):
    """Pickles that run a command, in each place where a checkpoint holds pickles."""
    pytest.importorskip("megatron.core")
    from megatron_tree.training.checkpoint_safety import INDEX, _IndexReader, check_index, weights_only

    made, index, common = tmp_path / "made", tmp_path / INDEX, tmp_path / "common.pt"
    index.write_bytes(pickle.dumps({"state": _Evil(made)}))
    with pytest.raises(ValueError, match=r"\.metadata is no index .* it names posix\.system"):
        check_index(tmp_path)
    of_class = b"cbuiltins\ngetattr\n(c%s\nS'%s'\ntR"  # as Python 3.11.2 pickles members of enums
    formats = b"torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING"
    member = _IndexReader(io.BytesIO(of_class % (formats, b"TORCH_PRESERVE_FORMAT") + b".")).load()
    assert member.name == "TORCH_PRESERVE_FORMAT"
    of_size = of_class % (b"torch\nSize", b"__new__")
    for text in (b"cos\nsystem\n", b"ctorch.distributed.checkpoint.filesystem\nos\n", b"ctorch\nload\n", of_size):
        index.write_bytes(text + b"(S'touch " + str(made).encode() + b"'\ntR.")
        with pytest.raises(ValueError, match="which has no place in it"):
            check_index(tmp_path)
    torch.save({"rng_state": _Evil(made)}, common)
    with weights_only(), pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(common, weights_only=False)
    assert not made.exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    torch.load(common, weights_only=False)  # the control: this is what would have been
    assert made.exists()


def test_weights_are_safetensors(tmp_path):
    pytest.importorskip("transformers")
    from megatron_tree.integrations.transformers.models import load_model
    from support.hf_models import tiny_model

    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path, torch.float32).num_parameters() == model.num_parameters()
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"can't be loaded .*weights must be \.safetensors"):
        load_model(tmp_path, torch.float32)


# --- ports ---

RANK = """
import os, sys, torch.distributed as dist, psutil
if sys.argv[1] == "ours":
    from megatron_tree.comm.rendezvous import start_default_group
    start_default_group("gloo", timeout_s=60)
else:
    dist.init_process_group("gloo")
dist.barrier()
print(sorted({c.laddr for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}), flush=True)
dist.barrier()
os._exit(0)
"""


def _listening_ranks(how, master):
    port = _free_port()
    env = os.environ | {"MASTER_ADDR": master, "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo",
                        "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}"}  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, how], env=env | {"RANK": str(r), "LOCAL_RANK": str(r)},
                         stdout=subprocess.PIPE, text=True)
        for r in range(2)
    ]  # fmt: skip
    told = [rank.communicate(timeout=500)[0] for rank in ranks]
    return port, [re.findall(r"ip='([^']+)', port=(\d+)", text) for text in told]


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost"])
def test_the_store_and_gloo_listen_on_loopback_only(master):
    port, (first, second) = _listening_ranks("ours", master)
    assert {ip for ip, _ in first + second} <= {"127.0.0.1", "::1"}
    assert str(port) in dict(map(reversed, first)) and str(port) not in dict(map(reversed, second))
    assert len(first) == 2 and len(second) == 1, "the store and gloo's, and gloo's"


@pytest.mark.slow
def test_torch_alone_lets_its_store_listen_on_all_interfaces():
    """The control: what `start_default_group` is there for."""
    port, (first, _) = _listening_ranks("torch", "127.0.0.1")
    assert dict(map(reversed, first))[str(port)] in ("::", "0.0.0.0")


def _listeners_of(process, until_line=None, seconds=600):
    """{(address, port): is it a rank's} of all processes below one, from its start to its end or a line it prints."""
    lines, found, stop, end = [], {}, threading.Event(), time.monotonic() + seconds

    def read():
        for line in process.stdout:
            lines.append(line)
            if until_line and line.startswith(until_line):
                stop.set()
        stop.set()

    threading.Thread(target=read, daemon=True).start()
    while True:
        last = stop.is_set()
        for child in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            try:
                is_rank = "LOCAL_RANK" in child.environ()
                for c in child.net_connections("inet"):
                    if c.status == psutil.CONN_LISTEN or (c.type != 1 and c.laddr):
                        found[c.laddr.ip, c.laddr.port] = is_rank
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        if last:
            return found, "".join(lines)
        assert time.monotonic() < end, "".join(lines)
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.parametrize("script", ["train_gpt", "generate", "serve"])
def test_what_the_launch_scripts_listen_on(tmp_path, script):
    """The rendezvous, gloo's ports of the ranks and the HTTP server's: all on loopback, nothing else at any time."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("megatron.core")
    from support.http_server import byte_model, byte_tokenizer
    from support.training_runs import TINY, write_text

    model = tmp_path / "tiny"
    byte_tokenizer().save_pretrained(model)
    byte_model().save_pretrained(model)
    (tmp_path / "text").write_text("the quick brown fox")
    common = ["--model", model]
    arguments = {
        "train_gpt": [*TINY.split(), "--data-path", write_text(tmp_path / "texts"), "--context-parallel-size", 2,
                      "--output-dir", tmp_path / "out", "--save", tmp_path / "kept"],
        "generate": [*common, "--prompt-file", tmp_path / "text", "--question", "who?", "--max-new-tokens", 4],
        "serve": [*common, "--port", 0],
    }[script]  # fmt: skip
    port = _free_port()
    command = ["bash", REPO / "launch" / "deepspeed_local.sh", "-n", 2, "--port", port]
    command += [REPO / "launch" / f"{script}.py", *arguments]
    env = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1", "STOP_SECONDS": "40"}
    env |= {
        "VIRTUAL_ENV": str(Path(sys.executable).parents[1]),
        "PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(list(map(str, command)), env=env, **pipes)
    try:
        found, output = _listeners_of(process, "serving " if script == "serve" else None)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    assert ("127.0.0.1", port) in found, output
    assert {ip for ip, _ in found} == {"127.0.0.1"}, (found, output)
    assert all(found.values()), f"the launcher itself listens: {found}"
    if script == "serve":
        assert ("127.0.0.1", int(re.search(r"http://127.0.0.1:(\d+)/v1", output)[1])) in found
