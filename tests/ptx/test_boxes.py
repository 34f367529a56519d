"""The forward whose keys and values come by the copy engine (TMA): the bits of the one that loads them itself."""

import contextlib

import pytest
import torch

from megatron_tree.core import kernels
from megatron_tree.core.kernels.triton import configs
from megatron_tree.core.layout import Segment, positions_of
from megatron_tree.tools.bench.low_precision import TRAINING, Training, training_inputs

pytestmark = pytest.mark.ptx
TABLE = configs.tiles
MANY = (Segment(0, 0, 520),), (Segment(0, 0, 520),), 520, 520  # tiles: the barriers of three stages go round
CASES = {"many": Training(MANY, (1, 1), (64, 64), {}), **TRAINING}


@pytest.fixture(autouse=True)
def _on_sm_90(pytestconfig):
    if pytestconfig.getoption("--ptx") == "sm_80":
        pytest.skip("the copy engine needs sm_90")


def forward(case, boxes, monkeypatch):
    """A call of the kernel on inputs whose padding is NaN."""
    case = CASES[case]
    q, k, v, _ = training_inputs(case, torch.bfloat16, "cpu")
    q_segments, k_segments, _, s_k = case.segments
    for x in (k, v):
        x[:, positions_of(k_segments, s_k, device="cpu") < 0] = float("nan")
    monkeypatch.setattr(configs, "tiles", lambda *args: TABLE(*args)._replace(boxes=boxes))
    return kernels.attn_fwd(q, k, v, q_segments=q_segments, k_segments=k_segments, spec=case.spec, backend="triton")


def backward(case, fused, monkeypatch):
    """dq, dk, dv of inputs whose padding is NaN, but for dout's."""
    case = CASES[case]
    q, k, v, dout = training_inputs(case, torch.bfloat16, "cpu")
    q_segments, k_segments, s_q, s_k = case.segments
    segments = dict(q_segments=q_segments, k_segments=k_segments, spec=case.spec, backend="triton")
    out, lse = kernels.attn_fwd(q, k, v, **segments)
    for x, segment, n in ((q, q_segments, s_q), (k, k_segments, s_k), (v, k_segments, s_k)):
        x[:, positions_of(segment, n, device="cpu") < 0] = float("nan")
    monkeypatch.setattr(configs, "tiles", lambda *args: TABLE(*args)._replace(fused=fused))
    return kernels.attn_bwd(dout, q, k, v, lse, kernels.attn_delta(dout, out), **segments)


def kernel_of(launch):
    from ptx import device

    device.launches.clear()
    launch()
    return device.launches[-1]


@pytest.mark.parametrize(
    "case", ["many", "128", "256", "full", "window", "two-sided", "softcap", "packed", "dropout 128"]
)
def test_the_same_bits(case, monkeypatch):
    results = [forward(case, boxes, monkeypatch) for boxes in (False, True)]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("case", ["many", "128", "window", "packed", "dropout 128"])
def test_dq_is_added_up_with_dk_and_dv(case, monkeypatch):
    (dq, *others), (fused, *same) = (backward(case, fused, monkeypatch) for fused in (False, True))
    assert all(torch.equal(x, y) for x, y in zip(others, same, strict=True))
    torch.testing.assert_close(fused, dq, rtol=1e-5, atol=1e-5 * float(dq.abs().max()))


def check_faults(kernel, limits, is_right, most=None):
    """At least these shares of the faults of each kind end in a Fault, or in what is not right."""
    from ptx import faults
    from ptx.syntax import Fault

    for kind, least in limits:
        places, seen = faults.places(kernel.program, kind)[:most], 0
        for place in places:
            right = False
            with faults.planted(kernel, kind, place), contextlib.suppress(Fault):
                right = is_right()
            seen += not right
        print(f"{kind}: {seen} of {len(places)}")
        assert seen >= max(1, least * len(places))


@pytest.mark.parametrize("most", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_faults(most, monkeypatch):
    """Waits, expected bytes and destinations of copies. Masked tiles are at most two, of three stages."""
    kernel = kernel_of(lambda: forward("many", True, monkeypatch))
    truth = forward("many", False, monkeypatch)
    limits = ("wait for boxes", 1.0), ("expected bytes", 0.8), ("box offset", 0.8)
    same = lambda: all(map(torch.equal, forward("many", True, monkeypatch), truth))  # noqa: E731
    check_faults(kernel, limits, same, most)


def test_faults_of_sums(monkeypatch):
    """A sum that begins elsewhere, and one that is not waited for (other waits may follow before its box changes)."""
    kernel = kernel_of(lambda: backward("many", True, monkeypatch))
    (truth, *_) = backward("many", False, monkeypatch)
    close = lambda: torch.allclose(backward("many", True, monkeypatch)[0], truth, rtol=1e-3, atol=1e-4)  # noqa: E731
    check_faults(kernel, (("wait for sums", 0.3), ("sum offset", 1.0)), close)
