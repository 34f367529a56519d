"""Calls over a sharded KV cache for test_fuzz_cache.py: tree_decode over any shards, and lives of a cache."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from megatron_tree import TreeConfig, tree_decode
from megatron_tree.core import energy
from megatron_tree.core.cache import CACHE_DTYPES, ShardedCache, quantize
from megatron_tree.core.config import DECODE_SCHEDULES
from megatron_tree.core.plan import grids
from megatron_tree.core.spec import AttnSpec
from support.attention import distances, make_slopes, slopes_of
from support.decoding import prefill_chunk, same_everywhere
from support.fuzz import EPSILON, TIMEOUT_S, check_close, magnitude, randn, told

HEADS = st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 1), (8, 4)])
HEAD_DIMS = st.sampled_from([(4, 4), (8, 8), (8, 4), (3, 5), (1, 1)])
DTYPES = st.sampled_from([torch.float64, torch.float64, torch.float32])
GAP = 3  # positions that no slot has, so that "the query's" is not "the last"


@dataclass(frozen=True, kw_only=True, repr=False)
class Masked:
    """What all queries of a case have in common."""

    heads: tuple[int, int] = (2, 1)
    head_dims: tuple[int, int] = (4, 4)
    dtype: torch.dtype = torch.float64
    left: int = -1
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    seed: int = 0

    __repr__ = told

    @property
    def options(self):
        given = dict(sinks=randn(self.seed + 3, self.heads[0])) if self.sinks else {}
        given |= dict(alibi_slopes=make_slopes(self.heads[0])) if self.slopes else {}
        return dict(window_size=(self.left, -1), softcap=self.softcap) | given

    def oracle(self, q, k, v, q_positions, k_positions, keep):
        """(out, lse) in float64."""
        slopes = slopes_of(self.options.get("alibi_slopes"))
        mask = dict(window_size=(self.left, -1), softcap=self.softcap, alibi_slopes=slopes)
        spec = AttnSpec(softmax_scale=self.head_dims[0] ** -0.5, **mask)
        if keep is not None:
            keep = keep & energy.visible(q_positions, k_positions, spec)
        seen = dict(keep=keep, distance=distances(q_positions, k_positions))
        return energy.attention(q.double(), k.double(), v.double(), spec=spec, sinks=self.options.get("sinks"), **seen)


@dataclass(frozen=True, kw_only=True, repr=False)
class Decode(Masked):
    """One call of tree_decode over shards that know nothing of one another."""

    shards: tuple[tuple[int, ...], ...]
    """By rank: the valid slots of each row."""
    spare: tuple[int, ...]
    """By rank: slots beyond the longest row, or pages nobody refers to."""
    whole: bool = False
    """No cache_seqlens: all rows of a rank are equally long."""
    positions: bool = False
    s_q: int = 1
    page_size: int = 0
    """0: not paged."""
    stored: str = "auto"
    strided: bool = False
    schedule: str = "auto"
    config: tuple = ()

    @property
    def batch(self):
        return len(self.shards[0])

    def q(self):
        return randn(self.seed, self.batch, self.s_q, self.heads[0], self.head_dims[0], dtype=self.dtype)

    def q_positions(self):
        g = torch.Generator().manual_seed(self.seed)
        return torch.randint(0, 2 * self.num_positions, (self.batch, self.s_q), generator=g)

    @property
    def num_positions(self):
        return GAP + max(sum(row) for row in zip(*self.shards))

    def slots(self, rank):
        """(k, v [b, s, h_kv, d or d_v], positions [b, s]) of a rank's valid slots, NaN and -1 beyond each row's."""
        n = max(self.shards[rank]) + (0 if self.page_size or self.whole else self.spare[rank])
        k, v = (
            randn(self.seed + 7 * rank + i, self.batch, n, self.heads[1], d, dtype=self.dtype)
            for i, d in enumerate(self.head_dims)
        )
        g = torch.Generator().manual_seed(self.seed + rank)
        positions = torch.randint(-1, self.num_positions, (self.batch, n), generator=g)  # -1: hidden
        for row, length in enumerate(self.shards[rank]):
            k[row, length:], v[row, length:], positions[row, length:] = float("nan"), float("nan"), -1
        return k, v, positions


@st.composite
def decodes(draw, world):
    """A valid call on `world` ranks; rows that see nothing, empty shards and an empty cache among them."""
    batch, page_size = draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 1, 2, 5, 16]))
    whole = not page_size and draw(st.booleans())
    lengths = st.one_of(st.just(0), st.integers(0, 20))
    rank = lengths.map(lambda n: (n,) * batch) if whole else st.tuples(*[lengths] * batch)
    s_q = draw(st.sampled_from([1, 1, 2, 5]))
    left, slopes = draw(st.sampled_from([-1, -1, 0, 3, 11])), draw(st.integers(0, 3)) == 0
    return Decode(
        shards=draw(st.tuples(*[rank] * world)),
        spare=draw(st.tuples(*[st.integers(0, 3)] * world)),
        whole=whole,
        positions=s_q > 1 or left >= 0 or slopes or draw(st.booleans()),
        s_q=s_q,
        heads=draw(HEADS),
        head_dims=draw(HEAD_DIMS),
        dtype=draw(DTYPES),
        page_size=page_size,
        stored=draw(st.sampled_from(list(CACHE_DTYPES))) if page_size else "auto",
        left=left,
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
        sinks=draw(st.booleans()),
        slopes=slopes,
        strided=draw(st.booleans()),
        schedule=draw(st.sampled_from(DECODE_SCHEDULES)),
        config=(
            ("timeout_s", TIMEOUT_S),
            ("transport", draw(st.sampled_from(["auto", "direct", "builtin"]))),
            ("check", draw(st.sampled_from(["first", "always", "never"]))),
            ("backend", draw(st.sampled_from(["auto", "reference"]))),
        ),
        seed=draw(st.integers(0, 1000)),
    )


def _paged(call, rank, k, v):
    """Pages in any order, one that nobody refers to between them: (k, v, options of the call)."""
    size, stored = call.page_size, CACHE_DTYPES[call.stored]
    columns = max(1, -(-k.shape[1] // size))
    num_pages = columns * call.batch + call.spare[rank] + 1
    numbers = torch.randperm(num_pages, generator=torch.Generator().manual_seed(call.seed + rank))
    table = numbers[: columns * call.batch].reshape(call.batch, columns)
    options, pages = {"block_table": table.int()}, []
    for name, x in (("k", k), ("v", v)):
        scattered = torch.full((num_pages, size, *x.shape[2:]), float("nan"), dtype=x.dtype)
        if stored:
            scattered.zero_()
        for row, length in enumerate(call.shards[rank]):
            slots = torch.arange(length)
            scattered[table[row, slots // size], slots % size] = x[row, :length]
        if stored:
            scattered, options[f"{name}_scale"] = quantize(scattered, stored)
        pages.append(scattered)
    return *pages, options


def run_decode(rank, world, call):
    """(out, lse, whether all ranks hold the same bits)."""
    k, v, positions = call.slots(rank)
    options = dict(call.options, config=TreeConfig(**dict(call.config)), schedule=call.schedule)
    if not call.whole:
        options["cache_seqlens"] = torch.tensor(call.shards[rank])
    if call.page_size:
        k, v, paged = _paged(call, rank, k, v)
        options |= paged
        slots = options["block_table"].shape[1] * call.page_size
        positions = torch.nn.functional.pad(positions, (0, slots - positions.shape[1]), value=-1)
    elif call.strided:
        k, v = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (k, v))
    if call.positions:
        options |= dict(q_positions=call.q_positions(), cache_positions=positions)
    out, lse = tree_decode(call.q(), k, v, cp_group=dist.group.WORLD, return_lse=True, **options)
    return out, lse, same_everywhere(out) and same_everywhere(lse)


def check_decode(call, results):
    """The first rank's result against the truth; the others must hold its bits."""
    assert all(same for _, _, same in results), "ranks differ"
    out, lse, _ = results[0]
    shards = [call.slots(rank) for rank in range(len(call.shards))]
    if call.stored != "auto":
        stored = CACHE_DTYPES[call.stored]
        for i, shard in enumerate(shards):
            whole = [quantize(x, stored) for x in shard[:2]]
            shards[i] = *((x.float() * scale[..., None]).to(call.dtype) for x, scale in whole), shard[2]
    for row in range(call.batch):
        parts = [[x[row : row + 1, : n[row]] for x in shard] for shard, n in zip(shards, call.shards)]
        k, v, positions = (torch.cat(x, 1) for x in zip(*parts))
        keep = (positions >= 0)[:, None] if call.positions else None
        o, l = call.oracle(call.q()[[row]], k, v, call.q_positions()[[row]], positions, keep)
        _close(f"row {row}", call.dtype, (out[[row]], o), (lse[[row]], l))


