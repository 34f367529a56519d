"""A group of 8 answers to a prompt of 2,000 tokens, as one packed row: what it computes, and that it is exact."""

import time

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
from megatron_tree import prefix_tree
from support.ranks import run_distributed
from support.rounding import assert_near
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

PROMPT, ANSWERS, LENGTH, VOCAB = 2000, 8, 250, 512


def _model(dtype):
    """In float64 GPT-2, which computes nothing in less."""
    torch.manual_seed(1)
    if dtype == torch.float64:
        options = {"n_positions": 4096, "n_embd": 64, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0}
        options |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
        config = GPT2Config(vocab_size=VOCAB, **options)
    else:
        options = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=4096, **options)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(2.0)
    return model


def _answers():
    draw = torch.Generator().manual_seed(2)
    prompt = torch.randint(VOCAB, (PROMPT,), generator=draw)
    ends = torch.randint(VOCAB, (ANSWERS, LENGTH), generator=draw)
    ends[:, 0] = torch.arange(ANSWERS)
    return [torch.cat((prompt, end)) for end in ends]


def _grpo(log_probs, mask):
    """Clipped ratios [8, s] with an advantage for each answer, as in GRPO."""
    advantages = torch.linspace(-0.5, 1, ANSWERS, dtype=log_probs.dtype)[:, None]
    ratio = torch.exp(log_probs - log_probs.detach() + 0.1 * log_probs.detach().sin())
    each = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -((each * mask).sum(1) / mask.sum(1)).mean()


def _separate(model, rows):
    """(loss, gradients, CPU seconds) of the rows one by one; every row's graph is freed before the next one's."""
    mask = (torch.arange(len(rows[0]) - 1) >= PROMPT - 1).to(model.dtype)
    started, log_probs = time.process_time(), []
    for row in rows:
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        log_probs.append(logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0] * mask)
    loss = _grpo(torch.stack(log_probs), mask.expand(ANSWERS, -1))
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], time.process_time() - started


def _as_tree(rank, world, dtype):
    """(tokens of this rank, CPU seconds, keys that its tokens see); its results are compared with the rows'."""
    rows, group = _answers(), dist.group.WORLD if world > 1 else None
    weights = (torch.arange(PROMPT + LENGTH) >= PROMPT).float().expand(ANSWERS, -1)
    model = _model(dtype)
    tree_hf.train_on_shards(model)
    started = time.process_time()
    tree = prefix_tree(rows, weights=weights)
    shard = tree_hf.shard_batch({"prefix_tree": tree}, cp_group=group)
    values = tree_hf.token_log_probs(model, shard).log_probs
    log_probs = tree.next_of_rows(tree_hf.gather_tokens(values, shard))
    loss = _grpo(log_probs[:, :-1], tree.row_weights[:, :-1].to(dtype))
    loss.backward()
    seconds = time.process_time() - started
    seen = int((shard["sequence_shard"].positions + 1).sum())
    result = loss.detach(), [p.grad for p in model.parameters()]
    for grad in result[1] if world > 1 else ():
        dist.all_reduce(grad)
        grad /= world
    separate = 0.0
    if rank == 0:
        expected, truth, separate = _separate(_model(dtype), rows)
        assert_near(result[0], expected, length=PROMPT, dtype=dtype)
        for mine, grad in zip(result[1], truth, strict=True):
            assert_near(mine, grad, length=ANSWERS * PROMPT, dtype=dtype)
    return tree.input_ids.shape[1], shard["input_ids"].shape[1], seen, seconds, separate


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_group_of_answers(world, dtype):
    found = [_as_tree(0, 1, dtype)] if world == 1 else run_distributed(_as_tree, world, dtype)
    tokens = PROMPT + ANSWERS * LENGTH + ANSWERS - 1
    assert [x[0] for x in found] == [tokens] * world  # of 8 * (2000 + 250)
    assert [x[1] for x in found] == [-(-tokens // world)] * world
    seen = [x[2] for x in found]
    assert max(seen) <= 1.06 * sum(seen) / world
    print(
        f"\n{world} ranks, {dtype}: {tokens} tokens instead of {ANSWERS * (PROMPT + LENGTH)}; forward and backward "
        f"{sum(x[3] for x in found):.1f} s of CPU instead of {found[0][4]:.1f}"
    )
