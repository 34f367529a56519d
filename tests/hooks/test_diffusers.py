"""Diffusers' transformers over two ranks against one: outputs, gradients and tangents, with masks of prompts."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.ranks import on_ranks

pytest.importorskip("diffusers", reason="needs diffusers")

import diffusers

from megatron_tree import TreeConfig
from megatron_tree.integrations.diffusers import attend, enable_tree_attention

CONFIG = TreeConfig(backend="reference")
SMALL = dict(num_attention_heads=2, attention_head_dim=16, num_layers=2)
GRID = (2, 4, 4)  # frames, height and width of the latent video, in tokens


def _randn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _wan():
    """Attention over the video alone; every rank attends to the whole prompt, of an odd length."""
    shape = dict(in_channels=4, out_channels=4, text_dim=8, freq_dim=8, ffn_dim=32, rope_max_seq_len=16)
    model = diffusers.WanTransformer3DModel(**SMALL, **shape)
    frames, height, width = GRID
    others = {"encoder_hidden_states": _randn((2, 5, 8), 1)}
    return model, _randn((2, 4, frames, 2 * height, 2 * width), 0), others


def _flux():
    """Prompt and image in one attention."""
    shape = dict(in_channels=8, num_single_layers=1, joint_attention_dim=8, pooled_projection_dim=8)
    model = diffusers.FluxTransformer2DModel(**SMALL, **shape, axes_dims_rope=(4, 4, 8))
    image_ids = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
    others = {"encoder_hidden_states": _randn((2, 6, 8), 1), "pooled_projections": _randn((2, 8), 2)}
    return model, _randn((2, 16, 8), 0), {**others, "img_ids": image_ids, "txt_ids": torch.zeros(6, 3)}


def _qwen():
    """Prompt and image in one attention, where the prompts have different lengths."""
    model = diffusers.QwenImageTransformer2DModel(
        **SMALL, in_channels=8, out_channels=2, joint_attention_dim=8, axes_dims_rope=(4, 6, 6)
    )
    mask = torch.arange(6) < torch.tensor([[6], [2]])  # of the second prompt, the second rank's shard is all padding
    others = {"encoder_hidden_states": _randn((2, 6, 8), 1), "encoder_hidden_states_mask": mask}
    return model, _randn((2, 16, 8), 0), {**others, "img_shapes": [[(1, 4, 4)]] * 2}


def _ltx():
    """Attention to a sharded prompt with a bias for its padding."""
    model = diffusers.LTXVideoTransformer3DModel(
        **SMALL, in_channels=8, out_channels=8, cross_attention_dim=32, caption_channels=8
    )
    mask = (torch.arange(6) < torch.tensor([[6], [2]])).long()
    others = {"encoder_hidden_states": _randn((2, 6, 8), 1), "encoder_attention_mask": mask}
    return model, _randn((2, 32, 8), 0), {**others, **dict(zip(("num_frames", "height", "width"), GRID))}


HUNYUAN = dict(num_attention_heads=2, attention_head_dim=8, num_layers=1, num_single_layers=1, num_refiner_layers=1)
HUNYUAN |= dict(text_embed_dim=8, pooled_projection_dim=8, rope_axes_dim=(2, 2, 4))
MODELS = {"wan": _wan, "flux": _flux, "qwen": _qwen, "ltx": _ltx}


def _mean_flow_loss(model, others, x, t, velocity):
    """(out, its tangent, loss): the loss of one model along its own derivative, docs/derivatives.md."""
    run = lambda x, t: model(x, timestep=t, **others, return_dict=False)[0]  # noqa: E731
    out, change = torch.func.jvp(run, (x, t), (velocity, torch.ones_like(t)))
    return out, change, ((out - velocity.view_as(out) + 0.1 * change) ** 2).mean()


def _found(model, others, x, sum_over_ranks):
    t, velocity = torch.tensor([0.3, 0.7], dtype=torch.float64), _randn(x.shape, 5)
    out, change, loss = _mean_flow_loss(model, others, x, t, velocity)
    names, parameters = zip(*((n, p) for n, p in model.named_parameters()))
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    for gradient in gradients if sum_over_ranks else ():
        dist.all_reduce(gradient)
    return {"out": out.detach(), "tangent": change.detach(), "loss": loss.detach(), **dict(zip(names, gradients))}


@on_ranks(2, fresh=True)
def test_a_diffusers_transformer_over_two_ranks_gives_what_one_rank_gives(world):
    torch.accelerator.device_count = lambda: 1  # diffusers counts accelerators; the CPU is this machine's
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))["cp"]
    torch.manual_seed(0)
    models = {name: make() for name, make in MODELS.items()}
    with sdpa_kernel(SDPBackend.MATH):  # torch's other kernels have no forward-mode derivative
        truths = {name: _found(model.double(), others, x, False) for name, (model, x, others) in models.items()}
    for name, (model, x, others) in models.items():
        enable_tree_attention(model, mesh, config=CONFIG)
        found = _found(model, others, x, True)
        for what, right in truths[name].items():  # some of diffusers' norms and embeddings compute in fp32
            error, scale = (float(x.abs().max()) for x in (found[what] - right, right))
            assert error <= 1e-6 * max(scale, 1e-3), (name, what, error, scale)

    unplanned, flash = diffusers.HunyuanVideoTransformer3DModel(**HUNYUAN), _wan()[0]
    with pytest.raises(ValueError, match="HunyuanVideoTransformer3DModel has no context-parallel plan"):
        enable_tree_attention(unplanned, mesh)
    q = _randn((1, 4, 2, 8), 0)
    with pytest.raises(ValueError, match=r"attn_mask has shape \(1, 1, 4, 4\)"):
        attend(q, q, q, torch.ones(1, 1, 4, 4, dtype=torch.bool), group=mesh, config=CONFIG)
    with pytest.raises(ValueError, match="does not take is_causal"):
        attend(q, q, q, is_causal=True, group=mesh, config=CONFIG)
    flash.set_attention_backend("_native_flash")
    with pytest.raises(ValueError, match=r"attention backends \['_native_flash'\]: call set_attention_backend"):
        enable_tree_attention(flash, mesh)
