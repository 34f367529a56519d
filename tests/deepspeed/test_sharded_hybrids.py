"""init_inference(weights="sharded") of models with recurrent layers: N ranks hold 1/N of their heads and states."""

import math

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
from megatron_tree import TreeConfig
from megatron_tree.core import comm
from megatron_tree.inference.generation.scheduler import Scheduler
from megatron_tree.integrations import deepspeed as tree_deepspeed
from support.hf_architectures import HYBRIDS, WHOLE, assert_logits, random_model
from support.hf_models import hf_generate, left_padded, plain, prompt
from support.ranks import largest, on_ranks, run_distributed
from support.scheduling import request, serve, tokens_of
from support_matrix import supported

NEW = 4
FAST = ("qwen3_next", "falcon_h1")
SMALL = ("router", "gate", "shared_expert_gate", "f_a_proj", "g_a_proj")  # whole on every rank, as most norms
KEY_ROWS = {"in_proj_qkvz": 2, "in_proj_qkv": 2, "conv1d": 2, "q_proj": 1, "k_proj": 1}  # of the delta rule's keys
GROUP_ROWS = {"in_proj": 2, "conv1d": 2}  # of Mamba 2's B and C
UNEVEN = {  # heads that ranks do not divide, ranks that share a key head, norms over heads of several ranks
    "qwen3_next": [{"linear_num_key_heads": 4, "linear_num_value_heads": 8}],
    "qwen3_5_text": [{"linear_num_key_heads": 1, "linear_num_value_heads": 4}],
    "bamba": [{"mamba_n_groups": 2}, {"mamba_n_groups": 4}],
    "falcon_h1": [
        {"mamba_n_groups": 2, "mamba_norm_before_gate": True},
        {"mamba_n_groups": 4, "mamba_norm_before_gate": False},
        {"mamba_rms_norm": False},
    ],
    "nemotron_h": [
        {"layers_block_type": ["mamba", "moe", "attention", "mamba"], "n_groups": 2, "moe_latent_size": latents}
        for latents in (None, 24)
    ],
    "zamba2": [{"mamba_ngroups": 2, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}],
}
IN_FILES = {  # experts one by one, q, k and v of a convolution apart, layers that share weights, experts without gates
    "qwen3_next": {},
    "kimi_linear": {},
    "zamba": {},
    "nemotron_h": UNEVEN["nemotron_h"][1],
}


def _engine(model, **options):
    return tree_deepspeed.init_inference(model, weights="sharded", page_size=2, prefill_chunk=8, **options)


def _rows(rows, layer, child, world):
    """The first rank's rows of a recurrent layer's weight: its key heads, which it may share, and its value heads."""
    num_keys, of_keys = world, 0
    if hasattr(layer, "num_k_heads"):
        num_keys, of_keys = layer.num_k_heads, KEY_ROWS.get(child, 0) * layer.num_k_heads * layer.head_k_dim
    elif hasattr(layer, "n_groups"):
        num_keys, of_keys = layer.n_groups, GROUP_ROWS.get(child, 0) * layer.n_groups * layer.ssm_state_size
    return (rows - of_keys) // world + of_keys // min(world, num_keys)


def _weight_bytes(model, world):
    """Of the first rank, which gets what doesn't come out even."""
    config, total = model.config, 0
    head_groups = 1 if hasattr(config, "kv_lora_rank") else math.gcd(world, config.num_key_value_heads)
    for name, p in model.named_parameters():
        owner, _, child = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
        layer, rows = model.get_submodule(owner), p.shape[0]
        recurrent, n = isinstance(getattr(layer, "conv1d", None), torch.nn.Conv1d), p.numel()
        over_heads = (recurrent and hasattr(layer, "n_groups")) or (
            child in ("q_norm", "k_norm") and rows > layer.head_dim
        )
        if recurrent and child in (*KEY_ROWS, *GROUP_ROWS):
            total += n // rows * _rows(rows, layer, child, world)
        elif child in SMALL or name.endswith("_adapter_list.0.0.weight") or ("norm" in child and not over_heads):
            total += n
        elif not recurrent and child in ("k_proj", "v_proj", "k_norm"):
            total += n // head_groups
        elif p.dim() == 3 and "experts" in name:  # in units of 8 neurons, or of 4
            width = rows_of_expert = p.shape[2] if child == "down_proj" else p.shape[1] // 2
            unit = 8 if width // 8 >= world else 4
            total += n // rows_of_expert * unit * -(-(width // unit) // world)
        else:
            total += n // rows * -(-rows // world) if "embed" in name or child == "lm_head" else n // world
    return total * model.dtype.itemsize


