"""Megatron's hybrid models: attention layers under tree, Mamba layers under Megatron's own context parallelism."""

import functools

import pytest

pytest.importorskip("megatron.core")

from megatron_tree.integrations import megatron as tree
from support.megatron_hybrid import build_hybrid, mamba_in_torch, run_hybrid
from support.megatron_models import Case, check, megatron
from support.ranks import run_distributed

MAMBA = "M*-M"


@pytest.mark.supports("hybrid models (MambaModel)", with_="kernels of mamba_ssm written in torch; cp = 2, 4")
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_and_gradients(world):
    """Megatron's Mamba layers undo the zigzag that attention has, so they show that ours is the same."""
    case = Case(cp=world, batch=2, install=True, local_spec=True)
    cases = [case, Case(cp=world, batch=2), Case(cp=world, batch=2, install=True, local_spec=True, positions="none")]
    check(world, cases, run=functools.partial(run_hybrid, pattern=MAMBA))


def _dispatched(rank, world):
    with megatron(tp=1, pp=1, cp=1), mamba_in_torch():
        model = build_hybrid(Case(), MAMBA)
        with pytest.raises(ValueError, match=r"MambaMixer \(a layer with a recurrent state\) needs packed documents"):
            tree.use_dispatched_documents(model)
        with pytest.raises(ValueError, match="serves a GPTModel"):
            tree.MegatronRunner(model)


@pytest.mark.refuses("Mamba layers", when="use_dispatched_documents is called")
@pytest.mark.refuses("a MambaModel", when="MegatronRunner is made")
def test_what_recurrent_layers_can_not_take():
    run_distributed(_dispatched, 1)
