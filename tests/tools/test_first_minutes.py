"""What the first ten minutes on a GPU measure and keep, as far as a CPU can show it."""

import sys
from types import ModuleType

import pytest
import torch

from megatron_tree.core import energy
from megatron_tree.core.kernels import fastest
from megatron_tree.core.layout import positions_of, sequences_of
from megatron_tree.core.spec import AttnSpec
from megatron_tree.tools.bench.kernels import STAGES, stage_ends
from megatron_tree.tools.bench.tasks import DONE, NOT_RUN, Task, run_tasks
from megatron_tree.tools.bench.verdict import AIMS, verdict
from megatron_tree.tools.calibrate.kernel_cases import KernelCase, KernelTiming, inputs, ours, truth_of, verify
from megatron_tree.tools.calibrate.other_kernels import others
from support.rounding import assert_near

CPU, S = torch.device("cpu"), 64


@pytest.mark.parametrize("kind", ["fwd", "bwd"])
@pytest.mark.parametrize(("mask", "d"), [("window", 16), ("packed", 16), ("zigzag", 16), ("", 192)])
def test_masks_are_the_oracles(mask, d, kind, monkeypatch):
    """What results are compared with, and what is timed, see the same keys."""
    monkeypatch.setattr("megatron_tree.tools.calibrate.kernel_cases.WINDOW", 20)
    case = KernelCase(kind, 2, S, 4, 2, d, "", mask)
    given, segments = inputs(case, CPU, torch.float32), case.segments
    assert [x.shape[-1] for x in given] == [d, d, case.d_v, case.d_v]
    (q_pos, q_seq), (k_pos, k_seq) = ((positions_of(x, S), sequences_of(x, S)) for x in segments.values())
    keep = energy.visible(q_pos, k_pos, case.spec) & (q_seq[:, None] == k_seq)
    expected = {"window": 20 * S - 190, "packed": 8 * 36, "zigzag": 32 * S}.get(mask, S * (S + 1) // 2)
    assert int(keep.sum()) == expected
    exact = [x.double() for x in given]
    wanted = (
        energy.attention(*exact[:3], spec=case.spec, keep=keep)[:1]
        if kind == "fwd"
        else energy.attention_grads(*exact, spec=case.spec, keep=keep)
    )
    truth = truth_of(case, given)
    for x, want in zip(truth.values(), wanted, strict=True):
        torch.testing.assert_close(x, want)
    result = ours(case, "reference", given)()
    verify(case, "ours, reference", result, truth, torch.float32)
    assert result[0].dtype == torch.float32


def _dense(q, k, v, keep, scale):
    """[b, s, h, d] by torch's operations."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~keep, float("-inf")).softmax(-1), v)


class _Flash(ModuleType):
    """FlashAttention 3's functions, as their documentation has them."""

    def flash_attn_func(self, q, k, v, *, softmax_scale, causal, window_size):
        at = torch.arange(q.shape[1])
        keep = at[:, None] >= at
        if window_size != (-1, -1):
            assert window_size[1] == 0
            keep = keep & (at[:, None] - at <= window_size[0])
        return _dense(q, k, v, keep, softmax_scale)

    def flash_attn_varlen_func(
        self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal
    ):
        assert q.dim() == 3 and cu_seqlens_q.dtype == torch.int32 and max_seqlen_k >= S // 8
        at, of = torch.arange(len(q)), torch.bucketize(torch.arange(len(q)), cu_seqlens_q[1:], right=True)
        keep = (at[:, None] >= at) & (of[:, None] == of)
        return _dense(q[None], k[None], v[None], keep, softmax_scale)[0]

    def flash_attn_with_kvcache(self, q, k_cache, v_cache, *, softmax_scale):
        return _dense(q, k_cache, v_cache, torch.ones(1, k_cache.shape[1], dtype=torch.bool), softmax_scale)


class _FlashInfer(ModuleType):
    def single_decode_with_kv_cache(self, q, k, v, *, kv_layout, sm_scale):
        assert kv_layout == "NHD" and q.dim() == 2 and k.dim() == v.dim() == 3
        return _dense(q[None, None], k[None], v[None], torch.ones(1, len(k), dtype=torch.bool), sm_scale)[0, 0]


class _FlashMLA(ModuleType):
    def get_mla_metadata(self, lengths, rows, heads):
        assert lengths.dtype == torch.int32 and heads == 1
        return "plan", "splits"

    def flash_mla_with_kvcache(self, q, pages, table, lengths, d_v, plan, splits, scale, *, causal):
        assert pages.shape[1:] == (64, 1, 576) and table.dtype == torch.int32 and (plan, splits) == ("plan", "splits")
        k = pages[table.long()].flatten(1, 2)
        keep = torch.ones(1, k.shape[1], dtype=torch.bool)
        return _dense(q, k, k[..., :d_v], keep, scale), None


LIBRARIES = {
    "FlashAttention 3": ("flash_attn_interface", _Flash),
    "FlashInfer": ("flashinfer", _FlashInfer),
    "FlashMLA": ("flash_mla", _FlashMLA),
}


@pytest.mark.parametrize(
    ("names", "case"),
    [
        (["FlashAttention 3"], KernelCase("fwd", 1, S, 4, 2, 16)),
        (["FlashAttention 3"], KernelCase("bwd", 1, S, 4, 2, 16)),
        (["FlashAttention 3"], KernelCase("fwd", 1, S, 4, 4, 192)),
        (["FlashAttention 3"], KernelCase("fwd", 1, S, 4, 2, 16, "", "packed")),
        (["FlashAttention 3"], KernelCase("bwd", 1, S, 4, 2, 16, "", "packed")),
        (["FlashAttention 3"], KernelCase("bwd", 1, S, 4, 2, 16, "", "window")),
        (["FlashAttention 3", "FlashInfer"], KernelCase("decode", 1, S, 4, 2, 16)),
        (["FlashAttention 3"], KernelCase("decode", 2, S, 4, 2, 16)),
        (["FlashMLA"], KernelCase("decode", 2, 128, 4, 1, 576, "latent")),
        ([], KernelCase("decode", 1, S, 4, 2, 16, "paged int8")),
        ([], KernelCase("fwd", 1, S, 4, 2, 16, "", "zigzag")),
    ],
    ids=lambda x: x.label if isinstance(x, KernelCase) else None,
)
def test_libraries_are_called_as_documented(names, case, monkeypatch):
    """With stand-ins that know shapes and dtypes: their results are the truth."""
    monkeypatch.setattr("megatron_tree.tools.calibrate.kernel_cases.WINDOW", 20)
    for module, kind in LIBRARIES.values():
        stand_in = kind(module)
        stand_in.__spec__ = object()
        monkeypatch.setitem(sys.modules, module, stand_in)
    given = inputs(case, CPU, torch.float32)
    calls = others(case, given)
    assert list(calls) == names
    for name, call in calls.items():
        verify(case, name, call(), truth_of(case, given), torch.float32)


@pytest.fixture
def table(monkeypatch, tmp_path):
    """The user's, of a GPU that this CPU pretends to be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fastest, "gpu_of", lambda device: "GPU X")
    fastest.table.cache_clear()
    yield
    fastest.table.cache_clear()


def test_tiles_that_were_fastest_are_launched(table, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    from megatron_tree.core.kernels import KVCache
    from megatron_tree.core.kernels.triton import configs, decode, host
    from megatron_tree.core.spec import Dropout

    q = torch.randn(1, 40, 2, 16, dtype=torch.float16)
    spec, dims = AttnSpec(softmax_scale=0.25), host.HeadDims(16, 16)
    usual = host._tiles("fwd", q, dims, spec)
    fastest.keep("GPU X", {"16": "triton", "fwd 16": [32, 16, 4, 1]})
    fastest.keep("GPU X", {"decode of 16 16": [16, 32, 2, 1]})
    fastest.keep("GPU X", {"64": "cudnn"})  # of earlier entries backends alone are gone
    assert fastest.for_gpu("GPU X", 16) == ("cudnn",)
    assert host._tiles("fwd", q, dims, spec) == configs.Tiles(32, 16, 4, 1) != usual
    assert host._tiles("fwd", q.float(), dims, spec) == usual == host._tiles("dq", q, dims, spec)
    assert host._tiles("fwd", q, dims, AttnSpec(softmax_scale=0.25, dropout=Dropout(0.1, 3))) == usual
    assert host._tiles("fwd", q, host.HeadDims(16, 16, dual=True), spec) == usual
    launched, kernel = [], decode.attn_decode_kernel
    monkeypatch.setattr(decode, "attn_decode_kernel", _Noted(kernel, launched))
    k = torch.randn(1, 80, 1, 16, dtype=torch.float16)
    decode._fixed.cache_clear()
    state = decode.attn_decode(q[:, :1], KVCache(k, k), spec)
    decode._fixed.cache_clear()
    assert (launched[0]["M"], launched[0]["N"], launched[0]["num_warps"]) == (16, 32, 2)
    out, _ = energy.attention(*(x.double() for x in (q[:, :1], k, k)), spec=AttnSpec(softmax_scale=0.25, causal=False))
    assert_near(state[..., :-1], out, 80, dtype=torch.float16)


class _Noted:
    def __init__(self, kernel, launched):
        self._kernel, self._launched = kernel, launched

    def __getitem__(self, grid):
        return lambda **arguments: self._launched.append(arguments) or self._kernel[grid](**arguments)


@pytest.mark.parametrize(
    "entries", [{"fwd 128": [64, 64, 4]}, {"fwd 128": "triton"}, {"128": [1, 2, 3, 4]}, {"fwd": [1] * 4}]
)
def test_a_table_with_anything_else_is_refused(entries, table):
    fastest.keep("GPU X", entries)
    with pytest.raises(ValueError, match="GPU X: .* must be a head_dim and one of .*four tile sizes"):
        fastest.table()


def test_who_wins_a_race():
    pytest.importorskip("triton", reason="triton is not installed")
    from megatron_tree.core.kernels.triton.configs import Tiles
    from megatron_tree.tools.bench.race import winner

    a, b, fused = Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2), Tiles(64, 64, 8, 2, fused=True)
    assert winner([(1.0, "", None), (0.9, "", a), (0.8, "", b), (0.5, "", fused)]) == b
    assert winner([(1.0, "", None), (0.99, "", a)]) is None
    assert winner([(0.99, "", a), (1.5, "", b)]) == a  # what is in use does not run


def test_the_verdict_names_what_is_not_reached():
    (forward, backward, decode, *rest), row = AIMS, KernelTiming
    rows = [
        row(forward.case, "fwd", "ours, triton", 1.0, 400.0, "TFLOP/s"),
        row(forward.case, "race", "fwd 64x64", 1.0, 600.0, "TFLOP/s"),
        row(forward.case, "fwd", "FlashAttention 3", 1.0, 700.0, "TFLOP/s"),
        row(forward.case, "fwd", "matrix product", 1.0, 900.0, "TFLOP/s"),
        row(backward.case, "bwd", "ours, cudnn", 1.0, 330.0, "TFLOP/s"),
        row(decode.case, "decode", "ours, triton", 1.0, 3500.0, "GB/s"),
        row(decode.case, "decode", "device copy", 1.0, 4000.0, "GB/s"),
    ]
    said = verdict(rows, {"device": "H", "dtype": "bf16"}).splitlines()
    assert said[2].endswith("| 480 TFLOP/s | 400 (triton) | 700 (FlashAttention 3) | **no** |")
    assert said[3].endswith("| 320 TFLOP/s | 330 (cudnn) |  | yes |")
    assert said[4].endswith("| 0.85 of a copy | 0.875 (triton) |  | yes |")
    assert [x.endswith("| not measured |") for x in said[5:]] == [True] * len(rest)


def test_stages_share_what_compiling_has_left():
    ends = stage_ends(100.0, 370.0)
    assert list(ends) == list(STAGES) and list(ends.values()) == sorted(ends.values())
    assert ends["machine"] == 100.0 + 12.5 and ends["verdict"] == 370.0


def test_a_stage_ends_when_its_time_is_up(monkeypatch):
    class Here:
        gone = False

        def run(self, task, limit_s, emit):
            return DONE, ""

        def close(self):
            pass

    monkeypatch.setattr("megatron_tree.tools.bench.tasks.Worker", Here)
    outcomes = []
    tasks = [Task(stage, "", None, 1.0) for stage in ("late", "free")]
    run_tasks(tasks, end=float("inf"), ends={"late": 0.0}, emit=None, ended=outcomes.append)
    assert [x.status for x in outcomes] == [NOT_RUN, DONE]
