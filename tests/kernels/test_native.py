"""The C kernel that decodes on CPUs, and torch's kernel in its place: exact, read once, the same bits for any batch."""

import ctypes
import functools
import itertools

import pytest
import torch

from megatron_tree.core import energy, kernels
from megatron_tree.core.cache import quantize
from megatron_tree.core.kernels import KVCache, aten, native, reference
from megatron_tree.core.kernels.native import product
from megatron_tree.core.spec import AttnSpec
from support.attention import distances, make_slopes, slopes_of
from support.decoding import decode_inputs
from support.paging import paged
from support.rounding import assert_near, error, rounding

NARROW = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SHAPES = {  # heads, d, d_v, queries
    "32/8 x 128": ((32, 8), 128, 128, 1),
    "9/3 x 64": ((9, 3), 64, 64, 1),
    "16/1 x 80": ((16, 1), 80, 80, 1),
    "2/2 x 24, 5": ((2, 2), 24, 5, 1),
    "14/2 x 20, 36, 3 queries": ((14, 2), 20, 36, 3),
    "4/4 x 8, 7 queries": ((4, 4), 8, 8, 7),
}


def forms(q, k, v, seed=0):
    """(name, cache, bool [b, s_q, n] or None, options of AttnSpec and `distance`) of all that decoding allows."""
    b, s_q, n = q.shape[0], q.shape[1], k.shape[1]
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, n + 1, (b,), generator=g)
    lengths[0] = n
    slots = torch.randperm(n, generator=g).expand(b, -1).clone()
    slots[:, ::7] = -1
    q_positions = torch.randint(n // 2, n, (b, s_q), generator=g)
    within = torch.arange(n) < lengths[:, None, None]
    for size in (16, 5):
        (pk, table), (pv, _) = paged(k, size), paged(v, size)
        keep = within.expand(b, s_q, n)
        yield f"pages of {size}", KVCache(pk, pv, lengths=lengths, block_table=table), keep, {}
    yield "dense", KVCache(k, v), None, {}
    slopes = slopes_of(0.1 * make_slopes(q.shape[2], b))
    for more in ({}, dict(window_size=(n // 3, 0)), dict(softcap=4.0), dict(alibi_slopes=slopes, softcap=4.0)):
        spec = AttnSpec(softmax_scale=1.0, **more)
        keep = energy.visible(q_positions, slots, spec) & (slots >= 0)[:, None] & within
        cache = KVCache(k, v, lengths=lengths, q_positions=q_positions, k_positions=slots)
        yield f"positions {more}", cache, keep, more | dict(distance=distances(q_positions, slots))


def worst(state, out, lse):
    """Errors of a packed state: of out and lse; rows that see nothing must be exact."""
    lse = lse.transpose(1, 2)
    empty = lse == float("-inf")
    assert torch.equal(state[..., -1] == float("-inf"), empty) and not state[..., :-1][empty].any()
    return error(state[..., :-1], out), error(state[..., -1], lse)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGE = "32/8 x 128"


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(shape, dtype, marks=[pytest.mark.slow] * (shape == LARGE and dtype is not torch.bfloat16))
        for shape in SHAPES
        for dtype in DTYPES
    ],
    ids=str,
)
def test_exact(shape, dtype):
    """At most twice as far from the oracle as the formulas in torch, which widen to fp32 as well."""
    heads, d, d_v, s_q = SHAPES[shape]
    for n in (1, 63, 1500):
        q, k, v = decode_inputs(2, s_q, n, heads, d, d_v, dtype=dtype)
        for name, cache, keep, more in forms(q, k, v):
            distance = more.pop("distance", None)
            spec = AttnSpec(softmax_scale=d**-0.5, **more)
            exact = energy.attention(*(x.double() for x in (q, k, v)), spec=spec, keep=keep, distance=distance)
            errors = [
                worst(kernels.attn_decode(q, cache, spec, backend), *exact) for backend in ("native", "reference")
            ]
            assert all(ours <= 2 * theirs + rounding(n) for ours, theirs in zip(*errors)), (name, n, errors)


@pytest.mark.parametrize("heads", [(9, 3), (2, 2)], ids=str)
def test_a_query_that_sees_no_key_of_a_block(heads):
    """Its rows share what is read with rows of a query that does."""
    q, k, v = decode_inputs(1, 3, 300, heads, 64, 64, dtype=torch.float32)
    q_positions, slots = torch.tensor([[127, 128, 299]]), torch.arange(300)[None]
    for window_size in ((-1, 0), (100, 0)):
        spec = AttnSpec(softmax_scale=0.1, window_size=window_size)
        state = native.attn_decode(q, KVCache(k, v, q_positions=q_positions, k_positions=slots), spec)
        keep = energy.visible(q_positions, slots, spec)
        out, lse = energy.attention(*(x.double() for x in (q, k, v)), spec=spec, keep=keep)
        assert_near(state[..., :-1], out, 300)
        assert_near(state[..., -1], lse.transpose(1, 2), 300)


@pytest.mark.parametrize("dtype", NARROW)
def test_eight_bits(dtype):
    """As exact as what is stored, in pages out of order, with 1 and 3 queries and for fp32 and bf16."""
    for (heads, d, d_v, s_q), of_q in itertools.product(SHAPES.values(), (torch.float32, torch.bfloat16)):
        q, k, v = decode_inputs(2, s_q, 200, heads, d, d_v, dtype=of_q)
        (k, k_scale), (v, v_scale) = quantize(k, NARROW[dtype]), quantize(v, NARROW[dtype])
        lengths, spec = torch.tensor([200, 77]), AttnSpec(softmax_scale=d**-0.5)
        keep = (torch.arange(200) < lengths[:, None, None]).expand(2, s_q, 200)
        stored = [x.double() * scale.double()[..., None] for x, scale in ((k, k_scale), (v, v_scale))]
        exact = energy.attention(q.double(), *stored, spec=spec, keep=keep)
        (pk, table), *others = (paged(x, 16) for x in (k, v, k_scale, v_scale))
        pv, *scales = (pages for pages, _ in others)
        cache = KVCache(pk, pv, *scales, lengths=lengths, block_table=table)
        state = kernels.attn_decode(q, cache, spec, backend="native")
        assert_near(state[..., :-1], exact[0], 200)
        assert_near(state[..., -1], exact[1].transpose(1, 2), 200)


@pytest.mark.parametrize("dtype", [*NARROW.values(), torch.float16, torch.bfloat16], ids=str)
def test_every_number_of_a_narrow_type(dtype):
    """All bit patterns, subnormal ones, infinities and NaN among them: values of one key each, so out is the value."""
    bits = torch.arange(256 if dtype.itemsize == 1 else 65536, dtype=torch.int32)
    v = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype).view(-1, 1, 1, 16)
    k = torch.zeros_like(v)
    narrow = dtype if dtype.itemsize == 2 else torch.float32
    q, scales = torch.ones(len(v), 1, 1, 16, dtype=narrow), torch.ones(len(v), 1, 1)
    table = torch.arange(len(v), dtype=torch.int32)[:, None]
    seen = dict(lengths=torch.ones(len(v), dtype=torch.int64), block_table=table)
    cache = KVCache(k, v, *((scales, scales) if dtype.itemsize == 1 else ()), **seen)
    out = native.attn_decode(q, cache, AttnSpec(softmax_scale=1.0))[:, 0, 0, :16]
    torch.testing.assert_close(out, v.float()[:, 0, 0], rtol=0, atol=0, equal_nan=True)


def test_nan_is_not_lost():
    """In a key or value that is seen, among others and alone."""
    for n, which in itertools.product((1, 5, 100), "kv"):
        q, k, v = decode_inputs(1, 1, n, dtype=torch.float32)
        (k if which == "k" else v)[0, n // 2, 0, 3] = float("nan")
        state = native.attn_decode(q, KVCache(k, v), AttnSpec(softmax_scale=1.0))
        assert state[0, 0, :2].isnan().any(-1).all() and state[0, 0, 2:].isfinite().all()


@pytest.mark.parametrize("memory", ["heads first", "every second element", "head_dim first"])
def test_any_strides(memory):
    q, k, v = decode_inputs(3, 2, 70, (6, 3), 24, 24, dtype=torch.float32)
    state = native.attn_decode(q, KVCache(k, v), AttnSpec(softmax_scale=0.2))

    def moved(x):
        if memory == "every second element":
            return x.repeat_interleave(2, -1)[..., ::2]
        order = (0, 2, 1, 3) if memory == "heads first" else (3, 0, 1, 2)
        return x.permute(order).contiguous().permute([order.index(i) for i in range(4)])

    again = native.attn_decode(moved(q), KVCache(moved(k), moved(v)), AttnSpec(softmax_scale=0.2))
    assert torch.equal(state, again)


def test_the_same_bits_for_any_batch_and_number_of_threads(monkeypatch):
    """A row alone, in a batch, in pages, by one thread and by three."""
    monkeypatch.setattr(native, "_BYTES_OF_A_THREAD", 1)
    q, k, v = decode_inputs(3, 2, 2500, (6, 3), 24, 40, dtype=torch.bfloat16)
    lengths, spec = torch.tensor([2500, 0, 1025]), AttnSpec(softmax_scale=0.2)
    (pk, table), (pv, _) = paged(k, 16), paged(v, 16)
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            found.append(native.attn_decode(q, KVCache(k, v, lengths=lengths), spec))
            found.append(native.attn_decode(q, KVCache(pk, pv, lengths=lengths, block_table=table), spec))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], x) for x in found[1:])
    for i in range(3):
        n = int(lengths[i])
        alone = native.attn_decode(q[i : i + 1], KVCache(*(x[i : i + 1, :n] for x in (k, v))), spec)
        assert torch.equal(alone, found[0][i : i + 1])


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 2)], ids=str)
def test_the_same_bits_in_any_order_of_reading(heads):
    """A large cache is read key by key where few query rows share a key, one of its rows alone in tiles of keys."""
    q, k, v = decode_inputs(2, 1, 2101, heads, 128, 128, dtype=torch.float32)
    assert k.nbytes + v.nbytes > 8 << 20 > k[:1].nbytes + v[:1].nbytes  # LARGE of decode.c
    spec = AttnSpec(softmax_scale=0.1)
    together = native.attn_decode(q, KVCache(k, v), spec)
    (pk, table), (pv, _) = paged(k, 16), paged(v, 16)
    in_pages = KVCache(pk, pv, lengths=torch.tensor([2101, 2101]), block_table=table)
    assert torch.equal(native.attn_decode(q, in_pages, spec), together)
    for i in range(2):
        alone = native.attn_decode(q[i : i + 1], KVCache(k[i : i + 1], v[i : i + 1]), spec)
        assert torch.equal(alone, together[i : i + 1])
    exact = energy.attention(*(x.double() for x in (q, k, v)), spec=spec)
    assert_near(together[..., :-1], exact[0], 2101)


