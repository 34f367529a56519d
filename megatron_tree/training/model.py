"""Megatron-core's GPT model, data-parallel wrapper and optimizer, from the options."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from ..config import TreeConfig
from ..integrations import megatron as tree
from ..integrations.megatron.fusions import fusion_options
from ..integrations.megatron.norm import use_sequence_parallel_norm
from .schedule import build_scheduler


@dataclass
class Trainee:
    """A model under training."""

    chunks: list[Any]
    """DistributedDataParallel around each part of the GPTModel that this rank holds: one, or one per virtual stage."""
    optimizer: Any
    scheduler: Any
    config: TransformerConfig

    def named_chunks(self) -> list[tuple[str, Any]]:
        """The parts with Megatron-LM's names for them in a checkpoint."""
        if len(self.chunks) == 1:
            return [("model", self.chunks[0])]
        return [(f"model{stage}", chunk) for stage, chunk in enumerate(self.chunks)]

    def num_parameters(self) -> int:
        """Of this rank."""
        return sum(p.numel() for chunk in self.chunks for p in chunk.parameters())

    def loss_scale(self) -> float:
        """1 unless training is in fp16."""
        return float(self.optimizer.get_loss_scale())


def start_model_parallel(args: argparse.Namespace) -> None:
    """Create Megatron's process groups and seed its random number generators."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()  # as Megatron-LM spreads them
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int, multiple: int = 64) -> int:
    """Vocabulary size, rounded up to `multiple` and to the tensor-parallel size."""
    padded = -(-vocab_size // multiple) * multiple
    return -(-padded // tensor_parallel_size) * tensor_parallel_size


def parameter_dtype(args: argparse.Namespace) -> torch.dtype:
    """Of the parameters that compute; the optimizer's own copies are fp32."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def transformer_config(args: argparse.Namespace, *, on_gpu: bool) -> TransformerConfig:
    """Megatron's model configuration: RMSNorm, SwiGLU, no biases, losses averaged over all tokens."""
    dtype = parameter_dtype(args)
    interleaved = args.num_virtual_stages_per_pipeline_rank is not None
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
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        attention_softmax_in_fp32=True,
        softmax_type=args.softmax_type,
        init_method_std=args.init_method_std,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.num_virtual_stages_per_pipeline_rank,
        overlap_p2p_comm=interleaved,  # without it, messages between two stages would take each other's place
        batch_p2p_comm=not interleaved,
        context_parallel_size=args.context_parallel_size,
        hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
        cp_comm_type=per_layer,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=args.bf16,
        fp16=args.fp16,
        calculate_per_token_loss=True,
        recompute_granularity=args.recompute_granularity,
        recompute_modules=args.recompute_modules,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        use_cpu_initialization=not on_gpu,
        bias_activation_fusion=on_gpu,
        **(fusion_options(normalization="RMSNorm") if on_gpu else {}),
        **optional,
    )


def block_spec(args: argparse.Namespace, config: TransformerConfig, stage: int | None) -> Any:
    """Megatron's own layers; with context parallelism tree attention in them, with sequence parallelism our norm."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=stage
    )
    if args.sequence_parallel:
        spec = use_sequence_parallel_norm(spec)
    if args.context_parallel_size == 1:
        return spec
    tree_config = TreeConfig(
        grid=args.grid,
        grid_backward=args.grid_backward,
        head_groups=args.head_groups,
        topology=args.topology,
        backend=args.attention_kernels,
        timeout_s=60.0 * args.distributed_timeout_minutes,
    )
    return tree.use_tree_attention(spec, tree_config=tree_config)


def build_trainee(args: argparse.Namespace, device: torch.device) -> Trainee:
    """Build this rank's part of everything that is trained.

    Args:
        args: checked options.
        device: where parameters live.
    """
    config = transformer_config(args, on_gpu=device.type == "cuda")
    config.finalize_model_grads_func = finalize_model_grads
    chunks = [_chunk(args, config, device, stage) for stage in range(args.num_virtual_stages_per_pipeline_rank or 1)]
    optimizer = get_megatron_optimizer(_optimizer_config(args), chunks, use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss
    return Trainee(chunks=chunks, optimizer=optimizer, scheduler=build_scheduler(args, optimizer), config=config)


def _chunk(args: argparse.Namespace, config: TransformerConfig, device: torch.device, stage: int) -> Any:
    """The part of the model that this rank holds in a virtual stage (0 if there are none)."""
    place = {"ignore_virtual": False, "vp_stage": stage}
    vp_stage = None if args.num_virtual_stages_per_pipeline_rank is None else stage
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(args, config, vp_stage),
        vocab_size=padded_vocab_size(args.vocab_size, args.tensor_model_parallel_size),
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        position_embedding_type="rope",
        rotary_base=args.rotary_base,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
    ).to(device)
    if args.bf16 or args.fp16:
        model = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=not args.fp16,  # there they are expected: the loss scale follows them
    )
    return DistributedDataParallel(config, ddp_config, model, disable_bucketing=stage > 0)


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
        fp16=args.fp16,
        loss_scale=args.loss_scale,
        initial_loss_scale=args.initial_loss_scale,
        min_loss_scale=args.min_loss_scale,
        loss_scale_window=args.loss_scale_window,
        hysteresis=args.hysteresis,
        params_dtype=parameter_dtype(args),
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
