"""A GPTModel under context parallelism against the same model on one rank with Megatron's own attention.

    check(4, [Case(cp=4), Case(cp=4, extra=(("qk_layernorm", True),))])

starts four ranks once and goes through all cases, which share a layout. All ranks hold the same weights and text; the
reference is computed on every rank by itself. Losses and every gradient must agree.
"""

import contextlib
import dataclasses
import math
import zlib

import torch
import torch.distributed as dist

from megatron_tree import TreeConfig, unshard_sequence
from megatron_tree.integrations import megatron as tree
from megatron_tree.integrations.megatron import compat
from megatron_tree.integrations.megatron.norm import use_sequence_parallel_norm
from support.ranks import run_distributed

SEQ_LENGTH, VOCAB = 32, 64
TOLERANCE = 3e-5  # of the largest entry, in fp32; processors round differently


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model, its layout and its schedule."""

    cp: int = 1
    tp: int = 1
    pp: int = 1
    batch: int = 3
    num_heads: int = 8
    num_heads_kv: int = 2
    cp_comm_type: str | tuple = "tree"
    cp_sizes: tuple | None = None  # hierarchical_context_parallel_sizes
    tree_config: TreeConfig | None = None
    install: bool = False  # call install() ...
    local_spec: bool = False  # ... and leave Megatron's own layer spec as it is
    tree: bool | None = None  # tree attention; default: with cp > 1
    positions: str = "rope"  # position_embedding_type
    mla: bool = False  # multi-latent attention
    dtype: torch.dtype = torch.float32
    extra: tuple = ()
    """Further options of the TransformerConfig: (name, value) pairs."""

    @property
    def is_tree(self):
        return self.cp > 1 if self.tree is None else self.tree


def schedules(cp):
    """Keyword arguments of a Case: what the planner chooses, the rivals, and every grid."""
    grids = [(a, cp // a) for a in range(1, cp + 1) if cp % a == 0]
    pinned = [{"tree_config": TreeConfig(grid=grid)} for grid in grids]
    return [{}, {"cp_comm_type": "p2p"}, {"cp_comm_type": "all_gather"}, *pinned]


@contextlib.contextmanager
def megatron(*, tp, pp, cp, **others):
    """Megatron's process groups for one layout; on a CPU if there is nothing else.

    others: further arguments of `initialize_model_parallel`.
    """
    from torch.distributed import distributed_c10d

    with tree.megatron_on_cpu():
        from megatron.core import parallel_state
        from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            create_gloo_process_groups=False,
            **others,
        )
        try:
            model_parallel_cuda_manual_seed(1)
            yield
        finally:
            parallel_state.destroy_model_parallel()  # forgets the groups, but leaves their threads running
            for group in [g for g in distributed_c10d._world.pg_map if g is not dist.group.WORLD]:
                dist.destroy_process_group(group)
            for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
                embedding.forward.cache_clear()  # its keys hold the groups of context parallelism


def run_all(cases, run=None):
    """`run(case)` of cases that share a layout; by default `forward_backward`."""
    ((tp, pp, cp, sizes),) = {(case.tp, case.pp, case.cp, case.cp_sizes) for case in cases}
    sizes = {"hierarchical_context_parallel_sizes": list(sizes)} if sizes else {}
    with megatron(tp=tp, pp=pp, cp=cp, **sizes):
        return [(run or forward_backward)(case) for case in cases]


def transformer_config(case, **options):
    """The TransformerConfig of a case; `options` win."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    listed = isinstance(case.cp_comm_type, tuple)
    defaults = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": case.num_heads,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "context_parallel_size": case.cp,
        "cp_comm_type": list(case.cp_comm_type) if listed else case.cp_comm_type,
        "hierarchical_context_parallel_sizes": list(case.cp_sizes) if case.cp_sizes else None,
        "params_dtype": case.dtype,
        "pipeline_dtype": case.dtype,
        "bf16": case.dtype == torch.bfloat16,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "calculate_per_token_loss": True,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
    }
    if case.mla:
        mla = {"multi_latent_attention": True, "rope_type": "rope", "v_head_dim": 12}
        mla |= {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8}
        return MLATransformerConfig(**{**defaults, **mla, **dict(case.extra), **options})
    kv = {"num_query_groups": case.num_heads_kv}
    return TransformerConfig(**{**defaults, **kv, **dict(case.extra), **options})


def layer_spec(case):
    """Megatron's own layer for cp = 1 and for the plugin, else the one with tree attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    options = dict(case.extra)
    arguments = {
        "normalization": "RMSNorm",
        "multi_latent_attention": case.mla,
        "qk_layernorm": options.get("qk_layernorm", False),
        "num_experts": options.get("num_moe_experts"),
    }
    if not case.is_tree or case.local_spec:
        return get_gpt_layer_local_spec(**arguments)
    return tree.get_gpt_layer_tree_spec(**arguments, tree_config=case.tree_config)


def block_spec(case, config):
    """All layers and the final norm, with norms for sequence parallelism."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    block = TransformerBlockSubmodules(layer_specs=[layer_spec(case)] * config.num_layers, layer_norm=WrappedTorchNorm)
    return use_sequence_parallel_norm(block)


