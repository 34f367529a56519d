"""What the emulator notices: faults in the compiled forward and backward, planted one at a time.

A fault is noticed if the launch ends in a Fault, or if a result is off by more than a hundred times the usual.
docs/kernels.md explains those that are not.
"""

import collections
import contextlib

import pytest
import torch

from megatron_tree.core import energy
from megatron_tree.core.kernels.triton import attn_delta, host
from megatron_tree.core.layout import Segment
from megatron_tree.core.spec import AttnSpec
from support.triton_inputs import inputs

pytestmark = pytest.mark.ptx
S, D = 300, 64
WHOLE = dict(
    q_segments=(Segment(0, 0, S),), k_segments=(Segment(0, 0, S),), spec=AttnSpec(softmax_scale=D**-0.5, causal=True)
)
KERNELS = ("attn_fwd_kernel", "attn_bwd_dq_kernel", "attn_bwd_dkdv_kernel")


@pytest.fixture(scope="module")
def case():
    """Kernel -> (a call that launches it, what it returns in truth)."""
    q, k, v, dout = inputs(S, S, (1, 1), D, D, batch=1, dtype=torch.bfloat16)
    exact = [x.double() for x in (q, k, v, dout)]
    keep = torch.ones(S, S, dtype=torch.bool).tril()
    out, lse = energy.attention(*exact[:3], spec=WHOLE["spec"], keep=keep)
    grads = energy.attention_grads(*exact, spec=WHOLE["spec"], keep=keep)
    delta = attn_delta(dout, out.float())
    before = [torch.randn(x.shape) for x in (q, k, v)]

    def backward():  # added to what is there: with one head to a KV head, by the kernel
        grads = [x.clone() for x in before]
        host.accumulate_bwd(dout, q, k, v, lse.float(), delta, grads, **WHOLE)
        return [x - y for x, y in zip(grads, before)]

    forward = lambda: host.attn_fwd(q, k, v, **WHOLE)  # noqa: E731
    return {KERNELS[0]: (forward, (out, lse)), KERNELS[1]: (backward, grads), KERNELS[2]: (backward, grads)}


def error(call, truth):
    found = [((x - t).abs().max() / t.abs().max()).item() for x, t in zip(call(), truth)]
    return float("inf") if any(x != x for x in found) else max(found)


def kernel_of(name, call):
    from ptx import device

    device.launches.clear()
    call()
    return next(kernel for kernel in device.launches if kernel.program.name == name)


def noticed(kernel, call, truth, kind, place):
    from ptx import faults
    from ptx.syntax import Fault

    with faults.planted(kernel, kind, place), contextlib.suppress(Fault):
        return error(call, truth) > 0.02
    return True


def missed(kernel, call, truth, kind, places):
    return [kernel.program.instructions[n].line for n in places if not noticed(kernel, call, truth, kind, n)]


def test_a_fault_of_every_kind_is_noticed(case):
    """In the forward: at least one place, the last but one where there are several."""
    from ptx import faults

    call, truth = case[KERNELS[0]]
    kernel = kernel_of(KERNELS[0], call)
    assert error(call, truth) < 2e-3
    found = collections.Counter()
    for kind in faults.KINDS:
        places = faults.places(kernel.program, kind)
        found[kind] += any(noticed(kernel, call, truth, kind, n) for n in places[:3])
    kinds = {kind for kind in faults.KINDS if faults.places(kernel.program, kind)}
    assert {kind for kind, n in found.items() if n} == kinds and len(kinds) >= 6


def test_what_lies_outside_of_a_tensor_is_not_read():
    """One state more than there are: the merge reads beyond its input."""
    from megatron_tree.core.kernels.triton import merge
    from ptx.syntax import Fault

    states = torch.randn(3, 5, 17)
    arguments = dict(IN=states, BITS=states, OUT=torch.empty(5, 17), inner=5, outer_stride=255, state_stride=85)
    launch = merge.merge_states_kernel[(5,)]
    launch(**arguments, num_states=3, E=16, WORDS=1, COLS=16, STATES=8, num_warps=4)
    with pytest.raises(Fault, match=r"merge_states_kernel .*outside of all tensors"):
        launch(**arguments, num_states=4, E=16, WORDS=1, COLS=16, STATES=8, num_warps=4)


LEAST = {  # share of the places of a kind that must be noticed; docs/kernels.md explains the others
    "barrier": 0.7, "proxy fence": 0.6, "register fence": 0.3, "wait for copies": 0.5, "wait for products": 0.5,
    "copy offset": 0.9,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", KERNELS)
def test_most_faults_are_noticed(case, name):
    """Every place of every kind."""
    from ptx import faults

    call, truth = case[name]
    kernel = kernel_of(name, call)
    for kind in faults.KINDS:
        places = faults.places(kernel.program, kind)
        lines = missed(kernel, call, truth, kind, places)
        print(f"{name} {kind}: {len(places) - len(lines)} of {len(places)} noticed; not those in lines {lines}")
        assert len(places) - len(lines) >= LEAST.get(kind, 0.95) * len(places), (kind, lines)
