"""The plan of a decode step: bytes and steps of every reduction, and which one is chosen."""

import dataclasses

import pytest

from megatron_tree.core.plan import default_topology, place, plan_decode

DGX, ETHERNET = default_topology("nccl"), default_topology("gloo")
LAN = dataclasses.replace(  # 1 ms and 1 Gbit between nodes
    ETHERNET,
    name="lan",
    overhead_s=5e-5,
    memory_bandwidth=7e9,
    levels=(
        ETHERNET.levels[0],
        dataclasses.replace(ETHERNET.levels[1], latency_s=1e-3, bandwidth=1.16e8, port_bandwidth=1.16e8),
    ),
)
D_V = 128
STATE = 16 * (D_V + 1) * 4


def decode(hosts, topology=LAN, rows=16, kv_bytes=1 << 25, **options):
    hosts = list(hosts)
    sizes = dict(rows=rows, head_dim_v=D_V, kv_bytes=kv_bytes)
    return plan_decode(len(hosts), **sizes, topology=topology, placement=place(topology, hosts), **options)


def costs(plan):
    return {(c.schedule, c.across): c.cost for c in plan.candidates}


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_bytes_and_steps_on_a_flat_network(world):
    """The table of docs/design.md, section 3, on one host per rank."""
    found = costs(decode(range(world)))
    share = -(-16 // world) * (D_V + 1) * 4
    core = 1 << (world.bit_length() - 1)
    rest = world - core
    expected = {
        "allgather": ((world - 1) * STATE, 1),
        "scatter": (2 * (world - 1) * share, 2),
        "allreduce": (2 * (world - 1) / world * (STATE + 64), 2),
        "ring": ((world - 1) << 25, world - 1),
        "butterfly": (
            (core * (core.bit_length() - 1) + 2 * rest) * STATE / world,
            core.bit_length() - 1 + 2 * (rest > 0),
        ),
    }
    assert {schedule for schedule, _ in found} == set(expected)
    for schedule, (sent, steps) in expected.items():
        cost = found[schedule, "direct"]
        assert cost.bytes_per_level[0] == 0 and cost.bytes == pytest.approx(sent) and cost.steps == steps
    assert found["allgather", "direct"].peak_bytes == world * STATE
    assert found["ring", "direct"].peak_bytes == 2 << 25


def test_two_level_crosses_the_network_with_one_state_per_node():
    plan = decode([n // 4 for n in range(16)])
    found = costs(plan)
    assert found["two_level", "direct"].bytes_per_level == (2 * 12 * STATE / 16, 4 * 3 * STATE / 16)
    assert found["two_level", "butterfly"].bytes_per_level == (2 * 12 * STATE / 16, 4 * 2 * STATE / 16)
    assert found["allgather", "direct"].bytes_per_level == (3 * STATE, 12 * STATE)
    assert found["butterfly", "direct"].bytes_per_level == (2 * STATE, 2 * STATE)
    assert plan.schedule == "two_level"


def test_builtin_two_level_is_two_all_gathers():
    found = costs(decode([n // 8 for n in range(64)], DGX))
    assert found["two_level", "direct"].bytes_per_level == (7 * STATE, 7 * STATE)
    assert ("two_level", "butterfly") not in found


def test_the_choice_follows_the_network_and_the_size():
    nodes = [n // 4 for n in range(16)]
    assert decode(nodes).schedule == "two_level"
    assert decode([0] * 8, DGX).schedule == "allgather"
    assert decode([0] * 8, DGX, rows=1 << 15).schedule == "scatter"
    assert decode([0] * 4, ETHERNET).schedule in ("allgather", "butterfly")
    assert decode(range(8), ETHERNET, rows=1 << 15).schedule == "scatter"


@pytest.mark.parametrize("world", [2, 4, 8, 16])
@pytest.mark.parametrize("rows", [1, 64, 4096])
@pytest.mark.parametrize("kv_bytes", [0, 1 << 25])
@pytest.mark.parametrize("topology", [LAN, ETHERNET, DGX], ids=lambda t: t.name)
def test_auto_is_close_to_the_best_and_never_a_ring(world, rows, kv_bytes, topology):
    for ranks_per_host in (1, 4, world):
        plan = decode([n // ranks_per_host for n in range(world)], topology, rows, kv_bytes)
        assert plan.schedule != "ring"
        least = min(c.cost.time_s for c in plan.candidates if c.schedule != "ring")
        assert plan.cost.time_s <= 1.01 * least * (1 + 1e-9)


def test_one_rank_has_nothing_to_reduce():
    cost = decode([0]).cost
    assert cost.time_s == cost.compute_s and cost.bytes == cost.peak_bytes == cost.steps == 0


def test_pinned_schedules_are_honoured():
    for schedule in ("allreduce", "allgather", "butterfly", "scatter", "two_level", "ring"):
        for hosts in ([0] * 6, [n // 3 for n in range(6)], [0, 0, 1]):
            assert decode(hosts, schedule=schedule).schedule == schedule


def test_what_is_refused():
    with pytest.raises(ValueError, match="schedule='tree' is unknown: choose one of 'auto', 'allreduce'"):
        decode([0] * 4, schedule="tree")
    with pytest.raises(ValueError, match=r"memory_budget=10 bytes is too small .* of the decode step: .* needs is \d+"):
        decode([0] * 4, memory_budget=10)


def test_the_memory_budget_excludes_candidates():
    plan = decode([0] * 8, DGX, memory_budget=5 * STATE)
    assert plan.schedule != "allgather" and plan.cost.peak_bytes <= 5 * STATE


def test_local_heads_need_the_first_half_of_scatter():
    hosts = range(4)
    whole, half = (costs(decode(hosts, local_heads=own))["scatter", "direct"] for own in (False, True))
    assert (half.bytes, half.steps) == (whole.bytes / 2, 1)
    assert half.time_s < whole.time_s
    assert decode(hosts, local_heads=True).schedule == "scatter"


def test_shared_memory_makes_rounds_of_messages_expensive():
    """Ranks of one host that share memory: one round, of all states or of own heads; two where states are large."""
    shm = dataclasses.replace(ETHERNET, transport="shm")
    for rows, local_heads, schedule in ((16, False, "allgather"), (16, True, "scatter"), (1 << 14, False, "scatter")):
        options = dict(topology=shm, rows=rows, local_heads=local_heads, kv_bytes=None)
        plan = decode([0] * 4, **options)
        assert plan.schedule == schedule
        in_messages = decode([0] * 4, **{**options, "topology": ETHERNET})
        assert costs(plan)[schedule, "direct"].time_s < costs(in_messages)[schedule, "direct"].time_s
        assert costs(plan)[schedule, "direct"].bytes == costs(in_messages)[schedule, "direct"].bytes
        assert costs(plan)["butterfly", "direct"] == costs(in_messages)["butterfly", "direct"]


def test_states_that_are_read_in_other_gpus_memory():
    """All of a state, or the rows of own heads; large ones, and schedules of several rounds, are NCCL's."""
    reads = dataclasses.replace(DGX, transport="symm_mem")
    for rows, local_heads, schedule in ((16, False, "allgather"), (16, True, "scatter")):
        found, in_messages = (costs(decode([0] * 8, x, rows, local_heads=local_heads)) for x in (reads, DGX))
        assert found[schedule, "direct"].time_s < in_messages[schedule, "direct"].time_s
        assert found[schedule, "direct"].bytes == in_messages[schedule, "direct"].bytes
        assert found["butterfly", "direct"] == in_messages["butterfly", "direct"]
        assert decode([0] * 8, reads, rows, local_heads=local_heads).schedule == schedule
    large = dict(rows=1 << 15)
    assert costs(decode([0] * 8, reads, **large)) == costs(decode([0] * 8, DGX, **large))
