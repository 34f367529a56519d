"""The lower bound of bytes between nodes against enumerated cases and the planner, and its table in docs/planner.md."""

import itertools
from pathlib import Path

import pytest

from megatron_tree.core.plan import Shape
from megatron_tree.core.plan.command import least_bytes, least_rows
from support.plans import DGX, ETHERNET, training

DOCS = Path(__file__).resolve().parents[2] / "docs" / "planner.md"
TOKENS = 1 << 20


def fewest_rows(owners, queries, *, causal):
    """Fewest rows that move, over all nodes, for one KV head with some query heads: for every choice of the keys that
    each node gets, a query goes to as few other nodes as together hold what it sees. owners: the node of each token."""
    tokens, nodes = range(len(owners)), range(max(owners) + 1)
    own = [sum(1 << j for j in tokens if owners[j] == node) for node in nodes]
    keys = [(node, j) for node in nodes for j in tokens if owners[j] != node]
    trips = [[x for n in nodes for x in itertools.combinations(set(nodes) - {node}, n)] for node in nodes]
    best = 2 * len(owners) * len(nodes)
    for chosen in itertools.product((0, 1), repeat=len(keys)):
        held, rows = own.copy(), sum(chosen)
        for (node, j), taken in zip(keys, chosen):
            held[node] |= taken << j
        for t in tokens:
            missing = (2 << t if causal else 1 << len(tokens)) - 1 & ~held[owners[t]]
            if rows >= best:
                break
            rows += queries * next(len(x) for x in trips[owners[t]] if not missing & ~sum_of(held[i] for i in x))
        best = min(best, rows)
    return best


def sum_of(sets):
    union = 0
    for one in sets:
        union |= one
    return union


@pytest.mark.parametrize("nodes", [2, 3, 4])
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 6])
def test_small_cases_need_exactly_so_many_rows(nodes, queries):
    """One token on each node, and as many KV heads as nodes, so work can be balanced."""
    rows = fewest_rows(range(nodes), queries, causal=False)
    assert least_rows(nodes, queries * nodes, nodes) == pytest.approx(rows)


@pytest.mark.parametrize(("nodes", "queries", "rows"), [(2, 1, 1), (2, 4, 1.5), (3, 1, 3), (3, 4, 4.5)])
def test_zigzag_shares_of_a_causal_mask_need_fewer(nodes, queries, rows):
    """Per token of a share, of two chunks."""
    owners = [*range(nodes), *reversed(range(nodes))]
    assert fewest_rows(owners, queries, causal=True) / 2 == rows < nodes * least_rows(nodes, queries * nodes, nodes)


@pytest.mark.parametrize(("nodes", "queries"), [(3, 1), (3, 3), (4, 2), (5, 1)])
def test_pairs_that_foreign_rows_allow(nodes, queries):
    """The inequalities of docs/planner.md, for every set of foreign rows of one token per node."""
    subsets = [set(x) for n in range(nodes) for x in itertools.combinations(range(1, nodes), n)]
    for keys in subsets:
        for rows in itertools.combinations_with_replacement(subsets, queries):  # of each head
            made = [(q, k) for x in rows for q in {0, *x} for k in {0, *keys}]
            x, y = sum(map(len, rows)), len(keys)
            assert sum(max(pair) > 0 for pair in made) <= x * y + x + queries * y
            pairs = sum(q != k for q, k in made)
            for part in (0, 0.25, 0.5, 1):
                assert pairs <= x * (1 + part * (nodes - 2)) + queries * y * (1 + (1 - part) * (nodes - 2))


