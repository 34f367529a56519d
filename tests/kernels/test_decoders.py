"""Libraries that decode, against the float64 oracle: stand-ins on the CPU check shapes, strides and dtypes, and return
lse to the base that each library's documentation says."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, tree_decode
from megatron_tree.core import energy, kernels
from megatron_tree.core.kernels import KVCache, SharedPages, backends, decoders
from megatron_tree.core.spec import AttnSpec
from support.library_stand_ins import check_rows, dense_forward, stand_ins_of_libraries
from support.paging import paged
from support.ranks import on_ranks
from support.rounding import assert_near
from support.triton_inputs import inputs

LENGTHS = torch.tensor([0, 70, 96, 1, 64])


def attend(q, k, v, lengths, scale):
    """q [b, s_q, h, d], keys [b, s, h_kv, d] -> out [b, s_q, h, d_v], lse [b, h, s_q], natural."""
    keep = (torch.arange(k.shape[1]) < lengths[:, None])[:, None, None]
    k, v = (x.masked_fill(~keep[:, 0, 0, :, None, None], 0) for x in (k, v))
    out, lse = dense_forward(*(x.transpose(1, 2) for x in (q, k, v)), keep, scale)
    return out.transpose(1, 2), lse


class FlashInfer(ModuleType):
    """flashinfer's BatchDecodeWithPagedKVCacheWrapper, of pages in the layout NHD; lse to the base 2."""

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(self, workspace, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False):
            assert workspace.dtype == torch.uint8 and workspace.numel() >= 128 << 20 and not use_cuda_graph
            assert kv_layout == "NHD" and use_tensor_cores, "other groups of heads than 1, 2, 3, 4, 6, 8"

        def plan(
            self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
            logits_soft_cap=None, q_data_type="float16", kv_data_type=None, sm_scale=None,
        ):  # fmt: skip
            assert all(x.dtype == torch.int32 and x.dim() == 1 for x in (indptr, indices, last_page_len))
            assert len(indptr) == len(last_page_len) + 1 and len(indices) == indptr[-1]
            assert all(x.device.type == "cpu" for x in (indptr, last_page_len)), "no wait for the GPU within"
            counts = indptr.diff()
            assert torch.all((last_page_len <= page_size) & ((last_page_len > 0) == (counts > 0)))
            assert logits_soft_cap is None or logits_soft_cap > 0
            self.facts = num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type, kv_data_type
            self.rows = list(zip(indices.split(counts.tolist()), last_page_len.tolist()))
            self.scale, self.softcap = sm_scale, logits_soft_cap

        def run(self, q, paged_kv_cache, *, return_lse):
            k, v = paged_kv_cache
            check_rows(q, k, v)
            assert return_lse and q.dim() == 3 and q.is_contiguous() and k.shape == v.shape and len(q) == len(self.rows)
            assert self.facts == (q.shape[1], k.shape[2], q.shape[2], k.shape[1], q.dtype, k.dtype)
            out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -5e4)  # of a row without keys
            for i, (numbers, last) in enumerate(self.rows):
                if len(numbers):
                    n = (len(numbers) - 1) * k.shape[1] + last
                    some = [x[numbers.long()].flatten(0, 1)[None, :n].double() for x in (k, v)]
                    spec = AttnSpec(softmax_scale=self.scale, softcap=self.softcap or 0.0)
                    o, l = energy.attention(q[i][None, None].double(), *some, spec=spec)
                    out[i], lse[i] = o[0, 0].to(q.dtype), (l[0, :, 0] / math.log(2)).float()
            return out, lse


