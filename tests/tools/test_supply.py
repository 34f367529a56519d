"""What is read is never run; what listens is known, and on the interface asked for."""

import io
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from support.processes import free_port

psutil = pytest.importorskip("psutil")

REPO = Path(__file__).resolve().parents[2]


# --- safe loading; ruff's rules S and TID251 (pyproject.toml) keep unpickling and shells out ---


class _Evil:
    """A pickle of it runs a command when it is read."""

    def __init__(self, made):
        self.made = made

    def __reduce__(self):
        return os.system, (f"touch {self.made}",)


def test_checkpoints_of_others_run_nothing(tmp_path):
    """Pickles that run a command, in each place where a checkpoint holds pickles."""
    pytest.importorskip("megatron.core")
    from megatron_tree.tools.training.checkpoint import INDEX, _IndexReader, check_index, weights_only

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
    with pytest.raises(ValueError, match=r"can't be loaded: .*weights must be \.safetensors"):
        load_model(tmp_path, torch.float32)


# --- ports ---

RANK = """
import os, torch.distributed as dist, psutil
from megatron_tree.core.comm.rendezvous import start_default_group

start_default_group("gloo", timeout_s=60)
dist.barrier()
print(sorted({c.laddr for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}), flush=True)
dist.barrier()
os._exit(0)
"""


def _listening_ranks(master):
    port = free_port()
    env = os.environ | {"MASTER_ADDR": master, "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo",
                        "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}"}  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK], env=env | {"RANK": str(r), "LOCAL_RANK": str(r)},
                         stdout=subprocess.PIPE, text=True)
        for r in range(2)
    ]  # fmt: skip
    told = [rank.communicate(timeout=500)[0] for rank in ranks]
    return port, [re.findall(r"ip='([^']+)', port=(\d+)", text) for text in told]


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost"])
def test_the_store_and_gloo_listen_on_loopback_only(master):
    port, (first, second) = _listening_ranks(master)
    assert {ip for ip, _ in first + second} <= {"127.0.0.1", "::1"}
    assert str(port) in dict(map(reversed, first)) and str(port) not in dict(map(reversed, second))
    assert len(first) == 2 and len(second) == 1, "the store and gloo's, and gloo's"


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
@pytest.mark.parametrize("name", ["train", "generate", "serve"])
def test_what_the_commands_listen_on(tmp_path, name):
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
        "train": [*TINY.split(), "--data-path", write_text(tmp_path / "texts"), "--context-parallel-size", 2,
                      "--output-dir", tmp_path / "out", "--save", tmp_path / "kept"],
        "generate": [*common, "--prompt-file", tmp_path / "text", "--question", "who?", "--max-new-tokens", 4],
        "serve": [*common, "--port", 0],
    }[name]  # fmt: skip
    port = free_port()
    command = ["bash", REPO / "launch" / "deepspeed_local.sh", "-n", 2, "--port", port]
    command += [name, *arguments]
    env = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1", "STOP_SECONDS": "40"}
    env |= {
        "VIRTUAL_ENV": str(Path(sys.executable).parents[1]),
        "PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(list(map(str, command)), env=env, **pipes)
    try:
        found, output = _listeners_of(process, "serving " if name == "serve" else None)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    assert ("127.0.0.1", port) in found, output
    assert {ip for ip, _ in found} == {"127.0.0.1"}, (found, output)
    assert all(found.values()), f"the launcher itself listens: {found}"
    if name == "serve":
        assert ("127.0.0.1", int(re.search(r"http://127.0.0.1:(\d+)/v1", output)[1])) in found
