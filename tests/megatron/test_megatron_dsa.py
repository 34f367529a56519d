"""Megatron's DSA under context parallelism against its own on one rank: losses, the indexer's loss, all gradients."""

import dataclasses
import functools
import multiprocessing
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_tree import TreeConfig
from megatron_tree.integrations import megatron as tree
from megatron_tree.integrations.megatron import compat
from megatron_tree.integrations.megatron.dsa import TreeDSAttention
from support.core_attention import Group
from support.megatron_dsa import DSA, build_dsa, hadamard_in_torch, run_dsa, with_options
from support.megatron_models import SEQ_LENGTH, Case, check, megatron, run_all, transformer_config, whole_batch
from support.ranks import on_ranks, run_distributed
from support.refusals import refused_with
from support.rounding import assert_near, error
from support_matrix import refused

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
UP = dict(recompute_granularity="selective", recompute_modules=["mla_up_proj"])
SPARSE = dict(dsa_indexer_use_sparse_loss=True)
CASE = functools.partial(Case, mla=True, batch=2, extra=DSA)


@pytest.mark.supports("sparse attention (DSA)", with_="both losses, YaRN, recomputation; cp = 2, 4; tp = 2, cp = 2")
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_dsa(world):
    case = functools.partial(CASE, cp=world)
    kinds = [{}, {"local_spec": True, "extra": with_options(**SPARSE)}]
    kinds += [{"extra": with_options(**changes)} for changes in (FULL, UP, dict(rope_type="yarn", q_lora_rank=None))]
    kinds += [{"extra": with_options(calculate_per_token_loss=False)}]
    check(world, [case(**kind) for kind in kinds], run=run_dsa)


def test_schedules():
    configs = TreeConfig(grid=(2, 1)), TreeConfig(schedule="ring")
    check(2, [CASE(cp=2, tree_config=config) for config in configs], run=run_dsa)


def test_tensor_and_sequence_parallelism():
    case = functools.partial(CASE, cp=2, tp=2)
    kinds = [{}, {"extra": with_options(sequence_parallel=True, **SPARSE)}]
    check(4, [case(**kind) for kind in kinds], run=run_dsa)


def _reduced_gradients(case):
    """Gradients after all that Megatron does to them, of two microbatches; every data-parallel rank has the same."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with hadamard_in_torch() as dsa:
        chunk = build_dsa(case, finalize_model_grads_func=finalize_model_grads)
        model = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(), chunk)
        batch = compat.batch_on_this_cp_rank(whole_batch(case))

        def step(iterator, model):
            losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
            return losses, lambda out: (out.sum(), torch.tensor(out.numel(), dtype=torch.int), {})

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(()),
            model=[model],
            num_microbatches=2,
            seq_length=SEQ_LENGTH,
            micro_batch_size=case.batch,
            forward_only=False,
        )
        dsa.DSAIndexerLossAutoScaler.main_loss_backward_scale = None
    return {name: p.main_grad.clone() for name, p in chunk.named_parameters()}


@pytest.mark.parametrize("per_token", [False, True])
@on_ranks(4)
def test_scaling(per_token):
    """Data-parallel ranks become ranks of a sequence: no gradient changes, neither a layer's nor an indexer's."""
    case = CASE(extra=with_options(calculate_per_token_loss=per_token))
    want, *others = (run_all([dataclasses.replace(case, cp=cp)], _reduced_gradients)[0] for cp in (1, 2, 4))
    for gradients in others:
        for name, x in gradients.items():
            assert error(x, want[name]) <= 3e-5, name
    assert any("indexer" in name and x.count_nonzero() for name, x in want.items())


def _bf16_errors(rank, world):
    """[(name, error to fp32, that of one rank in bf16)]: losses, and all gradients together."""
    cases = CASE(), CASE(dtype=torch.bfloat16), CASE(dtype=torch.bfloat16, cp=world)
    exact, dense, ours = (run_all([case], run_dsa)[0] for case in cases)

    def errors(result):
        losses = float((result[0] - exact[0]).square().mean().sqrt())
        return losses, sum(float((x - exact[1][name]).square().sum()) for name, x in result[1].items()) ** 0.5

    return list(zip(("losses", "gradients"), errors(ours), errors(dense), strict=True))


def test_bf16_is_as_good_as_on_one_rank():
    for name, ours, dense in run_distributed(_bf16_errors, 2)[0]:
        assert ours <= 2 * dense, f"{name}: {ours:.2e}, on one rank {dense:.2e}"


@pytest.mark.slow
@pytest.mark.supports("sparse attention (DSA)", with_="checkpoints in another layout")
def test_checkpoints(tmp_path):
    run_distributed(_store_and_load, 4, str(tmp_path))


def _store_and_load(rank, world, folder):
    """Stored by 2 ranks of a sequence, loaded by 4 and by Megatron's own layer on one."""
    from megatron.core import dist_checkpointing, parallel_state

    for cp in (2, 4, 1):
        with megatron(tp=1, pp=1, cp=cp), hadamard_in_torch(), compat.no_manager_process():
            model = build_dsa(CASE(cp=cp))
            dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
            state = model.sharded_state_dict(metadata={"dp_cp_group": dp_cp})
            if cp == 2:
                with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # it starts processes
                    dist_checkpointing.save(state, folder)
                continue
            for p in model.parameters():
                p.data.zero_()
            model.load_state_dict(dist_checkpointing.load(state, folder))
            assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
            assert sum("indexer" in name for name in weights) == 10, sorted(weights)