def _state_bytes(model, world):
    """Of the first rank; the whole states are those of a model that is not split."""
    cache = tree_hf.TreeCache(model.config)
    before = model.config._attn_implementation
    model.set_attn_implementation("tree")
    with torch.no_grad():
        model(prompt(1, 5), past_key_values=cache)
    model.set_attn_implementation(before)
    cache.runs.end(cache._batch())
    layers = {str(x.layer_idx): x for x in model.modules() if hasattr(x, "conv1d") or hasattr(x, "in_proj")}
    total = 0
    for name, x in cache.store.book.rows[cache.rows[0]].state.tensors.items():
        number, kind, _ = name.split(".")
        rows = x.shape[1] // world if kind == "recurrent" else _rows(x.shape[1], layers[number], "conv1d", world)
        total += x.nbytes // x.shape[1] * rows
    return total


def _row_bytes(cache):
    return [cache.store.book.rows[row].state.nbytes for row in cache.rows]


def _generation(rank, world, name, changes, even):
    """Prompts in chunks that go on from a state, rows of different lengths, and Transformers' own generate."""
    model, ids = random_model(name, **changes), prompt(1, 21)
    padded, mask = left_padded(2, 13)
    want, want_padded = plain(model, ids, NEW), plain(model, padded, NEW, mask)
    of_rows = [plain(model, row[seen.bool()][None], NEW) for row, seen in zip(padded, mask)]
    weights, states = (_weight_bytes(model, world), _state_bytes(model, world)) if even else (0, 0)
    engine = _engine(model, split_latents=True if hasattr(model.config, "kv_lora_rank") else None)
    for chunk in (8, 64):
        options = {"max_new_tokens": NEW, "keep_logits": True, "chunk_size": chunk}
        result = tree_deepspeed.generate(engine, ids, **options)
        assert_logits(torch.stack(result.logits, 1), want[1], f"chunks of {chunk}")
        assert torch.equal(result.tokens, want[0]), f"chunks of {chunk}"
    if even:
        assert engine.weight_bytes == weights or (rank and engine.weight_bytes < weights)
        assert _row_bytes(result.cache) == [states]
    result = tree_deepspeed.generate(engine, padded, attention_mask=mask, **options)
    for row, (tokens, logits) in enumerate(of_rows):
        assert torch.equal(result.tokens[row], tokens[0]), f"row {row} of other lengths"
        assert_logits(torch.stack(result.logits, 1)[row], logits[0], f"row {row} of other lengths")
    tokens, logits = hf_generate(engine, padded, NEW, mask, past_key_values=engine.new_cache())
    assert torch.equal(tokens, want_padded[0])
    assert_logits(logits, want_padded[1], "model.generate")


OVER_RANKS = "weights and recurrent states over all ranks; 2 and 4 ranks"


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", supported((name for name in HYBRIDS if name not in WHOLE), OVER_RANKS, FAST))
def test_tokens_and_bytes(name, world):
    run_distributed(_generation, world, name, {}, True, fresh=True, timeout=200)


@pytest.mark.parametrize(
    ("name", "changes", "world"),
    [
        pytest.param(name, changes, world, marks=() if (i, world) == (0, 3) and name in FAST else pytest.mark.slow)
        for name, cases in UNEVEN.items()
        for i, changes in enumerate(cases)
        for world in (3, 4)
    ],
)
def test_shares_of_heads(name, changes, world):
    run_distributed(_generation, world, name, changes, False, fresh=True, timeout=200)


def _rows_and_files(rank, world, name, folder):
    """A row and its copy go on apart; ranks with parts of the states save rows, and ranks with whole ones."""
    model, text = random_model(name), prompt(1, 12)[0]
    with torch.no_grad():
        want = model(text[None]).logits[0]
    whole = random_model(name)
    whole.set_attn_implementation("tree")
    engine, options = _engine(model), {"fingerprint": name}
    runner = engine.new_runner()
    row = runner.add()
    assert_logits(runner.prefill(row, text[:9]), want[8], "prefill")
    copy = runner.fork(row)
    for i in (9, 10):
        assert_logits(runner.step([row], text[i : i + 1][None])[0, 0], want[i], "step")
    assert_logits(runner.step([copy], text[9:10][None])[0, 0], want[9], "a copy")

    new_cache = lambda: tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD, page_size=2)  # noqa: E731
    for what, cache, runs in (("parts", engine.new_cache(), engine.module), ("whole", new_cache(), whole)):
        with torch.no_grad():
            runs(text[None, :9], past_key_values=cache)
        cache.save(f"{folder}/{what}", [text[:9]], **options)
        for loading, model_of in ((engine.new_cache(), engine.module), (new_cache(), whole)):
            assert torch.equal(loading.load(f"{folder}/{what}", **options)[0], text[:9])
            again = tree_hf.Runner(model_of, loading, token_group=dist.group.WORLD)
            assert_logits(again.step(loading.rows, text[9:10][None])[0, 0], want[9], f"{what}, loaded")
    bare = tree_hf.TreeCache(model.config, cp_group=engine.sp_group, head_shares=runner.head_shares)
    with pytest.raises(ValueError, match="and recurrent states: each rank has a part|other head groups hold other KV"):
        bare.save(f"{folder}/bare", [], **options)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_rows_and_files(name, world, tmp_path):
    run_distributed(_rows_and_files, world, name, str(tmp_path), fresh=True, timeout=200)


