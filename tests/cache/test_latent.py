"""Latent attention: heads that read latents get what keys made of them would give; what is stored and what is sent."""

import dataclasses
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_tree import tree_decode, tree_prefill
from megatron_tree.core.attention.validate import make_spec
from megatron_tree.core.cache import ShardedCache, attention
from megatron_tree.core.cache.forward import ForwardPass, forward_pass
from megatron_tree.core.cache.latent import LatentHeads
from megatron_tree.core.comm import work
from megatron_tree.core.config import TreeConfig
from megatron_tree.core.kernels import KVCache, attn_decode
from megatron_tree.core.plan import grids, load_topology, place, plan_decode, plan_prefill_grid, save_topology
from support.ranks import largest, run_distributed
from support.rounding import rounding

HEADS, NOPE, ROTARY, WIDTH_V, RANK = 6, 8, 4, 6, 12  # from 17 queries on it pays to expand
CHUNKS = (40, 3, 21, 64)


def _heads(dtype=torch.float64):
    up = torch.randn(HEADS, NOPE + WIDTH_V, RANK, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return LatentHeads(up, NOPE)


def _tokens(n, seed=2):
    """q [1, n, h, d], latents [1, n, 1, r] and rotary keys [1, n, 1, ...]."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, NOPE + ROTARY), (1, RANK), (1, ROTARY))
    return [torch.randn(1, n, *shape, generator=random, dtype=torch.float64) for shape in shapes]


def _dense(q, latents, rotary, heads, scale):
    """Attention with every head's keys and values, written down; q are the last tokens."""
    k_nope, v = torch.einsum("bsr,hdr->bshd", latents[:, :, 0], heads.up).split((NOPE, WIDTH_V), -1)
    k = torch.cat((k_nope, rotary.expand(-1, -1, HEADS, -1)), -1)
    hidden = torch.ones(q.shape[1], k.shape[1]).triu(1 + k.shape[1] - q.shape[1]).bool()
    p = (scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


def test_heads_over_latents_are_heads_over_keys():
    heads, (q, latents, rotary) = _heads(), _tokens(20)
    want = _dense(q, latents, rotary, heads, 0.3)
    entries = torch.cat((latents, rotary), -1)
    k, v = heads.expand(entries)
    options = dict(cp_group=None, softmax_scale=0.3, q_positions=torch.arange(20), cache_positions=torch.arange(20))
    absorbed = heads.project(tree_decode(heads.absorb(q), entries, None, head_dim_v=RANK, **options))
    for out in (tree_decode(q, k, v, **options), absorbed):
        torch.testing.assert_close(out, want)
    assert heads.up.data_ptr() == heads.up[:, :NOPE].data_ptr()


def test_what_pays_is_less_work():
    deepseek = LatentHeads(torch.empty(128, 256, 512, device="meta"), 128)
    assert [deepseek.pays_to_expand(n) for n in (1, 170, 171)] == [False, False, True]
    for heads in (deepseek, _heads()):
        r, both = heads.rank, heads.up.shape[1]
        for n in range(1, 300):  # products for one key and one head; the rotary part is the same
            assert heads.pays_to_expand(n) == (n * both + r * both < n * 2 * r)
    assert not LatentHeads(torch.empty(2, 12, 6, device="meta"), 6).pays_to_expand(10**9)  # latents as narrow as heads


@pytest.mark.parametrize("backend", ["native", "aten", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_take_keys_of_576_that_hold_their_values(backend, dtype):
    random = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 3, 8, 576, generator=random), torch.randn(2, 130, 1, 576, generator=random)
    positions = torch.arange(130).expand(2, -1)
    seen = dict(lengths=torch.tensor([130, 57]), q_positions=torch.tensor([[56, 80, 129], [3, 56, 56]]))
    seen["k_positions"], found = positions, {}
    for name, type_ in (("exact", torch.float64), (backend, dtype), ("dense", dtype)):
        keys = k.to(type_)
        values, head_dim_v = (None, 512) if name == backend else (keys[..., :512].clone(), None)
        cache = KVCache(keys, values, head_dim_v=head_dim_v, **seen)
        name_of = "reference" if name != backend else backend
        spec = make_spec(q.to(type_), True, 0.07, (-1, -1), 0.0)
        found[name] = attn_decode(q.to(type_), cache, spec, backend=name_of).double()
    error, allowed = ((found[x] - found["exact"]).abs().max() for x in (backend, "dense"))
    assert error <= 2 * allowed + 1e-6 * found["exact"].abs().max()


def _only(grid):
    """Lets the planner choose this grid alone."""

    def plan(sizes, **options):
        return plan_prefill_grid(tuple(size if g == grid else None for g, size in zip(grids(4), sizes)), **options)

    return mock.patch.object(attention, "plan_prefill_grid", plan)


def _on_grids(rank, world):
    """`_row_in_chunks` of sharded tokens on 2 x 2, and the worst error of sharded heads on every grid."""
    with _only((2, 2)):
        errors, expanded = _row_in_chunks(rank, world, True, "auto")
    shares, heads, (q, latents, rotary) = (2, 2, 1, 1), _heads(), _tokens(80)
    own, group = slice(sum(shares[:rank]), sum(shares[: rank + 1])), dist.group.WORLD
    split = own, LatentHeads(heads.up[own], NOPE)
    all_heads = slice(None), heads
    for grid, (given, latent) in itertools.product(grids(world), (split, all_heads)):
        store = ShardedCache([None], rank=rank, world=world, page_size=4, latent=True)
        row = store.book.add()
        for new in (slice(0, 40), slice(40, 80)):
            with _only(grid), forward_pass(store, [row], 40, cp_group=group, head_shares=shares) as forward:
                forward.write(0, latents[:, new], rotary[:, new])
                out = forward.attend(0, q[:, new, given], latent=latent, softmax_scale=0.3)
            want = _dense(q[:, new], latents[:, : new.stop], rotary[:, : new.stop], heads, 0.3)[:, :, own]
            errors.append(float((out - want).abs().max()))
    return errors, expanded


def test_a_row_on_grids():
    for errors, expanded in run_distributed(_on_grids, 4):
        assert largest(errors) < 1e-12
        assert expanded == [True, False, False, True]  # half of 40, 3, 21 and 64 queries meet a key


def _row_on_an_accelerator(rank, world):
    with mock.patch.object(attention, "ACCELERATORS", ("cpu",)):
        return _row_in_chunks(rank, world, True, "auto")


def _row_in_chunks(rank, world, sharded, dtype):
    """Errors of all chunks of a row, and which of them made keys."""
    group = dist.group.WORLD if world > 1 else None
    store = ShardedCache([None], rank=rank, world=world, page_size=4, latent=True, dtype=dtype)
    heads, (q, latents, rotary), row = _heads(), _tokens(sum(CHUNKS)), store.book.add()
    expanded, errors, first = [], [], 0
    expand = LatentHeads.expand
    for n in CHUNKS:
        made, new = [], slice(first, first + n)
        LatentHeads.expand = lambda self, entries, made=made: made.append(1) or expand(self, entries)
        try:
            with forward_pass(store, [row], n, cp_group=group, sharded=sharded) as forward:
                runs = (forward.append.shares[rank] or [(first, 1)]) if sharded else [(first, n)]
                own = torch.cat([torch.arange(begin, begin + count) for begin, count in runs])
                forward.write(0, latents[:, own], rotary[:, own])
                out = forward.attend(0, q[:, own], latent=heads, softmax_scale=0.3)
        finally:
            LatentHeads.expand = expand
        first += n
        if not sharded or forward.append.shares[rank]:
            want = _dense(q[:, new], latents[:, :first], rotary[:, :first], heads, 0.3)
            errors.append(float((out - want[:, own - new.start]).abs().max()))
        expanded.append(bool(made))
    assert store.nbytes == store.num_local() * (8 * (RANK + ROTARY) if dtype == "auto" else RANK + ROTARY + 8)
    return errors, expanded


@pytest.mark.parametrize("world", [1, 4])
def test_a_row_in_chunks(world):
    for sharded in (True, False):
        for errors, expanded in run_distributed(_row_in_chunks, world, sharded, "auto"):
            assert largest(errors) < 1e-12
            # 3 tokens meet latents; 21 tokens that are sharded meet made keys where ranks share the queries
            assert expanded[0] == (not sharded or world < 4) and not expanded[1], (sharded, expanded)
    for errors, _ in run_distributed(_row_in_chunks, world, True, "int8"):
        assert 0 < largest(errors) < 0.2
    for errors, expanded in run_distributed(_row_on_an_accelerator, world):
        assert largest(errors) < 1e-12 and all(expanded)


def _bytes_sent(rank, world):
    """By way to attend: payload bytes of this rank for 64 tokens over as many that are there."""
    group, sent = dist.group.WORLD, {}
    heads, (q, latents, rotary) = _heads(), _tokens(128)
    store = ShardedCache([None], rank=rank, world=world, page_size=4, latent=True)
    row = store.book.add()
    for what, n in (("first", 64), ("second", 64)):
        with forward_pass(store, [row], n, cp_group=group, sharded=True) as forward:
            own = torch.cat([torch.arange(a, a + count) for a, count in forward.append.shares[rank]])
            forward.write(0, latents[:, own], rotary[:, own])
            with work.record() as log:
                forward.attend(0, q[:, own], latent=heads, softmax_scale=0.3)
        sent[what] = sum(x.bytes for x in log)
    entries = torch.cat((latents, rotary), -1)[:, rank::world]
    with work.record() as log:
        tree_decode(heads.absorb(q[:, :1]), entries, None, head_dim_v=RANK, cp_group=group, schedule="ring")
    sent["ring"] = sum(x.bytes for x in log if x.bytes > 16)
    return sent


def _merged(rank, world, topologies, dtype):
    """Worst error of a decoded token of two rows, by topology and with weights whole or split; and bytes sent."""
    heads, (q, latents, rotary), group = _heads(dtype), [x.to(dtype) for x in _tokens(21)], dist.group.WORLD
    shares, options, found = [(3, 3), (3, 2, 1)][world - 2], dict(softmax_scale=0.3), []
    own = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    for topology in topologies:
        config = TreeConfig(topology=topology, transport="direct")
        for held in (None, shares):
            store = ShardedCache([None], rank=rank, world=world, page_size=4, latent=True)
            rows = [store.book.add(), store.book.add()]
            for row in rows:
                with forward_pass(store, [row], 20, cp_group=None) as forward:
                    forward.write(0, latents[:, :20], rotary[:, :20])
            state = dict(cp_group=group, head_shares=held, schedule="scatter")
            with forward_pass(store, rows, 1, **state) as forward, work.record() as log:
                forward.write(0, *(x[:, 20:].expand(2, -1, -1, -1) for x in (latents, rotary)))
                out = forward.attend(0, q[:, 20:].expand(2, -1, -1, -1), latent=heads, config=config, **options)
            want = _dense(q[:, 20:], latents, rotary, heads, 0.3)[:, :, slice(None) if held is None else own]
            sent = sum(x.bytes for x in log if x.bytes > 16)
            found.append((sent, float((out - want).abs().max()), float(want.abs().max())))
    return found


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (3, torch.float32), (2, torch.bfloat16)])
def test_values_are_merged_where_that_is_faster(world, dtype, tmp_path):
    """Projecting before the merge is exact, and sends fewer bytes; where weights are split all ranks read more of them.
    So only a topology with fast memory does it there."""
    topologies = []
    for bandwidth in (1e15, 1e3):
        topologies.append(dataclasses.replace(load_topology("laptop"), memory_bandwidth=bandwidth))
        save_topology(topologies[-1], tmp_path / f"{bandwidth}.yaml")
    paths = [str(tmp_path / f"{bandwidth}.yaml") for bandwidth in (1e15, 1e3)]
    for found in run_distributed(_merged, world, paths, dtype):
        for i, (sent, error, largest_out) in enumerate(found):
            own = i % 2
            width = RANK if own and i > 1 else WIDTH_V
            longest = 2 * 3 if own else 2 * HEADS // world  # rows of a state: those of two queries
            assert sent == (world - 1) * longest * (width + 1) * 4 * (1 if own else 2), (i, found)
            sums = 21 if dtype == torch.float32 else 2  # others are in fp32
            assert error < rounding(sums, dtype) * largest_out, (i, found)
            if world == 2:
                plan = plan_decode(
                    2, rows=2 * HEADS, head_dim_v=width, kv_bytes=None, topology=topologies[0],
                    placement=place(topologies[0], [0, 0]), schedule="scatter", local_heads=bool(own),
                )  # fmt: skip
                assert plan.cost.bytes == sent


def test_latents_are_sent_once():
    for sent in run_distributed(_bytes_sent, 2):
        for what, tokens in (("first", 32), ("second", 64), ("ring", 64)):
            assert sent[what] == 8 * tokens * (RANK + ROTARY), what


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"v_cache": None}, "head_dim_v=None with v_cache=None"),
        ({"v_cache": torch.zeros(1, 4, 1, 8), "head_dim_v": 8}, "head_dim_v=8 with v_cache=given"),
        ({"v_cache": None, "head_dim_v": 17}, "head_dim_v=17 must be from 1 to the head_dim"),
    ],
)
def test_values_that_are_not_clear(options, message):
    q, k = torch.zeros(1, 1, 2, 16), torch.zeros(1, 4, 1, 16)
    with pytest.raises(ValueError, match=message):
        tree_decode(q, k, cp_group=None, **options)
    if "v_cache=None" in message:
        with pytest.raises(ValueError, match="pass v_cache=None and head_dim_v, not None"):
            tree_prefill(q, k, None, cp_group=None, shares=[[(0, 1)]], key_segments=[], expand=lambda x: (x, x))


def test_bytes_of_a_token_at_deepseeks_sizes():
    transformers = pytest.importorskip("transformers")
    from megatron_tree.integrations.transformers import TreeCache

    config = transformers.DeepseekV3Config(qk_rope_head_dim=64, kv_lora_rank=512)
    for dtype, each in (("auto", 2 * (512 + 64)), ("int8", 512 + 64 + 8)):
        cache = TreeCache(config, dtype=dtype)
        with cache.forward_pass([cache.store.book.add()], 5) as forward:
            assert isinstance(forward, ForwardPass)
            for layer in range(config.num_hidden_layers):
                forward.write(layer, *(torch.zeros(1, 5, 1, n, dtype=torch.bfloat16) for n in (512, 64)))
        assert cache.nbytes == config.num_hidden_layers * 5 * each
        assert cache.store.allocated_bytes == config.num_hidden_layers * 16 * each  # one page