def _close(name, dtype, *pairs):
    allowed = 1e-10 if dtype == torch.float64 else 64 * EPSILON[torch.float32]
    for what, (found, truth) in zip(("out", "lse"), pairs):
        check_close(f"{what} of {name}", found, truth, allowed * max(1.0, magnitude(truth)))


@dataclass(frozen=True, kw_only=True, repr=False)
class Life(Masked):
    """A `ShardedCache` from its first row on: what is done to it, one thing after another."""

    actions: tuple[tuple, ...]
    """("prefill", row, tokens, number of the grid), ("decode", first row, rows, tokens, schedule), ("fork", row),
    ("crop", row, tokens), ("remove", row); rows are numbers among those there, modulo how many there are."""
    page_size: int = 4
    transport: str = "auto"


numbers = st.integers(0, 7)
ACTIONS = st.one_of(
    st.tuples(st.just("prefill"), numbers, st.integers(1, 40), numbers),
    st.tuples(st.just("decode"), numbers, st.integers(1, 3), st.integers(1, 3), st.sampled_from(DECODE_SCHEDULES)),
    st.tuples(st.just("decode"), numbers, st.integers(1, 3), st.just(1), st.sampled_from(DECODE_SCHEDULES)),
    st.tuples(st.just("fork"), numbers),
    st.tuples(st.just("crop"), numbers, st.integers(0, 9)),
    st.tuples(st.just("remove"), numbers),
)
LIVES = st.builds(
    Life,
    actions=st.lists(ACTIONS, min_size=1, max_size=12).map(tuple),
    page_size=st.sampled_from([1, 2, 4, 7]),
    heads=HEADS,
    head_dims=HEAD_DIMS,
    dtype=DTYPES,
    left=st.sampled_from([-1, -1, 0, 5, 17]),
    softcap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
    slopes=st.integers(0, 3).map(lambda n: n == 0),
    transport=st.sampled_from(["auto", "builtin"]),
    seed=st.integers(0, 1000),
)


