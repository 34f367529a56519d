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
OF_SWITCH = {"original_max_position_embeddings": SWITCH}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3]} | OF_SWITCH
LONGROPE |= {"long_factor": [2.0, 4.0, 8.0, 16.0]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
TIED = {"tie_word_embeddings": True}
WINDOWED = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

CONFIGS = {  # family -> (its architecture, what its configuration has besides)
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "head_dim": 8} | WINDOWED),
    "gemma2": (
        "gemma2",
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8} | WINDOWED,
    ),
    "gpt_oss": ("gpt_oss", {"num_experts": 2, "num_experts_per_tok": 1} | WINDOWED),
    "deepseek_v3": ("deepseek_v3", {"first_k_dense_replace": 3, "moe_intermediate_size": 2048}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 8} | WINDOWED),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3_longrope": ("phi3", {"sliding_window": None, "rope_parameters": LONGROPE} | OF_SWITCH),
    "llama_dynamic": ("llama", {"max_position_embeddings": SWITCH, "rope_parameters": DYNAMIC}),
    "gpt2": ("gpt2", {"num_hidden_layers": 2, "max_position_embeddings": 64, "n_inner": None}),
    "falcon_h1": ("falcon_h1", {"max_position_embeddings": 128}),
    # of interest for how their weights are split; smollm2: heads that no even number divides
    "smollm2": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72} | TIED),
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 40, "head_dim": 8}),
    "deepseek_v3_experts": ("deepseek_v3", LATENT | {"q_lora_rank": 96, "n_group": 2, "topk_group": 1}),
    "deepseek_v2": ("deepseek_v2", LATENT | {"q_lora_rank": None}),
    "olmo2": ("olmo2", {}),
}


def family_config(family):
    name, changes = CONFIGS[family]
    return tiny_config(name, **{"max_position_embeddings": 256} | changes)


def mistral_large4():
    """A random model of images and text whose queries see the keys that an index selects."""
    torch.manual_seed(1)
    text = {name: size for name, size in LATENT.items() if name not in ("first_k_dense_replace", "hidden_size")}
    text |= {"hidden_size": 64, "n_group": 1, "topk_group": 1, "index_topk": 6, "index_n_heads": 12}
    text |= {"index_head_dim": 8, "num_hidden_layers": 4, "mlp_layer_types": ["dense", "sparse", "dense", "dense"]}
    config = transformers.MistralLarge4Config(text_config=text)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2}
    for name, size in {**sizes, "head_dim": 8}.items():
        setattr(config.vision_config, name, size)
    model = transformers.MistralLarge4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.mul_(4.0)
    return model


def glm5_next(**changes):
    """A random model of images and text whose queries see pools of tokens, chosen by an index; with large weights, and
    states that live long. changes: of its text part."""
    torch.manual_seed(1)
    text = {name: size for name, size in LATENT.items() if name not in ("first_k_dense_replace", "hidden_size")}
    text |= {"hidden_size": 64, "n_group": 1, "topk_group": 1, "index_topk": 8, "index_kpool": 4, "index_n_heads": 12}
    text |= {"index_head_dim": 8, "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "dense"]}
    text |= {"layer_types": ["linear_attention", "indexed_attention", "indexed_attention"], "qk_rope_head_dim": 0}
    text |= {"indexer_types": ["full", "full", "shared"], "linear_num_heads": 4, "linear_head_dim": 8, "hc_mult": 2}
    config = transformers.Glm5NextConfig(text_config=text | {"q_lora_rank": 16} | changes)
    sizes = {"hidden_size": 16, "depth": 1, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    for name, size in sizes.items():
        setattr(config.vision_config, name, size)
    model = transformers.Glm5NextForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "kpool_compress" in name:  # zeros and ones
                weight.normal_()
            elif weight.dim() > 1 and "embed" not in name:
                weight.mul_(4.0)
            if name.endswith("A_log"):
                weight.sub_(4.0)
    return model


def tiny_model(family, seed=1, positions=None):
    """A random model, the same on every rank, with weights large enough that attention matters."""
    torch.manual_seed(seed)
    config = family_config(family)
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
