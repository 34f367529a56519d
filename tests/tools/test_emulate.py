"""Emulated clusters: ranks in real namespaces on a real network; what was set is measured, and failures name ranks."""

import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist

from megatron_tree.emulate import Cluster, Unavailable, network_bytes
from megatron_tree.emulate.network import build_switch
from support.emulation import emulated

NETWORK = dict(latency_s=1e-3, rate_bits=1e9, lifetime_s=60)
PORT = 7000


@pytest.fixture(scope="module")
def cluster():
    with Cluster(nodes=2, ranks_per_node=2, **NETWORK) as cluster:
        yield cluster


def _namespace():
    return os.stat("/proc/self/ns/net").st_ino


# ---- ranks


def _place():
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"]
    return [os.environ[name] for name in names], _namespace(), torch.get_num_threads()


@emulated
def test_ranks_stand_in_their_nodes(cluster):
    results = cluster.run(_place)
    for rank, (variables, _, num_threads) in enumerate(results):
        assert variables == [str(rank), "4", str(rank % 2), "2", "10.77.0.1", "eth0"]
        assert num_threads == 1
    namespaces = [namespace for _, namespace, _ in results]
    assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3]
    assert _namespace() not in namespaces


@emulated
def test_functions_and_arguments_need_no_pickling(cluster):
    class Local:
        value = 5

    assert cluster.run(lambda x: x.value + int(os.environ["RANK"]), Local()) == [5, 6, 7, 8]


def _sum_over_gloo():
    dist.init_process_group("gloo")
    x = torch.full((100_000,), float(dist.get_rank()))
    before = network_bytes()
    dist.all_reduce(x)
    dist.barrier()
    after = network_bytes()
    return x.unique().tolist(), {name: after[name] - before[name] for name in after}


@emulated
def test_collectives_cross_the_network(cluster):
    for values, sent in cluster.run(_sum_over_gloo):
        assert values == [6.0]
        assert sent["network"] > 400_000 and sent["loopback"] > 400_000


@emulated
def test_one_node_has_no_network():
    with Cluster(nodes=1, ranks_per_node=2, **NETWORK) as cluster:
        for values, sent in cluster.run(_sum_over_gloo):
            assert values == [1.0]
            assert sent["network"] == 0 and sent["loopback"] > 400_000


# ---- the network


def _ping_and_send(num_bytes):
    """Rank 0: round trips in seconds; rank 1: seconds to receive num_bytes; both: bytes that their nodes sent."""
    if os.environ["RANK"] == "0":
        with socket.create_server(("10.77.0.1", PORT)) as server:
            peer, _ = server.accept()
    else:
        while True:
            try:
                peer = socket.create_connection(("10.77.0.1", PORT), timeout=30)
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    before = network_bytes()["network"]
    if os.environ["RANK"] == "0":
        times = []
        for _ in range(5):
            start = time.perf_counter()
            peer.sendall(b"?")
            assert peer.recv(1) == b"!"
            times.append(time.perf_counter() - start)
        peer.sendall(os.urandom(num_bytes))
        peer.recv(1)
        measured = min(times)
    else:
        for _ in range(5):
            assert peer.recv(1) == b"?"
            peer.sendall(b"!")
        start, left = time.perf_counter(), num_bytes
        while left:
            left -= len(peer.recv(min(left, 1 << 20)))
        measured = time.perf_counter() - start
        peer.sendall(b".")
    return measured, network_bytes()["network"] - before


@pytest.mark.alone
@emulated
def test_delay_rate_and_bytes_are_what_was_set():
    num_bytes, latency_s, rate_bits = 5_000_000, 20e-3, 100e6
    with Cluster(nodes=2, latency_s=latency_s, rate_bits=rate_bits, lifetime_s=60) as cluster:
        (round_trip, sent), (transfer, answered) = cluster.run(_ping_and_send, num_bytes)
    assert 0.95 < round_trip / (2 * latency_s) < 6  # bits are not taken for bytes
    assert 0.95 < transfer / (8 * num_bytes / rate_bits) < 6
    assert num_bytes < sent < 1.1 * num_bytes
    assert answered < 0.1 * num_bytes


# ---- failures


def _fail_on_rank_2():
    print("about to fail")
    if os.environ["RANK"] == "2":
        raise ArithmeticError("told to fail")
    time.sleep(600)


def _die_on_rank_1():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def _hang_on_rank_3():
    if os.environ["RANK"] == "3":
        time.sleep(600)


@emulated
def test_a_rank_that_raises_names_itself(cluster):
    with pytest.raises(RuntimeError, match=r"(?s)node 1, rank 2 ended with 1.*about to fail.*told to fail") as caught:
        cluster.run(_fail_on_rank_2)
    assert "rank 0" not in str(caught.value)


@emulated
def test_a_rank_that_dies_is_named(cluster):
    with pytest.raises(RuntimeError, match="node 0, rank 1 was killed by SIGKILL"):
        cluster.run(_die_on_rank_1)


@emulated
def test_a_rank_that_hangs_is_named_with_its_stack(cluster):
    with pytest.raises(RuntimeError, match=r"(?s)ranks \[3\] had not finished after timeout_s=4\b.*in _hang_on_rank_3"):
        cluster.run(_hang_on_rank_3, timeout_s=4)


@emulated
def test_a_result_that_cannot_be_pickled_is_an_error(cluster):
    with pytest.raises(RuntimeError, match=r"(?i)can't pickle"):
        cluster.run(lambda: lambda: None)


@emulated
def test_the_cluster_works_after_failures(cluster):
    assert [values for values, _ in cluster.run(_sum_over_gloo)] == [[6.0]] * 4


@emulated
def test_lifetime():
    with Cluster(nodes=1, latency_s=0, rate_bits=1e9, lifetime_s=0.5) as cluster:
        with pytest.raises(RuntimeError, match="not finished after the cluster's lifetime_s=0.5"):
            cluster.run(time.sleep, 600)
        with pytest.raises(RuntimeError, match="past its lifetime_s=0.5"):
            cluster.run(time.sleep, 600)


@emulated
def test_a_network_that_ends_is_an_error():
    with Cluster(nodes=2, **NETWORK) as cluster:
        os.kill(cluster._network._switch.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the emulated network has ended: the switch ended with status -9"):
            cluster.run(time.sleep, 600)


@pytest.mark.parametrize(
    "wrong", [dict(nodes=0), dict(nodes=999), dict(ranks_per_node=0), dict(latency_s=-1), dict(rate_bits=0)], ids=str
)
def test_bad_arguments(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}={wrong[name]}:"):
        Cluster(**{**dict(nodes=2, **NETWORK), **wrong})


def test_outside_of_a_cluster():
    with pytest.raises(RuntimeError, match="not in an emulated node"):
        network_bytes()
    with pytest.raises(RuntimeError, match="use it inside `with"):
        Cluster(nodes=2, **NETWORK).run(_place)


# ---- what is missing


def test_root_is_needed(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="needs root"), Cluster(nodes=2, **NETWORK):
        pass


def test_tun_is_needed(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(Unavailable, match="/dev/net/tun"), Cluster(nodes=2, **NETWORK):
        pass


def test_a_compiler_is_needed_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(Unavailable, match="C compiler"):
        build_switch()
    assert not list(tmp_path.iterdir())


@emulated
def test_the_switch_is_built_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = build_switch()
    built = program.stat()
    assert build_switch() == program and program.stat() == built
    assert list(program.parent.iterdir()) == [program]
    monkeypatch.setenv("XDG_CACHE_HOME", str(program))
    with pytest.raises(Unavailable, match="set XDG_CACHE_HOME"):
        build_switch()
