"""The Triton kernels against the float64 oracle: compiled on a GPU, elsewhere in the interpreter (small shapes)."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, shard_positions, tree_attn_func, tree_decode
from megatron_tree.core import energy, kernels, merge
from megatron_tree.core.kernels.triton import attn_delta, configs, host
from megatron_tree.core.layout import Segment
from megatron_tree.core.spec import AttnSpec
from support.blocks import CELLS, check_block
from support.ranks import largest, run_distributed
from support.rounding import assert_near, error, rounding
from support.triton_inputs import DEVICE, inputs

SPECS = {
    "causal": {},
    "full": dict(causal=False),
    "window": dict(window_size=(9, 0)),
    "two-sided": dict(causal=False, window_size=(20, 3)),
    "right only": dict(causal=False, window_size=(-1, 5)),
    "softcap": dict(softcap=3.0),
    "alibi": dict(alibi_slopes=((0.5, 0.2, 0.0, -0.02),)),
    "alibi, two-sided, softcap": dict(
        alibi_slopes=((0.5, 0.2, 0.1, -0.02),), causal=False, window_size=(20, 3), softcap=3.0
    ),
}


def check_cell(cell, options, heads, d, d_v, **how):
    check_block("triton", CELLS[cell], options, heads, d, d_v, **how)


@pytest.mark.parametrize("cell", [pytest.param("one", marks=pytest.mark.slow), *list(CELLS)[1:]])
@pytest.mark.parametrize("mask", SPECS)
def test_masks_on_any_cell(mask, cell):
    check_cell(cell, SPECS[mask], (4, 2), 16, 16)


@pytest.fixture
def tf32():
    """torch's switch for TF32 in products of fp32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def test_three_products_of_tf32(tf32):
    """Are as near as fp32. Only a GPU has them: the interpreter multiplies in fp32, whatever the switch says."""
    check_cell("cell of a grid", {}, (4, 2), 64, 64)


def test_when_fp32_runs_on_tensor_cores(tf32, monkeypatch):
    """In fp32, up to a head_dim of 192, without tangents, on NVIDIA's GPUs, where torch's switch allows TF32."""
    arches = {"arch": "sm90"}
    monkeypatch.setattr(host, "arch", lambda device: arches["arch"])
    q, narrow = torch.zeros(1, 1, 1, 64), host.HeadDims(192, 128)
    wide, dual = host.HeadDims(193, 64), host.HeadDims(64, 64, True)
    found = [host.precision_of(q, x) for x in (narrow, wide, dual)]
    assert found == ["tf32x3", "ieee", "ieee"] and host.precision_of(q.half(), narrow) == "ieee"
    arches["arch"] = "gfx942"
    assert host.precision_of(q, narrow) == "ieee"
    arches["arch"], torch.backends.cuda.matmul.fp32_precision = "sm90", "ieee"
    assert host.precision_of(q, narrow) == "ieee"


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30, 4.0])
def test_scales(scale, softcap):
    """The forward takes the largest product before it scales: a scale below 0 turns the order around."""
    check_cell("offsets", dict(softmax_scale=scale, softcap=softcap), (4, 2), 16, 16)


@pytest.mark.parametrize("heads", [*(pytest.param(x, marks=pytest.mark.slow) for x in ((2, 2), (3, 1))), (6, 2)])
@pytest.mark.parametrize(
    ("d", "d_v"), [(16, 16), (64, 64), (24, 40), (48, 32), (96, 64), (8, 5), (192, 128), (128, 192), (256, 256)]
)
def test_heads_and_head_dims(heads, d, d_v):
    if d * d_v > 4096 and heads != (3, 1) and DEVICE == "cpu":
        pytest.skip("wide heads run with one grouping only in the interpreter: it takes seconds per case")
    check_cell("offsets", {}, heads, d, d_v)


@pytest.mark.parametrize("cell", ["cell of a grid", "packed"])
def test_boxes(cell, monkeypatch):
    """Keys and values by the copy engine: padding that is NaN is brought along, and left out."""
    table, made = configs.tiles, []
    monkeypatch.setattr(configs, "tiles", lambda *args: table(*args)._replace(boxes=True))
    descriptor = host.TensorDescriptor
    monkeypatch.setattr(host, "TensorDescriptor", lambda *args: made.append(descriptor(*args)) or made[-1])
    check_cell(cell, dict(window_size=(20, 0)), (4, 2), 32, 16)
    expected = host.arch(torch.device(DEVICE)) in host.BOX_ARCHES
    assert [x.block_shape[-1] for x in made] == [32, 16] * expected


