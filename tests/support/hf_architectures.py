"""Tiny configurations of Transformers' causal language models, by the name of the architecture (`model_type`)."""

import torch

import transformers

SIZES = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "n_inner": 48, "ffn_dim": 48,
    "word_embed_proj_dim": 32, "rotary_dim": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_shared_experts": 1, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "is_decoder": True, "type_vocab_size": 1, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
WINDOW = 7
_GEMMA = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 131, "global_head_dim": 16}
SHARED_KEYS = {"num_kv_shared_layers": 2, "num_hidden_layers": 4}
SHARED_KEYS |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
OF_ONE = {  # what these configurations want besides
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 3}
    | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}}
    | {"ffn_config": {"ffn_hidden_size": 16, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 8},
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 12,  # with few heads many scores are 0: ties
        "index_head_dim": 8,
        "index_topk": 4,
        "hc_mult": 2,
    },
    "emu3_text_model": _TOKENS,
    "gemma3n_text": _GEMMA | SHARED_KEYS | {"laurel_rank": 8, "activation_sparsity_pattern": None},
    "gemma4_text": _GEMMA | {"enable_moe_block": True, "top_k_experts": 2},
    "gemma4_unified_text": _GEMMA,
    "llama4_text": {"intermediate_size": 16, "intermediate_size_mlp": 48, "num_experts_per_tok": 1, "floor_scale": 5}
    | {"num_hidden_layers": 4, "layer_types": None, "attention_chunk_size": WINDOW},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "minimax_m3_vl_text": {"dense_intermediate_size": 48, "shared_intermediate_size": 16}
    | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "mllama_text_model": _TOKENS,
    "roc_bert": {"pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "xlnet": {"d_model": 32, "n_head": 4, "d_head": 8},
    "xmod": {"default_language": "en_XX"},
    "cwm": _TOKENS,
    "modernbert-decoder": {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    "phimoe": {"sliding_window": 7},
    "longcat_flash": {"head_dim": 4, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16},
    "ctrl": {"n_embd": 32, "dff": 48, "n_layer": 3, "n_head": 4},
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_MAMBA1 = {"mamba_d_state": 8, "mamba_dt_rank": 4}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_DELTA |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_MLPS = {"mlp_layer_types": ["dense", "sparse", "dense"]}
_DELTA_LATENT = LATENT | _MLPS | {"linear_num_heads": 4, "linear_head_dim": 8, "layer_types": _DELTA["layer_types"]}
_OLD_NAMES = ["mamba", "hybrid", "mamba"]
HYBRIDS = {  # with recurrent layers: what each wants besides
    "bailing_hybrid": _DELTA_LATENT | {"head_dim": 8},
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64},
    "granitemoehybrid": _MAMBA2 | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 48},
    "jamba": _MAMBA1 | {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _DELTA_LATENT,
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"]},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "olmo_hybrid": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "zamba": _MAMBA1
    | {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4, "n_mamba_heads": 4},
    "zamba2": {"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 8}
    | {"layers_block_type": _OLD_NAMES, "num_mem_blocks": 1},
    "zaya": {
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        "sliding_window": WINDOW,
    },
}
_INDEX = LATENT | {"index_topk": 6, "index_n_heads": 12, "index_head_dim": 8}  # with few heads many scores are 0: ties
_INDEX |= {"layer_types": ["indexed_attention"] * 3, "mlp_layer_types": ["dense", "sparse", "dense"]}
_SHARED_INDEX = _INDEX | {"indexer_types": ["full", "shared", "full"]}
INDEXED = {  # with layers whose queries see the keys that an index selects
    "axk2": _INDEX,
    "deepseek_v32": _INDEX,
    "dots3_note": _INDEX
    | {
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "sliding_window": WINDOW,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 12,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 10,
        "swa_qk_nope_head_dim": 6,
        "swa_v_head_dim": 4,
    },
    "glm_moe_dsa": _SHARED_INDEX,
    "hy_v4": _SHARED_INDEX,
}

POOLED = {  # with layers whose queries see the blocks of tokens that an index selects
    "qwen4_exp_text": _DELTA
    | {
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 12,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 6,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 50,
        "heads_per_ngram": 2,
        "eos_token_id": 71,  # n-grams begin after it; it is in most prompts of tests
    },
}

STATE_SPACE = {  # without attention
    "falcon_mamba": {"state_size": 8},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
}

SERVED = (
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "bert", "bert-generation", "biogpt", "bitnet",
    "camembert", "cohere", "cohere2", "cohere2_moe", "ctrl", "cwm", "data2vec-text", "deepseek_v2", "deepseek_v3",
    "dots1", "electra", "ernie", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma",
    "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox",
    "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hrm_text",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "kolibri1",
    "laguna", "llama", "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3",
    "mistral", "mistral4", "mixtral", "modernbert-decoder", "moss_transcribe_diarize", "nanochat", "nemotron", "olmo",
    "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "roberta", "roberta-prelayernorm", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma",
    "xlm-roberta", "xlm-roberta-xl", "youtu",
)  # fmt: skip

# of those, the ones whose weights can't be split over the ranks, and why
_BERTS = ("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta")
_BERTS += ("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")
WHOLE = {
    **dict.fromkeys((*_BERTS, "ctrl", "modernbert-decoder"), "unknown names"),
    "gpt_bigcode": "a projection to 8 heads of 8",
    "hrm_text": "it runs every layer several times",
    "longcat_flash": "gates and inputs of 16 neurons were expected",  # some experts have no weights
    "mimo_v2_flash": "k_proj",
    "zaya": "a projection was expected",
}


def tiny_config(name, **changes):
    """The configuration of an architecture's text part, made small; changes: other values of its options."""
    config = transformers.CONFIG_MAPPING[name]().get_text_config(decoder=True)
    names = (name, config.model_type, config.model_type.removesuffix("_text"))
    other_names = type(config).attribute_map
    known = set(vars(config)) | set(other_names) | {name for name in SIZES if name.endswith("_token_id")}
    sizes = {key: value for key, value in SIZES.items() if key in known}
    if vars(config).get("kv_lora_rank") is not None:  # an attribute that differs between layers can't be read
        sizes |= {key: value for key, value in LATENT.items() if key in known}
        sizes.pop("head_dim", None)
    special = HYBRIDS | INDEXED | POOLED | STATE_SPACE
    special = next((special[x] for x in names if x in special), {})
    if not special and (kinds := vars(config).get("layer_types")):
        sizes["layer_types"] = kinds[-3:] if len(set(kinds[-3:])) >= len(set(kinds[:3])) else kinds[:3]
    if vars(config).get("sliding_window"):
        sizes["sliding_window"] = WINDOW
    return type(config)(**sizes | OF_ONE.get(config.model_type, {}) | special | changes)


def random_model(name, **changes):
    """A tiny model of an architecture for evaluation, with larger weights than usual: its tokens depend on them."""
    return model_of(tiny_config(name, **changes))


def deepseek_v4(**changes):
    """With random weights where they are zeros at first: of biases of gates and routers, sinks and the experts of token
    ids."""
    model = random_model("deepseek_v4", **changes)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith(("position_bias", "sinks")):
                x.normal_()
        for name, x in model.named_buffers():
            if name.endswith("tid2eid"):
                x.copy_(torch.arange(x.numel()).view(x.shape) // 3 % 4)
            if name.endswith("e_score_correction_bias"):
                x.normal_()
    return model


def model_of(config, name=None):
    """Likewise, of a configuration; name: of its architecture, where another one has this text part."""
    torch.manual_seed(1)
    mapping = transformers.AutoModelForCausalLM._model_mapping
    of_text = type(config) in mapping
    auto = transformers.AutoModelForCausalLM if of_text else transformers.AutoModelForImageTextToText  # Mistral 4
    if name is None or of_text:
        model = auto.from_config(config, attn_implementation="eager").eval()
    else:
        whole = mapping[transformers.CONFIG_MAPPING[name]]
        model = whole._from_config(config, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight_name.endswith("ple.conv1d.weight"):  # zeros
                weight.normal_()
            if weight.dim() > 1 and not any(part in weight_name for part in ("embed", "wte", "wpe", "A_log")):
                weight.mul_(3.0)
    return model


def long_lived_model(name):
    """A random model whose states live long, so that gradients depend on tokens far before."""
    model = random_model(name)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.sub_(4.0)
    return model


def assert_logits(got, want, what):
    """Equal but for rounding in fp32."""
    error = float((got - want).abs().max() / want.abs().max())
    assert error < 5e-5, f"{what}: {error:.1e}"
