"""What only a GPU can show, beside the cases of `bench kernels` (`make gpu`). `make gputests` runs these."""

import pytest
import torch

from megatron_tree.core import energy, kernels
from megatron_tree.core.kernels import KVCache, fastest, libraries
from megatron_tree.core.layout import Segment
from megatron_tree.core.spec import AttnSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device, torch sees none"),
]


def test_the_default_backend_is_what_was_measured_or_a_library_or_triton():
    q = torch.zeros(1, 4, 2, 64, device="cuda", dtype=torch.bfloat16)
    first = fastest.for_device(q.device, 64) if fastest.knows(q.device) else libraries.preferred(q.device)
    expected = (*first, "triton")[0]
    assert kernels.choose(q, q, q, AttnSpec(softmax_scale=1.0)).name == expected


@pytest.mark.xdist_group("memory")
def test_long_decode():
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(1, 1, 16, 128, device="cuda", dtype=torch.bfloat16, generator=g)
    k, v = torch.randn(2, 1, 1_000_003, 2, 128, device="cuda", dtype=torch.bfloat16, generator=g)
    spec = AttnSpec(softmax_scale=128**-0.5)
    state = kernels.attn_decode(q, KVCache(k, v), spec)
    cache = KVCache(k.float(), v.float())
    out, lse = kernels.attn_decode(q.float(), cache, spec, backend="reference").split((128, 1), -1)
    assert (state[..., :-1] - out).abs().max() < 1e-2 * out.abs().max()
    assert (state[..., -1:] - lse).abs().max() < 1e-4


@pytest.mark.parametrize(("head_dim", "s_q", "dtype"), [(256, 1, torch.float32), (256, 8, torch.bfloat16)])
def test_decode_of_wide_heads(head_dim, s_q, dtype):
    """What takes most shared memory: fp32, and many queries in a tile."""
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(1, s_q, 16, head_dim, device="cuda", dtype=dtype, generator=g)
    k, v = torch.randn(2, 1, 3000, 2, head_dim, device="cuda", dtype=dtype, generator=g)
    spec = AttnSpec(softmax_scale=head_dim**-0.5)
    state = kernels.attn_decode(q, KVCache(k, v), spec)
    out, _ = energy.attention(*(x.double() for x in (q, k, v)), spec=spec)
    assert (state[..., :-1] - out).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2) * out.abs().max()


def test_bits_do_not_depend_on_the_batch_or_the_run():
    """deterministic=True: a row of a decode batch alone and among others; forward and backward time after time."""
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(8, 1, 16, 128, device="cuda", dtype=torch.bfloat16, generator=g)
    k, v = torch.randn(2, 8, 20_000, 4, 128, device="cuda", dtype=torch.bfloat16, generator=g)
    lengths = torch.tensor([20_000, 1, 1024, 0, 777, 19_999, 5000, 64], device="cuda")
    spec = AttnSpec(softmax_scale=128**-0.5, deterministic=True)
    together = kernels.attn_decode(q, KVCache(k, v, lengths=lengths), spec)
    for i in (slice(n, n + 1) for n in range(8)):
        alone = kernels.attn_decode(q[i], KVCache(k[i], v[i], lengths=lengths[i]), spec)
        assert torch.equal(alone, together[i])
    q, k, v, dout = torch.randn(4, 2, 1000, 8, 128, device="cuda", dtype=torch.bfloat16, generator=g)
    whole = dict(q_segments=(Segment(0, 0, 1000),), k_segments=(Segment(0, 0, 1000),), spec=spec, backend="triton")

    def results():
        out, lse = kernels.attn_fwd(q, k, v, **whole)
        return out, lse, *kernels.attn_bwd(dout, q, k, v, lse, kernels.attn_delta(dout, out), **whole)

    first = results()
    assert all(torch.equal(x, y) for _ in range(50) for x, y in zip(first, results()))
