"""What others have measured on GPUs, beside the cost model's predictions."""

import pytest

from megatron_tree.core.plan.command import main
from megatron_tree.core.plan.published import comparisons, ordered

PACKED = "H100, FA3, packed documents cut one by one"


@pytest.fixture(scope="module")
def compared():
    return comparisons()


def test_times(compared):
    """Within 25 %."""
    assert len(compared) == 149
    for c in compared:
        assert 0.75 < c.ratio < 1.25, c


def test_orders(compared):
    """Which schedule is faster, where measurements differ by 10 %. The exceptions are kernels, not networks: on B200
    cuDNN's causal kernels with gathered keys in the backward, and with one head of the whole sequence."""
    right, wrong = ordered(compared)
    exceptions = {(slow.what, slow.case.split(",")[0], slow.name) for slow, _ in wrong}
    assert exceptions == {
        (PACKED, "forward", "a2a+p2p"),
        (PACKED, "forward", "Ulysses"),
        ("B200, cuDNN, causal", "forward", "Ulysses"),
        ("B200, cuDNN, causal", "backward", "KV gather"),
        ("B200, cuDNN, no mask", "backward", "KV gather"),
    }
    assert len(right) >= 84 and len(right) + len(wrong) == 95


def test_rings_are_slowest_on_h100(compared):
    """Also on the 8 GPUs of a node, where no message is waited for."""
    cases = {c[:3] for c in compared if c.what.startswith("H100, FA3")}
    assert len(cases) == 20
    for case in cases:
        slowest = max((c for c in compared if c[:3] == case), key=lambda c: c.predicted)
        assert slowest.name == "ring", case


def test_the_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--published"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "84 of 95 orders are as measured" in out
    assert out.count("measured  predicted  ratio") == 11 and "  8 GPUs, 524 kB  all-reduce" in out
