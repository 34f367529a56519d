"""Megatron's hybrid models: attention, Mamba and gated delta nets on shards of a sequence against one rank."""

import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_tree.integrations import megatron as tree
from support.core_attention import config
from support.megatron_hybrid import build_hybrid, mamba_chunk_scan_combined, mixers_in_torch, run_hybrid
from support.megatron_models import Case, check, megatron, run_all
from support.megatron_release import GDN
from support.ranks import on_ranks, run_distributed
from support.refusals import refused_with

MAMBA, GATED = "M*-M", "G*G"


def options(**extra):
    return tuple(extra.items())


THREE_HEADS = options(mamba_num_heads=3, mamba_num_groups=1)
FULL = options(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def check_hybrid(world, pattern, cases):
    check(world, cases, run=functools.partial(run_hybrid, pattern=pattern))


@pytest.mark.supports("hybrid models (MambaModel)", with_="kernels of mamba_ssm in torch; cp = 2, 4; tp = 2, cp = 2")
@pytest.mark.supports("hybrid models (MambaModel)", with_="heads that cp does not divide")
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_mamba(world):
    case = functools.partial(Case, cp=world, batch=2)
    plugin = dict(install=True, local_spec=True)
    kinds = [plugin, {"extra": THREE_HEADS}, plugin | {"positions": "none"}]
    kinds += [{"extra": options(use_mamba_mem_eff_path=False)}]
    check_hybrid(world, MAMBA, [case(**kind) for kind in kinds])


def test_mamba_of_another_cp_comm_type_is_megatrons():
    """It undoes the zigzag that attention has, so it also shows that ours is the same."""
    case = functools.partial(Case, cp=2, batch=2)
    of_layers = dict(cp_comm_type=("p2p", "tree", "p2p", "tree"), install=True, local_spec=True)
    check_hybrid(2, MAMBA, [case(cp_comm_type="p2p"), case(**of_layers)])


@pytest.mark.supports("gated delta nets", with_="Megatron's torch kernel; cp = 2, 4; tp = 2, cp = 2")
@pytest.mark.supports("gated delta nets", with_="heads that cp does not divide; recomputation")
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gated_delta_nets(world):
    case = functools.partial(Case, cp=world, batch=2)
    variant = options(experimental_attention_variant="gated_delta_net", linear_attention_freq=[1, 0, 1])
    odd = options(linear_num_key_heads=3, linear_num_value_heads=3)
    kinds = [{}, {"extra": odd}, {"extra": FULL}, dict(install=True, local_spec=True, extra=variant)]
    check_hybrid(world, GATED, [case(**kind) for kind in kinds])


def _bf16_errors(rank, world, pattern):
    """[(name, error to fp32, that of one rank in bf16)]: losses, and all gradients together."""
    plain, bf16 = Case(batch=2), Case(batch=2, dtype=torch.bfloat16)
    run = functools.partial(run_hybrid, pattern=pattern)
    (exact,), (dense,), (ours,) = (run_all([c], run) for c in (plain, bf16, dataclasses.replace(bf16, cp=world)))

    def error(result):
        losses = float((result[0] - exact[0]).square().mean().sqrt())
        return losses, sum(float((g - exact[1][name]).square().sum()) for name, g in result[1].items()) ** 0.5

    return list(zip(("losses", "gradients"), error(ours), error(dense), strict=True))


@pytest.mark.parametrize("pattern", [MAMBA, GATED])
def test_bf16_is_as_good_as_on_one_rank(pattern):
    for name, error, dense in run_distributed(_bf16_errors, 2, pattern)[0]:
        assert error <= 2 * dense, f"{name}: {error:.2e}, on one rank {dense:.2e}"


@pytest.mark.parametrize("pattern", [MAMBA, GATED])
def test_tensor_and_context_parallelism(pattern):
    case = functools.partial(Case, tp=2, cp=2, batch=2)
    sizes = options(mamba_num_heads=6, mamba_num_groups=2)
    kinds = [{"extra": sizes}, {"extra": options(sequence_parallel=True)}]
    check_hybrid(4, pattern, [case(**kind) for kind in kinds])


def _mixer(model):
    layer = model.decoder.layers[0]
    return layer.self_attention if hasattr(layer, "self_attention") else layer.mixer


@pytest.mark.parametrize("pattern", [MAMBA, GATED])
@on_ranks(2)
def test_batches_over_fewer_ranks(rank, world, pattern):
    """Hybrid context parallelism: a batch may lie on one of the ranks alone, sbhd and thd."""
    x, outs = torch.randn(12, 1, 64, generator=torch.Generator().manual_seed(rank)), []
    bounds = torch.tensor([0, len(x)])
    for size, form in ((1, None), (world, "sbhd"), (world, "thd")):
        lengths = dict(max_seqlen_q=len(x), max_seqlen_kv=len(x), local_cp_size=1)
        packed = PackedSeqParams(form, bounds, bounds, **lengths) if form else None
        with megatron(tp=1, pp=1, cp=size), mixers_in_torch(), torch.no_grad():
            outs.append(_mixer(build_hybrid(Case(cp=size), pattern))(x, None, packed_seq_params=packed)[0])
    worst = max(float((out - outs[0]).abs().max() / outs[0].abs().max()) for out in outs)
    assert worst < 1e-5, worst


@pytest.mark.parametrize("pattern", [MAMBA, GATED])
@on_ranks(2)
def test_checkpoints_are_those_of_megatron(world, pattern):
    """Keys and shapes in a checkpoint: ours (cp) and Megatron's own (cp = 1)."""
    from megatron.core import parallel_state

    stored = []
    for size in (world, 1):
        with megatron(tp=1, pp=1, cp=size), mixers_in_torch():
            dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
            state = build_hybrid(Case(cp=size), pattern).sharded_state_dict(metadata={"dp_cp_group": dp_cp})
            stored.append(
                {key: (item.key, tuple(item.data.shape)) for key, item in state.items() if item.data is not None}
            )
    ours, megatrons = stored
    assert ours == megatrons, (ours, megatrons)
    assert any(key.endswith("in_proj.weight") for key in ours), (ours, megatrons)


@pytest.mark.refuses("Mamba layers whose cp_comm_type has no tree", when="use_dispatched_documents is called")
@pytest.mark.refuses("a MambaModel", when="MegatronRunner is made")
@pytest.mark.refuses("gated delta nets", when="MegatronRunner is made")
@pytest.mark.refuses("cp_comm_type other than tree in a gated delta net (up to 0.17)", when="the model is built")
@pytest.mark.refuses("an inference context in recurrent layers on shards", when="the forward")
@on_ranks(2)
def test_what_recurrent_layers_can_not_take(world):
    plain = Case(cp=world, cp_comm_type="p2p")
    with megatron(tp=1, pp=1, cp=world), mixers_in_torch():
        mamba = build_hybrid(plain, MAMBA)
        with refused_with("TreeMambaMixer (a layer with a recurrent state, and a cp_comm_type without a tree)"):
            tree.use_dispatched_documents(mamba)
        for name in ("GatedDeltaNet2", "GatedDeltaProductMixer"):  # of Megatron's main branch
            with refused_with(f"{name} (a layer with a recurrent state, and a cp_comm_type without a tree)"):
                tree.use_dispatched_documents(torch.nn.Sequential(type(name, (torch.nn.Module,), {})()))
        with pytest.raises(ValueError, match="serves a GPTModel"):
            tree.MegatronRunner(mamba)
        with refused_with("cp_comm_type='p2p' in a layer with a gated delta net, which has no context paral"):
            build_hybrid(plain, GATED)
        with pytest.raises(ValueError, match="the model has a TreeGatedDeltaNet: .* no recurrent states"):
            tree.MegatronRunner(build_hybrid(Case(cp=world), GATED).eval())
        for pattern in (MAMBA, GATED):
            mixer = _mixer(build_hybrid(Case(cp=world), pattern))
            with refused_with("context_parallel_size=1, not 2"):
                mixer(torch.zeros(4, 1, 64), inference_context=object())


GATED_CONFIG = dict(experimental_attention_variant="gated_delta_net", linear_attention_freq=2, cp_comm_type="tree")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cp_comm_type": "p2p"}, "does not support context parallel"),
        ({"cp_comm_type": ["tree", "p2p"]}, "does not support context parallel"),
        ({"linear_num_value_heads": None}, "linear_num_value_heads must be set"),
        ({"cp_comm_type": ["tree"]}, "Length of cp_comm_type"),
    ],
)
def test_the_checks_of_gated_delta_nets(changed, message):
    """With a tree in all layers they are those of one rank; without install() they are Megatron's."""
    options = GDN | GATED_CONFIG | {"context_parallel_size": 2}
    tree.install()
    try:
        assert config(**options).context_parallel_size == 2
        assert config(**options).experimental_attention_variant == "gated_delta_net"
        with pytest.raises(AssertionError, match=message):
            config(**options | changed)
    finally:
        tree.uninstall()
    with pytest.raises(AssertionError, match="does not support context parallel"):
        config(**options)


