"""A GPTModel under context parallelism against the same model on one rank with Megatron's own attention.

Every test is one call of a rank function, which goes through many cases with one process group. All ranks hold the same
weights and text; the reference is computed on every rank by itself.
"""

import contextlib
import dataclasses
import zlib

import pytest
import torch
import torch.distributed as dist

from dist_utils import run_distributed

pytest.importorskip("megatron.core")

from megatron_tree import TreeConfig, unshard_sequence
from megatron_tree.integrations import megatron as tree

SEQ_LENGTH, VOCAB = 32, 64
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    cp: int = 1
    tp: int = 1
    pp: int = 1
    batch: int = 3
    num_heads: int = 8
    num_heads_kv: int = 2
    cp_comm_type: str | tuple = "tree"
    tree_config: TreeConfig | None = None
    install: bool = False  # call install() ...
    local_spec: bool = False  # ... and leave Megatron's own layer spec as it is
    dtype: torch.dtype = torch.float32
    extra: tuple = ()


@contextlib.contextmanager
def megatron(*, tp, pp, cp):
    """Megatron's process groups for one layout; on a CPU if there is nothing else."""
    from torch.distributed import distributed_c10d

    with tree.megatron_on_cpu():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            create_gloo_process_groups=False,
        )
        try:
            model_parallel_cuda_manual_seed(1)
            yield
        finally:
            parallel_state.destroy_model_parallel()  # forgets the groups, but leaves their threads running
            for group in [g for g in distributed_c10d._world.pg_map if g is not dist.group.WORLD]:
                dist.destroy_process_group(group)


def run_all(cases):
    """[(losses, gradients)] of cases that share a layout."""
    (layout,) = {(case.tp, case.pp, case.cp) for case in cases}
    with megatron(**dict(zip(("tp", "pp", "cp"), layout, strict=True))):
        return [forward_backward(case) for case in cases]


def transformer_config(case):
    from megatron.core.transformer.transformer_config import TransformerConfig

    listed = isinstance(case.cp_comm_type, tuple)
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=case.num_heads,
        num_query_groups=case.num_heads_kv,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        context_parallel_size=case.cp,
        cp_comm_type=list(case.cp_comm_type) if listed else case.cp_comm_type,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        bf16=case.dtype == torch.bfloat16,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        **dict(case.extra),
    )


def build_model(case):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    if case.cp == 1 or case.local_spec:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    else:
        spec = tree.get_gpt_layer_tree_spec(normalization="RMSNorm", tree_config=case.tree_config)
    config = transformer_config(case)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    cores = {type(layer.self_attention.core_attention).__name__ for layer in model.decoder.layers}
    assert cores == {"DotProductAttention" if case.cp == 1 else "TreeDotProductAttention"}
    shard = (
        97 * parallel_state.get_tensor_model_parallel_rank() + 89 * parallel_state.get_pipeline_model_parallel_rank()
    )
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + shard)
        noise = 0.15 * torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_((noise + ("layernorm" in name)).bfloat16())  # every dtype gets exactly the same weights
    return Float16Module(config, model) if case.dtype == torch.bfloat16 else model


