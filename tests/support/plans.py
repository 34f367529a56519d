"""Plans of training calls on made-up clusters, and the words that they send by the formulas of docs/design.md."""

import dataclasses

from megatron_tree.core.plan import HeadSplit, Shape, default_topology, place, plan_training

DGX, ETHERNET = default_topology("nccl"), default_topology("gloo")
NO_COPIES = dataclasses.replace(ETHERNET, memory_bandwidth=1e18, chunk_s=0.0, byte_s=0.0)  # links and products alone
MHA, GQA4, GQA8 = Shape(32, 32, 128, 128), Shape(32, 8, 128, 128), Shape(64, 8, 128, 128)
MQA = Shape(16, 1, 128, 128)


def training(world, shape, topology=ETHERNET, hosts=None, **options):
    placement = place(topology, list(hosts or range(world)))
    options = {"batch": 1, "seq_len": 1024 * world, "bytes_per_word": 2, **options}
    return plan_training(world, shape, topology=topology, placement=placement, **options)


def ring(plan):
    return [next(c for c in table if c.schedule == "ring" and c.ulysses_size == 1) for table in plan.candidates]


def forward_words(grid: tuple[int, int], shape: Shape, ulysses_size: int = 1) -> float:
    """Words per token of a share that a rank sends forward: (u-1)/u (|Q| + |K| + |V| + |O|) to exchange heads, then
    (a-1)(|Q| + |O| + lse) + (b-1)(|K| + |V|)."""
    (a, b), u = grid, ulysses_size
    q, o, kv, statistic = _words(shape, u)
    return (a - 1) * (q + o + statistic) + (b - 1) * kv + (u - 1) * (q + kv + o) / u


def backward_words(grid: tuple[int, int], shape: Shape, ulysses_size: int = 1) -> float:
    """The same backward: dout, delta and then dq, dk, dv to exchange heads; down the column q, dout, lse, delta and
    then dq; along the row k, v and then dk, dv."""
    (a, b), u = grid, ulysses_size
    q, o, kv, statistic = _words(shape, u)
    return (a - 1) * (2 * q + o + 2 * statistic) + (b - 1) * 2 * kv + (u - 1) * (o + statistic + q + kv) / u


def _words(shape: Shape, u: int) -> tuple[float, float, float, float]:
    """Words of a token's q, o, k and v, and of one statistic, with the padding and copies of `HeadSplit`."""
    h, h_kv, d, d_v = shape
    split = HeadSplit.of(h, h_kv, u)
    heads, kv_heads = round(h * split.padding), round(h_kv * split.kv_padding)
    return heads * d, heads * d_v, kv_heads * (d + d_v), heads
