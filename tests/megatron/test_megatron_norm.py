"""The norm for sequence parallelism without Apex and TransformerEngine, and its way into a spec. No ranks."""

import copy

import pytest
import torch
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_tree.integrations import megatron as tree
from support.core_attention import config


def block_spec():
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    return TransformerBlockSubmodules(layer_specs=[layer, layer], layer_norm=WrappedTorchNorm)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_it_computes_what_megatrons_norm_computes(normalization):
    model = config(normalization=normalization)
    theirs, ours = WrappedTorchNorm(model, 32, eps=1e-3), tree.SequenceParallelNorm(model, 32, eps=1e-3)
    assert [(name, x.shape) for name, x in ours.state_dict().items()] == [
        (name, x.shape) for name, x in theirs.state_dict().items()
    ]
    for parameter in theirs.parameters():
        parameter.data.normal_()
    ours.load_state_dict(theirs.state_dict())
    x = 3 + torch.randn(5, 2, 32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    assert ours.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_weights_around_zero():
    plain = tree.SequenceParallelNorm(config(normalization="RMSNorm"), 32)
    around_zero = tree.SequenceParallelNorm(config(normalization="RMSNorm", layernorm_zero_centered_gamma=True), 32)
    x = torch.randn(3, 32)
    assert not around_zero.weight.any()
    assert torch.equal(plain(x), around_zero(x))
    around_zero.weight.data.fill_(0.5)
    torch.testing.assert_close(around_zero(x), 1.5 * plain(x))


def test_every_norm_of_a_block_is_replaced():
    spec = block_spec()
    before = copy.deepcopy(spec)
    result = tree.use_sequence_parallel_norm(tree.use_tree_attention(spec))
    assert spec == before
    assert result.layer_norm is tree.SequenceParallelNorm
    first, second = (layer.submodules for layer in result.layer_specs)
    assert first is second, "a spec used twice stays one object"
    attention = first.self_attention.submodules
    norms = (first.input_layernorm, first.pre_mlp_layernorm, attention.q_layernorm, attention.k_layernorm)
    assert set(norms) == {tree.SequenceParallelNorm}
    assert attention.core_attention.module is tree.TreeDotProductAttention
    assert tree.use_sequence_parallel_norm(result) is result
    fused = TransformerBlockSubmodules(layer_specs=[], layer_norm=FusedLayerNorm)
    assert tree.use_sequence_parallel_norm(fused) is fused, "fused norms stay"


@pytest.mark.refuses("a single layer's spec", when="use_sequence_parallel_norm is called")
def test_a_layer_spec_is_refused():
    with pytest.raises(ValueError, match="pass a block spec"):
        tree.use_sequence_parallel_norm(get_gpt_layer_local_spec(normalization="RMSNorm"))


@pytest.mark.refuses("another normalization in SequenceParallelNorm", when="the model is built")
def test_another_normalization_is_refused():
    with pytest.raises(ValueError, match=r"normalization='L2Norm'.*one of LayerNorm, RMSNorm"):
        tree.SequenceParallelNorm(config(normalization="L2Norm"), 32)