@on_ranks(2)
def test_latents_without_their_projection(rank, world):
    """What Megatron passes from 0.19 on: queries of latents, one head of keys, and the projection of values."""
    with megatron(tp=1, pp=1, cp=world), hadamard_in_torch() as dsa:
        core = build_dsa(CASE(cp=world)).decoder.layers[0].self_attention.core_attention
        config, s, b, h = core.config, 8, 2, 8
        r, nope, pe, d_v = config.kv_lora_rank, config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        g, same = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(9)
        shapes = [(s, b, h, nope), (s, b, h, pe), (s, b, r), (s, b, 1, pe)]
        leaves = [torch.randn(shape, generator=g) for shape in shapes]
        leaves += [torch.randn(shape, generator=same) * 0.3 for shape in ((h, nope, r), (h, d_v, r))]
        tokens = dict(x=torch.randn(s, b, 64, generator=g), qr=torch.randn(s, b, 32, generator=g))
        results = []
        for absorbed in (False, True):
            core.zero_grad()
            q_nope, q_pe, latents, k_pe, up_k, up_v = (x.clone().requires_grad_() for x in leaves)
            if absorbed:
                q, k = torch.einsum("sbhd,hdr->sbhr", q_nope, up_k), latents[:, :, None]
                given = torch.cat((q, q_pe), -1), torch.cat((k, k_pe), -1), None
            else:
                k, v = (torch.einsum("sbr,hdr->sbhd", latents, up) for up in (up_k, up_v))
                given = torch.cat((q_nope, q_pe), -1), torch.cat((k, k_pe.expand(-1, -1, h, -1)), -1), v
            out = core(*given, **tokens, up_v_weight=up_v if absorbed else None)
            out.square().sum().backward()
            for shared in (up_k, up_v):
                dist.all_reduce(shared.grad)
            grads = [x.grad for x in (q_nope, q_pe, latents, k_pe, up_k, up_v, *core.indexer.parameters())]
            results.append([out.detach(), *grads])
            dsa.DSAIndexerLossLoggingHelper.tracker.clear()
    for i, (plain, latent) in enumerate(zip(*results, strict=True)):
        assert plain.count_nonzero()
        assert_near(latent, plain, 16 * SEQ_LENGTH * (r + pe), f"result {i}")


def _core(options=None, **kwargs):
    """A TreeDSAttention for two ranks that is never built as far as its indexer."""
    with tree.megatron_on_cpu():
        config = transformer_config(Case(mla=True), **(options or {}))
        config.context_parallel_size = 2
        groups = types.SimpleNamespace(tp=Group(1), cp=Group(2))
        kwargs = dict(attn_mask_type=AttnMaskType.causal, attention_type="self", pg_collection=groups) | kwargs
        return TreeDSAttention(config, None, 1, **kwargs)