def _loaded(rank, world, name, folder):
    model, text = random_model(name), prompt(1, 12)[0]
    with torch.no_grad():
        want = model(text[None]).logits[0]
    engine = _engine(model)
    cache = engine.new_cache()
    cache.load(f"{folder}/parts", fingerprint=name)
    again = tree_hf.Runner(engine.module, cache, token_group=dist.group.WORLD)
    assert_logits(again.step(cache.rows, text[9:10][None])[0, 0], want[9], "loaded by other ranks")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_other_numbers_of_ranks_load_parts(name, tmp_path):
    run_distributed(_rows_and_files, 4, name, str(tmp_path), fresh=True, timeout=200)
    for world in (2, 3):
        run_distributed(_loaded, world, name, str(tmp_path), fresh=True, timeout=200)


def _from_files(rank, world, folder, name):
    model, ids = random_model(name, **IN_FILES[name]), prompt(1, 20)
    with torch.no_grad():
        want = model(ids).logits[0, -1]
    engine = _engine(folder)
    runner = engine.new_runner()
    assert_logits(runner.prefill(runner.add(), ids[0]), want, "from files")
    by_formula = not hasattr(model.config, "kv_lora_rank") and name != "nemotron_h"
    assert rank or not by_formula or engine.weight_bytes == _weight_bytes(model, world)


@pytest.mark.parametrize("name", IN_FILES)
def test_pieces_are_read_from_files(name, tmp_path):
    random_model(name, **IN_FILES[name]).save_pretrained(tmp_path)
    run_distributed(_from_files, 2, str(tmp_path), name, fresh=True, timeout=200)


def _bf16(rank, world, name):
    """The error of the next token's logits by that of the plain model in bf16, and the bits of a step of two rows."""
    ids, model = prompt(1, 40), random_model(name)
    with torch.no_grad():
        truth = model(ids, logits_to_keep=1).logits
        allowed = (model.to(torch.bfloat16)(ids, logits_to_keep=1).logits - truth).abs().max()
    runner = _engine(model).new_runner()
    error = (runner.prefill(runner.add(), ids[0]) - truth).abs().max() / allowed
    return float(error), runner.step([runner.add(), runner.add()], ids[:, :2].view(2, 1))


@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba"])
def test_bf16_within_the_rule_and_the_same_bits_on_all_ranks(name):
    errors, logits = zip(*run_distributed(_bf16, 4, name, fresh=True))
    assert largest(errors) <= 2
    assert all(torch.equal(own, logits[0]) for own in logits)


def _sent_in_a_step(rank, world, num_groups):
    model = random_model("bamba", mamba_n_groups=num_groups)
    runner = _engine(model, tree_config=TreeConfig(transport="direct")).new_runner()
    row, ids = runner.add(), prompt(1, 9)[0]
    runner.prefill(row, ids)
    with comm.record() as sent:
        runner.step([row], ids[None, :1])
    return sum(x.bytes for x in sent)


def test_bytes_of_norms_over_heads_of_several_ranks():
    """A number for each token, group and layer, to each other rank; none where no ranks share a group."""
    world, layers = 4, 2
    sent = {n: run_distributed(_sent_in_a_step, world, n, fresh=True) for n in (2, world)}
    for own, without in zip(sent[2], sent[world], strict=True):
        assert own - without == (world - 1) * layers * 2 * 4


@on_ranks(2, fresh=True)
def test_served_together(rank):
    """Rows that go on with another's text, and several answers of one prompt, over parts of the states."""
    requests = [request(length, NEW) for length in (5, 9, 5)] + [request(7, NEW, n=2)]
    model = random_model("qwen3_next")
    want = [plain(model, r.prompt[None], NEW)[0][0].tolist() for r in requests]
    runner = _engine(model).new_runner()
    scheduler = Scheduler(runner, max_rows=4, max_waiting=8, keep_bytes=1 << 20)
    if rank:
        scheduler.run()
        return
    events = serve(scheduler, requests)
    for found, own in zip(events, want, strict=True):
        assert tokens_of(found) == own
    assert tokens_of(events[-1], 1) == want[-1]


@on_ranks(4, fresh=True)
def test_refusals():
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    for changes, options, message in (
        (heads, {}, r"(?s)linear_attn: 2 value heads \(1 key heads\) on 4 ranks.*start 2 ranks or fewer"),
        ({}, {"queries": "repeated"}, "queries='repeated' can't split"),
        ({"dtype": torch.bfloat16}, {}, "experts.gate_up_proj: 16 neurons in units of 8 are too few for all ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            _engine(random_model("qwen3_next", **changes), **options)
