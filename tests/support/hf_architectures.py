"""Tiny configurations of Transformers' causal language models, by the name of the architecture (`model_type`)."""

import transformers

SIZES = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "n_inner": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "rotary_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "is_decoder": True,
    "type_vocab_size": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
OF_ONE = {  # what these configurations want besides
    "cwm": {"bos_token_id": 1, "eos_token_id": 2},
    "modernbert-decoder": {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    "phimoe": {"sliding_window": 7},
    "longcat_flash": {"head_dim": 4, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16},
    "mpt": {"use_cache": True},
    "falcon": {"alibi": True, "multi_query": False, "num_attention_heads": 6, "hidden_size": 48},
    "ctrl": {"n_embd": 32, "dff": 48, "n_layer": 3, "n_head": 4},
}
WINDOW = 7

SERVED = (
    "afmoe",
    "apertus",
    "arcee",
    "aria_text",
    "axk1",
    "beam",
    "bert",
    "bert-generation",
    "biogpt",
    "bitnet",
    "bloom",
    "camembert",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "ctrl",
    "cwm",
    "data2vec-text",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "electra",
    "ernie",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "falcon",
    "flex_olmo",
    "flint",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt-sw3",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "helium",
    "hrm_text",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "kolibri1",
    "laguna",
    "lfm2",
    "llama",
    "longcat_flash",
    "mellum",
    "mimo_v2_flash",
    "minicpm3",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "modernbert-decoder",
    "mpt",
    "moss_transcribe_diarize",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "roberta",
    "roberta-prelayernorm",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "xlm-roberta",
    "xlm-roberta-xl",
    "youtu",
)

# of those, the ones whose weights can't be split over the ranks, and why
_BERTS = ("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta")
_BERTS += ("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")
WHOLE = {
    **dict.fromkeys((*_BERTS, "ctrl", "modernbert-decoder"), "unknown names"),
    **dict.fromkeys(("bloom", "falcon", "mpt"), "its own code"),
    "biogpt": "embed_positions",
    "gpt_bigcode": "a projection to 8 heads of 8",
    "hrm_text": "z_L_init",
    "lfm2": "feed_forward.w1",
    "mimo_v2_flash": "k_proj",
    "opt": "embed_positions",
}


def tiny_config(name):
    """The configuration of an architecture, made small."""
    made = transformers.CONFIG_MAPPING[name]()
    config = made.get_text_config(decoder=True)
    other_names = type(config).attribute_map
    known = set(vars(config)) | set(other_names) | {name for name in SIZES if name.endswith("_token_id")}
    sizes = {key: value for key, value in SIZES.items() if key in known}
    if getattr(config, "kv_lora_rank", None) is not None:
        sizes |= {key: value for key, value in LATENT.items() if key in known}
        sizes.pop("head_dim", None)
    if kinds := getattr(config, "layer_types", None):
        sizes["layer_types"] = kinds[-3:] if len(set(kinds[-3:])) >= len(set(kinds[:3])) else kinds[:3]
    if getattr(config, "sliding_window", None):
        sizes["sliding_window"] = WINDOW
    return type(config)(**sizes | OF_ONE.get(name, {}))