def forward_backward(case):
    """(losses [b, s] of the last stage or None, gradients by parameter), of this rank's layers, summed over cp."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_batch_on_this_cp_rank

    if case.install:
        tree.install(tree_config=case.tree_config)
    try:
        model = build_model(case)
    finally:
        tree.uninstall()
    group = parallel_state.get_context_parallel_group()
    text = torch.randint(0, VOCAB, (case.batch, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(7))
    positions = torch.arange(SEQ_LENGTH).expand(case.batch, -1).contiguous()
    whole = {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous(), "positions": positions}

    def forward_step(iterator, model):
        batch = next(iterator)
        losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
        return losses, lambda out: (out.sum(), torch.tensor(out.numel(), dtype=torch.int), out.detach())

    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([get_batch_on_this_cp_rank(whole)]),
        model=[model],
        num_microbatches=1,
        seq_length=SEQ_LENGTH,
        micro_batch_size=case.batch,
        forward_only=False,
    )
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.float()
        dist.all_reduce(gradient, group=group)
        gradients[name.removeprefix("module.")] = gradient
    if not losses:
        return None, gradients
    return (losses[0] if case.cp == 1 else unshard_sequence(losses[0], group, 1)), gradients


def worst_error(result, reference):
    """Largest relative error of losses and gradients, and where."""
    (losses, gradients), (true_losses, true_gradients) = result, reference
    assert gradients.keys() == true_gradients.keys()
    errors = {
        name: float((g - true_gradients[name]).abs().max() / true_gradients[name].abs().max())
        for name, g in gradients.items()
    }
    if losses is not None:
        errors["losses"] = float(((losses - true_losses) / true_losses).abs().max())
    assert all(error == error for error in errors.values()), errors
    where = max(errors, key=errors.get)
    return errors[where], where


def reference_of(case):
    extra = tuple((name, value) for name, value in case.extra if not name.startswith("recompute"))
    return dataclasses.replace(case, cp=1, install=False, tree_config=None, cp_comm_type="tree", extra=extra)


def _compare(rank, world, cases):
    """[(error, where)] of every case."""
    needed = list({repr(r): r for r in map(reference_of, cases)}.values())
    references = dict(zip(map(repr, needed), run_all(needed), strict=True))
    results = run_all(cases)
    return [worst_error(result, references[repr(reference_of(c))]) for result, c in zip(results, cases, strict=True)]


def check(world, cases):
    for results in run_distributed(_compare, world, cases, timeout=200.0):
        for case, (error, where) in zip(cases, results, strict=True):
            assert error <= TOLERANCE, f"{where} is off by {error:.1e} in {case}"


def schedules(cp):
    grids = [(a, cp // a) for a in range(1, cp + 1) if cp % a == 0]
    pinned = [{"tree_config": TreeConfig(grid=grid)} for grid in grids]
    return [{}, {"cp_comm_type": "p2p"}, {"cp_comm_type": "all_gather"}, *pinned]


@pytest.mark.parametrize("cp", [2, 4])
def test_every_schedule_equals_one_rank(cp):
    heads = [8, 2, 1]  # MHA, GQA, MQA
    check(cp, [Case(cp=cp, num_heads_kv=h, batch=b, **s) for h in heads for b in (1, 3) for s in schedules(cp)])


def test_sinks_and_windows():
    window = (("window_size", (5, 0)),)
    skipping = (*window, ("window_attn_skip_freq", 2))
    listed = (*window, ("window_attn_skip_freq", [0, 1]))
    sinks = [(("softmax_type", name),) for name in ("off-by-one", "learnable")]
    kinds = [window, skipping, listed, *sinks, (*skipping, *sinks[1])]
    check(2, [Case(cp=2, extra=extra, **schedule) for extra in kinds for schedule in schedules(2)])


def test_recomputation():
    selective = (("recompute_granularity", "selective"), ("recompute_modules", ["core_attn"]))
    full = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
    check(4, [Case(cp=4, extra=extra, **schedule) for extra in (selective, full) for schedule in schedules(4)])


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
def test_with_other_parallelism(layout):
    check(4, [Case(cp=2, **layout, **schedule) for schedule in schedules(2)])


def test_plugin_needs_only_the_configuration():
    plugin = {"cp": 2, "install": True, "local_spec": True}
    pinned = TreeConfig(grid=(1, 2))
    check(2, [Case(**plugin), Case(**plugin, tree_config=pinned), Case(**plugin, cp_comm_type=("tree", "tree"))])


def test_a_schedule_for_each_layer():
    check(
        2,
        [
            Case(cp=2, install=True, cp_comm_type=("tree", "p2p")),
            Case(cp=2, install=True, cp_comm_type=("all_gather", "tree")),
        ],
    )


def _sink_shards(rank, world, tp, cp):
    """Where the learnable sinks of the first layer go in a checkpoint: ours (cp) and Megatron's own (cp = 1)."""
    from megatron.core import parallel_state

    shards = []
    for size in (cp, 1):
        with megatron(tp=tp, pp=1, cp=size):
            model = build_model(Case(tp=tp, cp=size, extra=(("softmax_type", "learnable"),)))
            dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
            state = model.sharded_state_dict(metadata={"dp_cp_group": dp_cp})
            (shard,) = [item for key, item in state.items() if "layers.0" in key and "softmax_offset" in key]
            shards.append((shard.key, shard.global_shape, shard.global_offset, shard.replica_id))
    return shards


def test_sinks_are_stored_as_megatron_stores_them():
    ranks = run_distributed(_sink_shards, 4, 2, 2)
    assert all(ours == megatrons for ours, megatrons in ranks)
    assert {ours[2] for ours, _ in ranks} == {(0, 0), (0, 4)}


def _bf16_errors(rank, world, cases):
    """Errors (Frobenius norm) of tree and dense bf16 against fp32, same weights: [(name, tree, dense)] by case."""
    reference = reference_of(cases[0])
    truth, dense = run_all([dataclasses.replace(reference, dtype=torch.float32), reference])
    rows = []
    for result in run_all(cases):
        names = [("losses", result[0], dense[0], truth[0])]
        names += [(name, result[1][name], dense[1][name], true) for name, true in truth[1].items()]
        rows.append([(name, float((a - c).norm()), float((b - c).norm())) for name, a, b, c in names])
    return rows


@pytest.mark.parametrize("cp", [2, 4])
def test_bf16_is_as_good_as_dense_bf16(cp):
    cases = [Case(cp=cp, dtype=torch.bfloat16, **schedule) for schedule in schedules(cp)]
    for case, rows in zip(cases, run_distributed(_bf16_errors, cp, cases)[0], strict=True):
        for name, error, dense in rows:
            limit = 2 if name == "losses" else 3
            assert error <= limit * dense, f"{name}: {error:.2e}, dense bf16 {dense:.2e}, {case}"