class FlashMLA(ModuleType):
    """flash_mla's dense decoding; lse to the base e, inf where a row has no keys."""

    def get_mla_metadata(self, *facts):
        return SimpleNamespace(facts=None), None

    def flash_mla_with_kvcache(
        self, q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False,
    ):  # fmt: skip
        assert num_splits is None and not causal and head_dim_v == 512 and tile_scheduler_metadata.facts is None
        assert q.shape[-1] == 576 and k_cache.shape[1:] == (64, 1, 576) and q.dtype == k_cache.dtype
        check_rows(q, k_cache)
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (block_table, cache_seqlens))
        tile_scheduler_metadata.facts = q.shape, cache_seqlens  # a plan is of one batch of lengths
        k = k_cache[block_table.long()].flatten(1, 2)
        out, lse = attend(q, k, k[..., :512], cache_seqlens, softmax_scale)
        return out, lse.masked_fill((cache_seqlens == 0)[:, None, None], float("inf"))


@pytest.fixture
def stand_ins(monkeypatch):
    for module in (FlashInfer("flashinfer"), FlashMLA("flash_mla")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    machine = SimpleNamespace(capability=(9, 0), multi_processor_count=132)
    with stand_ins_of_libraries(monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: machine.capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: machine)
        decoders._flashinfer_wrapper.cache_clear()
        yield machine
    decoders._flashinfer_wrapper.cache_clear()


def case(kind: str, heads=(8, 2), d=64, s_q=1, page=64, dtype=torch.bfloat16):
    """q, the cache, and the float64 rows of keys and values. kind: "dense", "pages" or "latents"."""
    s, latent = 96, kind == "latents"
    q, k, v, _ = (x.cpu().to(dtype) for x in inputs(s_q, s, heads, d, d, batch=len(LENGTHS)))
    rows = [k.double(), k[..., :512].double() if latent else v.double()]
    if kind == "dense":
        return q, KVCache(k, v, lengths=LENGTHS), rows
    (k, table), v = paged(k, page), None if latent else paged(v, page)[0]
    return q, KVCache(k, v, head_dim_v=512 if latent else None, lengths=LENGTHS, block_table=table), rows


def check(backend, q, cache, rows, spec, lengths=LENGTHS):
    state = kernels.attn_decode(q, cache, spec, backend=backend)
    assert state.dtype == torch.float32
    for i, n in enumerate(lengths.tolist()):
        out, lse = energy.attention(q[i : i + 1].double(), *(x[i : i + 1, :n] for x in rows), spec=spec)
        assert_near(state[i, ..., :-1], out[0], 1, f"row {i}", q.dtype)
        assert_near(state[i, ..., -1], lse[0].T, max(1, n))


@pytest.mark.parametrize(
    ("backend", "kind", "options", "capability"),
    [
        ("fa3", "dense", {}, (9, 0)),
        ("fa3", "pages", dict(heads=(4, 4), s_q=3, page=16), (9, 0)),
        ("fa3", "pages", dict(d=256, dtype=torch.float16), (9, 0)),
        ("fa4", "dense", dict(s_q=2), (9, 0)),
        ("fa4", "pages", dict(page=16), (10, 0)),
        ("flashinfer", "pages", {}, (9, 0)),
        ("flashinfer", "pages", dict(heads=(10, 2), s_q=3, page=16, d=128, dtype=torch.float16), (8, 0)),
        ("flashmla", "latents", dict(heads=(16, 1), d=576), (9, 0)),
        ("flashmla", "latents", dict(heads=(16, 1), d=576, s_q=2, dtype=torch.float16), (9, 0)),
    ],
)
def test_states_match_the_oracle(stand_ins, backend, kind, options, capability):
    """Rows of several lengths, one of them empty; lse to the base e."""
    stand_ins.capability = capability
    q, cache, rows = case(kind, **options)
    check(backend, q, cache, rows, AttnSpec(softmax_scale=0.2))
    state = kernels.attn_decode(q[:0], cache._replace(k=cache.k[:0], lengths=LENGTHS[:0]), AttnSpec(softmax_scale=0.2))
    assert state.shape[0] == 0


def test_other_options(stand_ins):
    """A softcap, all slots of a cache, and pages that rows share."""
    q, cache, rows = case("pages")
    check("flashinfer", q, cache, rows, AttnSpec(softmax_scale=0.4, softcap=2.0))
    full = torch.full_like(LENGTHS, 96)
    whole = [torch.cat((x, x[:, :32]), 1) for x in rows]
    (k, table), (v, _) = (paged(x.to(q.dtype), 64) for x in whole)
    for backend in ("fa3", "flashinfer"):
        check(backend, q, KVCache(k, v, block_table=table), whole, AttnSpec(softmax_scale=0.2), full + 32)
    both = torch.tensor([1, 2])
    shared = (SharedPages(both, table[:1, :1]),)
    first = [x[:1, :64].expand(len(q), -1, -1, -1) for x in rows]
    for backend in ("fa3", "flashinfer"):
        state = kernels.attn_decode(
            q, cache._replace(shared=shared, k=k, v=v, block_table=table), AttnSpec(softmax_scale=0.2), backend
        )
        for i in both.tolist():
            parts = [torch.cat((y[i : i + 1], x[i : i + 1, : LENGTHS[i]]), 1) for x, y in zip(rows, first)]
            out, lse = energy.attention(q[i : i + 1].double(), *parts, spec=AttnSpec(softmax_scale=0.2))
            assert_near(state[i, ..., :-1], out[0], 1, dtype=q.dtype)
            assert_near(state[i, ..., -1], lse[0].T, 200)


def test_bits_do_not_depend_on_the_batch(stand_ins, monkeypatch):
    """deterministic=True: one split, which the stand-in can see; FA4 is told how many it makes."""
    seen, operator = [], torch.ops.aten._flash_attention_forward

    def noted(*args, num_splits, **options):
        seen.append(num_splits)
        return operator(*args, num_splits=num_splits, **options)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", noted)
    q, cache, _ = case("dense")
    for name, capability, deterministic in (("fa3", 9, False), ("fa3", 9, True), ("fa4", 9, False), ("fa4", 10, False)):
        stand_ins.capability = (capability, 0)
        kernels.attn_decode(q, cache, AttnSpec(softmax_scale=0.2, deterministic=deterministic), name)
    long = KVCache(*(torch.zeros(1, 5000, 2, 64, dtype=q.dtype) for _ in range(2)))
    kernels.attn_decode(q[:1], long._replace(lengths=LENGTHS[:1]), AttnSpec(softmax_scale=0.2), "fa4")
    assert seen == [None, 1, None, 1, 9]


def test_what_they_refuse(stand_ins, monkeypatch):
    """By name: a ValueError that says why."""
    q, dense, _ = case("dense")
    pages, latents = case("pages")[1], case("latents", heads=(16, 1), d=576)
    small = case("pages", page=16)[1]
    positions = dict(
        q_positions=torch.zeros(5, 1, dtype=torch.int64), k_positions=torch.zeros(5, 96, dtype=torch.int64)
    )
    eight = pages._replace(k=pages.k.to(torch.int8), v=pages.v.to(torch.int8))
    lists = pages._replace(selected=torch.zeros(5, 1, 4, dtype=torch.int32))
    refused = [
        ("fa3", q, dense._replace(**positions), {}, "positions of a cache's slots"),
        ("fa3", q, eight, {}, r"pages in torch.int8: it knows no scale"),
        ("flashinfer", q, eight, {}, r"pages in torch.int8: it knows no scale"),
        ("fa3", q, lists, {}, "selected slots"),
        ("fa3", q, dense, dict(softcap=1.0), "softcap"),
        ("fa4", q, dense, dict(deterministic=True), "deterministic=True"),
        ("fa4", q, pages, {}, "a cache in pages on sm_90"),
        ("fa3", latents[0], latents[1], {}, "head_dim 576 of q and k with 512 of v"),
        ("fa3", q.float(), dense, {}, "q in torch.float32"),
        ("fa3", q, dense, dict(softmax_scale=-1.0), "softmax_scale=-1.0"),
        ("flashinfer", q, dense, {}, "a cache that is not in pages"),
        ("flashinfer", latents[0], latents[1], {}, "head_dim 576"),
        ("flashinfer", q, pages, dict(deterministic=True), "deterministic=True"),
        ("flashmla", q, pages, {}, "anything but latents"),
        ("flashmla", latents[0], latents[1], dict(softcap=1.0), "softcap"),
        (
            "flashmla",
            latents[0],
            case("latents", heads=(16, 1), d=576, page=16)[1],
            {},
            "a cache that is not in pages of 64 tokens",
        ),
        ("cudnn", q, small, {}, "decoding"),
    ]
    for name, x, cache, options, why in refused:
        spec = AttnSpec(**dict(softmax_scale=1.0) | options)
        with pytest.raises(ValueError, match=f"backend='{name}' can't take {why}"):
            kernels.attn_decode(x, cache, spec, name)
    spec = AttnSpec(softmax_scale=1.0)
    with pytest.raises(ValueError, match="anything but decoding"):
        kernels.choose(q, q, q, spec, "flashmla")
    with pytest.raises(ValueError, match="not schedule='ring'"):
        kernels.choose(q, dense.k, dense.v, spec, "fa3", decodes=True)
    stand_ins.capability = (10, 0)
    with pytest.raises(ValueError, match="a GPU of compute capability 10.x"):
        kernels.attn_decode(latents[0], latents[1], spec, "flashmla")
    monkeypatch.setattr(decoders, "installed", lambda module: False)
    for name, x, cache in (("flashmla", *latents[:2]), ("flashinfer", q, pages)):
        with pytest.raises(ValueError, match="is not installed"):
            kernels.attn_decode(x, cache, spec, name)


def test_auto_takes_flashmla_for_latents_alone(stand_ins, monkeypatch):
    monkeypatch.setattr(backends, "ACCELERATORS", ("cpu",))
    spec = AttnSpec(softmax_scale=0.2)

    def chosen(kind, **options):
        q, cache, _ = case(kind, **options)
        return kernels.choose(q, cache.k, cache.values, spec, decodes=True, cache=cache)

    latents = dict(heads=(16, 1), d=576)
    assert chosen("latents", **latents).name == "flashmla"
    others = [chosen("pages"), chosen("latents", **latents, page=16)]
    monkeypatch.setattr(decoders, "installed", lambda module: False)
    others.append(chosen("latents", **latents))
    assert "flashmla" not in {x.name for x in others} and not any("flashmla" in x.reason for x in others)


@on_ranks(2)
def test_ranks_decode_with_a_library():
    """Each over its shard, whose rows differ in length. A ring's shards have positions, which libraries can't take:
    all ranks raise."""
    with pytest.MonkeyPatch.context() as monkeypatch, stand_ins_of_libraries(monkeypatch):
        q, _, (k, v) = case("dense")
        rank, group = dist.get_rank(), dist.group.WORLD
        half = slice(48 * rank, 48 * rank + 48)
        call = dict(cp_group=group, cache_seqlens=(LENGTHS - 48 * rank).clamp(0, 48), config=TreeConfig(backend="fa3"))
        shards = [x[:, half].to(q.dtype) for x in (k, v)]
        out, lse = tree_decode(q, *shards, **call, softmax_scale=0.2, return_lse=True)
        for i, n in enumerate(LENGTHS.tolist()):
            some = (x[i : i + 1].double() for x in (q, k[:, :n], v[:, :n]))
            want, want_lse = energy.attention(*some, spec=AttnSpec(softmax_scale=0.2))
            assert_near(out[i], want[0], 1, dtype=q.dtype)
            assert_near(lse[i], want_lse[0], max(1, n))
        with pytest.raises(ValueError, match="not schedule='ring'"):
            tree_decode(q, *shards, **call, schedule="ring")
