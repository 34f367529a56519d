"""What only a GPU can show: bf16, real sizes, offsets beyond 2^31 elements, CUDA graphs. `make gpu` runs these."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from megatron_tree import energy, kernels
from megatron_tree.bench.kernel_cases import RULE, Case, inputs
from megatron_tree.config import AttnSpec, Dropout
from megatron_tree.dropout import keep_weights
from megatron_tree.kernels import PagedKV, Visible
from megatron_tree.kernels.triton import attn_decode
from megatron_tree.layout import Segment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device, torch sees none"),
]
CHECKED = [Case("fwd", 1, 640, 4, 2, 64), Case("fwd", 1, 640, 4, 2, 128), Case("fwd", 1, 320, 2, 1, 256)]
MUCH_MEMORY = pytest.mark.xdist_group("memory")


@pytest.mark.parametrize("backend", ["triton", "aten", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CHECKED, ids=lambda c: c.label)
def test_within_the_rule(case, dtype, backend):
    """The error against float64 is at most twice, of gradients three times, that of dense attention in `dtype`."""
    q, k, v, dout = inputs(case, "cuda", dtype)
    spec = AttnSpec(softmax_scale=case.d**-0.5)
    whole = (Segment(0, 0, case.s),)
    segments = dict(q_segments=whole, k_segments=whole, spec=spec, backend=backend)
    out, lse = kernels.attn_fwd(q, k, v, **segments)
    delta = (out.float() * dout.float()).sum(-1).transpose(1, 2).contiguous()
    found = dict(zip(RULE, (out, *kernels.attn_bwd(dout, q, k, v, lse.float(), delta, **segments))))
    keep = torch.ones(case.s, case.s, dtype=torch.bool, device="cuda").tril()
    exact = [x.double() for x in (q, k, v, dout)]
    truth = (
        energy.attention(*exact[:3], spec=spec, keep=keep)[0],
        *energy.attention_grads(*exact, spec=spec, keep=keep),
    )
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        dense = sdpa(*leaves, is_causal=True, enable_gqa=True)
    dense = [x.transpose(1, 2) for x in (dense, *torch.autograd.grad(dense, leaves, dout.transpose(1, 2)))]
    ratios = {}
    for (name, x), t, low in zip(found.items(), truth, dense):
        allowed = max((low.double() - t).abs().max().item(), 4 * torch.finfo(dtype).eps * t.abs().max().item())
        ratios[name] = (x.double() - t).abs().max().item() / allowed
    assert all(ratio <= RULE[name] for name, ratio in ratios.items()), ratios


def test_the_default_backend_is_triton():
    q = torch.zeros(1, 4, 2, 64, device="cuda", dtype=torch.bfloat16)
    assert kernels.choose(q, q, q, AttnSpec(softmax_scale=1.0)).name == "triton"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_dropout_in_bf16(head_dim):
    """Compiled kernels drop what the formula drops; tests/kernels/test_dropout.py has the rest."""
    s, h = 200, 4
    spec = AttnSpec(softmax_scale=head_dim**-0.5, dropout=Dropout(0.2, 1 << 40 | 3))
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, s, h, head_dim, device="cuda", dtype=torch.bfloat16, generator=g)
    positions = torch.arange(s, device="cuda")
    oracle = dict(
        spec=spec,
        keep=energy.visible(positions, positions, spec),
        keep_weights=keep_weights(spec.dropout, batch=2, num_heads=h, q_positions=positions, k_positions=positions),
    )
    exact = [x.double() for x in (q, k, v, dout)]
    out, lse = energy.attention(*exact[:3], **oracle)
    whole = dict(q_segments=(Segment(0, 0, s),), k_segments=(Segment(0, 0, s),), spec=spec, backend="triton")
    o, l = kernels.attn_fwd(q, k, v, **whole)
    assert (o - out).abs().max() < 2e-2 and (l - lse).abs().max() < 1e-3
    grads = kernels.attn_bwd(dout, q, k, v, l, kernels.attn_delta(dout, o), **whole)
    for ours, truth in zip(grads, energy.attention_grads(*exact, **oracle)):
        assert (ours - truth).abs().max() < 1e-2 * truth.abs().max()


@MUCH_MEMORY
@pytest.mark.parametrize("s", [100_000, 1_000_003])
def test_long_decode(s):
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(1, 1, 16, 128, device="cuda", dtype=torch.bfloat16, generator=g)
    k, v = torch.randn(2, 1, s, 2, 128, device="cuda", dtype=torch.bfloat16, generator=g)
    spec = AttnSpec(softmax_scale=128**-0.5)
    state = kernels.attn_decode(q, k, v, visible=Visible(), spec=spec)
    out, lse = kernels.attn_decode(
        *(x.float() for x in (q, k, v)), visible=Visible(), spec=spec, backend="reference"
    ).split((128, 1), -1)
    assert (state[..., :-1] - out).abs().max() < 1e-2 * out.abs().max()
    assert (state[..., -1:] - lse).abs().max() < 1e-4


@MUCH_MEMORY
def test_offsets_beyond_int32():
    """The last of 2^31 and more elements is read where it is: a key that alone matters stands at the very end."""
    s = (1 << 31) // 128 + 1000
    k = torch.zeros(1, s, 1, 128, device="cuda", dtype=torch.bfloat16)
    v = torch.zeros_like(k)
    q = torch.zeros(1, 1, 1, 128, device="cuda", dtype=torch.bfloat16)
    q[..., 0], k[0, -1, 0, 0], v[0, -1, 0, 5] = 30.0, 30.0, 7.0
    state = kernels.attn_decode(q, k, v, visible=Visible(), spec=AttnSpec(softmax_scale=1.0))
    assert abs(state[..., 5].item() - 7.0) < 1e-2
    whole = dict(q_segments=(Segment(0, s - 1, 1),), k_segments=(Segment(0, 0, s),), spec=AttnSpec(softmax_scale=1.0))
    out, _ = kernels.attn_fwd(q, k, v, **whole, backend="triton")
    assert abs(out[..., 5].item() - 7.0) < 1e-2


@MUCH_MEMORY
def test_pages_beyond_int32():
    """A paged cache of more than 2^31 elements: the row's last token, in the last page, is the one that matters."""
    size, n = 256, (1 << 31) // (256 * 2 * 128) + 8
    k = torch.zeros(n, size, 2, 128, device="cuda", dtype=torch.bfloat16)
    v = torch.zeros_like(k)
    q = torch.zeros(1, 1, 2, 128, device="cuda", dtype=torch.bfloat16)
    q[..., 0], k[-1, 99, :, 0], v[-1, 99, :, 5] = 30.0, 30.0, 7.0
    table = torch.tensor([[0, n // 2, n - 1]], dtype=torch.int32, device="cuda")
    seen = Visible(lengths=torch.tensor([2 * size + 100], device="cuda"))
    state = attn_decode(q, k, v, visible=seen, spec=AttnSpec(softmax_scale=1.0), paged=PagedKV(table))
    assert (state[..., 5] - 7.0).abs().max() < 1e-2


@MUCH_MEMORY
def test_merging_states_beyond_int32():
    """Five states of 2^29 elements, of which the last alone weighs anything."""
    states = torch.zeros(5, 1 << 24, 32, device="cuda")
    states[..., -1] = -100.0
    states[4, :, :5], states[4, :, -1] = 3.0, 100.0
    merged = kernels.merge_packed(states)
    assert torch.equal(merged[:, :5], states[4, :, :5]) and (merged[:, -1] - 100.0).abs().max() < 1e-4


def test_a_decode_step_in_a_cuda_graph():
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, 1, 8, 64, device="cuda", dtype=torch.bfloat16, generator=g)
    k, v = torch.randn(2, 2, 4096, 2, 64, device="cuda", dtype=torch.bfloat16, generator=g)
    lengths = torch.tensor([4096, 100], device="cuda")
    call = lambda: kernels.attn_decode(q, k, v, visible=Visible(lengths=lengths), spec=AttnSpec(softmax_scale=0.125))  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = call()
    q.copy_(torch.randn(2, 1, 8, 64, device="cuda", generator=g))
    lengths.copy_(torch.tensor([17, 4000]))
    graph.replay()
    torch.testing.assert_close(state, call())


def test_fp8_cache():
    """Pages in fp8 with a scale per slot and head: equal to attention over the dequantized cache."""
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, 1, 8, 128, device="cuda", dtype=torch.bfloat16, generator=g)
    k, v = torch.randn(2, 2, 1024, 2, 128, device="cuda", generator=g)
    scales = [x.abs().amax(-1) / 448 for x in (k, v)]
    k8, v8 = ((x / s[..., None]).to(torch.float8_e4m3fn) for x, s in zip((k, v), scales))
    spec = AttnSpec(softmax_scale=128**-0.5)
    pages = [x.flatten(0, 1).unflatten(0, (-1, 64)) for x in (k8, v8, *scales)]
    table = torch.arange(32, dtype=torch.int32, device="cuda").view(2, 16)
    state = attn_decode(q, *pages[:2], visible=Visible(), spec=spec, paged=PagedKV(table, *pages[2:]))
    exact = [x.double() * s.double()[..., None] for x, s in zip((k8, v8), scales)]
    out, _ = energy.attention(q.double(), *exact, spec=spec)
    assert (state[..., :-1] - out).abs().max() < 1e-2


@pytest.mark.parametrize(("head_dim", "s_q", "dtype"), [(256, 1, torch.float32), (256, 8, torch.bfloat16)])
def test_decode_of_wide_heads(head_dim, s_q, dtype):
    """What takes most shared memory: fp32, and many queries in a tile."""
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(1, s_q, 16, head_dim, device="cuda", dtype=dtype, generator=g)
    k, v = torch.randn(2, 1, 3000, 2, head_dim, device="cuda", dtype=dtype, generator=g)
    spec = AttnSpec(softmax_scale=head_dim**-0.5)
    state = kernels.attn_decode(q, k, v, visible=Visible(), spec=spec)
    out, _ = energy.attention(*(x.double() for x in (q, k, v)), spec=spec)
    assert (state[..., :-1] - out).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2) * out.abs().max()


