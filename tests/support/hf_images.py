"""Tiny random models of images and text, and batches with images for them."""

import torch
import torch.nn.functional as F

import transformers

IMAGE, VIDEO, START = 120, 121, 122
TEXT = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GRID_VISION = {  # of patches in any grid
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
TILE_VISION = {  # of square tiles
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": 123}


def _grid(made, text=None, vision=None):
    config = {"text_config": TEXT | (text or {}), "vision_config": GRID_VISION | (vision or {}), **TOKENS}
    return made, config | {"video_token_id": VIDEO}


def _tiles(made, text, vision, **more):
    return made, {"text_config": text, "vision_config": vision, "image_token_id": IMAGE, **more}


CLIP = {"model_type": "clip_vision_model", "projection_dim": 16} | TILE_VISION
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False} | TILE_VISION
LLAMA, QWEN2 = {"model_type": "llama"} | TEXT, {"model_type": "qwen2"} | TEXT
COHERE2 = {"model_type": "cohere2", **TEXT, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
OF_GLM = {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}
OF_QWEN2 = {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2, "patch_size": 4, "spatial_merge_size": 2}
CONFIGS = {
    "qwen2_vl": lambda: _grid("Qwen2VL", {"rope_parameters": ROPE}, OF_QWEN2),
    "qwen2_5_vl": lambda: _grid(
        "Qwen2_5_VL", {"rope_parameters": ROPE}, {"window_size": 16, "fullatt_block_indexes": [1]}
    ),
    "qwen3_vl": lambda: _grid(
        "Qwen3VL", {"rope_parameters": ROPE}, {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    ),
    "qwen3_5": lambda: _grid(
        "Qwen3_5",
        LINEAR | {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
        {"num_position_embeddings": 16},
    ),
    "glm4v": lambda: _grid("Glm4v", OF_GLM, {"image_size": 16}),
    "glm46v": lambda: _grid("Glm46V", OF_GLM, {"image_size": 16}),
    "glm4v_moe": lambda: _grid(
        "Glm4vMoe",
        OF_GLM
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1},
        {"image_size": 16},
    ),
    "glm5_next": lambda: _grid(
        "Glm5Next",
        {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 0, "qk_nope_head_dim": 8}
        | {"v_head_dim": 6, "index_topk": 4, "index_kpool": 2, "index_n_heads": 12, "index_head_dim": 8, "hc_mult": 2}
        | {"layer_types": ["linear_attention", "indexed_attention"], "mlp_layer_types": ["dense"] * 2}
        | {"linear_num_heads": 2, "linear_head_dim": 8},
    ),
    "aya_vision": lambda: _tiles("AyaVision", COHERE2, SIGLIP, downsample_factor=2),
    "cohere2_vision": lambda: _tiles(
        "Cohere2Vision", COHERE2, SIGLIP, downsample_factor=2, alignment_intermediate_size=32
    ),
    "idefics3": lambda: _tiles("Idefics3", LLAMA, TILE_VISION, scale_factor=2, pad_token_id=0),
    "vipllava": lambda: _tiles("VipLlava", LLAMA, CLIP | {"num_hidden_layers": 3}, vision_feature_layers=[-2, -1]),
    "qwen3_vl_moe": lambda: _grid(
        "Qwen3VLMoe",
        EXPERTS | {"rope_parameters": ROPE, "decoder_sparse_step": 1},
        {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_5_moe": lambda: _grid(
        "Qwen3_5Moe",
        LINEAR
        | EXPERTS
        | {"shared_expert_intermediate_size": 16, "rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
        {"num_position_embeddings": 16},
    ),
    "llama4": lambda: _tiles(
        "Llama4",
        TEXT
        | {"attention_chunk_size": 9, "floor_scale": 5, "num_local_experts": 2, "intermediate_size_mlp": 48}
        | {"num_hidden_layers": 4},
        TILE_VISION
        | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "intermediate_size": 64},
        image_token_index=IMAGE,
    ),
    "gemma3": lambda: _tiles(
        "Gemma3",
        TEXT
        | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
        {"vision_use_head": False} | TILE_VISION,
        mm_tokens_per_image=4,
    ),
    "llava": lambda: _tiles("Llava", LLAMA, CLIP),
    "llava_next": lambda: _tiles("LlavaNext", LLAMA, CLIP, image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]]),
    "llava_onevision": lambda: _tiles(
        "LlavaOnevision", QWEN2, SIGLIP, image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]], video_token_id=VIDEO
    ),
    "internvl": lambda: _tiles("InternVL", QWEN2, TILE_VISION | {"image_size": [16, 16], "patch_size": [4, 4]}),
    "mistral3": lambda: _tiles(
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None} | TEXT,
        {"model_type": "pixtral", "head_dim": 8} | TILE_VISION | {"image_size": 32},
        spatial_merge_size=2,
    ),
    "smolvlm": lambda: _tiles("SmolVLM", LLAMA, TILE_VISION, scale_factor=2, pad_token_id=0),
}


def image_model(name, dtype=torch.float64, text=None, **more):
    """A random model, the same on every rank, with weights large enough that images and attention matter.

    text, more: other options of its text part, and of the whole model.
    """
    made, config = CONFIGS[name]()
    config = config | {"text_config": config["text_config"] | (text or {})} | more
    torch.manual_seed(1)
    config = getattr(transformers, f"{made}Config")(**config)
    model = getattr(transformers, f"{made}ForConditionalGeneration")(config).eval().to(dtype)
    if name.endswith("moe"):
        model.set_experts_implementation("eager")  # the default has no float64
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
                if not parameter.any():  # Gemma 3's projection of images
                    parameter.normal_()
    return model


