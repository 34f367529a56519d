"""Transformers' causal language models one by one: exact over a sharded cache and in training, or refused by name."""

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
import transformers
from megatron_tree.integrations.transformers.infer.weight_layout import plan_layout
from support.hf_architectures import SERVED, WHOLE, assert_logits, random_model, tiny_config
from support.hf_models import hf_generate, plain, prompt, tree_model
from support.hf_served import check_sharded, check_trained
from support.ranks import on_ranks
from support_matrix import slow_but
from transformers import AutoModelForCausalLM

NEW = 6
REPAIRED = ("afmoe", "hrm_text", "phimoe", "roberta", "llama")  # and one that was never wrong; the others are slow
OF_OTHER_FORM = ("olmo2", "gpt2", "gpt_neox")  # of weights; each stands for some models
OWN_CODE = (
    "big_bird", "bloom", "codegen", "cpmant", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "megatron-bert", "mpt",
    "openai-gpt", "reformer", "rembert", "roformer", "rwkv", "trocr", "xglm", "xlm", "xlnet",
)  # fmt: skip
OTHER_REASONS = {
    "bart": "decoder-only",
    "blt": "tokens in patches",
    "diffllama": "two attention calls for one cache update",
    "doge": "a mask that depends on its keys",
    "falcon_mamba": "no attention layers",
    "gemma4_unified_assistant": "keys and values of another model",
    "git": "images in the prompt",
    "inkling_text": "a bias by positions",
    "inkling2_text": "a bias by positions",
    "jetmoe": "keys that are repeated",
    "mamba": "no attention layers",
    "mamba2": "no attention layers",
    "marian": "decoder-only",
    "minimax": "only a cache of its own",
    "moshi": "a window that its cache has",
    "mllama": "keys of images only",
    "musicgen": "several codebooks",
    "recurrent_gemma": "keep their state in themselves",
    "whisper": "decoder-only",
    "xlstm": "only a cache of its own",
}


@pytest.mark.parametrize("name", slow_but(REPAIRED, SERVED))
@on_ranks(2)
def test_generation(name):
    model, ids = random_model(name), prompt(2, 21)
    want = plain(model, ids, NEW)
    model.set_attn_implementation("tree")
    caches = [tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD, page_size=2) for _ in range(2)]
    result = tree_hf.generate(model, ids, cache=caches[0], max_new_tokens=NEW, chunk_size=8, keep_logits=True)
    for what, (tokens, logits) in {
        "generate": (result.tokens, torch.stack(result.logits, 1)),
        "model.generate": hf_generate(model, ids, NEW, past_key_values=caches[1]),
    }.items():
        assert_logits(logits, want[1], what)
        assert torch.equal(tokens, want[0]), what


@pytest.mark.parametrize("name", slow_but(REPAIRED, SERVED))
@on_ranks(2)
def test_training(name):
    check_trained(lambda: random_model(name))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", slow_but(OF_OTHER_FORM, [x for x in SERVED if x not in WHOLE]))
@on_ranks(timeout=200.0)
def test_weights_over_all_ranks(world, name):
    check_sharded(random_model(name))


@pytest.mark.parametrize(("name", "what"), WHOLE.items())
def test_weights_that_stay_whole_are_refused_by_name(name, what):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(name))
    for world in (2, 4):
        with pytest.raises(ValueError, match=what):
            plan_layout(model, world, 0)


def test_layers_that_run_several_times_have_no_dropout():
    model = random_model("hrm_text")
    model.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="attention_dropout=0.1: HrmTextForCausalLM runs every layer several times"):
        tree_hf.train_on_shards(model)


@pytest.mark.parametrize(
    ("name", "what"),
    {**dict.fromkeys(OWN_CODE, "computes attention in its own code"), **OTHER_REASONS}.items(),
)
def test_refused_by_name(name, what):
    config = transformers.CONFIG_MAPPING[name]()
    with pytest.raises(ValueError, match=what):
        tree_hf.TreeCache(config)


def test_the_decoder_of_an_encoder_and_decoder():
    """Whose configuration says that it is a decoder alone."""
    config = transformers.BartConfig(is_encoder_decoder=False, is_decoder=True)
    with pytest.raises(ValueError, match="BartConfig is of an encoder-decoder architecture; .* Use attn_impl"):
        tree_hf.TreeCache(config)


def test_vision_inside_the_text_part_is_not_split():
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.Phi4MultimodalConfig(**sizes, num_key_value_heads=2, vocab_size=131, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ValueError, match="Phi4MultimodalForCausalLM: weights='sharded' .* its vision or audio part lies"
    ):
        plan_layout(model, 2, 0)


def test_own_code_is_refused_wherever_it_is_set_up():
    config = transformers.OpenAIGPTConfig(vocab_size=131, n_embd=32, n_layer=2, n_head=4)
    model = AutoModelForCausalLM.from_config(config)
    model.config._attn_implementation = "tree"
    for set_up in (lambda: tree_hf.train_on_shards(model), lambda: tree_hf.check_model(model)):
        with pytest.raises(ValueError, match="OpenAIGPTLMHeadModel computes attention in its own code"):
            set_up()


def test_an_update_that_no_attention_call_takes():
    """As in a model that computes attention itself: Transformers' own attention function in one layer."""
    model, ids = tree_model("llama"), prompt(1, 9)
    model.model.layers[1].self_attn.config = transformers.LlamaConfig(**model.config.to_dict())
    model.model.layers[1].self_attn.config._attn_implementation = "eager"
    cache = tree_hf.TreeCache(model.config)
    with torch.no_grad(), pytest.raises(ValueError, match="layer 1 updated the TreeCache, but its attention did not"):
        model(ids, past_key_values=cache)
    model.model.layers = model.model.layers[:2]  # now it is the last one
    runner = tree_hf.Runner(model, tree_hf.TreeCache(model.config))
    with pytest.raises(ValueError, match="layer 1 updated the TreeCache"):
        runner.prefill(runner.add(), ids[0])


def test_a_second_attention_call():
    model, ids = tree_model("llama"), prompt(1, 9)
    attention, first = model.model.layers[1].self_attn, model.model.layers[1].self_attn.forward

    def twice(*args, **kwargs):
        out = first(*args, **kwargs)
        q = torch.zeros(1, 4, 9, 8)
        tree_hf.tree_attention(attention, q, q[:, :2], q[:, :2], None)
        return out

    attention.forward = twice
    with torch.no_grad(), pytest.raises(ValueError, match=r"layer_idx=1\) attends without a cache update of its own"):
        model(ids, past_key_values=tree_hf.TreeCache(model.config))


def test_other_keys_or_values_than_those_in_the_cache():
    model, ids = tree_model("llama"), prompt(1, 9)
    for which in (0, 1):
        cache = tree_hf.TreeCache(model.config)
        update = cache.update

        def changed(k, v, layer_idx, update=update, which=which):
            kv = list(update(k, v, layer_idx))
            kv[which] = kv[which].flip(1)
            return kv

        cache.update = changed
        with torch.no_grad(), pytest.raises(ValueError, match="does not pass what the cache returns on"):
            model(ids, past_key_values=cache)