@pytest.mark.parametrize("nodes", [2, 3, 5, 8, 40])
@pytest.mark.parametrize(("h", "h_kv"), [(1, 1), (4, 2), (6, 6), (32, 8), (16, 1)])
def test_the_inequalities_allow_no_fewer_rows(nodes, h, h_kv):
    """For every number of keys, the queries that the inequalities need."""
    queries, others = h // h_kv, nodes - 1
    weights = [(1 + n / 60 * (others - 1), queries * (1 + (1 - n / 60) * (others - 1))) for n in range(61)]
    fewest = float("inf")
    for y in (n / 200 * others * h_kv for n in range(201)):
        needed = [(h * others - of_key * y) / of_query for of_query, of_key in weights]
        needed.append((h * others - queries * y) / (min(y, others) + 1))
        fewest = min(fewest, y + max(0, *needed))
    assert 0.98 * least_rows(nodes, h, h_kv) <= fewest <= 1.1 * least_rows(nodes, h, h_kv)


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 4), (3, 2), (4, 8), (8, 4), (16, 1), (24, 1)])
@pytest.mark.parametrize(
    "shape", [Shape(16, 16, 128, 128), Shape(24, 6, 192, 128), Shape(32, 4, 64, 64), Shape(8, 1, 64, 64)]
)
def test_no_plan_sends_less(nodes, ranks, shape):
    """Every u, grid, nesting and ring. Heads across nodes need no more while there are as many KV heads."""
    h, h_kv, _, _ = shape
    hosts = [n // ranks for n in range(nodes * ranks)]
    topology = DGX if ranks > 1 else ETHERNET
    least = least_bytes(nodes, shape, batch=1, tokens=1024, bytes_per_word=2)
    plan = training(len(hosts), shape, topology, hosts)
    fewest = [min(c.cost.bytes_per_level[1] for c in table) for table in plan.candidates]
    assert fewest[0] >= least * (1 - 1e-9) and fewest[1] >= least * (1 - 1e-9)
    if h_kv % nodes == 0 and h // h_kv < nodes:
        assert fewest == [pytest.approx(least), pytest.approx(least, rel=0.02)]  # delta
    elif nodes in (2, 4, 8, 16) and h in (8, 16, 32):
        assert fewest[0] <= 1.12 * least and fewest[1] <= 2.01 * least


TABLE = [
    (32, 32, 8, 8),
    (32, 32, 32, 8),
    (32, 8, 4, 8),
    (32, 8, 8, 8),
    (32, 8, 32, 8),
    (64, 8, 32, 8),
    (32, 32, 16, 1),
    (16, 1, 8, 8),
]


@pytest.mark.parametrize(("h", "h_kv", "nodes", "ranks"), TABLE)
def test_the_table_in_the_docs(h, h_kv, nodes, ranks):
    """Heads across nodes, the grid inside: 4 (u-1)/u (h + max(h_kv, u)) words per head_dim and token, and delta."""
    hosts, shape = [n // ranks for n in range(nodes * ranks)], Shape(h, h_kv, 128, 128)
    tokens, u = TOKENS // len(hosts), nodes
    tables = training(len(hosts), shape, DGX, hosts, seq_len=TOKENS).candidates

    def fewest(schedule, heads):
        found = [[c for c in t if c.schedule == schedule and c.arrangement.heads == heads] for t in tables]
        return sum(min(c.cost.bytes_per_level[1] for c in passes) for passes in found) if all(found) else None

    least = 2 * least_bytes(nodes, shape, batch=1, tokens=tokens, bytes_per_word=2)
    across, grid, ring = fewest("grid", (u, 1)), fewest("grid", (1, 1)), fewest("ring", (1, 1))
    ulysses = fewest("grid", (nodes, ranks))
    assert across == pytest.approx((u - 1) / u * (4 * 128 * (h + max(h_kv, u)) + 2 * h) * 2 * tokens)
    sent = [f"{n / 1e9:.3g} GB" if n else "-" for n in (least, across, ulysses, grid, ring)]
    line = " | ".join([f"| {h}/{h_kv}", f"{nodes} x {ranks}", *sent])
    assert line in DOCS.read_text().replace("**", ""), line


def test_bytes_over_all_links_of_256_gpus():
    """Of a grid without exchange of heads, Mesh-Attention's tiles, and of heads across nodes, against the ring."""
    tables = training(256, Shape(32, 32, 128, 128), DGX, [n // 8 for n in range(256)], seq_len=TOKENS).candidates
    ring, grid, across = (
        sum(min(c.cost.bytes for c in t if c.schedule == schedule and c.arrangement.heads == heads) for t in tables)
        for schedule, heads in (("ring", (1, 1)), ("grid", (1, 1)), ("grid", (32, 1)))
    )
    assert [1 - grid / ring, 1 - across / ring] == pytest.approx([0.89, 0.98], abs=0.005)
