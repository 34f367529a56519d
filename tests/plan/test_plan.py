"""The planner: what it counts, what it chooses, what it refuses. No ranks are started."""

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tree.core.layout import Sharding
from megatron_tree.core.plan import Mask, Shape, grids, known_topologies, load_topology, place, plan_training
from megatron_tree.core.plan.cost import Stage
from megatron_tree.core.plan.training import seconds_of_pass
from megatron_tree.core.spec import MaskBounds
from support.plans import DGX, ETHERNET, GQA4, GQA8, MHA, NO_COPIES, backward_words, forward_words, ring, training

WORDS = forward_words, backward_words
NETWORKS = {
    "flat": (ETHERNET, range(64)),
    "hosts": (ETHERNET, [n // 8 for n in range(64)]),
    "dgx": (DGX, [n // 8 for n in range(64)]),
}


def test_fewest_words():
    """docs/design.md, section 2: best a near sqrt(p * h_kv / h), and better than a KV gather by these factors."""

    def best(world, shape, words=forward_words):
        return min(grids(world), key=lambda g: words(g, shape))

    assert best(16, GQA4)[0] == 2 and best(64, GQA4)[0] == 4
    assert forward_words((1, 8), MHA) / forward_words(best(8, MHA), MHA) == pytest.approx(1.75, rel=0.01)
    assert forward_words((1, 64), GQA4) / forward_words(best(64, GQA4), GQA4) == pytest.approx(2.3, rel=0.03)


@pytest.mark.parametrize("world", [2, 6, 8, 16, 64])
@pytest.mark.parametrize("shape", [MHA, GQA4, Shape(32, 1, 128, 128), Shape(16, 4, 192, 128)])
def test_planner_chooses_the_smallest_volume(world, shape):
    """On a flat network that is the bottleneck, the fastest grid is the one that sends the fewest bytes."""
    slow = dataclasses.replace(NO_COPIES, flops=1e18)
    plan = training(world, shape, slow, bytes_per_word=4)
    sizes = [u for u in range(1, min(world, shape.num_heads) + 1) if world % u == 0]
    least = min(sum(min(words(g, shape, u) for g in grids(world // u)) for words in WORDS) for u in sizes)
    u = plan.forward.ulysses_size
    assert u == plan.backward.ulysses_size
    sent = [words(chosen.grid, shape, u) for chosen, words in zip((plan.forward, plan.backward), WORDS)]
    assert sum(sent) <= 1.06 * least
    assert [plan.forward.cost.bytes, plan.backward.cost.bytes] == pytest.approx([1024 * 4 * n for n in sent])


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("shape", "limits"), [(MHA, (0.41, 0.15)), (GQA4, (0.99, 0.45)), (GQA8, (0.93, 0.7))])
@pytest.mark.parametrize("seq_len", [64 * 1024, 1 << 20])
def test_64_ranks_send_a_fraction_of_the_rings_bytes(network, shape, limits, seq_len):
    """Over the outermost level, where a ring of nodes sends 8 times less than one of single ranks. limits: for the
    short sequence, where what sends least takes longer, and for the long one, where compute hides nearly all of it."""
    topology, hosts = NETWORKS[network]
    limit = limits[seq_len == 1 << 20]
    plan = training(64, shape, topology, hosts, seq_len=seq_len)
    rings = ring(plan)
    kv = 2 * seq_len // 64 * shape.num_heads_kv * 128 * 2
    assert rings[0].cost.bytes == pytest.approx(63 * kv) and rings[1].cost.bytes == pytest.approx((63 + 64) * kv)
    sent = sum(chosen.cost.bytes_per_level[1] for chosen in (plan.forward, plan.backward))
    assert sent <= limit * sum(r.cost.bytes_per_level[1] for r in rings)


@pytest.mark.parametrize("name", known_topologies())
@pytest.mark.parametrize("world", [1, 2])
def test_every_topology_gives_a_plan(name, world):
    plan = training(world, GQA4, load_topology(name), [0] * world)
    assert plan.forward.cost.time_s >= plan.forward.cost.compute_s > 0 and plan.reason
    assert world > 1 or (plan.forward.grid == (1, 1) and plan.forward.cost.bytes == plan.forward.cost.peak_bytes == 0)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_reason_has_short_lines_and_no_rivals(network):
    topology, hosts = NETWORKS[network]
    for shape in (MHA, GQA8):
        lines = training(64, shape, topology, hosts, seq_len=1 << 20).reason.splitlines()
        assert len(lines) == 4 and max(map(len, lines)) <= 120 and "against" not in " ".join(lines)


@pytest.mark.parametrize("hosts", [[n // 4 for n in range(16)], [n // 2 for n in range(16)], [0] * 5 + [1] * 7])
@pytest.mark.parametrize("backward", [False, True])
def test_bytes_per_level_by_counting_messages(hosts, backward):
    """Every cell's peers, one by one, against the planner's bytes: two-level gathers and reductions."""
    world = len(hosts)
    shape, tokens, word = GQA4, 1024, 2
    placement = place(ETHERNET, hosts)
    h, h_kv, d, _ = shape
    q, stat, kv = tokens * h * d * word, tokens * h * 4, 2 * tokens * h_kv * d * word
    down, up, along, back = (2 * (q + stat), q, kv, kv) if backward else (q, q + stat, kv, 0)
    for grid in grids(world):
        plan = training(world, shape, ETHERNET, hosts, grid=grid)
        chosen = plan.backward if backward else plan.forward
        (a, b), (a0, b0) = grid, chosen.inner
        sent = [Fraction(0), Fraction(0)]
        cells = [
            ((n // (b // b0)) * a0 + l // b0, (n % (b // b0)) * b0 + l % b0)
            for n in range(world // placement.block)
            for l in range(placement.block)
        ]
        assert sorted(cells) == [(i, j) for i in range(a) for j in range(b)]
        nodes = [x // placement.block for x in range(world)]
        for x in range(world):
            for share, team in ((along + back, 0), (down + up, 1)):
                peers = [y for y in range(world) if cells[y][team] == cells[x][team] and y != x]
                outer = len({nodes[y] for y in peers} | {nodes[x]})
                for y in peers:
                    same_place = x % placement.block == y % placement.block
                    if nodes[x] == nodes[y] or outer == 1:
                        level = placement.level(placement.order[x], placement.order[y])
                        sent[level] += Fraction(share * outer, world)
                    elif same_place:
                        level = placement.level(placement.order[x], placement.order[y])
                        sent[level] += Fraction(share, world)
        assert chosen.cost.bytes_per_level == pytest.approx([float(s) for s in sent])
        assert chosen.cost.bytes == pytest.approx((a - 1) * (down + up) + (b - 1) * (along + back))


def test_a_hidden_network_is_crossed_less():
    """Compute takes so long that all take as long; the ring is the fastest by 1 %."""
    hosts = [n // 4 for n in range(16)]
    plan = training(16, MHA, ETHERNET, hosts, seq_len=1 << 18)
    across = [c.cost.bytes_per_level[1] for c in plan.candidates[0] if c.schedule == "grid"]
    assert plan.forward.cost.bytes_per_level[1] == min(across) and plan.forward.inner != (1, 1)


def test_head_chunks_overlap_communication_and_bound_memory():
    one, four = (training(16, MHA, grid=(4, 4), head_chunks=n) for n in (1, 4))
    assert four.forward.cost.time_s < one.forward.cost.time_s
    assert four.forward.cost.bytes == one.forward.cost.bytes
    assert four.forward.cost.peak_bytes < 0.55 * one.forward.cost.peak_bytes
    auto = training(16, MHA, grid=(4, 4))
    assert auto.forward.head_chunks in (1, 2, 4, 8, 16) and auto.forward.cost.time_s <= 1.01 * four.forward.cost.time_s


@given(
    groups=st.integers(1, 8),
    gather=st.lists(st.floats(0, 10), max_size=2),
    reduce=st.lists(st.floats(0, 10), max_size=2),
    own=st.floats(0, 10),
    compute=st.floats(0, 10),
)
@settings(max_examples=100, deadline=None)
def test_pipeline_bounds(groups, gather, reduce, own, compute):
    """Never faster than compute or the network alone, never slower than one after the other."""
    stages = [[], [Stage({"network": x}) for x in gather], [Stage({"network": x}) for x in reduce], []]
    time_s = seconds_of_pass([stages], groups, own, compute, together=True)
    busy, network = own + groups * compute, groups * (sum(gather) + sum(reduce))
    assert max(busy, network) <= time_s * (1 + 1e-9) + 1e-9
    assert time_s <= busy + network + 1e-9
    if groups == 1:
        exact = max(own, gather[0] if gather else 0) + sum(gather[1:]) + compute + sum(reduce)
        assert time_s == pytest.approx(exact)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(grid=(3, 5)), r"grid=\(3, 5\) has 15 cells but cp_group has 16 ranks: choose 1x16, 2x8"),
        (dict(grid_backward=(3, 5)), r"grid_backward=\(3, 5\) has 15 cells"),
        (dict(head_chunks=3), r"head_chunks=3 must divide num_heads_kv=8: choose one of \[1, 2, 4, 8\]"),
        (dict(head_chunks=4, ulysses_size=4), "head_chunks=4 must divide num_heads_kv=2: choose one of"),
        (dict(memory_budget=1000), r"memory_budget=1000 bytes is too small .* needs is \d+ bytes"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        training(16, GQA4, **options)


def test_the_placement_must_be_the_groups():
    with pytest.raises(ValueError, match="world=8 but placement holds 4 ranks"):
        plan_training(8, GQA4, batch=1, seq_len=8, bytes_per_word=2, topology=DGX, placement=place(DGX, [0] * 4))


def test_the_ring_hides_what_takes_less():
    """Each shift runs under a share's compute, and the slower of the two counts, not their sum."""
    fast = dataclasses.replace(NO_COPIES, flops=1e18)
    long, short, shifts = (
        ring(training(8, MHA, topology, seq_len=n))[0].cost
        for topology, n in ((NO_COPIES, 1 << 22), (NO_COPIES, 1 << 13), (fast, 1 << 13))
    )
    assert long.time_s == pytest.approx(long.compute_s), "all shifts are hidden"
    assert short.compute_s / 8 < shifts.time_s / 7
    assert short.time_s == pytest.approx(shifts.time_s + short.compute_s / 8), "all compute but the last share's is"


def test_head_chunks_keep_buffers_small_where_they_cost_no_time():
    computing = dataclasses.replace(ETHERNET, flops=1e9)  # compute hides everything
    assert training(16, MHA, computing, ulysses_size=1).forward.head_chunks == 16
    starting = dataclasses.replace(ETHERNET, overhead_s=1.0)  # messages cost more than what they carry
    assert training(16, MHA, starting).forward.head_chunks == 1


def windowed(window, seq_len, shape, world=64, hosts=8, **options):
    """A window layer on zigzag shares."""
    shares = Sharding(seq_len=seq_len, world=world, layout="zigzag")
    mask = Mask(MaskBounds(window, 0), shares, shares)
    fraction = min(1.0, 2 * (window + 1) / seq_len)
    options |= dict(seq_len=seq_len, mask=mask, visible_fraction=fraction)
    return training(world, shape, DGX, [n // hosts for n in range(world)], **options)


@pytest.mark.parametrize(("shape", "window", "megabytes"), [(Shape(64, 8, 64, 64), 127, 1.6), (GQA4, 1023, 25)])
def test_a_window_layer_sends_as_much_at_any_length(shape, window, megabytes):
    """GPT-OSS's and a Gemma-like layer at 64 ranks: the ends of two chunks, twice, and their gradients once."""
    sent = []
    for seq_len in (1 << 18, 1 << 20):
        plan = windowed(window, seq_len, shape)
        assert plan.forward.schedule == plan.backward.schedule == "cast", str(plan.forward)
        sent.append(plan.forward.cost.bytes + plan.backward.cost.bytes)
    _, h_kv, d, d_v = shape
    ends = 3 * 2 * window * h_kv * (d + d_v) * 2
    assert 0.9 * ends < sent[0] == sent[1] <= ends == pytest.approx(megabytes * 1e6, rel=0.03)
    alone = windowed(window, 1 << 20, shape, schedule="grid", ulysses_size=1)
    assert sent[1] < 0.05 * (alone.forward.cost.bytes + alone.backward.cost.bytes)