@pytest.mark.refuses("mixers of a release that was not read", when="use_tree_attention is called")
def test_a_release_that_was_not_read(monkeypatch):
    from megatron.core.ssm.mamba_mixer import MambaMixer

    monkeypatch.setattr("megatron_tree.integrations.megatron.compat.megatron_version", lambda: "0.20.0")
    with pytest.raises(tree.UnsupportedMegatronError, match=r"0\.20\.0: its MambaMixer is not known .* 0\.16.*0\.19"):
        tree.use_tree_attention(ModuleSpec(module=MambaMixer))


def test_the_scan_of_these_tests():
    """In one chunk as token by token."""
    torch.manual_seed(1)
    b, length, h, p, g, n = 2, 7, 6, 3, 2, 5
    x, dt, B, C = (torch.randn(b, length, *shape, dtype=torch.float64) for shape in ((h, p), (h,), (g, n), (g, n)))
    A, D, bias, state = -torch.rand(h), torch.randn(h), torch.randn(h), torch.randn(b, h, p, n)
    A, D, bias, state = (value.double() for value in (A, D, bias, state))
    kernel = functools.partial(mamba_chunk_scan_combined, D=D, dt_bias=bias, dt_softplus=True, return_final_states=True)
    out, final = kernel(x, dt, A, B, C, 4, initial_states=state)
    for t in range(length):
        step = F.softplus(dt[:, t] + bias)
        new = step[..., None, None] * x[:, t, :, :, None] * B[:, t].repeat_interleave(3, 1)[:, :, None]
        state = state * (step * A).exp()[..., None, None] + new
        read = (state * C[:, t].repeat_interleave(3, 1)[:, :, None]).sum(-1) + D[:, None] * x[:, t]
        torch.testing.assert_close(out[:, t], read, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(final, state, rtol=1e-12, atol=1e-12)
