"""Megatron's DSA on CPU ranks: its own code, with the Hadamard transform and one linear layer written in torch.

check(2, [Case(cp=2, mla=True, install=True, extra=DSA)], run=run_dsa)
"""

import contextlib
import dataclasses
import math
from unittest import mock

import torch
import torch.distributed as dist

from megatron_tree.integrations import megatron as tree
from support.megatron_models import SEQ_LENGTH, VOCAB, forward_backward, set_weights, transformer_config
from support.megatron_release import DSA as OPTIONS

DSA = tuple(OPTIONS.items())


def with_options(**options):
    """DSA with other options."""
    return tuple((OPTIONS | options).items())


class Duplicated(torch.nn.Linear):
    """A projection that every tensor-parallel rank has whole, as TransformerEngine's."""

    def __init__(self, inputs, outputs, *, config, init_method, bias, parallel_mode, **others):
        assert parallel_mode == "duplicated" and not bias
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)

    def forward(self, x):
        return super().forward(x), None


def hadamard(x):
    """The normed Walsh-Hadamard transform of the last dimension, a power of two."""
    matrix = torch.ones(1, 1, dtype=x.dtype)
    for _ in range(int(math.log2(x.shape[-1]))):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return x @ matrix * x.shape[-1] ** -0.5


@contextlib.contextmanager
def hadamard_in_torch():
    """Context in which Megatron's DSA runs without fast_hadamard_transform, in any dtype."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    with mock.patch.object(dsa, "rotate_activation", hadamard):
        yield dsa


def dsa_block(config):
    """Megatron's spec of DSA, with layers of its own instead of TransformerEngine's."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_dsa_module_spec_for_backend
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    class Backend(LocalSpecProvider):
        def linear(self):
            return Duplicated

    attention = get_dsa_module_spec_for_backend(config, Backend())
    parts = dict.fromkeys(("linear_q_down_proj", "linear_kv_down_proj"), ColumnParallelLinear)
    attention.submodules = dataclasses.replace(attention.submodules, **parts)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True)
    layer.submodules.self_attention = attention
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=WrappedTorchNorm)


def build_dsa(case, **options):
    """The GPTModel of this rank, with the weights of `set_weights`. `options` go to the TransformerConfig."""
    if not case.is_tree:
        return _model(case, **options)
    tree.install(tree_config=case.tree_config)
    try:
        return _model(case, **options)
    finally:
        tree.uninstall()


def _model(case, **options):
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    config = transformer_config(case, **options)
    spec = dsa_block(config)
    if config.sequence_parallel:
        spec = tree.use_sequence_parallel_norm(spec)
    if case.is_tree and not case.local_spec:
        spec = tree.use_tree_attention(spec, tree_config=case.tree_config)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQ_LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    cores = {type(layer.self_attention.core_attention).__name__ for layer in model.decoder.layers}
    assert cores == {"TreeDSAttention" if case.is_tree else "DSAttention"}, cores
    set_weights(model)
    return Float16Module(config, model) if case.dtype == torch.bfloat16 else model


def build_weighted(case, times=1.0):
    """`build_dsa` for one document after another: the indexer's loss is the mean over the tokens of all, times this."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

    model = build_dsa(case)

    def weight(_, args):
        DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(times * args[0].shape[1] / sum(case.documents)))

    model.register_forward_pre_hook(weight)
    return model


def logged_losses(dsa):
    """The indexer's losses by layer, as Megatron logs them; the tracker is empty afterwards."""
    from megatron.core import parallel_state

    with mock.patch.object(dist.ReduceOp, "AVG", dist.ReduceOp.SUM):  # gloo has no average
        dsa.DSAIndexerLossLoggingHelper.reduce_loss_in_tracker()
    values = dsa.DSAIndexerLossLoggingHelper.tracker.pop("values") / parallel_state.get_data_parallel_world_size()
    dsa.DSAIndexerLossLoggingHelper.clean_loss_in_tracker()
    return values


def run_dsa(case, run=forward_backward, build=build_dsa):
    """`run` of a model with DSA; the logged losses are with its gradients."""
    with hadamard_in_torch() as dsa:
        losses, gradients = run(case, build=build)
        dsa.DSAIndexerLossAutoScaler.main_loss_backward_scale = None
        logged = logged_losses(dsa)
    if not dict(case.extra).get("calculate_per_token_loss", True):  # averaged over the ranks, not summed
        gradients = {name: x / case.cp for name, x in gradients.items()}
    return losses, gradients if hasattr(case, "documents") else gradients | {"logged": logged}
