"""Megatron-core's GPT model, data-parallel wrapper, optimizer and learning-rate schedule, from the options."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from ..config import TreeConfig
from ..integrations import megatron as tree
from .data import VOCAB_SIZE


@dataclass
class Trainee:
    """A model under training."""

    model: Any
    """DistributedDataParallel around this rank's part of the GPTModel."""
    optimizer: Any
    scheduler: OptimizerParamScheduler
    config: TransformerConfig


def start_model_parallel(args: argparse.Namespace) -> None:
    """Create Megatron's process groups and seed its random number generators."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(args.seed)
    model_parallel_cuda_manual_seed(args.seed)


def padded_vocab_size(tensor_parallel_size: int, multiple: int = 64) -> int:
    """Vocabulary size, rounded up to `multiple` and to the tensor-parallel size: 320 for all usual sizes."""
    padded = -(-VOCAB_SIZE // multiple) * multiple
    return -(-padded // tensor_parallel_size) * tensor_parallel_size


def transformer_config(args: argparse.Namespace, *, on_gpu: bool) -> TransformerConfig:
    """Megatron's model configuration: RMSNorm, SwiGLU, no biases, no dropout, losses averaged over all tokens."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    per_layer = args.cp_comm_type if len(args.cp_comm_type) > 1 else args.cp_comm_type[0]
    optional = {} if args.window_size is None else {"window_size": args.window_size}
    if args.window_attn_skip_freq is not None:
        optional["window_attn_skip_freq"] = args.window_attn_skip_freq
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        softmax_type=args.softmax_type,
        init_method_std=args.init_method_std,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        cp_comm_type=per_layer,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=args.bf16,
        calculate_per_token_loss=True,
        recompute_granularity=args.recompute_granularity,
        recompute_modules=args.recompute_modules,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        use_cpu_initialization=not on_gpu,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        **optional,
    )


def layer_spec(args: argparse.Namespace) -> Any:
    """Megatron's own layers; with context parallelism, tree attention in them."""
    if args.context_parallel_size == 1:
        return get_gpt_layer_local_spec(normalization="RMSNorm")
    tree_config = TreeConfig(
        grid=args.grid,
        grid_backward=args.grid_backward,
        head_groups=args.head_groups,
        topology=args.topology,
        backend=args.attention_kernels,
        timeout_s=60.0 * args.distributed_timeout_minutes,
    )
    return tree.get_gpt_layer_tree_spec(normalization="RMSNorm", tree_config=tree_config)


def build_trainee(args: argparse.Namespace, device: torch.device) -> Trainee:
    """Build this rank's part of everything that is trained.

    Args:
        args: checked options.
        device: where parameters live.
    """
    config = transformer_config(args, on_gpu=device.type == "cuda")
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(args),
        vocab_size=padded_vocab_size(args.tensor_model_parallel_size),
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=args.rotary_base,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    ).to(device)
    if args.bf16:
        model = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=True,
    )
    model = DistributedDataParallel(config, ddp_config, model)
    optimizer = get_megatron_optimizer(_optimizer_config(args), [model], use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss
    return Trainee(model=model, optimizer=optimizer, scheduler=_scheduler(args, optimizer), config=config)


def _optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )


def _scheduler(args: argparse.Namespace, optimizer: Any) -> OptimizerParamScheduler:
    """Linear warm-up, then a cosine down to min_lr. Counted in samples, as in Megatron-LM."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=args.train_iters * args.global_batch_size,
        lr_decay_style="cosine",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,  # a resumed run follows its own options
        override_opt_param_scheduler=True,
    )
