"""A GPTModel on 2 ranks against one, with whichever megatron-core PYTHONPATH names. Started by test_patches.py.

    python megatron_release.py WAY RANK WORLD STORE         WAY: spec, install or patch

Prints "equal" for each kind of attention whose losses, gradients, and logits when it is served are those of
context_parallel_size=1.
"""

import contextlib
import importlib
import inspect
import sys
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_tree.integrations import megatron as tree
from megatron_tree.integrations.megatron import compat

SEQ, VOCAB = 16, 64
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
    "multi_latent_attention": True,
}
GDN = {  # Megatron's own torch code of the recurrence
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "deterministic_mode": True,
    "activation_func": F.silu,
}
DSA = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 16,  # with few heads many scores are 0, and which of these are selected is open
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 9,
    "dsa_indexer_loss_coeff": 0.5,
    "calculate_per_token_loss": True,
    "add_bias_linear": False,
}
MAMBA = {"mamba_num_heads": 3, "mamba_head_dim": 8, "mamba_state_dim": 4, "mamba_num_groups": 1}


def config_of(kind, cp, cp_comm_type):
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    make = MLATransformerConfig if kind in ("mla", "dsa") else TransformerConfig
    return make(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=4 if kind in ("mla", "dsa") else 2,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        context_parallel_size=cp,
        cp_comm_type=cp_comm_type,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        **{"gqa": {}, "mla": MLA, "gdn": GDN, "mamba": MAMBA, "dsa": MLA | DSA}[kind],
    )


def layer_spec(kind, by_spec, config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import import_module

    if kind == "dsa":
        from support.megatron_dsa import dsa_block

        return dsa_block(config)
    if kind == "gdn":
        block = gated_delta_net_block("G*")
        return tree.use_tree_attention(block) if by_spec else block
    if by_spec:  # what pretrain_gpt.py does with --spec, in every release
        return import_module(["megatron_tree.integrations.megatron", "get_gpt_layer_tree_spec"])
    return get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=kind == "mla")


def gated_delta_net_block(pattern):
    """Layers of Megatron's own modules and the last norm: G a gated delta net and an MLP, * attention and an MLP."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layers = {letter: get_gpt_layer_local_spec(normalization="RMSNorm") for letter in "G*"}
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    layers["G"].submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)
    return TransformerBlockSubmodules(layer_specs=[layers[x] for x in pattern], layer_norm=WrappedTorchNorm)


def further_kinds(way):
    """Recurrent layers of releases that were read: ours. A patch knows attention only: then gated delta nets of a
    release whose own take a cp_comm_type. DSA, whose configuration install() lets through."""
    if way != "patch":
        is_read = compat.megatron_version().startswith(compat.READ)
        return ["gdn", "mamba"] * is_read + ["dsa"] * (way == "install")
    module = importlib.import_module("megatron.core.ssm.gated_delta_net")
    return ["gdn"] * ("cp_comm_type" in inspect.signature(module.GatedDeltaNet.__init__).parameters)


@contextlib.contextmanager
def kernels_in_torch(kind):
    """Context for models of this kind."""
    from support.megatron_dsa import hadamard_in_torch
    from support.megatron_hybrid import mamba_in_torch

    kernels = {"gdn": gated_delta_net_in_torch, "mamba": mamba_in_torch, "dsa": hadamard_in_torch}
    with kernels.get(kind, contextlib.nullcontext)():
        yield


def hybrid_model(config, by_spec):
    """A Mamba layer, then one of attention."""
    from megatron.core.models.mamba import MambaModel

    from support.megatron_hybrid import stack_spec

    spec = tree.use_tree_attention(stack_spec()) if by_spec else stack_spec()
    sizes = dict(vocab_size=VOCAB, max_sequence_length=SEQ)
    pattern = dict(hybrid_override_pattern="M*", position_embedding_type="rope")
    return MambaModel(config=config, mamba_stack_spec=spec, **sizes, **pattern)


def gpt_model(config, spec):
    from megatron.core.models.gpt.gpt_model import GPTModel

    sizes = dict(vocab_size=VOCAB, max_sequence_length=SEQ)
    return GPTModel(config=config, transformer_layer_spec=spec, **sizes, position_embedding_type="rope")


@contextlib.contextmanager
def gated_delta_net_in_torch():
    """Context in which Megatron builds and runs gated delta nets without flash-linear-attention."""
    package = "megatron.core.ssm.gated_delta_net"
    importlib.import_module(package)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch._dynamo.config, "disable", True))
        for name, module in list(sys.modules.items()):
            if name.startswith(package):
                for attribute, value in (("HAVE_FLA", True), ("l2norm", lambda x: F.normalize(x, dim=-1))):
                    stack.enter_context(mock.patch.object(module, attribute, value, create=True))
        yield


def losses_and_gradients(way, kind, cp):
    """(summed loss, {parameter: gradient}, logits of `served` or None) with `cp` context-parallel ranks."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    cp_comm_type = "tree" if way == "spec" else ["tree", "tree"]  # a list needs install() or the patch up to 0.16
    config, by_spec = config_of(kind, cp, cp_comm_type if cp > 1 else None), way == "spec" and cp > 1
    model = hybrid_model(config, by_spec) if kind == "mamba" else gpt_model(config, layer_spec(kind, by_spec, config))
    cores = {type(module).__name__ for name, module in model.named_modules() if name.endswith(".core_attention")}
    assert cores == {("" if cp == 1 else "Tree") + ("DSAttention" if kind == "dsa" else "DotProductAttention")}, cores
    tokens = torch.randint(VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(2))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    batch["position_ids"] = torch.arange(SEQ).expand(2, SEQ).contiguous()
    batch = {**batch, "cu_seqlens": None} if "cu_seqlens" in wanted_keys() else batch
    if cp > 1:
        batch = compat.batch_on_this_cp_rank(batch)
    mask = None if cp > 1 else torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)
    losses = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    losses.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    if cp > 1:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        total = losses.detach().sum()
        dist.all_reduce(total)
    else:
        total = losses.detach().sum()
    logits = served(model.eval(), tokens[0, :-1], mask) if kind in ("gqa", "mla") else None
    parallel_state.destroy_model_parallel()
    return total, gradients, logits


@torch.no_grad()
def served(model, text, mask):
    """Logits of the last two tokens of a text [s]: by MegatronRunner, or without a cache where there is a mask."""
    if mask is not None:
        positions = torch.arange(len(text))[None]
        return model(text[None], positions, mask, runtime_gather_output=True)[0, -2:]
    runner = tree.MegatronRunner(model, page_size=2)
    row = runner.add()
    return torch.stack((runner.prefill(row, text[:-1]), runner.step([row], text[None, -1:])[0, -1]))


def wanted_keys():
    """Names that a release's `get_batch_on_this_cp_rank` looks for in every batch."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    return ("cu_seqlens",) if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters else ()


def compare(rank, world, way):
    """A small model on `world` ranks against one, tree attention by `way`. Returns the kinds of attention."""
    kinds = ["gqa", "mla", *further_kinds(way)]
    if way == "patch":
        assert compat.is_patched()
        assert not compat.misreads_cp_comm_type_list()
    else:
        assert not compat.is_patched()
    with tree.megatron_on_cpu():
        if way == "install":
            tree.install()
        for kind in kinds:
            with kernels_in_torch(kind):
                loss, gradients, logits = losses_and_gradients(way, kind, world)
                expected_loss, expected, expected_logits = losses_and_gradients(way, kind, 1)
            torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-5)
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    return kinds


def main(way, rank, world, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for kind in compare(rank, world, way):
        print(f"equal {kind}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
