"""`megatron-tree calibrate` finds what an emulated network was set to, checks messages, and writes a topology."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_tree.core.kernels import fastest
from megatron_tree.core.plan import default_topology, load_topology, place, save_topology
from megatron_tree.tools.calibrate import cluster, command, compute, kernel_cases, links
from megatron_tree.tools.calibrate.cluster import calibrate
from megatron_tree.tools.calibrate.kernel_cases import KernelCase, keep_fastest
from megatron_tree.tools.emulate import Cluster
from support.emulation import emulated
from support.ranks import DistributedTestError, run_distributed

REPO = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
LATENCY_S, RATE_BITS = 3e-3, 200e6
PAYLOAD = RATE_BITS / 8 * 1448 / 1538  # bytes/s: TCP's share of a full Ethernet frame


def _on_cluster():
    dist.init_process_group("gloo")
    return calibrate(CPU, name="emulated", memory_bandwidth=2e9, flops=3e9)


@pytest.mark.slow
@pytest.mark.alone
@emulated
def test_finds_what_the_network_was_set_to(tmp_path):
    with Cluster(nodes=2, ranks_per_node=2, latency_s=LATENCY_S, rate_bits=RATE_BITS, lifetime_s=120) as cluster:
        found, *others = cluster.run(_on_cluster)
    assert all(other == found for other in others)
    topology = found.topology
    inside, between = topology.levels
    assert 0.9 < between.latency_s / LATENCY_S < 3
    assert 0.3 < between.bandwidth / PAYLOAD < 1.1
    assert 0.3 < between.port_bandwidth / PAYLOAD < 1.3
    assert between.size == 0 and topology.host_size == 2 and (inside.name, inside.size) == ("host", 2)
    assert inside.latency_s < LATENCY_S and inside.bandwidth > PAYLOAD
    assert 0 < topology.overhead_s < LATENCY_S
    assert (topology.memory_bandwidth, topology.flops) == (2e9, 3e9)

    save_topology(topology, tmp_path / "found.yaml")
    assert load_topology(tmp_path / "found.yaml") == topology
    assert place(topology, [0, 0, 1, 1]).block == 2


def _on_one_host(rank, world):
    """Kernels, too, on small tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(compute.CACHE_BYTES, "cpu", 1 << 20)
        patch.setitem(compute.ROWS, "cpu", 64)
        patch.setattr(compute, "SENT_S", 1e-3)
        lines = []
        return calibrate(CPU, name="local", say=lines.append), lines


def test_one_host():
    (found, lines), *others = run_distributed(_on_one_host, 3)
    assert all(other == found for other, _ in others)
    (level,) = found.topology.levels
    assert (level.name, level.size, found.topology.host_size) == ("host", 0, 3)
    assert level.port_bandwidth == level.bandwidth
    assert lines[0] == "3 ranks on 1 hosts, gloo on cpu" and len(lines) > 4
    assert "transport" in dict(found.table)
    assert 1e6 < found.topology.memory_bandwidth < 1e13 and 1e6 < found.topology.flops < 1e15
    assert 0 < found.topology.chunk_s < 0.1 and 0 <= found.topology.byte_s < 1e-5


class _BusyLinks:
    """Small messages waited for the processor, and took longer than large ones."""

    device = CPU

    def exchange(self, pairs, num_bytes=links._SMALL, count=1):
        seconds = 0.5 if num_bytes == links._SMALL else 0.04
        return {tuple(pair): links.Times(seconds, seconds * links.REPEATS) for pair in pairs}


def test_a_busy_machine_has_positive_bandwidths():
    latency_s, bandwidth, overhead_s = cluster._measure_pairs(_BusyLinks(), [(0, 1)])
    assert latency_s > 0 and overhead_s == 0 and bandwidth == 2 * cluster._FIRST_BYTES / 0.04
    assert cluster._measure_ports(_BusyLinks(), [([0, 1], [2, 3])], bandwidth) > bandwidth


def _one_rank_sends_something_else(rank, world):
    pattern = links._pattern
    if rank == 0:
        links._pattern = lambda *args: pattern(*args).flip(0)
    try:
        calibrate(CPU, name="wrong", memory_bandwidth=1e9, flops=1e9, timeout_s=20)
    finally:
        links._pattern = pattern


def test_messages_are_checked():
    with pytest.raises(DistributedTestError, match="from rank 0 to rank 1 brought wrong bytes"):
        run_distributed(_one_rank_sends_something_else, 2, fresh=True)


def test_the_fastest_backend_is_kept_for_auto(monkeypatch, tmp_path):
    """With a GPU's name for this CPU, where aten is the only one of the backends that runs on GPUs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fastest, "name_of", lambda device: "GPU X")
    timed = []
    monkeypatch.setattr(kernel_cases, "clock", lambda call, device: timed.append(call()) or 1.0)
    fastest.keep("GPU X", {"256": "triton"})
    fastest.keep("GPU Y", {"64": "fa3"})
    said = keep_fastest(CPU, tuple(KernelCase(kind, 1, 64, 2, 1, 16) for kind in ("fwd", "bwd")))
    assert [len(x) for x in timed if isinstance(x, tuple)] == [2, 3]  # (out, lse), and the gradients
    assert dict(said)["fastest up to head_dim 16"] == "aten"
    try:
        assert fastest.for_gpu("GPU X", 16) == ("aten",) and fastest.for_gpu("GPU X", 17) == ()
        assert fastest.for_gpu("GPU Y", 64) == ("fa3",)
    finally:
        fastest.table.cache_clear()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--out", "found.txt"], "--out found.txt: a topology file ends in .yaml"),
        (["--out", "nowhere/found.yaml"], "there is no folder"),
    ],
    ids=["suffix", "folder"],
)
def test_wrong_command_lines(argv, said, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(argv) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_command_line_with_a_launcher(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["-m", "megatron_tree", "calibrate", "--out", "found.yaml", "--no-compute"]
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*launcher, *options], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    topology = load_topology(tmp_path / "found.yaml")
    assert topology.name == "found" and topology.flops == default_topology("gloo").flops
    assert done.stdout.count("written to found.yaml") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "found.yaml"]