class _Model:
    """The plain truth of a life: every row is a list of token numbers; a token's q, k and v are a matter of it."""

    def __init__(self, life):
        (h, h_kv), (d, d_v) = life.heads, life.head_dims
        count = 4 * sum(a[2] if a[0] == "prefill" else a[2] * a[3] if a[0] == "decode" else 0 for a in life.actions) + 4
        shapes = ((h, d), (h_kv, d), (h_kv, d_v))
        self.q, self.k, self.v = (randn(life.seed + i, count, *s, dtype=life.dtype) for i, s in enumerate(shapes))
        self.life, self.rows, self.next = life, [], 0

    def more(self, row, n):
        """Positions of n new tokens of a row: (q, k, v) [1, n, heads, dim] of them."""
        new = list(range(self.next, self.next + n))
        self.next += n
        self.rows[row] += new
        return [x[new][None] for x in (self.q, self.k, self.v)]

    def wanted(self, row, n):
        """The oracle for the last n tokens of a row."""
        tokens = self.rows[row]
        at, last = torch.arange(len(tokens)), slice(len(tokens) - n, None)
        q, k, v = (x[tokens][None] for x in (self.q, self.k, self.v))
        return self.life.oracle(q[:, last], k, v, at[last], at, torch.tensor(True))[0]


