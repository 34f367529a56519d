"""`TreeConfig(deterministic="ranks")`: outputs and gradients have the same bits on any number of ranks."""

import contextlib
import dataclasses
import io
import itertools
import random
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_tree import (
    TreeConfig,
    dispatch_documents,
    shard_positions,
    tree_attn_func,
    tree_attn_varlen_func,
    tree_decode,
    tree_prefill,
)
from megatron_tree.core import comm, energy
from megatron_tree.core.attention.call import PlannedAttention
from megatron_tree.core.cache.pages import quantize
from megatron_tree.core.dropout import keep_weights
from megatron_tree.core.kernels import leaves
from megatron_tree.core.kernels.leaves import LEAF
from megatron_tree.core.layout import Segment, packed_layout
from megatron_tree.core.merge import merge_tree
from megatron_tree.core.plan import default_topology, place, plan_training
from megatron_tree.core.plan.plans import Shape
from megatron_tree.core.spec import AttnSpec, Dropout
from support.attention import distances, make_inputs, make_sinks, seen_in
from support.decoding import decode_inputs, decode_oracle, same_everywhere
from support.ranks import as_launched, on_ranks, run_distributed
from support.rounding import assert_near

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call on a whole sequence."""

    lengths: tuple[int, ...]
    """Of its documents."""
    heads: tuple[int, int]
    dims: tuple[int, int]
    batch: int
    dtype: torch.dtype
    mask: dict
    seed: int

    @property
    def documents(self):
        return len(self.lengths) > 1

    def inputs(self):
        """q, k, v, dout, dlse."""
        tokens, (d, d_v) = sum(self.lengths), self.dims
        tensors = make_inputs(tokens, self.heads, batch=self.batch, d=d, d_v=d_v, dtype=self.dtype, seed=self.seed)
        g = torch.Generator().manual_seed(self.seed)
        dlse = torch.randn(self.batch, self.heads[0], tokens, generator=g, dtype=torch.float64)
        if max(self.lengths) == 1:  # dq and dk come from dlse alone: else they might be less than dout.v is rounded by
            dlse += max(self.dims) ** 0.5
        return *tensors, dlse.to(torch.promote_types(self.dtype, torch.float32))


@dataclasses.dataclass(frozen=True)
class Seat:
    """Who computes it."""

    world: int
    layout: object
    """A name, "dispatched", or lengths."""
    config: dict
    alone: bool = False
    """Only the first row of the batch."""


def _draw(seed, worlds):
    """A problem, and where it is computed: first on one rank."""
    r = random.Random(seed)
    h_kv = r.choice([1, 2, 3])
    tokens = r.choice([1, 96, 2 * LEAF, 24 * r.randint(2, 20), r.randint(2, 8 * LEAF)])
    cuts = sorted(r.choices(range(1, tokens + 1), k=r.choice([0, 0, 2, 4])))
    lengths = tuple(b - a for a, b in itertools.pairwise([0, *cuts, tokens]))
    batch = 1 if len(lengths) > 1 else r.choice([1, 2])
    heads = h_kv * r.choice([1, 2, 3]), h_kv
    mask = r.choice([{}, {}, dict(causal=False), dict(window_size=(r.choice([0, 40, 200]), 0))])
    mask |= r.choice([{}, {}, dict(softcap=3.0), dict(alibi_slopes=tuple(2.0**-i for i in range(heads[0])))])
    mask |= r.choice([{}, {}, {}, dict(dropout_p=0.3, dropout_seed=seed)])
    if len(lengths) == 1 and r.random() < 0.25:
        a, b, c = (r.randint(0, tokens) for _ in range(3))
        mask = dict(
            ranges=[((0, a), (0, b), "causal"), ((a, tokens), (min(b, c), tokens), r.choice(["full", "inverse"]))]
        )
    if r.random() < 0.5:
        mask["sinks"] = True
    dtype = r.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64])
    problem = Problem(lengths, heads, r.choice([(16, 16), (24, 8), (64, 64)]), batch, dtype, mask, seed)
    seats = [Seat(1, "zigzag", {})] + [Seat(1, "zigzag", {}, alone=True)] * (batch > 1)
    for world in worlds:
        config = r.choice([{}, {}, dict(schedule="grid"), dict(grid=(1, world)), dict(comm_dtype="fp32")])
        sizes = [u for u in range(1, min(world, heads[0]) + 1) if world % u == 0]
        if "grid" not in config and r.random() < 0.6:
            config = config | dict(ulysses_size=r.choice(sizes))
        if config.get("ulysses_size", 1) == 1 and r.random() < 0.5:
            config = config | dict(head_chunks=h_kv)
        layouts = ["contiguous", "dispatched"] if problem.documents else ["contiguous", "uneven"]
        layouts += ["zigzag"] * 2 * (tokens % (2 * world) == 0) + ["documents"] * problem.documents
        layout = r.choice(layouts)
        if layout == "uneven":
            cuts = sorted(r.choices(range(tokens + 1), k=world - 1))
            layout = tuple(b - a for a, b in itertools.pairwise([0, *cuts, tokens]))
        seats.append(Seat(world, layout, config))
    return problem, seats


def _compute(problem, seat, group, rank):
    """{result: (rows of the whole sequence, this rank's part)}."""
    tokens, world = sum(problem.lengths), seat.world
    q, k, v, dout, dlse = (x[:1] if seat.alone else x for x in problem.inputs())
    bounds = [0, *itertools.accumulate(problem.lengths)]
    options = dict(problem.mask, cp_group=group, config=TreeConfig(deterministic="ranks", **seat.config))
    slopes, sinks = options.pop("alibi_slopes", None), options.pop("sinks", None)
    if slopes:
        options["alibi_slopes"] = torch.tensor(slopes)
    at, padded = torch.arange(tokens), tokens  # where tokens lie in the padded sequence
    if not problem.documents:
        cut = seat.layout
    elif seat.layout == "dispatched":
        cut = dispatch_documents(bounds, group)
        padded = cut.num_rows * world
    elif seat.layout == "documents":
        pads = [0, *itertools.accumulate(-(-n // (2 * world)) * 2 * world for n in problem.lengths)]
        cut, padded = packed_layout(bounds, pads), pads[-1]
        at = torch.cat([torch.arange(a, a + n) for a, n in zip(pads, problem.lengths)])
        options |= dict(cu_seqlens=bounds, cu_seqlens_padded=pads)
    else:
        cut = seat.layout
        options |= dict(cu_seqlens=bounds, layout=cut)
    mine = shard_positions(padded, rank, world, cut)
    token = torch.full((padded + 1,), -1)
    token[at] = torch.arange(tokens)
    rows = token[mine]
    held = rows >= 0

    def shard(x, dim=1):
        return x.index_select(dim, rows.clamp(min=0))

    leaves = [shard(x).requires_grad_() for x in (q, k, v)]
    if sinks:
        leaves.append(
            make_sinks(problem.heads[0]).to(torch.promote_types(problem.dtype, torch.float32)).requires_grad_()
        )
        options["sinks"] = leaves[3]
    if problem.documents:
        if seat.layout == "dispatched":
            options["layout"] = cut
        out, lse = tree_attn_varlen_func(*(x[0] for x in leaves[:3]), return_lse=True, **options)
        out, lse = out[None], lse[None]
    else:
        out, lse = tree_attn_func(*leaves[:3], return_lse=True, layout=cut, **options)
    upstream = shard(dout) * held[:, None, None], shard(dlse, 2) * held
    grads = torch.autograd.grad((out, lse), leaves, upstream)
    found = dict(zip(NAMES, (out.detach(), lse.detach(), *grads)))
    return {
        name: (rows[held], x if name == "dsinks" else x[..., held] if name == "lse" else x[:, held])
        for name, x in found.items()
    }


def _on_ranks(rank, size, drawn):
    """[[{result: part} of each place, where this rank has one] of each problem]."""
    groups = {1: None, size: dist.group.WORLD}
    for world in sorted({seat.world for _, seats in drawn for seat in seats} - set(groups)):
        groups[world] = dist.new_group(list(range(world)))
    return [
        [_compute(problem, seat, groups[seat.world], rank) if rank < seat.world else None for seat in seats]
        for problem, seats in drawn
    ]


def _whole(problem, parts):
    """{result: tensor} of the whole sequence."""
    found = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        if name == "dsinks":
            found[name] = torch.stack([x for _, x in pieces]).sum(0)
            continue
        order = torch.cat([rows for rows, _ in pieces]).argsort()
        assert len(order) == sum(problem.lengths)
        dim = 2 if name == "lse" else 1
        found[name] = torch.cat([x for _, x in pieces], dim).index_select(dim, order)
    return found


def _truth(problem):
    q, k, v, dout, dlse = (x.double() for x in problem.inputs())
    mask = dict(problem.mask)
    sinks = make_sinks(problem.heads[0]) if mask.pop("sinks", None) else None
    slopes, ranges = mask.pop("alibi_slopes", None), mask.pop("ranges", None)
    dropout = Dropout(mask.pop("dropout_p"), mask.pop("dropout_seed")) if "dropout_p" in mask else None
    spec = AttnSpec(softmax_scale=q.shape[-1] ** -0.5, alibi_slopes=slopes and (slopes,), dropout=dropout, **mask)
    lengths = torch.tensor(problem.lengths)
    seq = torch.arange(len(lengths)).repeat_interleave(lengths)
    pos = torch.cat([torch.arange(n) for n in problem.lengths])
    keep = energy.visible(pos, pos, spec) if ranges is None else seen_in(ranges, len(pos), len(pos))
    keep &= seq[:, None] == seq
    weights = None
    if dropout:
        at = dict(q_positions=pos, k_positions=pos, q_sequences=seq)
        weights = keep_weights(dropout, batch=problem.batch, num_heads=problem.heads[0], **at)
    options = dict(spec=spec, keep=keep, sinks=sinks, keep_weights=weights, distance=distances(pos, pos))
    out, lse = energy.attention(q, k, v, **options)
    dlse = dlse.masked_fill(lse.isinf(), 0.0)
    return dict(zip(NAMES, (out, lse, *energy.attention_grads(q, k, v, dout, dlse=dlse, **options))))


def _fuzz(seeds, size, worlds):
    drawn = [_draw(seed, worlds) for seed in seeds]
    _check(drawn, run_distributed(_on_ranks, size, drawn, timeout=900))


def _check(drawn, by_rank):
    """Every place's results are near the oracle's, and have the bits of the first place's."""
    for n, (problem, seats) in enumerate(drawn):
        results = [_whole(problem, [found[n][i] for found in by_rank[: p.world]]) for i, p in enumerate(seats)]
        first, truth = results[0], _truth(problem)
        for name, x in first.items():
            assert_near(x, truth[name], max(problem.lengths) * max(problem.dims), (problem, name), problem.dtype)
        for where, found in zip(seats[1:], results[1:]):
            for name, x in found.items():
                if where.alone:
                    same = name == "dsinks" or torch.equal(x, first[name][:1])
                else:
                    same = torch.equal(x, first[name])
                assert same, f"{name} differs from one rank's with {where}: {problem}"


def test_any_number_of_ranks_gives_the_same_bits():
    _fuzz(range(7), 4, (2, 3, 4))


TRITON = (
    (
        Problem((96,), (4, 2), (16, 16), 1, torch.float32, dict(softcap=3.0, sinks=True), 1),
        [(1, "zigzag", {}), (2, "zigzag", {}), (3, (10, 50, 36), {}), (4, "zigzag", dict(ulysses_size=2))],
    ),
    (
        Problem((40, 23, 9), (2, 1), (24, 8), 1, torch.float32, dict(window_size=(20, 0)), 2),
        [(1, "contiguous", {}), (2, "dispatched", {}), (3, "contiguous", {}), (4, "documents", {})],
    ),
)


def _on_triton(rank, size, drawn):
    """In leaves of 32 positions, as Triton's interpreter is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaves, "LEAF", 32)
        leaves.Leaves.of.cache_clear()
        try:
            return _on_ranks(rank, size, drawn)
        finally:
            leaves.Leaves.of.cache_clear()


@pytest.mark.parametrize("case", TRITON, ids=["a sequence", "documents"])
def test_triton_gives_the_same_bits_on_any_number_of_ranks(case):
    pytest.importorskip("triton", reason="triton is not installed")
    problem, seats = case
    seats = [Seat(world, layout, dict(config, backend="triton")) for world, layout, config in seats]
    _check([(problem, seats)], run_distributed(_on_triton, 4, [(problem, seats)], timeout=300))


WHOLE = (
    (
        Problem((6 * LEAF,), (8, 2), (16, 24), 2, torch.float32, dict(softcap=3.0, sinks=True), 1),
        [
            (1, "zigzag", {}),
            (2, (4 * LEAF, 2 * LEAF), {}),
            (3, "zigzag", dict(head_chunks=2)),
            (4, (LEAF, 0, 4 * LEAF, LEAF), {}),
        ],
    ),
    (
        Problem((256, 649, 119), (4, 2), (16, 16), 1, torch.bfloat16, dict(dropout_p=0.3, dropout_seed=2), 2),
        [(1, "contiguous", {}), (2, "contiguous", {}), (4, "contiguous", {}), (4, "contiguous", dict(ulysses_size=2))],
    ),
)


@contextlib.contextmanager
def _backward_by(schedule):
    """This backward wherever there is one for several ranks; gives the list of those that are taken."""
    plan_on, taken = PlannedAttention.plan_on, []

    def named(self, *args, **options):
        plan = plan_on(self, *args, **options)
        others = [x for x in plan.candidates[1] if x.ulysses_size == plan.forward.ulysses_size]
        taken.append(next((x for x in others if x.schedule == schedule), plan.backward))
        return dataclasses.replace(plan, backward=taken[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannedAttention, "plan_on", named)
        yield taken


def _on_ranks_by(rank, size, drawn, schedule):
    with _backward_by(schedule) as taken:
        found = _on_ranks(rank, size, drawn)
    worlds = {seat.world for _, seats in drawn for seat in seats if max(1, rank) < seat.world}
    assert sum(x.schedule == schedule for x in taken) >= len(worlds)
    return found


@pytest.mark.parametrize("schedule", ["gather", "integers"])
@pytest.mark.parametrize("case", WHOLE, ids=["a sequence", "documents"])
def test_both_backwards_give_the_same_bits(case, schedule):
    problem, seats = case
    drawn = [(problem, [Seat(world, layout, config) for world, layout, config in seats])]
    drawn[0][1].extend([Seat(1, "zigzag", {}, alone=True)] * (problem.batch > 1))
    _check(drawn, run_distributed(_on_ranks_by, 4, drawn, schedule, timeout=300))


@on_ranks(2, timeout=60)
def test_gradients_of_keys_travel_in_few_bytes(rank):
    """More where many queries see one key alone."""
    for dtype, factor, num_bytes in ((torch.float32, 1, 4), (torch.float32, 1000, 5), (torch.bfloat16, 1, 4)):
        q, k, v, dout = make_inputs(4 * LEAF, (4, 1), batch=1, d=16, d_v=24, dtype=dtype)
        k[:, 0] *= factor
        q, k, v, dout = (x.chunk(2, 1)[rank].clone().requires_grad_() for x in (q, k, v, dout.abs()))
        config, group = TreeConfig(deterministic="ranks"), dist.group.WORLD
        with _backward_by("integers"), comm.record() as log:
            tree_attn_func(q, k, v, cp_group=group, layout="contiguous", config=config).backward(dout)
        sent = [x.bytes for x in log if x.op == "all_to_all"]
        assert sent == [2 * LEAF * 40 * num_bytes], (sent, log)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_up_to_eight_ranks_give_the_same_bits():
    for first in range(100, 300, 20):
        _fuzz(range(first, first + 20), 8, (2, 3, 4, 6, 8))


def _slots_of(n, world, seed):
    """Which of n slots each rank has, in its order."""
    g = torch.Generator().manual_seed(seed)
    owner = torch.randint(world, (n,), generator=g)
    return [torch.randperm(int((owner == r).sum()), generator=g).argsort().argsort() for r in range(world)], owner


def _decode_forms(rank, size, worlds, dtype):
    """{form: {world: (out, lse)}}"""
    found = {}
    for world in worlds:
        group = dist.new_group(list(range(world)))
        if rank < world:
            for form, results in _decoded(rank, world, group if world > 1 else None, dtype).items():
                found.setdefault(form, {})[world] = results
    return found


def _decoded(rank, world, group, dtype):
    b, n, size, heads = 2, 300, 16, (6, 2)
    q, k, v = decode_inputs(b, 3, n, heads=heads, d=24, d_v=20, dtype=dtype)
    orders, owner = _slots_of(n, world, world)
    mine = (owner == rank).nonzero()[:, 0][orders[rank]]
    config = dict(cp_group=group, config=TreeConfig(deterministic="ranks"), return_lse=True)
    keys, values = k[:, mine], v[:, mine]
    at = dict(q_positions=torch.tensor([n - 3, 100, n - 1]), cache_positions=mine)
    found = {
        "dense": tree_decode(q[:, :1], keys, values, sinks=make_sinks(6), **config),
        "positions": tree_decode(q, keys, values, softcap=5.0, window_size=(90, 0), **at, **config),
        "slopes": tree_decode(q, keys, values, alibi_slopes=torch.linspace(0.1, 1.0, 6), **at, **config),
        "one row": tree_decode(q[1:], keys[1:], values[1:], softcap=5.0, window_size=(90, 0), **at, **config),
        "latent": tree_decode(q[:, :, :, :24], keys[:, :, :1], None, head_dim_v=16, **at, **config),
        "selected": tree_decode(q, keys, values, selected=_selected(mine, n), **config),
    }
    # pages on any rank; row 0 ends within its last page
    page_owner = torch.randint(world, (b, -(-n // size)), generator=torch.Generator().manual_seed(world))
    tables, lengths, pages = [], [], []
    for row in range(b):
        own = [i for i in range(page_owner.shape[1]) if page_owner[row, i] == rank]
        end = n if row else n - 5
        lengths.append(sum(min(size, end - i * size) for i in own))
        tables.append([len(pages) + i for i in range(len(own))])
        pages += [(row, i) for i in own]
    pad = torch.nn.functional.pad
    whole = [pad(x, (0, 0, 0, 0, 0, -n % size)).unflatten(1, (-1, size)) for x in (k, v)]
    stored = [torch.stack([x[row, i] for row, i in pages] or [torch.zeros_like(x[0, 0])]) for x in whole]
    width = max(1, *map(len, tables))
    table = torch.tensor([row + [0] * (width - len(row)) for row in tables], dtype=torch.int32)
    paged = dict(block_table=table, cache_seqlens=torch.tensor(lengths))
    found["paged"] = tree_decode(q[:, :1], *stored, **paged, **config)
    eight, scales = zip(*(quantize(x, torch.int8) for x in stored))
    scales = dict(k_scale=scales[0], v_scale=scales[1])
    found["8 bits"] = tree_decode(q[:, :1], *eight, **scales, **paged, **config)
    return found


def _selected(mine, n):
    """int32 [2, 3, m]: this rank's slots among every seventh position."""
    slots = (mine % 7 == 3).nonzero()[:, 0].to(torch.int32)
    return slots.expand(2, 3, -1).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoding_gives_the_same_bits_wherever_slots_are(dtype):
    by_rank = run_distributed(_decode_forms, 4, (1, 2, 3, 4), dtype, timeout=300)
    for form, found in by_rank[0].items():
        for rank, world in ((r, w) for w in found for r in range(w)):
            for x, first in zip(by_rank[rank][form][world], found[1]):
                assert torch.equal(x, first), f"{form} on rank {rank} of {world}"
    found = {form: results[1] for form, results in by_rank[0].items()}
    assert all(torch.equal(x, y[1:]) for x, y in zip(found["one row"], found["positions"]))
    q, k, v = decode_inputs(2, 3, 300, heads=(6, 2), d=24, d_v=20, dtype=dtype)
    dense = decode_oracle(q[:, :1], k, v, None, sinks=make_sinks(6))
    positions, at = torch.tensor([297, 100, 299])[:, None], torch.arange(300)
    windowed = decode_oracle(q, k, v, (at <= positions) & (at >= positions - 90), softcap=5.0)
    latent = decode_oracle(q, k[:, :, :1], k[:, :, :1, :16], at <= positions)
    selected = decode_oracle(q, k, v, (at % 7 == 3).expand(3, -1))
    want = dict(dense=dense, positions=windowed, latent=latent, selected=selected)
    for form, truth in want.items():
        for x, t in zip(found[form], truth):
            assert_near(x, t, 300, form, dtype if x.dtype == dtype else torch.float32)


def test_weights_far_below_the_largest_count_and_what_is_not_finite_shows():
    """One slot with a logit of 16, 100,000 slots with 0, which together weigh 1 % of it."""
    n, d = 100_001, 4
    k, q = torch.zeros(1, n, 1, d), torch.full((1, 1, 1, d), 2.0)
    k[0, 77] = 4.0
    v = torch.ones(1, n, 1, d)
    v[0, 77] = -1.0
    config = dict(cp_group=None, config=TreeConfig(deterministic="ranks"), return_lse=True)
    out, lse = tree_decode(q, k, v, **config)
    truth = decode_oracle(q, k, v, None)
    assert_near(out, truth[0], 1)
    assert_near(lse, truth[1], 1)
    for x in (k, v):
        x[0, 5, 0, 1] = torch.nan
        out, lse = tree_decode(q, k, v, **config)
        assert out[..., 1].isnan().all()
    assert lse.isnan().all()
    empty, lse = tree_decode(q, k[:, :0], v[:, :0], **config)
    assert not empty.any() and lse.isneginf().all()


def _prefilled(rank, size, worlds):
    """{world: (positions, out)} of a prompt in two chunks over a cache whose runs lie anywhere."""
    n, cut, found = 700, 390, {}
    q, k, v = decode_inputs(1, n, n, heads=(4, 2), d=16, d_v=16, dtype=torch.float32)
    for world in worlds:
        group = dist.new_group(list(range(world)))
        if rank >= world:
            continue
        r = random.Random(world)
        runs = [[] for _ in range(world)]
        for first in range(0, n, 10):
            runs[r.randrange(world)].append((first, 10))
        outs, positions = [], []
        for begin, end in ((0, cut), (cut, n)):
            shares = [[(first, 10) for first, _ in of_rank if begin <= first < end] for of_rank in runs]
            segments = [[Segment(10 * i, first, 10) for i, (first, _) in enumerate(x) if first < end] for x in runs]
            mine = torch.tensor([p for first, m in shares[rank] for p in range(first, first + m)], dtype=torch.int64)
            held = torch.tensor([s.pos + i for s in segments[rank] for i in range(10)], dtype=torch.int64)
            options = dict(shares=shares, key_segments=segments, config=TreeConfig(deterministic="ranks"))
            outs.append(tree_prefill(q[:, mine], k[:, held], v[:, held], cp_group=group, **options))
            positions.append(mine)
        found[world] = torch.cat(positions), torch.cat(outs, 1)
    return found


def test_prompts_over_a_cache_have_the_bits_of_training():
    by_rank = run_distributed(_prefilled, 3, (1, 2, 3), timeout=300)
    q, k, v = decode_inputs(1, 700, 700, heads=(4, 2), d=16, d_v=16, dtype=torch.float32)
    out = tree_attn_func(q, k, v, cp_group=None, config=TreeConfig(deterministic="ranks"))
    for world in (1, 2, 3):
        for found in by_rank[:world]:
            positions, part = found[world]
            assert torch.equal(part, out[:, positions]), world


@pytest.mark.slow
@on_ranks(2, timeout=120)
def test_a_model_with_a_sharded_cache(rank):
    """Prompt and steps of a Llama, whose dense layers round on their own: its logits are those of one rank."""
    pytest.importorskip("transformers")
    from megatron_tree.integrations.transformers import TreeCache
    from megatron_tree.integrations.transformers.infer.runner import Runner
    from support.hf_models import VOCAB, tiny_model

    model, prompt = tiny_model("llama", positions=512), torch.randint(VOCAB, (300,))
    model.set_attn_implementation("tree")

    def logits(group):
        tree_config = TreeConfig(deterministic="ranks")
        runner = Runner(model, TreeCache(model.config, cp_group=group, page_size=16, tree_config=tree_config))
        row = runner.add()
        return torch.stack(
            [runner.prefill(row, prompt).view(-1)]
            + [runner.step([row], prompt[i].view(1, 1)).view(-1) for i in range(3)]
        )

    found = logits(dist.group.WORLD)
    assert same_everywhere(found)
    assert_near(found, logits(None), 300)


def _generated(rank, world, family):
    """(tokens, logits) of two prompts' answers, and on rank 0 the logits of three that are served; None where products
    of fewer rows have other bits in torch."""
    from megatron_tree.inference.generation.requests import Request
    from megatron_tree.inference.generation.sampling import SamplingParams
    from megatron_tree.inference.generation.scheduler import Scheduler
    from megatron_tree.integrations.transformers.infer.engine import generate, share_model
    from support.hf_models import tiny_model

    model, (rows, tokens) = tiny_model(family), (2, 150)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            x = torch.randn(rows * tokens, module.in_features)
            whole = module(x)
            if not all(torch.equal(module(x[:n]), whole[:n]) for n in (37, 38, 75, 76, 150)):  # of a rank
                return None
    engine = share_model(model, tree_config=TreeConfig(deterministic="ranks"))
    prompts = torch.randint(model.config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(0))
    found = generate(engine, prompts, max_new_tokens=4, keep_logits=True)
    served, scheduler = [], Scheduler(engine.new_runner(), max_rows=2, max_waiting=3)
    for prompt in (*prompts, prompts[0].flip(0)):  # one by one: prompts of one turn are one product on one rank
        if rank == 0:
            sampling = SamplingParams(max_tokens=3, temperature=0.0)
            scheduler.submit(Request(prompt=prompt, sampling=sampling, keep_logits=True), served.append)
        scheduler.run_once()
    scheduler.run_until_idle()
    logits = [x.logits for x in served if x.logits is not None]
    return found.tokens, torch.stack(found.logits, 1), torch.stack(logits) if logits else None


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_generation_has_the_same_bits_on_any_number_of_ranks(family):
    """Prompts on shards and steps over a sharded cache, with replicated weights: `init_inference` and the server."""
    pytest.importorskip("transformers")
    results = [x for world in (1, 2, 4) for x in run_distributed(_generated, world, family)]
    if any(x is None for x in results):
        pytest.skip("the dense layers' products of fewer rows have other bits on this processor")
    tokens, logits, served = results[0]
    assert len(served) == 9
    for x, y, z in results[1:]:
        assert torch.equal(x, tokens) and torch.equal(y, logits) and (z is None or torch.equal(z, served))


def _printed(rank, world, program):
    out = io.StringIO()
    with as_launched(), contextlib.redirect_stdout(out):
        exec(program, {"__name__": "__main__"})
    return out.getvalue()


def test_the_example_of_the_documentation():
    page = (Path(__file__).resolve().parents[2] / "docs" / "reliability.md").read_text()
    (program,) = re.findall(r"```python\n(# bits.py.*?)```", page, flags=re.DOTALL)
    printed = {text for world in (1, 3) for text in run_distributed(_printed, world, program)}
    assert len(printed) == 1 and printed.pop().startswith("bits "), printed


def test_a_tree_over_leaves_does_not_depend_on_what_is_hidden():
    """Merges in brackets: those of any leaves are the brackets of all leaves without the others, and a cut at a subtree
    gives subtrees."""

    def merged(leaves):
        return merge_tree(leaves, str, lambda a, b: f"({a} {b})")

    assert merged(range(6)) == "(((0 1) (2 3)) (4 5))"
    assert merged([1, 2, 5]) == "((1 2) 5)"
    assert merged([3]) == "3"
    assert merged(range(8)) == f"({merged(range(4))} {merged(range(4, 8))})"


@on_ranks(2, timeout=60)
def test_what_gives_other_bits_is_refused(rank):
    """On every rank, before anything is sent; the group goes on."""
    q, k, v, _ = make_inputs(8, (4, 2), dtype=torch.float32)
    group = dist.group.WORLD

    def call(config=None, **options):
        config = TreeConfig(deterministic="ranks", timeout_s=20, **(config or {}))
        return tree_attn_func(q, k, v, cp_group=group, config=config, **options)

    def refused(text, **options):
        with pytest.raises(ValueError, match=text):
            call(**options)

    refused("schedule='ring' gives other bits on another number of ranks.*choose 'grid'", config=dict(schedule="ring"))
    refused("schedule='cast' gives other bits", config=dict(schedule="cast"))
    refused(r"grid=\(2, 1\) gives other bits.*choose one row, \(1, n\)", config=dict(grid=(2, 1)))
    refused(r"grid_backward=\(2, 1\) gives other bits", config=dict(grid=(1, 2), grid_backward=(2, 1)))
    refused("backend='aten' gives other bits.*choose 'reference'", config=dict(backend="aten"))
    refused("return_max_logit=True does not take deterministic='ranks'", return_max_logit=True)
    refused("deterministic='ranks' does not take selected keys", selected=torch.zeros(2, 8, 2).int())
    assert call().shape == q.shape
    config = TreeConfig(deterministic="ranks", timeout_s=20)
    with pytest.raises(ValueError, match="schedule='butterfly' merges states of ranks.*choose 'allreduce'"):
        tree_decode(q[:, :1], k, v, cp_group=group, schedule="butterfly", config=config)
    with pytest.raises(ValueError, match="deterministic='ranks' does not take decoding in float64"):
        tree_decode(*(x.double() for x in (q[:, :1], k, v)), cp_group=group, config=config)
    with pytest.raises(
        ValueError, match="backend='triton' does not decode with deterministic='ranks': use backend='auto'"
    ):
        tree_decode(q[:, :1], k, v, cp_group=group, config=dataclasses.replace(config, backend="triton"))
    shares = dict(shares=[[(0, 8)], [(8, 8)]], key_segments=[(0, 0, 8)] if rank == 0 else [(0, 8, 8)])
    with pytest.raises(ValueError, match=r"grid=\(2, 1\) merges states of ranks.*choose \(1, 2\)"):
        tree_prefill(q, k, v, cp_group=group, config=config, **shares)
    with pytest.raises(ValueError, match="does not take selected keys in training and prefill: use deterministic=True"):
        tree_prefill(q, k, v, cp_group=group, config=config, selected=torch.zeros(2, 8, 2).int(), **shares)


def test_tangents_are_refused():
    q, k, v, _ = make_inputs(8, (2, 2))
    config = TreeConfig(deterministic="ranks")
    with pytest.raises(ValueError, match="deterministic='ranks' has first derivatives only"):
        torch.func.jvp(lambda x: tree_attn_func(x, k, v, cp_group=None, config=config), (q,), (q,))
    on_triton = dataclasses.replace(config, backend="triton")
    with pytest.raises(ValueError, match="deterministic='ranks' has first derivatives only"):
        torch.func.jvp(
            lambda x: tree_attn_func(x, k.float(), v.float(), cp_group=None, config=on_triton),
            (q.float(),),
            (q.float(),),
        )
    single = [x.float() for x in (q[:, :1], k, v)]
    for call in (tree_decode, tree_prefill):
        more = {} if call is tree_decode else dict(shares=[[(7, 1)]], key_segments=[(0, 0, 8)])
        with pytest.raises(ValueError, match="q has a tangent"):
            torch.func.jvp(
                lambda x, call=call, more=more: call(x, *single[1:], cp_group=None, config=config, **more),
                (single[0],),
                (single[0],),
            )
    assert tree_decode(*(x[:0] for x in single), cp_group=None, config=config).shape == (0, 1, 2, 8)
    q.requires_grad_()
    (grad,) = torch.autograd.grad(
        tree_attn_func(q, k, v, cp_group=None, config=config).square().sum(), q, create_graph=True
    )
    with pytest.raises(ValueError, match="deterministic='ranks' has first derivatives only"):
        grad.sum().backward()


def test_the_plan_says_what_is_sent():
    """A rank sends its KV in the forward, in the backward its queries, dout, lse and delta, too; nothing comes back. Or
    gradients of KV come back as integers."""
    topology, (b, s, p) = default_topology("gloo"), (2, 512, 4)
    call = dict(batch=b, seq_len=s, bytes_per_word=4, topology=topology, placement=place(topology, [0] * p))
    shape = Shape(8, 2, 64, 32)
    plan = plan_training(p, shape, deterministic="ranks", ulysses_size=1, **call)
    rows = b * s // p * (p - 1)
    kv, queries = rows * 2 * 96 * 4, rows * 8 * (96 + 2) * 4
    assert plan.forward.cost.bytes == kv and plan.backward.cost.bytes == kv + queries
    assert "rows gathered among 4" in plan.reason
    assert plan_training(p, shape, deterministic="ranks", **call).forward.ulysses_size in (1, 2)
    integers = plan_training(p, shape, deterministic="ranks", integers=True, ulysses_size=1, **call)
    assert integers.forward == plan.forward and integers.backward.cost.bytes == kv + kv
    assert "gradients added up as integers" in integers.reason