def build_model(case, **options):
    """The GPTModel of this rank, with the weights of `set_weights`. `options` go to the TransformerConfig."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    config = transformer_config(case, **options)
    spec = block_spec(case, config) if config.sequence_parallel else layer_spec(case)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=mtp,
        vocab_size=VOCAB,
        max_sequence_length=SEQ_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type=case.positions,
        share_embeddings_and_output_weights=False,
    )
    cores = [module for name, module in model.named_modules() if name.endswith(".core_attention")]
    assert cores and all(isinstance(core, tree.TreeDotProductAttention) == case.is_tree for core in cores)
    set_weights(model)
    return Float16Module(config, model) if case.dtype == torch.bfloat16 else model


def set_weights(model):
    """Weights that depend on the parameter's name and the tensor and pipeline rank alone, exact in every dtype; every
    tensor-parallel rank has the same indexer."""
    from megatron.core import parallel_state

    tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    for name, parameter in model.named_parameters():
        part = 0 if ".indexer." in name else tp
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + 97 * part + 89 * pp)
        noise = 0.15 * torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_((noise + ("norm" in name)).bfloat16())


def whole_batch(case):
    """tokens, labels and positions [b, s] of the whole sequence."""
    text = torch.randint(0, VOCAB, (case.batch, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(7))
    positions = torch.arange(SEQ_LENGTH).expand(case.batch, -1).contiguous()
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous(), "positions": positions}


def multimodal_positions(batch, length=SEQ_LENGTH):
    """Time, height and width [3, b, s]: in each row text, then an image of another size."""
    positions = torch.arange(length).repeat(3, batch, 1)
    for row in range(batch):
        start, columns = 5 + row, 3 + row
        pixels = torch.arange(max(0, length - start))
        image = torch.stack((torch.zeros_like(pixels), pixels // columns, pixels % columns))
        positions[:, row, start:] = start + image
    return positions


@contextlib.contextmanager
def mtp_losses():
    """The losses [b, s/cp] of multi-token prediction, in order; the model only adds their gradients to its own."""
    from unittest import mock

    from megatron.core.models.gpt import gpt_model

    seen = []

    class Recorder(gpt_model.MTPLossAutoScaler):
        @classmethod
        def apply(cls, hidden_states, loss):
            seen.append(loss.detach().clone())
            return super().apply(hidden_states, loss)

    gpt_model.MTPLossLoggingHelper.tracker.clear()  # is as long as the first model's number of these layers
    with mock.patch.object(gpt_model, "MTPLossAutoScaler", Recorder):
        yield seen


def forward_backward(case, build=None):
    """(losses [n, b, s] of the last stage or None, gradients by parameter), of this rank's layers, summed over cp.

    The losses are those of the model's output, then those of multi-token prediction. build: default `build_model`.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if case.install:
        tree.install(tree_config=case.tree_config)
    try:
        model = (build or build_model)(case)
    finally:
        tree.uninstall()

    batch = compat.batch_on_this_cp_rank(whole_batch(case))
    if case.positions == "mrope":  # its embedding takes those of the whole sequence
        batch["positions"] = multimodal_positions(case.batch)

    def forward_step(iterator, model):
        batch = next(iterator)
        losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
        return losses, lambda out: (out.sum(), torch.tensor(out.numel(), dtype=torch.int), out.detach())

    with mtp_losses() as further:
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([batch]),
            model=[model],
            num_microbatches=1,
            seq_length=SEQ_LENGTH,
            micro_batch_size=case.batch,
            forward_only=False,
        )
    gradients = gradients_over_cp(model)
    if not losses:
        return None, gradients
    losses = torch.stack((*losses, *further))
    return (
        losses if case.cp == 1 else unshard_sequence(losses, parallel_state.get_context_parallel_group(), 2)
    ), gradients


def gradients_over_cp(model, group=None):
    """{parameter: its gradient, summed over the ranks that hold other tokens}; default: of the sequence."""
    from megatron.core import parallel_state

    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.float()
        dist.all_reduce(gradient, group=group or parallel_state.get_context_parallel_group())
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        gradients[name.removeprefix("module.")] = gradient
    return gradients


def worst_error(result, reference):
    """Largest relative error of losses and gradients, and where."""
    (losses, gradients), (true_losses, true_gradients) = result, reference
    assert gradients.keys() == true_gradients.keys()
    errors = {
        name: float((g - true_gradients[name]).abs().max() / true_gradients[name].abs().max())
        for name, g in gradients.items()
    }
    if losses is not None:
        errors["losses"] = float(((losses - true_losses).abs() / true_losses.abs().clamp(min=1e-30)).max())
    assert not any(map(math.isnan, errors.values())), errors
    where = max(errors, key=errors.get)
    return errors[where], where


def reference_of(case):
    """The same model on one rank."""
    extra = tuple((name, value) for name, value in case.extra if not name.startswith("recompute"))
    plain = {"install": False, "local_spec": False, "tree": None, "tree_config": None, "cp_comm_type": "tree"}
    plain |= {"cp_sizes": None}
    return dataclasses.replace(case, cp=1, extra=extra, **plain)


def _compare(rank, world, cases, run, reference, run_reference):
    """[(error, where)] of every case."""
    needed = list({repr(r): r for r in map(reference, cases)}.values())
    references = dict(zip(map(repr, needed), run_all(needed, run_reference), strict=True))
    results = run_all(cases, run)
    return [worst_error(result, references[repr(reference(c))]) for result, c in zip(results, cases, strict=True)]


def check(world, cases, *, run=forward_backward, reference=reference_of, run_reference=None, timeout=200.0):
    """Losses and gradients of every case equal the model's on one rank.

    run(case) -> (losses, gradients); reference(case) -> the case it is compared with, which run_reference runs.
    """
    compare = (_compare, world, cases, run, reference, run_reference or run)
    for results in run_distributed(*compare, timeout=timeout):
        for case, (error, where) in zip(cases, results, strict=True):
            assert error <= TOLERANCE, f"{where} is off by {error:.1e} in {case}"
