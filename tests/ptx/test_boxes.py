"""The forward whose keys and values come by the copy engine (TMA): the bits of the one that loads them itself."""

import contextlib

import pytest
import torch

from megatron_tree import kernels
from megatron_tree.bench.low_precision import TRAINING, training_inputs
from megatron_tree.kernels.triton import configs
from megatron_tree.layout import positions_of

pytestmark = pytest.mark.ptx
TABLE = configs.tiles


@pytest.fixture(autouse=True)
def _on_sm_90(pytestconfig):
    if pytestconfig.getoption("--ptx") == "sm_80":
        pytest.skip("the copy engine needs sm_90")


def forward(case, boxes, monkeypatch):
    """A call of the kernel on inputs whose padding is NaN."""
    case = TRAINING[case]
    q, k, v, _ = training_inputs(case, torch.bfloat16, "cpu")
    q_segments, k_segments, _, s_k = case.segments
    for x in (k, v):
        x[:, positions_of(k_segments, s_k, device="cpu") < 0] = float("nan")
    monkeypatch.setattr(configs, "tiles", lambda *args: TABLE(*args)._replace(boxes=boxes))
    return kernels.attn_fwd(q, k, v, q_segments=q_segments, k_segments=k_segments, spec=case.spec, backend="triton")


def kernel_of(launch):
    from ptx import device

    device.launches.clear()
    launch()
    return device.launches[-1]


@pytest.mark.parametrize(
    "case", ["64", "128", "256", "full", "window", "two-sided", "softcap", "packed", "dropout 128"]
)
def test_the_same_bits(case, monkeypatch):
    results = [forward(case, boxes, monkeypatch) for boxes in (False, True)]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("most", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_faults(most, monkeypatch):
    """Waits, expected bytes and destinations of copies: at every place but those of a tile that never comes."""
    from ptx import faults
    from ptx.syntax import Fault

    kernel = kernel_of(lambda: forward("64", True, monkeypatch))
    truth = forward("64", False, monkeypatch)
    for kind in ("wait for boxes", "expected bytes", "box offset"):
        places, seen = faults.places(kernel.program, kind)[:most], 0
        for place in places:
            same = False
            with faults.planted(kernel, kind, place), contextlib.suppress(Fault):
                same = all(torch.equal(x, y) for x, y in zip(forward("64", True, monkeypatch), truth, strict=True))
            seen += not same
        print(f"{kind}: {seen} of {len(places)}")
        assert seen >= max(1, 0.6 * len(places))