when_built = functools.partial(refused, when="the model is built")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        when_built(
            "options that DSA has not", {"options": {"softmax_type": "learnable"}}, "softmax_type='learnable' in"
        ),
        when_built(
            "options that DSA has not", {"options": {"window_size": (5, 0)}}, r"window_size=\(5, 0\).*set it to None"
        ),
        when_built("options that DSA has not", {"options": {"qk_clip": True}}, "qk_clip=True in a layer with DSA"),
        when_built(
            "options that DSA has not",
            {"options": {"recompute_granularity": "selective"}},
            "recompute_modules has 'core_attn', .* recompute whole layers",
        ),
        when_built("options that DSA has not", {"cp_comm_type": "a2a"}, "cp_comm_type='a2a', ulysses_size=2 in"),
        ({"tree_config": TreeConfig(ulysses_size=2)}, "ulysses_size=2 in a layer with DSA"),
        ({"attention_type": "cross"}, "attention_type='cross'"),
    ],
)
def test_what_is_refused_when_it_is_built(kwargs, message):
    with pytest.raises(ValueError, match=message):
        _core(**kwargs)


@pytest.mark.parametrize("option", ["dsa_indexer_topk_freq", "dsa_indexer_scoring_relu"])
def test_options_of_newer_releases(option):
    config = transformer_config(Case(mla=True))
    compat.refuse_indexed(config)
    setattr(config, option, {"dsa_indexer_topk_freq": 4, "dsa_indexer_scoring_relu": False}[option])
    with pytest.raises(ValueError, match=f"{option}=.* has no such option with a tree: set it to"):
        compat.refuse_indexed(config)


@on_ranks(2)
def test_what_the_forward_can_not_take(rank, world):
    with megatron(tp=1, pp=1, cp=world), hadamard_in_torch():
        model = build_dsa(CASE(cp=world))
        core = model.decoder.layers[0].self_attention.core_attention
        q, x, qr = torch.zeros(4, 1, 8, 24), torch.zeros(4, 1, 64), torch.zeros(4, 1, 32)
        for changed, *said in (
            (dict(x=None), "x=False", "needs the layer's input x"),
            (dict(attention_bias=q), "attention_bias=True", "takes no bias"),
            (dict(up_v_weight=q), "value=True, up_v_weight=True are given"),
            (dict(attn_mask_type=AttnMaskType.no_mask), "AttnMaskType.no_mask", "use causal"),
            (dict(packed_seq_params=PackedSeqParams(qkv_format="bshd")), "qkv_format='bshd'", "'thd'"),
            (dict(attention_mask=torch.arange(8).eq(0).expand(1, 1, 4, 8)), "attention_mask (1, 1, 4, 8)"),
            (dict(some_new_option=3), "some_new_option, which"),
        ):
            with refused_with(*said):
                core(q, q, q[..., :12], **dict(x=x, qr=qr) | changed)


def test_the_checks_of_the_configuration():
    """Megatron refuses context parallelism for DSA, and with install() where a layer has no tree."""
    options = dict(context_parallel_size=2, **dict(DSA))
    tree.install()
    try:
        assert transformer_config(Case(mla=True), **options).context_parallel_size == 2
        for kind in ("p2p", ["tree", "p2p"]):
            with pytest.raises(AssertionError, match="context parallelism is not supported by DSAttention"):
                transformer_config(Case(mla=True), **options | dict(cp_comm_type=kind))
    finally:
        tree.uninstall()
    with pytest.raises(AssertionError, match="context parallelism is not supported by DSAttention"):
        transformer_config(Case(mla=True), **options)


def test_specs(monkeypatch):
    """The parts of a spec stay; what a spec pins, too; a release that was not read is refused."""
    from support.megatron_dsa import dsa_block

    with tree.megatron_on_cpu():
        block = dsa_block(transformer_config(Case(mla=True), **dict(DSA)))
    old = block.layer_specs[0].submodules.self_attention.submodules.core_attention
    new = tree.use_tree_attention(block, tree_config=TreeConfig(grid=(1, 2)))
    core = new.layer_specs[0].submodules.self_attention.submodules.core_attention
    assert old.module is DSAttention and core.module is TreeDSAttention and core.submodules is old.submodules
    assert core.params == {"tree_config": TreeConfig(grid=(1, 2))}
    assert tree.use_tree_attention(new) is new
    other = tree.use_tree_attention(new, tree_config=TreeConfig(grid=(2, 1)))
    core = other.layer_specs[0].submodules.self_attention.submodules.core_attention
    assert core.params["tree_config"].grid == (2, 1) and core.submodules is old.submodules
    monkeypatch.setattr("megatron_tree.integrations.megatron.compat.megatron_version", lambda: "0.21.0")
    with pytest.raises(tree.UnsupportedMegatronError, match=r"0\.21\.0: its DSAttention is not known .* 0\.16.*0\.20"):
        tree.core_attention_for_tree(ModuleSpec(module=DSAttention, submodules=old.submodules))
