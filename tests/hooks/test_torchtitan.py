"""TorchTitan's Llama 3 with tree attention over two ranks against its own masks on one."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from support.ranks import on_ranks

pytest.importorskip("torchtitan", reason="needs torchtitan")
pytest.importorskip("spmd_types", reason="needs spmd_types")
pytest.importorskip("tensorboard", reason="needs tensorboard")

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models import gpt_oss
from torchtitan.models.common.attention import get_causal_mask_mod, get_document_mask_mod
from torchtitan.models.gpt_oss.model import GptOssModel
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from megatron_tree import TreeConfig
from megatron_tree.integrations.torchtitan import IS_FOLDED, SPMD_BACKEND, with_tree_attention

DOCUMENTS = [[5, 11, 16], [32]]  # of each row of the batch


def _batch():
    tokens = torch.randint(0, 2048, (2, 33), generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    batch = tokens[:, :-1], tokens[:, 1:], positions
    return [x.flatten() for x in batch] if IS_FOLDED else batch


def _spec():
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    return spec


def _built(spec, parallelism):
    spec.model.update_from_config(config=Trainer.Config(model_spec=spec, parallelism=parallelism))
    torch.manual_seed(0)
    model = spec.model.build()
    model.init_states()
    return model


@contextlib.contextmanager
def _types_checked(dims, batch):
    """TorchTitan's debug.spmd_typechecking, which releases later than 0.3 have."""
    if not IS_FOLDED:
        yield
        return
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types

    annotate_input_spmd_types(dims, *batch)
    with get_spmd_context(parallel_dims=dims, spmd_typechecking=True)():
        yield


def _loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum")


def _mask(positions):
    """[b, 1, s, s]: what TorchTitan's flex attention gets, as a dense mask."""
    count, at = positions.numel() // positions.shape[-1], torch.arange(positions.shape[-1])
    rows, mods = torch.arange(count)[:, None, None, None], (get_causal_mask_mod(), get_document_mask_mod(positions))
    return torch.stack([mod(rows, None, at[:, None], at).expand(count, 1, -1, -1) for mod in mods]).all(0)


def _dense_attention(q, k, v, *, attention_masks, scale, enable_gqa):
    shape, (q, k, v) = q.shape, (x.view(-1, *x.shape[-3:]).transpose(1, 2) for x in (q, k, v))
    options = dict(attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).reshape(shape)


@functools.cache  # torch's FSDP tells equal meshes apart
def _dims(world, spmd_backend):
    parallelism = ParallelismConfig(context_parallel_degree=world, spmd_backend=spmd_backend)
    dims = ParallelDims.from_config(parallelism, world)
    with mock.patch.object(parallel_dims, "device_type", "cpu"):  # without a GPU it says "cuda"
        dims.build_mesh()
    return dims


def _parallel(parallelism, world):
    spec = with_tree_attention(_spec(), tree_config=TreeConfig(backend="reference"))
    set_spmd_backend(parallelism.spmd_backend)
    dims = _dims(world, parallelism.spmd_backend)
    training = TrainingConfig(mixed_precision_param="float32")
    others = dict(training=training, compile_config=CompileConfig(enable=False), ac_config=None, dump_folder="")
    model = spec.parallelize_fn(_built(spec, parallelism), parallel_dims=dims, parallelism=parallelism, **others)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    return model, dims


def test_models_with_windows_and_other_masks_are_refused():
    with pytest.raises(ValueError, match=r"gpt_oss: a layer's inner attention is .*window_size=\(127, 0\)"):
        with_tree_attention(gpt_oss.model_registry("debugmodel"))
    model = GptOssModel.__new__(GptOssModel)
    with pytest.raises(ValueError, match="GptOssModel makes its own masks"):
        with_tree_attention(_spec()).parallelize_fn(model, parallel_dims=None, parallelism=None)


@on_ranks(2, fresh=True)
def test_packed_documents_over_two_ranks_give_what_one_rank_gives(world):
    tokens, labels, positions = _batch()
    plain = _built(_spec(), ParallelismConfig())
    for layer in plain.layers.values():  # on the CPU flex attention has no backward
        layer.attention.inner_attention.forward = _dense_attention
    truth = _loss(plain(tokens, positions=positions, attention_masks=_mask(positions)), labels)
    truth.backward()
    right = {name: p.grad for name, p in plain.named_parameters()}

    for balancer in ("headtail", None):
        options = dict(context_parallel_load_balancer=balancer, spmd_backend=SPMD_BACKEND)
        model, dims = _parallel(ParallelismConfig(context_parallel_degree=world, **options), world)
        batch = tokens, labels, {"positions": positions}
        batch = prepare_context_parallel_input(*batch, dims.get_mesh("cp"), torch.device("cpu"), balancer)
        with _types_checked(dims, batch):
            logits = model(batch[0], **batch[2])
        loss = _loss(logits, batch[1])
        loss.backward()
        dist.all_reduce(total := loss.detach().clone())
        torch.testing.assert_close(total, truth.detach(), rtol=1e-6, atol=0)
        for name, parameter in model.named_parameters():
            found = parameter.grad.full_tensor()
            error, scale = (float(x.abs().max()) for x in (found - right[name], right[name]))
            assert error <= 1e-5 * scale, (name, error, scale)
    other = "partial_dtensor" if IS_FOLDED else "spmd_types"  # TorchTitan itself refuses the former
    for refused, backend in (("spmd_backend='spmd_types'", other), ("balancer='ptrr'", SPMD_BACKEND)):
        options = {"context_parallel_load_balancer": "ptrr", "spmd_backend": backend}
        with pytest.raises(ValueError, match=refused):
            _parallel(ParallelismConfig(context_parallel_degree=world, **options), world)