@pytest.mark.parametrize(("d", "deterministic"), [(32, False), (48, False), (32, True)])
def test_dq_with_dk_and_dv(d, deterministic, monkeypatch):
    """One kernel makes all gradients, but where bits have to be the same, and for heads of two tiles of columns."""
    table, asked = configs.tiles, []
    monkeypatch.setattr(configs, "tiles", lambda *args: asked.append(args[0]) or table(*args)._replace(fused=True))
    check_cell("packed", dict(window_size=(20, 0), deterministic=deterministic), (4, 2), d, 16)
    has_engine = host.arch(torch.device(DEVICE)) in host.BOX_ARCHES
    assert ("dq" in asked) == (deterministic or d == 48 or not has_engine)


def test_strides_of_boxes():
    """Of an axis of one entry torch may say anything: the engine is told what it would be, a multiple of 16 bytes."""
    x = torch.zeros(1, 40, 1, 64, dtype=torch.float16).as_strided((1, 40, 1, 64), (1, 64, 1, 1))
    assert host._descriptor(x, 16).strides == [2560, 64, 64, 1]
    assert host._descriptor(x.transpose(0, 1), 16).strides == [64, 64, 64, 1]


def test_where_boxes_cannot_be_used():
    """Two tiles of columns, tangents, an odd address or stride, one row for all of the batch, GPUs before sm_90."""
    tiles = configs.Tiles(16, 16, 4, 1, boxes=True)

    def taken(k, of=tiles, arch="sm90", dual=False):
        return host._boxes(k, k, of, host.HeadDims.of(k, k, dual), arch)["K_BOXES"] is not None

    x = torch.zeros(2, 8, 2, 64, dtype=torch.float16, device=DEVICE)
    assert taken(x) and taken(x[:1, :, :1]) and taken(x[..., :32])
    refused = (x[..., :48], x[..., 1:33], x[..., :36], torch.zeros(2, 8, 2, 34, dtype=torch.float16)[..., :32])
    assert not any(map(taken, (*refused, x[:1].expand(2, -1, -1, -1)))) and not taken(x, tiles._replace(boxes=False))
    assert not taken(x, arch="sm80") and not taken(x, dual=True)


def test_fp16_inputs():
    check_cell("cell of a grid", {}, (4, 2), 32, 32, dtype=torch.float16, limit=3e-3)


def test_merging_states_and_adding_gradients():
    """KV in three pieces: states are merged, and gradients of one launch after another accumulate in place."""
    s, spec = 48, AttnSpec(softmax_scale=0.25)
    q, k, v, dout = inputs(s, s, d=16, batch=1)
    q_segments, pieces = (Segment(0, 0, s),), (slice(0, 20), slice(20, 21), slice(21, 48))
    keep = torch.ones(s, s, dtype=torch.bool, device=DEVICE).tril()
    exact = [x.double() for x in (q, k, v, dout)]
    out, lse = energy.attention(*exact[:3], spec=spec, keep=keep)
    state = merge.empty_state((1, s, 4, 16), device=DEVICE)
    for p in pieces:
        segments = dict(q_segments=q_segments, k_segments=(Segment(0, p.start, p.stop - p.start),), spec=spec)
        merge.merge_into(state, host.attn_fwd(q, k[:, p], v[:, p], **segments))
    assert_near(state[0], out, s)
    assert_near(state[1], lse, s)
    delta = attn_delta(dout, state[0])
    dq = torch.zeros_like(q)
    for p, truth_k, truth_v in zip(
        pieces, *(t.tensor_split((20, 21), 1) for t in energy.attention_grads(*exact, spec=spec, keep=keep)[1:])
    ):
        segments = dict(q_segments=q_segments, k_segments=(Segment(0, p.start, p.stop - p.start),), spec=spec)
        grads = dq, torch.zeros_like(k[:, p]), torch.zeros_like(v[:, p])
        host.accumulate_bwd(dout, q, k[:, p], v[:, p], state[1], delta, grads, **segments)
        assert_near(grads[1], truth_k, s)
        assert_near(grads[2], truth_v, s)
    assert_near(dq, energy.attention_grads(*exact, spec=spec, keep=keep)[0], s)


@pytest.mark.parametrize("padded", [False, True])
def test_out_is_written_as_it_is_needed(padded):
    """In half precision its bits are those of the fp32 result, rounded; lse stays fp32."""
    q, k, v, _ = inputs(24, 24, d=16, dtype=torch.float16)
    whole = (Segment(0, 0, 24),)
    segments = dict(q_segments=(Segment(2, 2, 20),) if padded else whole, k_segments=whole)
    call = dict(**segments, spec=AttnSpec(softmax_scale=0.25))
    exact, found = host.attn_fwd(q, k, v, **call), host.attn_fwd(q, k, v, **call, out_dtype=q.dtype)
    assert exact[0].dtype == found[1].dtype == torch.float32 and found[0].dtype == q.dtype
    assert torch.equal(exact[0].half(), found[0]) and torch.equal(exact[1], found[1])


class SideStream(str):
    def wait_stream(self, other):
        pass


