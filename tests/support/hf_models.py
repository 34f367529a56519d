"""Tiny random Transformers models for tests, one per kind of attention, and plain generation to compare with."""

import torch

import transformers
from support.hf_architectures import SIZES, tiny_config
from transformers import AutoModelForCausalLM

VOCAB = SIZES["vocab_size"]
SHAPE = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
SHAPE |= {name: SIZES[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}
SHAPE |= {name: SIZES[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
SHAPE["max_position_embeddings"] = 256
LATENT = {  # the ratios of DeepSeek V3
    **{name: value for name, value in SHAPE.items() if name != "head_dim"},
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
SWITCH = 24  # longrope and dynamic NTK: longer rows have other rotary embeddings
WINDOWED = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, use_sliding_window=True, max_window_layers=1, **WINDOWED),
    "gemma2": lambda: transformers.Gemma2Config(
        **SHAPE, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=8, **WINDOWED
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1, **WINDOWED),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")},
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        first_k_dense_replace=3,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SHAPE, query_pre_attn_scalar=8, **WINDOWED),
    "phi3": lambda: transformers.Phi3Config(
        **{name: value for name, value in SHAPE.items() if name != "head_dim"}, sliding_window=9
    ),
    "phi3_longrope": lambda: transformers.Phi3Config(
        **{name: value for name, value in SHAPE.items() if name != "head_dim"},
        original_max_position_embeddings=SWITCH,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 4.0, 8.0, 16.0],
            "original_max_position_embeddings": SWITCH,
        },
    ),
    "llama_dynamic": lambda: transformers.LlamaConfig(
        **SHAPE | {"max_position_embeddings": SWITCH},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0},
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "falcon_h1": lambda: tiny_config("falcon_h1"),
    # of interest for how their weights are split
    "smollm2": lambda: transformers.LlamaConfig(  # heads that no even number divides
        **SHAPE | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}, tie_word_embeddings=True
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SHAPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=40,
    ),
    "deepseek_v3_experts": lambda: transformers.DeepseekV3Config(**LATENT, q_lora_rank=96, n_group=2, topk_group=1),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**LATENT, q_lora_rank=None, n_group=1, topk_group=1),
    "olmo2": lambda: transformers.Olmo2Config(**{name: value for name, value in SHAPE.items() if name != "head_dim"}),
}


def mistral_large4():
    """A random model of images and text whose queries see the keys that an index selects."""
    torch.manual_seed(1)
    text = {name: size for name, size in LATENT.items() if name not in ("first_k_dense_replace", "hidden_size")}
    text |= {"hidden_size": 64, "n_group": 1, "topk_group": 1, "index_topk": 6, "index_n_heads": 12}
    text |= {"index_head_dim": 8, "num_hidden_layers": 4, "mlp_layer_types": ["dense", "sparse", "dense", "dense"]}
    config = transformers.MistralLarge4Config(text_config=text)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    for name, size in {**sizes, "head_dim": 8}.items():
        setattr(config.vision_config, name, size)
    model = transformers.MistralLarge4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.mul_(4.0)
    return model


def tiny_model(family, seed=1, positions=None):
    """A random model, the same on every rank, with weights large enough that attention matters."""
    torch.manual_seed(seed)
    config = CONFIGS[family]()
    if positions is not None:
        config.max_position_embeddings = positions
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name and "wte" not in name and "wpe" not in name:
                weight.mul_(4.0)
            if name.endswith("sinks"):
                weight.normal_()
    return model


def tree_model(family, seed=1, positions=None):
    """The same with attention "tree"."""
    model = tiny_model(family, seed, positions)
    model.set_attn_implementation("tree")
    return model


def prompt(batch, length, seed=2):
    """int64 [batch, length], without the padding token."""
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(batch, length):
    """A prompt whose row i is padded by 3 i tokens on the left, and its attention mask."""
    ids, mask = prompt(batch, length), torch.ones(batch, length, dtype=torch.int64)
    for row in range(batch):
        ids[row, : 3 * row], mask[row, : 3 * row] = 0, 0
    return ids, mask


@torch.no_grad()
def plain(model, ids, new_tokens, mask=None, **options):
    """Transformers' own greedy generate: (new tokens [b, n], logits [b, n, vocab]). The model must not be "tree"."""
    assert model.config._attn_implementation != "tree"
    return hf_generate(model, ids, new_tokens, mask, **options)


@torch.no_grad()
def hf_generate(model, ids, new_tokens, mask=None, **options):
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return output.sequences[:, ids.shape[1] :], torch.stack(output.logits, 1).float()
