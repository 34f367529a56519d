"""Tangents and second derivatives of drawn calls of training attention, against the float64 energy.

support/fuzz.py says how to run more of it, and how to run a failure again.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.autograd import forward_ad

from megatron_tree import TreeConfig
from megatron_tree.core import energy
from support.fuzz import CALLS, EPSILON, attack, check_close, magnitude, randn, told
from support.fuzz_attention import Call, called, calls, oracle_options, padding_of, rows_of

WORLDS = (1, 2, 3, 4)
WAYS = ("double backward", "grad of jvp", "jvp of grad", "backward of jvp", "forward over reverse")
SECOND = ("q", "k", "v", "sinks")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DerivedCall:
    """A call, and the way in which its second derivatives are asked for."""

    call: Call
    way: str

    __repr__ = told

    def tangents(self):
        """Of q, k, v and sinks, of the whole sequence."""
        q, k, v, _, _, sinks = self.call.inputs()
        tensors = (q, k, v) if sinks is None else (q, k, v, sinks)
        return [randn(self.call.seed + 10 + i, *x.shape, dtype=x.dtype) for i, x in enumerate(tensors)]


@st.composite
def derived_calls(draw, world):
    call = draw(calls(world))
    config = {name: x for name, x in call.config if name != "backend"}
    config["backend"] = draw(st.sampled_from(["auto", "reference"]))
    dtype = call.dtype if call.dtype == torch.float32 else torch.float64
    call = dataclasses.replace(call, dtype=dtype, lse="in the loss", config=tuple(config.items()))
    return DerivedCall(call=call, way=draw(st.sampled_from(WAYS)))


def run(rank, world, derived):
    """{result: tensor} of this rank."""
    call = derived.call
    q, k, v, dout, dlse, sinks = call.inputs()
    tangents = derived.tangents()
    of_queries, of_keys = (rows_of(*sharding, rank, world) for sharding in call.shardings)
    rows = of_queries, of_keys, of_keys
    for tensors in ((q, k, v), tangents):
        for x, sharding in zip(tensors, (call.shardings[0], call.shardings[1], call.shardings[1])):
            x[:, padding_of(*sharding)] = float("nan")  # nothing may come of what lies in padding
    inputs, tangents[:3] = ([x[:, at] for x, at in zip(tensors, rows)] for tensors in ((q, k, v), tangents))
    if sinks is not None:
        inputs.append(sinks.to(torch.promote_types(call.dtype, torch.float32)))
        tangents[3] = tangents[3].to(inputs[3].dtype)
    upstream = dout[:, of_queries], dlse[..., of_queries]

    def attend(*tensors):
        options = dict(call.mask, cp_group=dist.group.WORLD, return_lse=True, config=TreeConfig(**dict(call.config)))
        if "alibi_slopes" in options:
            options["alibi_slopes"] = torch.tensor(options["alibi_slopes"]).squeeze(0)
        if len(tensors) > 3:
            options["sinks"] = tensors[3]
        return called(call, *tensors[:3], options)

    outt, lset = torch.func.jvp(attend, tuple(inputs), tuple(tangents))[1]
    second = _second(derived.way, attend, tuple(inputs), tuple(tangents), upstream)
    return {"outt": outt, "lset": lset} | dict(zip(SECOND, second))


def _second(way, attend, inputs, tangents, upstream):
    """The tangents of the gradients, or what equals them."""
    leaves = [x.clone().requires_grad_() for x in inputs]

    def gradient(*tensors):
        return torch.func.vjp(attend, *tensors)[1](upstream)

    def along(*tensors):
        outt, lset = torch.func.jvp(attend, tensors, tangents)[1]
        return (outt * upstream[0]).sum() + (torch.where(lset.isnan(), 0, lset) * upstream[1]).sum()

    if way == "double backward":
        grads = torch.autograd.grad(attend(*leaves), leaves, upstream, create_graph=True)
        return torch.autograd.grad(grads, leaves, tangents)
    if way == "jvp of grad":
        return torch.func.jvp(gradient, inputs, tangents)[1]
    if way == "grad of jvp":
        return torch.func.grad(along, tuple(range(len(inputs))))(*inputs)
    if way == "backward of jvp":
        return torch.autograd.grad(along(*leaves), leaves)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, tangents)]
        return [forward_ad.unpack_dual(g).tangent for g in torch.autograd.grad(attend(*duals), duals, upstream)]


def check(derived, results):
    """Every rank's results against the energy's derivatives."""
    call = derived.call
    q, k, v, dout, dlse, _ = (None if x is None else x.double() for x in call.inputs())
    options, tangents = oracle_options(call), [x.double() for x in derived.tangents()]
    outt, lset = energy.attention_tangents(q, k, v, tangents, **options)
    second = energy.attention_grads_tangents(q, k, v, dout, tangents, dlse=dlse, **options)
    expected = {"outt": outt, "lset": lset} | dict(zip(SECOND, second))
    tolerance = 1e-11 if call.dtype == torch.float64 else 64 * EPSILON[torch.float32]
    allowed = {name: tolerance * max(1.0, magnitude(x)) for name, x in expected.items()}
    for rank, found in enumerate(results):
        of_queries, of_keys = (rows_of(*sharding, rank, len(results)) for sharding in call.shardings)
        for name in ("outt", "lset", "q", "k", "v"):
            truth, at = expected[name], of_keys if name in ("k", "v") else of_queries
            truth = truth[..., at] if name == "lset" else truth[:, at]
            check_close(f"{name} of rank {rank}, {derived.way}", found[name], truth, allowed[name])
    if call.sinks:
        total = sum(x["sinks"].double() for x in results)
        check_close(f"sinks, {derived.way}", total, expected["sinks"], allowed["sinks"])


@pytest.mark.parametrize("world", WORLDS)
def test_any_call_matches_the_oracle(world):
    attack(run, check, world, derived_calls(world), CALLS["fast"] // 12)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [*WORLDS, 6])
def test_thousands_of_calls_match_the_oracle(world):
    attack(run, check, world, derived_calls(world), CALLS["slow"] // 8)
