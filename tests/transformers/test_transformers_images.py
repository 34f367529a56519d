"""Models of images and text: the text part with attention "tree", the vision part with Transformers' own."""

import pytest
import torch

from support.ranks import run_distributed

transformers = pytest.importorskip("transformers")

IMPLEMENTATIONS = {"text_config": "tree", "vision_config": "sdpa"}
IMAGE, TOKENS = 120, 16  # the token that stands for a part of an image, and how many parts the image has
VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
}  # fmt: skip
TEXT = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def _model(name):
    """A random model, the same on every rank."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    if name == "qwen3_vl":
        made, config = transformers.Qwen3VLForConditionalGeneration, transformers.Qwen3VLConfig
        text, vision = TEXT | {"rope_parameters": rope}, VISION | {"deepstack_visual_indexes": [0]}
    else:
        made, config = transformers.Qwen3_5ForConditionalGeneration, transformers.Qwen3_5Config
        text, vision = TEXT | LINEAR | {"rope_parameters": rope | {"partial_rotary_factor": 1.0}}, VISION
    torch.manual_seed(1)
    model = made(config(text_config=text, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=122)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)  # so that attention and the image matter
    return model


def _served(rank, world, name):
    import torch.distributed as dist

    from megatron_tree.integrations.transformers import TreeCache

    model = _model(name)
    ids = torch.tensor([[5, 7, 122] + [IMAGE] * TOKENS + [123, 9, 11, 13]])
    inputs = {"input_ids": ids, "image_grid_thw": torch.tensor([[1, 8, 8]]), "mm_token_type_ids": (ids == IMAGE).long()}
    options = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}

    def run(image, **more):
        found = model.generate(**inputs, pixel_values=image, **options, **more)
        return found.sequences, torch.stack(found.logits)

    image = torch.randn(4 * TOKENS, 3 * 2 * 4 * 4)
    want, other = run(image), run(-image)
    assert (want[1] - other[1]).abs().max() > 0.01, "the image does not matter"
    model.set_attn_implementation(IMPLEMENTATIONS)
    tokens, logits = run(image, past_key_values=TreeCache(model.config, cp_group=dist.group.WORLD, page_size=2))
    assert torch.equal(tokens, want[0])
    assert (logits - want[1]).abs().max() <= 1e-5 * want[1].abs().max()
    model.set_attn_implementation("tree")
    with pytest.raises(
        ValueError, match=r'set_attn_implementation\(\{"text_config": "tree", "vision_config": "sdpa"\}\)'
    ):
        run(image, past_key_values=TreeCache(model.config))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.supports(f"`{name}`", with_="images; model.generate; 2 ranks"))
    for name in ("qwen3_vl", "qwen3_5")
])  # fmt: skip
def test_images(name):
    run_distributed(_served, 2, name)
