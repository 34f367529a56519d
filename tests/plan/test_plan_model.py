"""Sizes read from a config.json: those of Transformers' models, without and with weights."""

import pytest
import torch

from megatron_tree.integrations.transformers.recurrent_rules import HeadShare, rule_of
from megatron_tree.plan.layers import Config, Layers
from megatron_tree.plan.model import Index, ModelSizes
from megatron_tree.plan.recurrent import Recurrent
from support.hf_architectures import HYBRIDS, random_model, tiny_config

transformers = pytest.importorskip("transformers")

FULL_SIZE = {  # layers that attend, recurrent layers; what the defaults lack
    "bailing_hybrid": (7, 35, {}),
    "bamba": (3, 29, {"attn_layer_indices": [9, 18, 27]}),
    "falcon_h1": (32, 32, {}),
    "granitemoehybrid": (1, 31, {"layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 26}),
    "jamba": (4, 28, {}),
    "kimi_linear": (6, 21, {}),
    "lfm2": (16, 16, {"layer_types": ["conv", "full_attention"] * 16}),
    "lfm2_moe": (16, 16, {"layer_types": ["conv", "full_attention"] * 16}),
    "lfm3": (11, 13, {}),
    "nemotron_h": (1, 1, {}),
    "olmo_hybrid": (8, 24, {}),
    "qwen3_5_moe_text": (10, 30, {}),
    "qwen3_5_text": (8, 24, {}),
    "qwen3_next": (12, 36, {}),
    "zamba2": (9, 54, {}),
    "axk2": (48, 0, {}),
    "deepseek_v32": (61, 0, {}),
    "glm_moe_dsa": (78, 0, {}),
    "hy_v4": (34, 0, {}),
    "mistral_large4": (72, 0, {}),
}
INDEXED = {  # layers that score keys, index heads
    "axk2": (48, 16),
    "deepseek_v32": (61, 64),
    "glm_moe_dsa": (78, 32),
    "hy_v4": (10, 16),
    "mistral_large4": (72, 32),
}
PLANNED = sorted(set(HYBRIDS) & set(FULL_SIZE))


@pytest.mark.parametrize("name", FULL_SIZE)
def test_parameters(name):
    """As many as the model has, but for embeddings and norms: 0.04 % at most."""
    attending, recurrent, fields = FULL_SIZE[name]
    config = transformers.CONFIG_MAPPING[name](**fields)
    sizes = ModelSizes.of(config.to_dict())
    assert sizes.attention_layers == attending
    assert (sizes.recurrent.layers if sizes.recurrent else 0) == recurrent
    assert (sizes.index[:2] if sizes.index else None) == INDEXED.get(name)
    of_text = name not in ("mistral_large4",)
    auto = transformers.AutoModelForCausalLM if of_text else transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(config)
    skipped = ("model.embed", "vision", "multi_modal", "language_model.embed")
    weights = sum(p.numel() for key, p in model.named_parameters() if not any(part in key for part in skipped))
    if config.get_text_config().tie_word_embeddings:
        weights += sizes.lm_head
    assert sizes.parameters == pytest.approx(weights, rel=4e-4)
    assert sizes.words(10**6) == pytest.approx(sizes.parameters + sizes.repeated)


@pytest.mark.parametrize("name", PLANNED)
def test_what_a_row_keeps(name):
    """The states, keys and values that the model leaves in its cache after four tokens."""
    sizes = ModelSizes.of(tiny_config(name).to_dict())
    with torch.no_grad():
        cache = random_model(name)(input_ids=torch.arange(4)[None] + 3, use_cache=True).past_key_values
    recurrent = conv = 0
    for layer in cache.layers:
        recurrent += sum(x.numel() for x in getattr(layer, "recurrent_states", {}).values() if x is not None)
        conv += sum(x.numel() for x in getattr(layer, "conv_states", {}).values() if x is not None)
    layers = sizes.recurrent.layers
    assert (recurrent, conv) == (layers * sizes.recurrent.state, layers * sizes.recurrent.conv)
    assert sizes.recurrent.row_bytes(2) == 4 * recurrent + 2 * conv
    keys = [x for layer in cache.layers for x in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    if "kv_lora_rank" not in tiny_config(name).to_dict():  # there Transformers keeps keys, and we latents
        assert sum(x.numel() for x in keys if x is not None) == 4 * sizes.token
    assert sizes.attention_layers == sum(x is not None for x in keys) / 2


@pytest.mark.parametrize("name", ["bamba", "jamba", "kimi_linear", "lfm3", "nemotron_h", "olmo_hybrid", "qwen3_next"])
@pytest.mark.parametrize("ranks", [2, 5, 24])
def test_what_the_busiest_rank_has(name, ranks):
    """As ranks share the heads of a layer with sharded weights."""
    config = transformers.CONFIG_MAPPING[name](**FULL_SIZE[name][2])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    layer = next(module for module in model.modules() if rule_of(module))
    shares = [HeadShare(rule_of(layer), layer, ranks, rank) for rank in range(ranks)]
    recurrent = ModelSizes.of(config.to_dict()).recurrent
    assert max(len(range(*share.values)) for share in shares) == recurrent.heads * recurrent.share(ranks)


QWEN = {"num_hidden_layers": 8, "linear_conv_kernel_dim": 4}
SAME = [  # ways to say that layers 3 and 7 of 8 attend
    {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2},
    {"full_attention_interval": 4},
    {"layer_group_size": 4},
    {"linear_attn_config": {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]}},
    {"attn_layer_indices": [3, 7]},
    {"full_attn_idxs": [3, 7]},
    {"attn_layer_period": 4, "attn_layer_offset": 3},
    {"text_config": {"full_attention_interval": 4}},
]


@pytest.mark.parametrize("fields", SAME, ids=lambda fields: next(iter(fields)))
def test_which_layers_attend(fields):
    found = Layers.of(Config(QWEN | fields))
    assert found.mixers == ("recurrent", "recurrent", "recurrent", "attention") * 2
    assert (found.attending, found.recurrent) == (2, 6) and set(found.mlps) == {"dense"}


def test_which_layers_have_experts():
    def mlps(**fields):
        return "".join(kind[0] for kind in Layers.of(Config({"num_hidden_layers": 4, "num_experts": 2, **fields})).mlps)

    assert mlps() == "ssss" and mlps(num_experts=0) == "dddd" and mlps(first_k_dense_replace=1) == "dsss"
    assert mlps(mlp_layer_types=["sparse", "dense"] * 2) == "sdsd"
    assert mlps(decoder_sparse_step=2, mlp_only_layers=[3]) == "dsdd"
    assert mlps(expert_layer_period=2, expert_layer_offset=1) == "dsds"
    assert mlps(hybrid_override_pattern="ME*-") == "nsnd"


def test_gathered_tokens_and_states():
    """The example of docs/planner.md: states of 36 layers in fp32, and keys and values of 12."""
    sizes = ModelSizes.of(transformers.CONFIG_MAPPING["qwen3_next"]().to_dict())
    weights, keys = sizes.recurrent.weights, 2 * 16 * 128
    layer = Recurrent(36, 32, 16, weights, keys * (2048 + 4), 128, 128, 128, 128 * 128, 8192, keys, 4)
    assert sizes.recurrent == layer and layer.state == 32 * 128 * 128 and sizes.token == 12 * 2 * 512
    assert [layer.share(ranks) for ranks in (1, 5, 8, 24, 32)] == [1, 1 / 4, 1 / 8, 1 / 16, 1 / 32]
    assert ModelSizes.of({**transformers.CONFIG_MAPPING["deepseek_v32"]().to_dict()}).index == Index(
        61, 64, 128, 2048, 1536 * 64 * 128 + 7168 * (128 + 64)
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mamba_d_conv": 4}, "has mamba_d_conv, but doesn't say which layers are recurrent: add layer_types"),
        ({"layer_types": ["mamba", "retention"]}, "has layers of type 'retention', which are not planned"),
        ({"layer_types": ["mamba", "attention"]}, "describes recurrent layers that are not planned: planned are gated"),
        ({"compress_rates": {"a": 4}}, "has compress_rates: models with compressed keys are not planned"),
        ({"index_kpool": 16}, "has index_kpool: models with pooled index keys are not planned"),
        ({"index_topk": 16}, "has index_n_heads=None: a whole number is needed"),
    ],
)
def test_what_is_refused(fields, message):
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    with pytest.raises(ValueError, match=message):
        ModelSizes.of(sizes | fields)