@pytest.mark.parametrize("options", [("-mavx2", "-mfma"), ("-msse2",)], ids=" ".join)
def test_narrower_vectors(options, monkeypatch):
    """What other processors run gives the same to rounding."""
    if "-mavx2" in options and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this processor has no AVX2")
    q, k, v = decode_inputs(2, 3, 200, (14, 2), 20, 36, dtype=torch.bfloat16)
    cache, spec = KVCache(k, v, lengths=torch.tensor([200, 3])), AttnSpec(softmax_scale=0.2, softcap=3.0)
    usual = native.attn_decode(q, cache, spec)
    _with_options(monkeypatch, *options)
    assert_near(native.attn_decode(q, cache, spec), usual, 200)
    for x in ([k, v], [k.float(), v.float()]):
        other = native.attn_decode(q.to(x[0].dtype), cache._replace(k=x[0], v=x[1]), spec)
        assert_near(other, usual, 200)


@pytest.mark.parametrize("options", [(), ("-mavx2", "-mfma"), ("-msse2",)], ids=" ".join)
@pytest.mark.parametrize("dtype", product.DTYPES, ids=str)
def test_products(dtype, options, monkeypatch):
    """Of whole vectors and less, of views; the bits of a row do not depend on others."""
    if "-mavx2" in options and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this processor has no AVX2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    if options:
        _with_options(monkeypatch, *options)
        monkeypatch.setattr(product, "_library", functools.cache(product._library.__wrapped__))
    for width, (rows, num_out) in itertools.product((5, 32, 80, 150), zip(product.ROWS, (3, 7, 2, 9))):
        x, weights = torch.randn(rows, 2 * width).to(dtype)[:, :width], torch.randn(num_out, width + 3).to(dtype)[:, 3:]
        bias = torch.randn(num_out).to(dtype)
        for more in ((), (bias,)):
            out = product.product(x, weights, *more)
            exact = x.double() @ weights.double().t() + (bias.double() if more else 0)
            assert out.dtype == dtype and out.shape == exact.shape
            assert_near(out, exact, width if dtype == torch.float32 else 1, dtype=dtype)
            assert torch.equal(out[:1], product.product(x[:1], weights, *more))