def test_the_host_does_not_wait_for_new_segments(monkeypatch):
    """Their tables are copied from pinned memory, once, on a stream that readers wait for; not while a graph is
    captured, which would copy them at every replay."""
    gpu, segments = torch.device("cuda", 0), (Segment(0, 0, 40),)
    done, stream = [], SideStream("side stream")
    stream.wait_stream = lambda other: done.append(f"waits for {other}")

    def copy(device, non_blocking):
        done.append("copy")
        return SimpleNamespace(device=device, record_stream=done.append)

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: SimpleNamespace(to=copy))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: done.append(stream) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(host, "_copies", lambda device: "copies")
    monkeypatch.setattr(host, "_make_tables", functools.lru_cache(host._make_tables.__wrapped__))
    monkeypatch.setattr(host, "_captured", [])
    for _ in range(2):
        host.tables(segments, segments, 16, gpu)
    assert done == ["copies", "copy"] * 2 + ["waits for copies", "side stream", "side stream"] * 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    host.tables(segments, segments, 16, gpu)
    with pytest.raises(RuntimeError, match="run the same call once before capturing it"):
        host.tables(segments, segments, 32, gpu)


@pytest.mark.parametrize("capturing", [False, True])
def test_tables_outlive_the_launches_that_read_them(capturing, monkeypatch):
    """They are cached, and dropped from the cache, as ALiBi's slopes: a stream that reads them keeps the memory, a
    graph the tables."""
    gpu, readers = torch.device("cuda", 0), []
    table = SimpleNamespace(device=gpu, record_stream=lambda stream: readers.append(stream))
    tables, slopes = (table, table), torch.zeros(1, 2)
    monkeypatch.setattr(host, "_make_tables", lambda *_: tables)
    monkeypatch.setattr(host, "_captured", [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SideStream("side stream"))
    monkeypatch.setattr(host, "_copies", lambda device: "copies")
    assert host.tables((), (), 16, gpu) is tables
    assert (readers, host._captured) == (([], [tables]) if capturing else (["side stream"] * 2, []))
    monkeypatch.setattr(host, "_slopes_on", lambda *_: slopes)
    monkeypatch.setattr(host, "_in_use", lambda tensors: readers.append(tensors) or tensors)
    host.alibi_slopes(AttnSpec(softmax_scale=1.0, alibi_slopes=((0.5, 0.25),)), slopes)
    assert readers[-1] == (slopes,)


@pytest.mark.parametrize("gpu", [1, 3, 1000])
def test_slices_of_the_heads_of_a_kv_head(gpu, monkeypatch):
    """dk and dv where a program takes all query heads of a KV head, half of them, or one; added to what is there."""
    monkeypatch.setattr(host, "multiprocessors", lambda device: gpu)
    s, spec = 40, AttnSpec(softmax_scale=0.25)
    q, k, v, dout = inputs(s, s, (8, 2), batch=1)
    exact = [x.double() for x in (q, k, v, dout)]
    keep = torch.ones(s, s, dtype=torch.bool, device=DEVICE).tril()
    out, lse = energy.attention(*exact[:3], spec=spec, keep=keep)
    grads = tuple(torch.ones_like(x) for x in (q, k, v))
    whole = dict(q_segments=(Segment(0, 0, s),), k_segments=(Segment(0, 0, s),), spec=spec)
    host.accumulate_bwd(dout, q, k, v, lse.float(), attn_delta(dout, out.float()), grads, **whole)
    for ours, truth in zip(grads, energy.attention_grads(*exact, spec=spec, keep=keep)):
        assert_near(ours, 1 + truth, 4 * s)  # of the heads of a KV head, too


def test_gradients_do_not_depend_on_the_batch(monkeypatch):
    """deterministic: as many slices for a row alone as for many, so the sums of dk and dv have one order."""
    monkeypatch.setattr(host, "multiprocessors", lambda device: 1)
    spec, whole = AttnSpec(softmax_scale=0.25, deterministic=True), (Segment(0, 0, 16),)
    q, k, v, dout = inputs(16, 16, (12, 1), batch=3)
    segments = dict(q_segments=whole, k_segments=whole, spec=spec)

    def gradients(*rows):
        out, lse = host.attn_fwd(*rows[:3], **segments)
        return host.attn_bwd(rows[3], *rows[:3], lse, attn_delta(rows[3], out), **segments)

    together = gradients(q, k, v, dout)
    alone = gradients(*(x[2:3] for x in (q, k, v, dout)))
    assert all(torch.equal(x[2:3], y) for x, y in zip(together, alone))


def test_any_strides():
    big = torch.randn(37, 2, 4, 64, device=DEVICE)  # sequence first, q k v side by side
    q, k, v = (big.transpose(0, 1)[..., i : i + 16] for i in (0, 16, 40))
    whole = (Segment(0, 0, 37),)
    spec = AttnSpec(softmax_scale=0.25)
    out, _ = kernels.attn_fwd(q, k, v, q_segments=whole, k_segments=whole, spec=spec, backend="triton")
    keep = torch.ones(37, 37, dtype=torch.bool, device=DEVICE).tril()
    truth, _ = energy.attention(q.double(), k.double(), v.double(), spec=spec, keep=keep)
    assert_near(out, truth, 37)


def test_delta_with_and_without_dlse():
    out, dout = torch.randn(2, 2, 19, 3, 24, device=DEVICE)
    dlse = torch.randn(2, 3, 19, device=DEVICE)
    expected = (out * dout).sum(-1).transpose(1, 2)
    torch.testing.assert_close(attn_delta(dout, out), expected)
    torch.testing.assert_close(attn_delta(dout, out, dlse), expected - dlse)


def _ranks_use_triton(rank, world):
    """Forward, backward, tangents and decode: the largest difference between Triton's kernels and reference."""
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 16 * world, h, 16, generator=g).to(DEVICE) for h in (4, 2, 2, 4))
    rows = shard_positions(16 * world, rank, world, device=DEVICE)
    results = []
    for backend in ("triton", "reference"):
        mine = [x[:, rows].clone().requires_grad_() for x in (q, k, v)]
        config = TreeConfig(backend=backend, grid=(world, 1))
        out = tree_attn_func(*mine, cp_group=dist.group.WORLD, config=config)
        grads = torch.autograd.grad(out, mine, dout[:, rows])
        decoded = tree_decode(q[:, :1], k[:, rows], v[:, rows], cp_group=dist.group.WORLD, config=config)
        plain = tuple(x.detach() for x in mine)
        attend = functools.partial(tree_attn_func, cp_group=dist.group.WORLD, config=config)
        outt = torch.func.jvp(attend, plain, plain)[1]
        results.append([out.detach(), *grads, decoded, outt])
    return largest(error(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.without_ptx
def test_several_ranks_with_triton_kernels():
    """Of one GPU, or in the interpreter."""
    assert largest(run_distributed(_ranks_use_triton, 2)) < rounding(32)


def test_lists_of_segments_and_gradients_of_another_dtype():
    q, k, v, dout = inputs(40, 40, batch=1)
    spec, whole = AttnSpec(softmax_scale=0.25), [Segment(0, 0, 40)]
    lists, tuples = (dict(q_segments=x, k_segments=x, spec=spec) for x in (whole, tuple(whole)))
    out, lse = host.attn_fwd(q, k, v, **lists)
    assert torch.equal(out, host.attn_fwd(q, k, v, **tuples)[0])
    delta = attn_delta(dout, out)
    ours = host.attn_bwd(dout.double(), q, k, v, lse, delta, **lists)
    assert all(torch.equal(*x) for x in zip(ours, host.attn_bwd(dout, q, k, v, lse, delta, **tuples)))


def test_unaligned_rows_are_copied():
    """Triton loads 2 bytes at a time where strides are not multiples of 16; a head_dim that is none stays as it is."""
    packed = torch.randn(1, 8, 2, 36, device=DEVICE)
    assert host._aligned(packed[..., :32]).stride() == (512, 64, 32, 1)
    shifted = torch.randn(1, 8, 2, 48, device=DEVICE)[..., 1:33]
    assert host._aligned(shifted).data_ptr() % 16 == 0 and torch.equal(host._aligned(shifted), shifted)
    for x in (packed[..., :24], torch.randn(1, 8, 2, 48, device=DEVICE)[..., :32]):
        assert host._aligned(x) is x


def test_dispatch_refuses_what_the_kernels_cannot_take():
    spec = AttnSpec(softmax_scale=1.0)
    q, k, v, _ = inputs(4, 4, d=16)
    assert kernels.choose(q, k, v, spec, "triton").name == "triton"
    wide = [torch.zeros(1, 4, 2, 264, device=DEVICE)] * 3
    with pytest.raises(ValueError, match=r"backend='triton' can't take head_dim 264 above 256"):
        kernels.choose(*wide, spec, "triton")
    with pytest.raises(ValueError, match="float64"):
        kernels.choose(*(x.double() for x in (q, k, v)), spec, "triton")
    with pytest.raises(ValueError, match=r"q in torch.float32 with k in torch.float16"):
        kernels.choose(q, k.half(), v, spec, "triton")
    with pytest.raises(ValueError, match=r"a batch of 65536, above 65535"):
        kernels.choose(*(x[:1].expand(65536, -1, -1, -1) for x in (q, k, v)), spec, "triton")
    if host.interpreting():
        with pytest.raises(ValueError, match="bf16 in Triton's interpreter"):
            kernels.choose(*(x.bfloat16() for x in (q, k, v)), spec, "triton")
