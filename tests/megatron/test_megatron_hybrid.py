"""Megatron's hybrid models: attention layers under tree, Mamba layers under Megatron's own context parallelism."""

import functools

import pytest

pytest.importorskip("megatron.core")

from megatron_tree.integrations import megatron as tree
from support.megatron_hybrid import build_hybrid, mamba_in_torch, run_hybrid
from support.megatron_models import Case, check, megatron
from support.ranks import run_distributed

MAMBA, PLAIN = "M*-M", "*-*-"


@pytest.mark.supports("hybrid models (MambaModel)", with_="attention and MLP layers; cp = 2, 4")
@pytest.mark.supports(
    "hybrid models (MambaModel)", with_="Mamba layers, kernels of mamba_ssm written in torch; cp = 2, 4"
)
@pytest.mark.parametrize(
    ("world", "pattern"),
    [(2, MAMBA), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, PLAIN), (4, MAMBA), (4, PLAIN)))],
)
def test_losses_and_gradients(world, pattern):
    """Megatron's Mamba layers undo the zigzag that attention has, so they show that ours is the same."""
    case = Case(cp=world, batch=2, install=True, local_spec=True)
    cases = [case, Case(cp=world, batch=2), Case(cp=world, batch=2, install=True, local_spec=True, positions="none")]
    check(world, cases, run=functools.partial(run_hybrid, pattern=pattern))


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
