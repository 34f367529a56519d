"""init_inference(weights="sharded"): N ranks hold 1/N of the weights and of the cache each; tokens as of one rank."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron_tree import TreeConfig
from megatron_tree.integrations import deepspeed as tree_deepspeed
from support.hf_models import hf_generate, left_padded, plain, prompt, tiny_model, tree_model
from support.ranks import largest, on_ranks, run_distributed
from support.tape import TapedSteps

NEW = 6
BLOCK = 2
FAMILIES = ("gemma3", "gpt_oss", "phi3", "deepseek_v3_experts")
SLOW_FAMILIES = ("llama", "mixtral", "smollm2", "qwen2", "qwen3", "gemma2", "mistral", "qwen2_moe", "deepseek_v2")
LATENT = ("deepseek_v3_experts", "deepseek_v2")
FULL_ATTENTION = ("llama", "mixtral", "smollm2", "qwen3", "qwen2_moe", *LATENT)  # all layers keep all tokens

LATENTS = ("q_a_proj", "kv_a_proj_with_mqa")
ROWS = ("gate_proj", "up_proj", "gate_up_proj", "embed_tokens", "lm_head", *LATENTS)


def _model(family, dtype=torch.float32):
    model = tiny_model(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zeros otherwise: one that is added by every rank would not show
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    return model.to(dtype)


def _most_bytes(model, world, split_latents=True):
    """Bytes of the first rank, which gets what doesn't come out even: k and v over head groups, all else over ranks."""
    config, total = model.config, 0
    groups = 1 if hasattr(config, "kv_lora_rank") else math.gcd(world, config.num_key_value_heads)
    d = getattr(model.model.layers[0].self_attn, "head_dim", None)
    for name, p in model.named_parameters():
        last = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        heads, heads_kv, n = config.num_attention_heads, config.num_key_value_heads, p.numel()
        own = groups and -(-(heads // groups) // (world // groups))  # the most query heads of a rank
        if last in ("q_proj", "q_b_proj", "kv_b_proj", "sinks") or (last == "o_proj" and p.dim() == 2):
            total += n // heads * own
        elif last in ("k_proj", "v_proj"):
            total += n // groups
        elif last == "qkv_proj":
            total += n // p.shape[0] * d * (own + 2 * heads_kv // groups)
        elif ("expert" in name and p.dim() == 3) or last == "gate_up_proj_bias":  # in units of 8 neurons
            width = p.shape[-1 if last == "gate_up_proj_bias" else 1 if p.shape[1] != config.hidden_size else 2]
            width //= 2 if "gate_up" in last else 1
            unit = 8 if width // 8 >= world else 4
            total += n // width * unit * -(-(width // unit) // world)
        elif last in LATENTS and not split_latents:
            total += n
        elif last in ROWS:
            rows = p.shape[0] // (2 if last == "gate_up_proj" else 1)
            total += n // rows * -(-rows // world)
        elif last == "down_proj" and p.dim() == 2:
            total += n // p.shape[1] * -(-p.shape[1] // world)
        else:
            assert "norm" in name or "gate" in name or "router" in name or name.endswith("bias"), name
            total += n
    return total * model.dtype.itemsize


def _numbers_of_a_token(model):
    config = model.config
    if hasattr(config, "kv_lora_rank"):
        return config.kv_lora_rank + config.qk_rope_head_dim
    return 2 * config.num_key_value_heads * model.model.layers[0].self_attn.head_dim


def _run(rank, world, families):
    found = {}
    for family in families:
        model = _model(family)
        one, (padded, mask) = prompt(1, 77), left_padded(4, 15)
        want, want_padded = plain(model, one, NEW), plain(model, padded, NEW, mask)
        split_latents = family != "deepseek_v2" if family in LATENT else None
        most, config = _most_bytes(model, world, split_latents is not False), model.config
        # chunks for the kernels of the prefill and of decoding
        options = dict(page_size=BLOCK, prefill_chunk=34, split_latents=split_latents)
        engine = tree_deepspeed.init_inference(model, weights="sharded", **options)
        assert sum(p.nbytes for p in model.parameters()) == engine.weight_bytes
        result = tree_deepspeed.generate(engine, one, max_new_tokens=NEW, keep_logits=True)
        assert torch.equal(result.tokens, want[0]), family
        held = result.cache.nbytes
        whole = 4 * config.num_hidden_layers * _numbers_of_a_token(model)
        if family in FULL_ATTENTION:
            group = engine.sp_size
            most_tokens = -(-(77 + NEW - 1) // BLOCK // group) * BLOCK + BLOCK
            assert held <= whole * most_tokens * group // world, family
        again = tree_deepspeed.generate(engine, padded, max_new_tokens=NEW, attention_mask=mask)
        assert torch.equal(again.tokens, want_padded[0]), family
        tokens, _ = hf_generate(engine, padded, NEW, mask, past_key_values=engine.new_cache())
        assert torch.equal(tokens, want_padded[0]), family
        error = (torch.stack(result.logits, 1) - want[1]).abs().max() / want[1].abs().max()
        found[family] = float(error), engine.weight_bytes, most, held, whole * (77 + NEW - 1)
    return found


def _check(results, world):
    for family in results[0]:
        errors, weights, most, held, whole = zip(*(found[family] for found in results))
        assert largest(errors) < 5e-6, family
        assert weights[0] == most[0] == max(weights), family
        if family in FULL_ATTENTION:
            assert sum(held) == whole[0], family


@pytest.mark.parametrize(
    ("world", "families"), [(4, FAMILIES), (2, ("mixtral", "deepseek_v2")), (3, ("smollm2", "llama"))]
)
def test_tokens_and_bytes(world, families):
    _check(run_distributed(_run, world, families, fresh=True, timeout=280), world)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_tokens_and_bytes_of_all_families(world):
    families = tuple(f for f in FAMILIES + SLOW_FAMILIES if not (world == 3 and f == "qwen2_moe"))
    _check(run_distributed(_run, world, families, fresh=True, timeout=290), world)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@on_ranks(4, fresh=True)
def test_bf16_within_the_rule_and_the_same_bits_on_all_ranks(world, family):
    """Error of the logits of the next token, by that of the plain model in bf16; also where tokens are shared."""
    ids = prompt(1, 60)
    truth = _model(family)(ids, logits_to_keep=1).logits
    model = _model(family, torch.bfloat16)
    allowed = (model(ids, logits_to_keep=1).logits - truth).abs().max()
    engine = tree_deepspeed.init_inference(model, weights="sharded", page_size=BLOCK)
    runner, errors = engine.new_runner(), []
    for engine.module.weight_gathering.forced in (None, True):
        errors.append((runner.prefill(runner.add(), ids[0]) - truth).abs().max() / allowed)
    batch = runner.step([runner.add(), runner.add()], ids[:, :2].view(2, 1))
    parts = [torch.empty_like(batch) for _ in range(world)]
    dist.all_gather(parts, batch)
    error, same = largest(errors), all(torch.equal(batch, part) for part in parts)
    assert error <= 2 and same, (error, same)


FILES = (
    "smollm2",
    "mixtral",
    "gpt_oss",
    "phi3",
    "deepseek_v2",
)  # tied weights, a tensor for each expert, biases, several files


def _from_files(rank, world, folder):
    """The largest difference of a logit of engines of saved models."""
    worst = {}
    for family in FILES:
        model, ids = _model(family), prompt(1, 40)
        want = model(ids).logits[0, -1]
        options = {"split_latents": True} if family in LATENT else {}
        engine = tree_deepspeed.init_inference(f"{folder}/{family}", weights="sharded", page_size=BLOCK, **options)
        runner = engine.new_runner()
        worst[family] = float((runner.prefill(runner.add(), ids[0]) - want).abs().max() / want.abs().max())
        assert engine.plain_attention == model.config._attn_implementation
        assert engine.model_bytes == sum(p.nbytes for p in model.parameters())
        assert rank or engine.weight_bytes == _most_bytes(model, world)
        assert not [name for name, x in engine.module.named_buffers() if x.device.type == "meta"]
    return worst


def test_pieces_are_read_from_files(tmp_path):
    for family in FILES:
        _model(family).save_pretrained(tmp_path / family, max_shard_size="40KB" if family == "phi3" else "1GB")
    for worst in run_distributed(_from_files, 2, str(tmp_path), fresh=True, timeout=200):
        assert largest(worst.values()) < 5e-6, worst


@on_ranks(3, fresh=True)
def test_refusals():
    from megatron_tree.integrations.transformers.attention import TreeCache

    latents = "is for weights='sharded' and models with latent attention"
    for family, options, message in (
        ("llama", {"tp_size": 2}, "leave sp_size=None and tp_size=2 out"),
        ("llama", {"sp_size": 3}, "leave sp_size=3 and tp_size=1 out"),
        ("llama", {"weights": "split"}, "weights='split' is unknown"),
        ("llama", {"split_latents": False}, f"split_latents=False {latents}"),
        ("deepseek_v2", {"split_latents": True, "weights": "replicated"}, f"split_latents=True {latents}"),
        (
            "llama",
            {"queries": "repeated", "weights": "replicated"},
            "queries='repeated' is for weights='sharded', but weights='replicated'",
        ),
        ("llama", {"queries": "whole"}, "queries='whole' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            tree_deepspeed.init_inference(_model(family), **{"weights": "sharded", **options})
    model = tiny_model("smollm2")
    engine = tree_deepspeed.init_inference(model, weights="sharded")
    ids, whole = prompt(1, 5), TreeCache(model.config, cp_group=engine.sp_group)
    with pytest.raises(ValueError, match=r"head_shares=\(3,\), but the cache is one for head_shares=None"):
        model(ids, past_key_values=whole)
    with pytest.raises(ValueError, match=r"head_shares=\(3,\), but no cache is given"):
        model(ids, use_cache=False)
    with pytest.raises(ValueError, match=r"save of a cache with head_shares=\(3,\): other head groups hold other KV"):
        TreeCache(model.config, head_shares=(3,)).save("x", [], fingerprint="")
    with pytest.raises(ValueError, match=r"head_shares=None, but the cache is one for head_shares=\(3,\)"):
        tree_model("smollm2")(ids, past_key_values=engine.new_cache())


def _replayed(rank, world, families):
    worst = {}
    for family in families:
        # gloo's ranks would meet in each call; NCCL's don't
        config = TreeConfig(transport="builtin", check="never")
        options = dict(weights="sharded", page_size=BLOCK, tree_config=config)
        engine = tree_deepspeed.init_inference(tiny_model(family), **options)
        ordinary, replayed = engine.new_runner(), engine.new_runner()
        replayed._graphs, tokens, errors = TapedSteps(replayed), prompt(3, 12), []
        for runner in (ordinary, replayed):
            for own, n in zip(tokens, (12, 7, 3)):
                runner.prefill(runner.add(), own[:n])
        new = torch.tensor([[1], [2], [3]])
        for _ in range(8):
            want, got = (runner.step([0, 1, 2], new) for runner in (ordinary, replayed))
            errors.append((got - want).abs().max() / want.abs().max())
            new = want.argmax(-1)
        worst[family] = largest(errors)
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_replayed_steps_over_sharded_weights(world):
    """The collectives of the weights' shares are replayed as well."""
    families = ("llama", "gpt_oss", "mixtral", "deepseek_v3_experts")
    for worst in run_distributed(_replayed, world, families, fresh=True):
        assert largest(worst.values()) <= 1e-5, worst
