"""Emulated clusters: ranks in real namespaces on a real network; what was set is measured, and failures name ranks."""

import os
import shutil
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megatron_tree.tools.emulate import Cluster, Unavailable, network_bytes
from support.emulation import emulated

NETWORK = dict(latency_s=1e-3, rate_bits=1e9, lifetime_s=60)


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


# ---- failures


def _break(how, victim):
    print("about to fail")
    if os.environ["RANK"] != victim:
        time.sleep(0 if how == "hang" else 600)
    elif how == "raise":
        raise ArithmeticError("told to fail")
    elif how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(600)


@emulated
@pytest.mark.parametrize(
    ("how", "victim", "said"),
    [
        ("raise", "2", r"(?s)node 1, rank 2 ended with 1.*about to fail.*told to fail"),
        ("die", "1", "node 0, rank 1 was killed by SIGKILL"),
        ("hang", "3", r"(?s)ranks \[3\] had not finished after timeout_s=4\b.*in _break"),
    ],
)
def test_a_rank_that_fails_is_named(cluster, how, victim, said):
    with pytest.raises(RuntimeError, match=said) as caught:
        cluster.run(_break, how, victim, timeout_s=4 if how == "hang" else 60)
    assert "rank 0" not in str(caught.value)
    assert len(cluster.run(_place)) == 4, "the cluster works after failures"


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


@pytest.mark.parametrize(
    ("module", "name", "value", "said"),
    [(os, "geteuid", 1000, "needs root"), (os, "access", False, "/dev/net/tun"), (shutil, "which", None, "C compiler")],
)
def test_what_is_missing_is_named(monkeypatch, tmp_path, module, name, value, said):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MEGATRON_TREE_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "access", lambda path, mode: mode & os.X_OK == 0)
    monkeypatch.setattr(module, name, lambda *_: value)
    with pytest.raises(Unavailable, match=said), Cluster(nodes=2, **NETWORK):
        pass
    assert not list(tmp_path.iterdir())
