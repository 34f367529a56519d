"""Training models of images and text on sharded sequences: losses and gradients of one rank without tree attention."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megatron_tree.integrations import transformers as tree_hf
from megatron_tree.integrations.transformers.families.images import MODELS
from support.hf_images import CONFIGS, batches, image_model, video_batch
from support.hf_models import tiny_model
from support.hf_training import averaged_gradients, gradients
from support.ranks import on_ranks, run_distributed
from support_matrix import slow_but, supported

FAST = ("gemma3", "glm4v", "llama4", "llava_next", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "smolvlm")
FP32 = {"glm5_next": 1e-4, "qwen3_5": 1e-4, "qwen3_5_moe": 1e-4}  # their delta rule; other errors are those of the loss


@functools.cache
def _alone(name, what):
    """(loss, gradients) of rows that Transformers runs one by one on this rank."""
    model, total = image_model(name), 0.0
    rows = [video_batch(name)] if what == "video" else batches(name, model)[what][1]
    counts = [int((row["labels"][:, 1:] != -100).sum()) for row in rows]
    for row, count in zip(rows, counts, strict=True):
        loss = model(**row, use_cache=False).loss * count / sum(counts)
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def _check(model, name, what, *, frozen=(), **tiles):
    """Loss and gradients of a batch that the ranks share, and those of `frozen` parts are none."""
    want, grads = _alone(name, what)
    tree_hf.train_on_shards(model, **tiles)
    batch = video_batch(name) if what == "video" else batches(name, model)[what][0]
    loss = model(**tree_hf.shard_batch(batch, cp_group=dist.group.WORLD)).loss
    loss.backward()
    assert sum(float(grad.norm()) for weight, grad in grads.items() if "vis" in weight) > 1e-3, "images do not matter"
    limit, largest = FP32.get(name, 1e-6), max(float(grad.abs().max()) for grad in grads.values())
    assert loss.item() == pytest.approx(want, rel=limit), what
    found = averaged_gradients(model)
    for weight, parameter in model.named_parameters():
        if any(part in weight for part in frozen):
            assert parameter.grad is None, weight
        elif weight in grads:
            error = (found[weight] - grads[weight]).abs().max()
            assert error <= limit * (grads[weight].abs().max() + 0.01 * largest), (what, weight, float(error))


def _trained(rank, world, name):
    for what in ("one row", "padded", "packed"):
        _check(image_model(name), name, what)


ALL_BATCHES = "images: training; 2 and 4 ranks; zigzag, padded, packed"


@pytest.mark.parametrize("name", supported(CONFIGS, ALL_BATCHES, FAST))
def test_training(name):
    run_distributed(_trained, 2, name)


@pytest.mark.parametrize("name", slow_but(["gemma3"], CONFIGS))
def test_training_on_four_ranks(name):
    run_distributed(_trained, 4, name)


def test_every_model_is_tested():
    assert CONFIGS.keys() == MODELS.keys()


OF_VIDEOS = [name for name in CONFIGS if MODELS[name].videos]


@pytest.mark.parametrize(
    "name", supported(OF_VIDEOS, "images: training; also videos; 2 ranks", ("qwen2_5_vl", "qwen3_vl"))
)
@on_ranks(2)
def test_videos(name):
    _check(image_model(name), name, "video")


@on_ranks(2)
def test_tiles_recomputed_layers_and_frozen_vision():
    """Tiles, layers that are recomputed, and a vision part that is frozen."""
    model = image_model("qwen3_vl")
    model.gradient_checkpointing_enable()
    _check(model.train(), "qwen3_vl", "padded", loss_tile=8, mlp_tile=8)

    model = image_model("qwen3_vl")
    model.model.visual.requires_grad_(False)
    features = []
    model.model.visual.register_forward_hook(lambda module, args, output: features.append(output.pooler_output))
    _check(model, "qwen3_vl", "padded", frozen=["visual"])
    assert len(features) == 1 and not features[0].requires_grad


@pytest.mark.parametrize("kind", [
    pytest.param("DDP", marks=pytest.mark.supports("`DistributedDataParallel`", with_="images: training; 2 ranks")),
    pytest.param("FSDP2", marks=pytest.mark.supports("FSDP2 (`fully_shard`)", with_="images: training; 2 ranks")),
])  # fmt: skip
@on_ranks(2)
def test_a_rank_runs_the_images_of_its_tokens_or_one(rank, world, kind):
    """One image at the beginning of the row, whose tokens rank 0 has: what the vision part runs on each rank, and the
    weights after two steps."""
    batch = batches("qwen3_vl", image_model("qwen3_vl"))["one row"][1][0]
    longer = {"input_ids": 60, "labels": -100, "mm_token_type_ids": 0}
    batch |= {key: torch.nn.functional.pad(batch[key], (0, 43), value=fill) for key, fill in longer.items()}

    def steps(wrap, shard):
        model, losses, patches = image_model("qwen3_vl").train(), [], []
        model.model.visual.register_forward_pre_hook(lambda module, args: patches.append(len(args[0])))
        wrapped = wrap(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for _ in range(2):
            loss = wrapped(**shard(batch)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model, patches

    def wrap(model):
        tree_hf.train_on_shards(model)
        if kind == "DDP":
            return DistributedDataParallel(model)
        options = {"mesh": dist.init_device_mesh("cpu", (world,)), "mp_policy": MixedPrecisionPolicy(torch.float32)}
        for layer in (*model.model.visual.blocks, *model.model.language_model.layers):
            fully_shard(layer, **options)
        return fully_shard(model, **options)

    want, plain, of_one = steps(lambda model: model, lambda batch: batch)
    losses, model, patches = steps(wrap, lambda batch: tree_hf.shard_batch(batch, cp_group=dist.group.WORLD))
    assert (of_one, patches) == ([32, 32], [32, 32] if rank == 0 else [16, 16])
    assert losses == pytest.approx(want, rel=1e-6)
    for (name, got), truth in zip(model.named_parameters(), plain.parameters(), strict=True):
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        assert (whole - truth).abs().max() < 1e-6, name


def _shard(model, batch):
    tree_hf.train_on_shards(model)
    return model(**tree_hf.shard_batch(batch, cp_group=None))


def test_what_is_refused():
    batch = batches("qwen3_vl", image_model("qwen3_vl"))["padded"][0]
    wrong = [
        ({"input_features": torch.zeros(1, 2, 3)}, r"\['input_features'\]: only input_ids.* leave the others out"),
        ({"position_ids": torch.arange(37).expand(2, 2, -1)}, r"position_ids \[2, 2, 37\] must have the shape of"),
        ({"mm_token_type_ids": torch.zeros(1, 37)}, r"mm_token_type_ids \[1, 37\] must have the shape of input_ids"),
    ]
    for more, message in wrong:
        with pytest.raises(ValueError, match=message):
            tree_hf.shard_batch(batch | more, cp_group=None)
    batch = batches("llava", image_model("llava"))["one row"][0]  # two images of 16 tokens
    types = {"token_type_ids": (batch["input_ids"] == 120).long()}
    wrong = [
        (types, "token_type_ids with images: LlavaForConditionalGeneration does not take them"),
        ({"pixel_values_videos": torch.zeros(1)}, "LlavaForConditionalGeneration does not train on shards of videos"),
        ({"pixel_values": torch.zeros(3, 3, 16, 16)}, r"32 image tokens for images of \[1, 1, 1\] patches"),
        ({"pixel_values": torch.zeros(4, 3, 16, 16)}, "32 image tokens, but the images give 64 features"),
    ]
    for more, message in wrong:
        with pytest.raises(ValueError, match=message):
            _shard(image_model("llava"), batch | {"pixel_values": batch["pixel_values"].float()} | more)
    model = image_model("gemma3").train()
    model.config.text_config.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"attention_dropout=0.1: Gemma3ForConditionalGeneration has none on shards"):
        _shard(model, batches("gemma3", model)["one row"][0])
    text = tiny_model("llama")
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM \(llama\) trains on shards of text only.* there: aya_vision"
    ):
        _shard(text, batch)