def _row(generator, images, length):
    """int64 [length]: text, then images of so many tokens with text between them."""
    text = torch.randint(3, IMAGE, (length,), generator=generator)
    place = 3
    for tokens in images:
        text[place - 1], text[place : place + tokens] = START, IMAGE
        place += tokens + 2
    return text


def image_rows(name, seed=3):
    """Rows of text and images: [(input_ids [n], what the model takes for its images)]."""
    generator = torch.Generator().manual_seed(seed)
    made = []

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for length, images in ((29, 2), (23, 1)):
        if "grid" in _kind(name):
            grid = torch.tensor([[1, 4, 4], [1, 2, 8]][:images])
            more = {"pixel_values": noise(int(grid.prod(-1).sum()), 3 * 2 * 4 * 4), "image_grid_thw": grid}
            tokens = [4, 4][:images]
        elif name in ("llava_next", "llava_onevision"):
            more = {"pixel_values": noise(images, 3, 3, 16, 16), "image_sizes": torch.tensor([[16, 32]] * images)}
            tokens = [OF_PINPOINTS[name]] * images
        elif name == "mistral3":
            more = {"pixel_values": noise(images, 3, 16, 16), "image_sizes": torch.tensor([[16, 16], [8, 16]][:images])}
            tokens = [4, 2][:images]
        elif name in ("idefics3", "smolvlm"):
            more, tokens = {"pixel_values": noise(1, images, 3, 16, 16)}, [4] * images
        else:
            more, tokens = {"pixel_values": noise(images, 3, 16, 16)}, [PER_TILE[name]] * images
        ids = _row(generator, tokens, length + sum(tokens))
        made.append((ids, more))
    return made


PER_TILE = {"aya_vision": 4, "cohere2_vision": 4, "gemma3": 4, "internvl": 4, "llama4": 4, "llava": 16, "vipllava": 16}
OF_PINPOINTS = {"llava_next": 52, "llava_onevision": 52}


def _kind(name):
    return "grid" if CONFIGS[name]()[1]["vision_config"].get("depth") else "tiles"


def types_of(name, ids):
    """What tells the model which tokens are images."""
    types = {"gemma3": "token_type_ids"}.get(name, "mm_token_type_ids" if _kind(name) == "grid" else None)
    return {types: (ids == IMAGE).long()} if types else {}


def _together(name, rows):
    if name in ("idefics3", "smolvlm"):  # [rows, images, ...]: those of zeros are left out
        most = max(given["pixel_values"].shape[1] for _, given in rows)
        pixels = [given["pixel_values"] for _, given in rows]
        return {"pixel_values": torch.cat([F.pad(x, (0, 0) * 3 + (0, most - x.shape[1])) for x in pixels])}
    return {key: torch.cat([given[key] for _, given in rows]) for key in rows[0][1]}


def batches(name, model):
    """{what: (batch, the batches of its single rows)}."""
    rows = image_rows(name)
    alone = []
    for ids, more in rows:
        one = {"input_ids": ids[None], "labels": ids[None].masked_fill(ids == IMAGE, -100)}
        alone.append(one | more | types_of(name, ids[None]))
    length = max(len(ids) for ids, _ in rows)
    ids = torch.stack([F.pad(ids, (0, length - len(ids))) for ids, _ in rows])
    mask = torch.stack([torch.arange(length) < len(ids) for ids, _ in rows])
    padded = {"input_ids": ids, "labels": ids.masked_fill(~mask | (ids == IMAGE), -100), "attention_mask": mask.long()}
    padded |= _together(name, rows) | types_of(name, ids)
    ids = torch.cat([ids for ids, _ in rows])[None]
    text = torch.cat([torch.arange(len(ids)) for ids, _ in rows])[None]
    labels = ids.masked_fill((text == 0) | (ids == IMAGE), -100)
    packed = {"input_ids": ids, "labels": labels, "position_ids": text} | _together(name, rows) | types_of(name, ids)
    if hasattr(model.base_model, "get_rope_index"):
        own = [
            model.base_model.get_rope_index(
                one["input_ids"], mm_token_type_ids=one["mm_token_type_ids"], image_grid_thw=one["image_grid_thw"]
            )[0]
            for one in alone
        ]
        packed["position_ids"] = torch.cat((text[None], torch.cat(own, -1)))
    return {"one row": (alone[0], alone[:1]), "padded": (padded, alone), "packed": (packed, alone)}


def video_batch(name):
    """A row with an image and a video of two frames; Qwen3 has each frame by itself, with text between them."""
    generator = torch.Generator().manual_seed(4)
    image, video = torch.tensor([[1, 4, 4]]), torch.tensor([[2, 4, 8]])
    ids = torch.randint(3, IMAGE, (1, 45), generator=generator)
    ids[0, 4:8] = IMAGE
    frames = [slice(14, 22), slice(24, 32)] if name.startswith("qwen3") else [slice(14, 30)]
    for frame in frames:
        ids[0, frame] = VIDEO
    pixels = [torch.randn(int(g.prod()), 96, generator=generator, dtype=torch.float64) for g in (image, video)]
    types = (ids == IMAGE) + 2 * (ids == VIDEO)
    of_pixels = {"pixel_values": pixels[0], "pixel_values_videos": pixels[1]}
    grids = {"image_grid_thw": image, "video_grid_thw": video}
    labels = ids.masked_fill(types > 0, -100)
    return {"input_ids": ids, "labels": labels, "mm_token_type_ids": types} | of_pixels | grids
