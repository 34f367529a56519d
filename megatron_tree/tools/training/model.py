"""Megatron-core's GPT model, data-parallel wrapper, optimizer and learning-rate schedule, from the options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from ...core.config import default_config
from ...integrations import megatron as tree
from ...integrations.megatron.fusions import fusion_options
from ...integrations.megatron.norm import use_sequence_parallel_norm


class Trainee(NamedTuple):
    """A model under training."""

    model: DistributedDataParallel
    """Around this rank's part of the GPTModel."""
    optimizer: Any
    scheduler: OptimizerParamScheduler


def start_model_parallel(args: argparse.Namespace) -> None:
    """Create Megatron's process groups, and seed the generators for the initial weights."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)


def build_trainee(args: argparse.Namespace, device: torch.device) -> Trainee:
    """Build this rank's part of everything that is trained, with its parameters on `device`."""
    model = build_model(args).to(device)
    config = model.config
    config.finalize_model_grads_func = finalize_model_grads
    model = Float16Module(config, model) if args.bf16 else model
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=True,
    )
    model = DistributedDataParallel(config, ddp_config, model)
    named = _named(OptimizerConfig, args) | {"min_lr": args.lr / 10, "params_dtype": config.params_dtype}
    optimizer_config = OptimizerConfig(optimizer="adam", adam_beta2=0.95, **named)
    optimizer = get_megatron_optimizer(optimizer_config, [model], use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss
    return Trainee(model, optimizer, build_scheduler(args, optimizer))


def build_model(args: argparse.Namespace, **config: Any) -> GPTModel:
    """This rank's part of the model. config: further fields of its TransformerConfig."""
    transformer, tp = transformer_config(args, **config), args.tensor_model_parallel_size
    return GPTModel(
        config=transformer,
        transformer_layer_spec=_block_spec(args, transformer),
        vocab_size=-(-padded_vocab_size(vars(args)) // tp) * tp,
        max_sequence_length=args.seq_length,
        position_embedding_type="rope",
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )


def padded_vocab_size(options: Mapping[str, Any]) -> int:
    """Rows of the embedding, before tensor parallelism asks for a multiple of its ranks."""
    unit = options["make_vocab_size_divisible_by"]
    return -(-options["vocab_size"] // unit) * unit


def transformer_config(args: argparse.Namespace, **others: Any) -> TransformerConfig:
    """Megatron's model configuration: RMSNorm, SwiGLU, no biases but those of q, k and v. others: further fields.

    Raises: ValueError, AssertionError for values that Megatron-core refuses.
    """
    on_gpu, dtype = torch.cuda.is_available(), torch.bfloat16 if args.bf16 else torch.float32
    named = _named(TransformerConfig, args) | {"layernorm_epsilon": args.norm_epsilon, **others}
    return TransformerConfig(
        **named,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_softmax_in_fp32=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        calculate_per_token_loss=True,
        use_cpu_initialization=not on_gpu,
        bias_activation_fusion=on_gpu,
        **(fusion_options() if on_gpu else {}),
    )


def _named(config: type, args: argparse.Namespace) -> dict[str, Any]:
    """The options that are fields of one of Megatron's configurations, by name; those left at None keep its default."""
    given = {field.name: getattr(args, field.name, None) for field in fields(config)}
    return {name: value for name, value in given.items() if value is not None}


def _block_spec(args: argparse.Namespace, config: TransformerConfig) -> Any:
    """Megatron's own layers; with context parallelism tree attention in them, with sequence parallelism our norm."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    if args.sequence_parallel:
        spec = use_sequence_parallel_norm(spec)
    if args.context_parallel_size == 1:
        return spec
    config = replace(default_config(), timeout_s=60.0 * args.distributed_timeout_minutes)
    return tree.use_tree_attention(spec, tree_config=config)


def build_scheduler(args: argparse.Namespace, optimizer: Any) -> OptimizerParamScheduler:
    """Megatron-core's scheduler, which counts samples. A resumed run follows its own options, not the checkpoint's."""
    batch = args.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.lr / 10,
        lr_warmup_steps=args.lr_warmup_iters * batch,
        lr_decay_steps=args.lr_decay_iters * batch,
        lr_decay_style="cosine",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
