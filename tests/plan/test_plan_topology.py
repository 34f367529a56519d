"""Topologies: what a file must say, where ranks sit, and the defaults."""

import pytest

from megatron_tree.core.plan import (
    Level,
    Topology,
    default_topology,
    known_topologies,
    load_topology,
    place,
    save_topology,
)
from megatron_tree.core.plan.topology import TOPOLOGIES

DGX, ETHERNET = default_topology("nccl"), default_topology("gloo")
TEXT = (TOPOLOGIES / "ethernet.yaml").read_text()
LEVELS = TEXT[TEXT.index("levels:") :]


def test_every_file_loads_under_its_own_name():
    names = known_topologies()
    assert {"dgx_h100", "ethernet", "gb200_nvl72", "laptop", "mi300x", "rtx4090x2"} <= set(names)
    for name in names:
        topology = load_topology(name)
        assert topology.name == name
        assert all(outer.latency_s >= inner.latency_s for inner, outer in zip(topology.levels, topology.levels[1:]))


def test_no_default_is_assumed_for_other_backends():
    with pytest.raises(ValueError, match="no topology is assumed for backend 'mpi', only for gloo, nccl: name one"):
        default_topology("mpi")


def test_save_and_load(tmp_path):
    for name in known_topologies():
        topology = load_topology(name)
        save_topology(topology, tmp_path / "mine.yaml")
        assert load_topology(str(tmp_path / "mine.yaml")) == topology


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("flops: 1.0e+12", "flops: 1e12", None),  # YAML takes this for text
        ("flops: 1.0e+12", "flops: fast", "flops='fast' must be a number"),
        ("flops: 1.0e+12", "", r"a topology lacks \['flops'\]"),
        ("flops: 1.0e+12", "flops: 1.0e+12\ncolour: red", r"unknown entries \['colour'\]"),
        ("transport: direct", "transport: carrier_pigeon", "transport='carrier_pigeon' must be one of"),
        ("    size: 8", "    size: 0", "level 'loopback': size=0 must be an integer from 1 to"),
        ("latency_s: 6.0e-5", "latency_s: .nan", "latency_s=nan must be a finite number"),
        ("bandwidth: 1.17e+9", "bandwidth: 0", "level 'ethernet': bandwidth=0.0 must be a positive number"),
        ("port_bandwidth: 3.0e+9", "port_bandwidth: 4.0e+9", "port_bandwidth=4e\\+09 must equal bandwidth=3e\\+09"),
        (LEVELS, "levels: 3\n", "levels=3 must be a list, innermost level first"),
        ("name: ethernet\n", "name: [\n", "topology file"),
    ],
)
def test_a_file_is_checked(tmp_path, old, new, message):
    path = tmp_path / "mine.yaml"
    assert old in TEXT
    path.write_text(TEXT.replace(old, new))
    if message is None:
        assert load_topology(str(path)) == ETHERNET
        return
    with pytest.raises(ValueError, match=message) as caught:
        load_topology(str(path))
    assert str(path) in str(caught.value)


def test_unknown_names_and_files():
    with pytest.raises(ValueError, match="topology 'nonsense' is unknown: name one of dgx_h100, ethernet"):
        load_topology("nonsense")
    with pytest.raises(ValueError, match=r"topology file nowhere\.yaml"):
        load_topology("nowhere.yaml")


@pytest.mark.parametrize(
    ("topology", "hosts", "block", "order"),
    [
        (DGX, ["n0"] * 8 + ["n1"] * 8, 8, None),
        (ETHERNET, [n % 4 for n in range(8)], 2, (0, 4, 1, 5, 2, 6, 3, 7)),
        (DGX, ["a"] * 3 + ["b"] * 5, 1, None),
        (DGX, ["a"] * 8, 1, None),
        (ETHERNET, ["a"] * 16 + ["b"] * 16, 16, None),
    ],
    ids=["two hosts", "ranks in turn", "uneven hosts", "one host", "more ranks than host_size"],
)
def test_ranks_are_placed_by_their_hosts(topology, hosts, block, order):
    placed, ranks = place(topology, hosts), range(len(hosts))
    assert (placed.order, placed.block) == (order or tuple(ranks), block)
    assert placed.top == int(len(set(hosts)) > 1)
    assert all(placed.level(r, s) == (hosts[r] != hosts[s]) for r in ranks for s in ranks)


def test_a_level_may_span_hosts():
    """GB200 NVL72: 18 hosts of 4 ranks are one NVLink unit."""
    topology = load_topology("gb200_nvl72")
    placed = place(topology, [n // 4 for n in range(144)])
    assert placed.block == 72 and placed.level(0, 71) == 0 and placed.level(71, 72) == 1
    assert place(topology, [n // 4 for n in range(72)]).top == 0


def test_three_levels():
    inner = dict(latency_s=1e-6, bandwidth=1e10)
    topology = Topology(
        name="racks",
        host_size=4,
        overhead_s=0.0,
        memory_bandwidth=1e10,
        flops=1e12,
        transport="direct",
        levels=(
            Level(name="numa", size=2, port_bandwidth=1e10, **inner),
            Level(name="host", size=2, port_bandwidth=1e10, **inner),
            Level(name="rack", size=2, port_bandwidth=1e10, **inner),
            Level(name="hall", size=2, port_bandwidth=1e10, **inner),
        ),
    )
    hosts = [n // 4 for n in range(16)]
    placed = place(topology, hosts)
    assert [placed.level(0, r) for r in (1, 2, 4, 8)] == [0, 1, 2, 3]
    assert placed.block == 8 and placed.top == 3
    assert place(topology, hosts[:8]).block == 4 and place(topology, hosts[:4]).block == 2
    with pytest.raises(ValueError, match="no room for 5 hosts: raise the size of its level 'hall' from 2"):
        place(topology, [n // 4 for n in range(20)])


def test_a_topology_of_one_host_refuses_several():
    with pytest.raises(ValueError, match="'laptop' describes a single host, but the group's ranks are on 2 hosts"):
        place(load_topology("laptop"), ["a", "b"])