def test_products_that_are_left_to_torch(monkeypatch):
    x, weights = torch.randn(2, 8), torch.randn(3, 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert product.product(x, weights) is not None
    columns, of_three = torch.randn(8, 3).t(), torch.randn(3, 8)
    doubles, wrong = (x.double(), weights.double()), ((x, weights[:, 1:]), (x[:, 1:], weights), (x, weights.half()))
    for left in ((x, columns), (of_three, weights), doubles, (x, weights, torch.randn(2, 3)), *wrong):
        assert product.product(*left) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert product.product(x, weights) is None


def _with_options(monkeypatch, *options):
    """Replace -march=native by these."""
    wanted = [*(option for option in native._OPTIONS if option != "-march=native"), *options, "-Wno-psabi"]
    monkeypatch.setattr(native, "_OPTIONS", wanted)
    monkeypatch.setattr(native, "_library", functools.cache(native._library.__wrapped__))


@pytest.mark.parametrize(("heads", "s_q"), [((8, 8), 1), ((8, 4), 1), ((12, 4), 1), ((16, 4), 1), ((4, 4), 4)])
def test_a_key_is_read_once(heads, s_q, monkeypatch):
    """Up to four query rows share it, whatever they are: counted by the kernel."""
    _with_options(monkeypatch, "-DCOUNT_READS")
    reads = ctypes.c_int64.in_dll(native._library(torch.float32), "reads")
    before = reads.value
    q, k, v = decode_inputs(2, s_q, 640, heads, 64, 128, dtype=torch.float32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # threads would count at the same time
    native.attn_decode(q, KVCache(k, v), AttnSpec(softmax_scale=1.0))
    assert reads.value - before == k.numel() + v.numel()


def test_torch_reads_a_key_once(monkeypatch):
    """aten's kernel reads keys for every head that it is given: it is given the KV heads, with rows."""
    heads, kernel = [], aten._block_fwd
    monkeypatch.setattr(
        aten, "_block_fwd", lambda q, k, *rest: heads.append((q.shape[2], k.shape[2])) or kernel(q, k, *rest)
    )
    q, k, v = decode_inputs(2, 3, 50, (6, 2))
    slots, spec = torch.randperm(50).expand(2, -1), AttnSpec(softmax_scale=0.3)
    seen = dict(lengths=torch.tensor([50, 20]), q_positions=torch.tensor([[49, 30, 10], [5, 19, 49]]))
    cache = KVCache(k, v, k_positions=slots, **seen)
    state = aten.attn_decode(q, cache, spec)
    assert heads == [(2, 2)]
    torch.testing.assert_close(state, reference.attn_decode(q, cache, spec), rtol=1e-12, atol=1e-12)


def test_without_a_compiler(monkeypatch, tmp_path):
    """torch's kernel decodes, and the log says why ours does not; asked for by name, ours is an error."""
    q, k, v = decode_inputs(1, 1, 8, dtype=torch.float32)
    spec = AttnSpec(softmax_scale=1.0)
    assert kernels.choose(q, k, v, spec).name == "aten"
    assert kernels.choose(q, k, v, spec, decodes=True).name == "native"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(native, "_library", native._library.__wrapped__)
    choice = kernels.choose(q, k, v, spec, decodes=True)
    assert choice.name == "aten" and "needs a C compiler" in choice.reason
    with pytest.raises(ValueError, match=r"backend='native' can't take anything here: decode.c needs a C compiler"):
        kernels.choose(q, k, v, spec, "native", decodes=True)
    with pytest.raises(ValueError, match="backend='native' can't take anything but decoding"):
        kernels.choose(q, k, v, spec, "native")
    assert kernels.choose(*(x.double() for x in (q, k, v)), spec, decodes=True).name == "aten"
