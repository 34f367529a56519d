"""init_inference(weights="sharded", queries=...): each rank of a head group computes its queries; none are gathered."""

import dataclasses
import math

import pytest
import torch
import yaml

from megatron_tree import TreeConfig
from megatron_tree.core import comm
from megatron_tree.core.plan import load_topology
from megatron_tree.integrations import deepspeed as tree_deepspeed
from support.hf_models import hf_generate, left_padded, plain, prompt, tiny_model
from support.ranks import largest, run_distributed

NEW = 6
# sinks, biases, windows, experts; q, k and v in one weight; latents
FAMILIES = ("gpt_oss", "phi3", "deepseek_v3")
SLOW_FAMILIES = ("llama", "smollm2", "gemma3", "mixtral", "qwen2", "qwen3", "gemma2", "mistral", "qwen2_moe", "olmo2",
                 "deepseek_v2", "deepseek_v3_experts")  # fmt: skip


def _engine(family, **options):
    return tree_deepspeed.init_inference(tiny_model(family), weights="sharded", page_size=2, **options)


def _rows_of_queries(engine, config):
    """Of this rank, in heads, and the rows of a head group."""
    attention = engine.module.model.layers[0].self_attn
    if hasattr(attention, "kv_b_proj"):
        queries = attention.q_proj if attention.q_b_proj is None else attention.q_b_proj
        return len(queries.weight) / attention.qk_head_dim, config.num_attention_heads
    d, groups = attention.head_dim, engine.module.weight_gathering.head_groups
    if hasattr(attention, "q_proj"):
        rows = len(attention.q_proj.weight)
    else:
        rows = len(attention.qkv_proj.weight) - 2 * config.num_key_value_heads // groups * d
    return rows / d, config.num_attention_heads / groups


def _run(rank, world, families):
    worst = []
    for family in families:
        one, (padded, mask), model = prompt(1, 77), left_padded(4, 15), tiny_model(family)
        want, want_padded = plain(model, one, NEW), plain(model, padded, NEW, mask)
        sent = {}
        for queries in ("split", "repeated"):
            engine = _engine(family, prefill_chunk=34, queries=queries)
            held, of_group = _rows_of_queries(engine, model.config)
            assert held == of_group if queries == "repeated" else held < of_group
            result = tree_deepspeed.generate(engine, one, max_new_tokens=NEW, keep_logits=True)
            assert torch.equal(result.tokens, want[0]), (family, queries)
            worst.append((torch.stack(result.logits, 1) - want[1]).abs().max() / want[1].abs().max())
            engine.module.weight_gathering.forced = True  # weights that several ranks hold are gathered once
            runner = engine.new_runner(chunk_size=77)
            row = runner.add()
            worst.append((runner.prefill(row, one[0]) - want[1][0, 0]).abs().max() / want[1].abs().max())
            engine.module.weight_gathering.forced = None
            with comm.record() as log:
                runner.step([row], one[:, :1])
            sent[queries] = len(log)
        tokens, _ = hf_generate(engine, padded, NEW, mask, past_key_values=engine.new_cache())
        assert torch.equal(tokens, want_padded[0]), family
        has_all = math.gcd(world, model.config.num_key_value_heads) == 1  # query heads on every rank
        saved = 2 if family == "olmo2" and has_all else 1  # its norm over all of them needs no sum then
        assert sent["split"] - sent["repeated"] == saved * model.config.num_hidden_layers, (family, sent)
    return largest(worst)


def test_tokens_and_no_gathers():
    assert largest(run_distributed(_run, 4, FAMILIES, fresh=True, timeout=280)) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
def test_tokens_and_no_gathers_of_all_families(world):
    families = tuple(f for f in SLOW_FAMILIES if tiny_model(f).config.num_key_value_heads % world)
    families = tuple(f for f in families if world == 4 or f != "qwen2_moe")  # its neurons
    assert largest(run_distributed(_run, world, families, fresh=True, timeout=290)) < 5e-6


def _chosen(rank, world, topologies):
    found = []
    for topology in topologies:
        engine = _engine("smollm2", queries="auto", tree_config=TreeConfig(topology=topology))
        held, of_group = _rows_of_queries(engine, engine.module.config)
        found.append(held == of_group)
    return found


def test_auto_follows_the_topology(tmp_path):
    """Repeated where messages take longer than reading more weights."""
    laptop, paths = load_topology("laptop"), []
    for bandwidth in (1e15, 1e3):
        topology = dataclasses.asdict(dataclasses.replace(laptop, memory_bandwidth=bandwidth))
        paths.append(str(tmp_path / f"{bandwidth}.yaml"))
        (tmp_path / f"{bandwidth}.yaml").write_text(
            yaml.safe_dump({k: v for k, v in topology.items() if v is not None})
        )
    for found in run_distributed(_chosen, 2, paths, fresh=True):
        assert found == [True, False]