def test_bits_do_not_depend_on_the_batch_or_the_run():
    """deterministic=True: a row of a decode batch alone and among others; forward and backward time after time."""
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(8, 1, 16, 128, device="cuda", dtype=torch.bfloat16, generator=g)
    k, v = torch.randn(2, 8, 20_000, 4, 128, device="cuda", dtype=torch.bfloat16, generator=g)
    lengths = torch.tensor([20_000, 1, 1024, 0, 777, 19_999, 5000, 64], device="cuda")
    spec = AttnSpec(softmax_scale=128**-0.5, deterministic=True)
    together = kernels.attn_decode(q, k, v, visible=Visible(lengths=lengths), spec=spec)
    for i in (slice(n, n + 1) for n in range(8)):
        alone = kernels.attn_decode(q[i], k[i], v[i], visible=Visible(lengths=lengths[i]), spec=spec)
        assert torch.equal(alone, together[i])
    q, k, v, dout = torch.randn(4, 2, 1000, 8, 128, device="cuda", dtype=torch.bfloat16, generator=g)
    whole = dict(q_segments=(Segment(0, 0, 1000),), k_segments=(Segment(0, 0, 1000),), spec=spec, backend="triton")

    def results():
        out, lse = kernels.attn_fwd(q, k, v, **whole)
        return out, lse, *kernels.attn_bwd(dout, q, k, v, lse, kernels.attn_delta(dout, out), **whole)

    first = results()
    assert all(torch.equal(x, y) for _ in range(50) for x, y in zip(first, results()))