def run_life(rank, world, life):
    """The worst error of all attention in a cache's life over that allowed, or what else went wrong."""
    window = None if life.left < 0 else life.left + 1
    cache = ShardedCache([window], rank=rank, world=world, page_size=life.page_size)
    model, ids = _Model(life), []
    options = dict(life.options, config=TreeConfig(timeout_s=TIMEOUT_S, transport=life.transport))
    for action, *arguments in life.actions:
        if not ids:
            ids.append(cache.book.add())
            model.rows.append([])
        row = arguments[0] % len(ids)
        if action == "prefill":
            _prefill(cache, model, ids, row, *arguments[1:], options)
        elif action == "decode":
            count = min(arguments[1], len(ids))
            _decode(cache, model, ids, [(row + i) % len(ids) for i in range(count)], *arguments[2:], options)
        elif action == "fork":
            ids.append(cache.book.fork(ids[row]))
            model.rows.append(list(model.rows[row]))
        elif action == "crop":
            length = max(0, len(model.rows[row]) - arguments[1])
            try:
                cache.crop(ids[row], length)
            except ValueError:
                assert window is not None, "only a window may have forgotten what is asked for"
            else:
                del model.rows[row][length:]
        else:
            cache.remove(ids.pop(row))
            model.rows.pop(row)
        assert [cache.book.rows[i].length for i in ids] == [len(tokens) for tokens in model.rows]
        ranks = list({id(part): part.rank for i in ids for part in cache.book.rows[i].parts}.values())
        assert cache.book.loads == [ranks.count(r) for r in range(world)]  # rows share pages
        (numbers,), (held,), (most,) = cache.book.numbers, cache.book.held, cache.book.most
        assert numbers.used <= held[rank] and numbers.capacity <= most
    for i in ids:
        cache.remove(i)
    assert cache.book.numbers[0].used == 0 and not any(cache.book.loads) and not any(cache.book.held[0])
    return True


def _prefill(cache, model, ids, row, n, grid, options):
    choices = grids(cache.book.world)
    out, mine = prefill_chunk(cache, ids[row], *model.more(row, n), options, choices[grid % len(choices)])
    wanted = model.wanted(row, n)[:, torch.tensor(mine, dtype=torch.int64)]
    _close(f"prefill on rank {cache.book.rank}", model.life.dtype, (out, wanted))


def _decode(cache, model, ids, rows, n, schedule, options):
    new = [model.more(row, n) for row in rows]
    q, k, v = (torch.cat(x) for x in zip(*new))
    append = cache.append([ids[row] for row in rows], n)
    cache.write(0, append, k, v)
    view, pages = cache.view(0, [ids[row] for row in rows], "cpu"), cache.layers[0]
    out = tree_decode(
        *(q, pages.k, pages.v),
        cp_group=dist.group.WORLD,
        block_table=view.block_table,
        cache_seqlens=view.lengths,
        q_positions=torch.tensor(append.first)[:, None] + torch.arange(n),
        cache_positions=view.positions,
        schedule=schedule,
        **options,
    )
    assert same_everywhere(out), "ranks differ"
    for i, row in enumerate(rows):
        _close(f"decode of row {row}", model.life.dtype, (out[[i]], model.wanted(row, n)))


def check_life(life, results):
    """The ranks have checked themselves: model and truth are cheap."""
    assert all(results)
