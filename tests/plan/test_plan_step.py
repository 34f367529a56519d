"""A decode step of a whole model: what each way to share weights and cache reads and sends."""

import dataclasses
import json
import math

import pytest

from megatron_tree.plan import load_topology, place
from megatron_tree.plan.command import main
from megatron_tree.plan.cost import placed_topology
from megatron_tree.plan.decode import exchanges_queries, gathered, gathered_queries
from megatron_tree.plan.model import Index, ModelSizes
from megatron_tree.plan.select import plan_select
from megatron_tree.plan.step import WAYS, plan_step, repeats_queries, splits_latents
from support.published_models import MODELS

LLAMA, DEEPSEEK = (ModelSizes.of(config) for config in MODELS.values())
DGX = load_topology("dgx_h100")


def costs(model, ranks, **sizes):
    found = plan_step(model, DGX, [n // 8 for n in range(ranks)], **{"seq_len": 1 << 20, **sizes})
    assert [c.way for c in found] == list(WAYS)
    return dict(zip(WAYS, found))


def test_sizes_of_published_models():
    """70.6 billion parameters, less an embedding; 37 of 671 billion for one token."""
    assert LLAMA.words(1) == pytest.approx(70.55e9 - 128256 * 8192, rel=1e-3)
    assert DEEPSEEK.words(1) == pytest.approx(36.6e9, rel=0.01) and DEEPSEEK.words(10**6) == pytest.approx(
        670e9, rel=2e-3
    )
    assert DEEPSEEK.cache == 576 and LLAMA.cache == 256
    assert ModelSizes.of({"text_config": MODELS["Llama 3.1 70B"]}) == LLAMA


@pytest.mark.parametrize("ranks", [4, 8, 16, 64])
def test_what_a_rank_reads(ranks):
    """Sharded: all but the projections of keys over all ranks; the cache over all ranks in every way."""
    found, whole = costs(LLAMA, ranks, batch=2), 2 * LLAMA.words(2)
    groups = math.gcd(ranks, 8)
    keys = 2 * 80 * LLAMA.keys
    assert found["whole weights"].weight_bytes == whole
    assert found["tensor parallel"].weight_bytes == pytest.approx(whole / groups)
    assert found["sharded"].weight_bytes == pytest.approx((whole - keys) / ranks + keys / groups)
    assert found["sharded"].weight_bytes == found["DCP"].weight_bytes <= found["Helix"].weight_bytes
    assert {c.cache_bytes for c in found.values()} == {2 * 2 * (1 << 20) * 80 * 8 * 256 / ranks}
    assert all(c.time_s > c.read_s > 0 for c in found.values())
    if ranks <= 8:  # every rank is a head group of its own: nothing to merge, nothing to gather
        assert len({found[way][1:] for way in list(WAYS)[1:]}) == 1


def test_latent_attention_has_one_kv_head():
    """The product splits nothing, DCP all but the projections into latents; 1/N of the cache each."""
    found = costs(DEEPSEEK, 16)
    assert found["tensor parallel"][1:] == found["whole weights"][1:]
    common = 2 * 61 * DEEPSEEK.shared
    assert found["sharded"].weight_bytes == pytest.approx(found["DCP"].weight_bytes)
    assert found["DCP"].weight_bytes == pytest.approx((2 * DEEPSEEK.words(1) - common) / 16 + common)
    assert found["sharded"].cache_bytes == 2 * (1 << 20) * 61 * 576 / 16


def test_projections_into_latents_are_split_where_that_is_faster():
    """Not on 2 nodes of GPUs, as gathers take longer than reading; on four CPU ranks that read slowly they are."""
    slow = dataclasses.replace(load_topology("laptop"), memory_bandwidth=5e9, transport="shm")
    for topology, hosts, splits in ((DGX, [n // 8 for n in range(16)], False), (slow, [0] * 4, True)):
        ranks = len(hosts)
        cost = plan_step(DEEPSEEK, topology, hosts, seq_len=4096)[list(WAYS).index("sharded")]
        whole = 0 if splits else 2 * 61 * DEEPSEEK.shared
        assert cost.weight_bytes == pytest.approx((2 * DEEPSEEK.words(1) - whole) / ranks + whole)
        placed = placed_topology(topology, place(topology, hosts))
        both = [(DEEPSEEK.shared / 2, DEEPSEEK.shared / DEEPSEEK.hidden_size / 2)] * 2
        assert splits_latents(placed, both, 2) == splits
        assert splits_latents(placed, [(1e12, 1.0)], 2) and not splits_latents(placed, [(1.0, 1.0)], 2)


HYBRID = {  # four layers of Qwen3-Next's sizes, of which one attends
    "num_hidden_layers": 4,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5632,
    "vocab_size": 1024,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize("ranks", [4, 8, 16, 64])
def test_recurrent_layers(ranks):
    """Ranks that split the weights have 1/N of the heads, their weights and states; others have all. Nothing moves but
    results: a recurrent layer sends what an MLP does."""
    model = ModelSizes.of(HYBRID)
    found, state = costs(model, ranks, batch=2), 2 * 3 * (32 * 128 * 128 * 4 + 8192 * 4 * 2)
    values, keys = 1 / min(ranks, 32), 1 / min(ranks, 16)
    of_keys = 2 * 3 * 4096 * 4 * 2 * (keys - values)
    assert found["whole weights"].state_bytes == state
    assert found["sharded"].state_bytes == pytest.approx(state * values + of_keys)
    assert found["tensor parallel"].state_bytes == state / 2  # of two KV heads
    assert found["whole weights"].weight_bytes == 2 * model.words(2)
    attention = model.queries / ranks + model.keys / math.gcd(ranks, 2) + model.output / ranks
    recurrent = model.recurrent.weights * values + 4096 * 2052 * (keys - values)
    rest = (4 * model.mlp + model.lm_head) / ranks
    assert found["sharded"].weight_bytes == pytest.approx(2 * (attention + rest + 3 * recurrent), rel=1e-4)
    assert {c.cache_bytes for c in found.values()} == {2 * 2 * (1 << 20) * 1 * 2 * 512 / ranks}
    for cost in found.values():
        touched = cost.weight_bytes + cost.cache_bytes + 2 * cost.state_bytes
        assert cost.read_s == pytest.approx(touched / DGX.memory_bandwidth) and cost.held_bytes == cost.weight_bytes
    plain = costs(model._replace(recurrent=None, mixers=1), ranks, batch=2)
    one_sum = costs(model._replace(recurrent=None, mixers=2), ranks, batch=2)
    for way in WAYS:
        three_sums = 3 * (one_sum[way].sent_bytes - plain[way].sent_bytes)
        assert found[way].sent_bytes == pytest.approx(plain[way].sent_bytes + three_sums)


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_selected_keys(ranks):
    """A rank reads its index keys and its part of 2,048 selected rows; what the ranks send does not depend on the
    sequence's length."""
    index = Index(61, 64, 128, 2048, 1536 * 64 * 128 + 7168 * (64 + 128))
    model = DEEPSEEK._replace(index=index)
    found, plain = costs(model, ranks), costs(DEEPSEEK, ranks)
    short = costs(model, ranks, seq_len=1 << 14)
    placement = place(DGX, [n // 8 for n in range(ranks)])
    plan, _ = plan_select(ranks, rows=1, topk=2048, topology=DGX, placement=placement)
    for way, cost in found.items():
        assert cost.cache_bytes == 2 * 2048 * 61 * 576 / ranks
        assert cost.index_bytes == 2 * (1 << 20) * 61 * 128 / ranks
        assert cost.weight_bytes == pytest.approx(plain[way].weight_bytes + 2 * 61 * index.weights)
        assert cost.sent_bytes == pytest.approx(plain[way].sent_bytes + 61 * plan.cost.bytes)
        assert short[way].sent_bytes == cost.sent_bytes and short[way].index_bytes == cost.index_bytes / 64
        assert cost.time_s < plain[way].time_s + 61 * plan.cost.time_s + 2 * 61 * index.weights / DGX.memory_bandwidth
    assert costs(model, ranks, seq_len=100)["sharded"].cache_bytes == pytest.approx(2 * 100 * 61 * 576 / ranks)


def test_weights_that_a_rank_holds():
    """All experts, read or not; a block that several layers share once."""
    for ranks in (1, 16):
        cost = costs(DEEPSEEK, ranks)["sharded"]
        unread = DEEPSEEK.parameters - DEEPSEEK.words(1)
        assert cost.held_bytes == pytest.approx(cost.weight_bytes + 2 * unread / ranks)
    shared = LLAMA._replace(repeated=10**9)
    assert costs(shared, 4)["sharded"].held_bytes == costs(LLAMA, 4)["sharded"].held_bytes - 2 * 10**9 / 4


def test_queries_are_repeated_where_that_is_faster():
    """For 70B on GPUs, as the planner predicts for a whole step; not on ranks that read slowly."""
    slow = dataclasses.replace(load_topology("laptop"), memory_bandwidth=1e9)
    for topology, hosts, repeated in ((DGX, [0, 0, 1, 1], True), (slow, [0] * 4, False)):
        placed = placed_topology(topology, place(topology, hosts))
        assert repeats_queries(placed, (1024 * 8192, 1024), 2) == repeated  # 8 of 64 heads of 128
    found = costs(LLAMA, 32)
    assert found["Helix"].time_s < found["sharded"].time_s and found["repeated"][1:] == found["Helix"][1:]


def test_values_are_merged_where_that_is_faster():
    """Of 64 rows, whose latents are four times as wide; of one row that would not pay for reading more weights. Ranks
    that have all weights read no more."""
    for batch, more in ((1, 0), (64, 2 * 61 * DEEPSEEK.values * 31 / 32)):
        found = costs(DEEPSEEK, 32, batch=batch)
        ours, helix = found["repeated"], found["Helix"]
        assert ours.weight_bytes == pytest.approx(helix.weight_bytes + more)
        assert (ours.time_s < helix.time_s) == (more > 0) and (ours.sent_bytes < helix.sent_bytes) == (more > 0)
        assert ours.time_s < found["sharded"].time_s or batch == 1
        wide = plan_step(DEEPSEEK._replace(values=0), DGX, [n // 8 for n in range(32)], batch=batch, seq_len=1 << 20)
        assert found["whole weights"].weight_bytes == wide[0].weight_bytes
        assert found["whole weights"].time_s < wide[0].time_s and found["whole weights"].sent_bytes < wide[0].sent_bytes


def test_queries_are_exchanged_where_that_is_faster():
    """An all-to-all has one latency, an all-gather many; but that sends every share through each node's port once for
    every rank there. Between ranks that send to all at once anyway there is no choice."""
    two = placed_topology(DGX, place(DGX, [n // 8 for n in range(16)]))
    for share in (1e3, 1e5, 1e6):
        ring, at_once = gathered(two, share), gathered(two, share, exchanged=True)
        assert ring[1] == at_once[1] == 15 * share
        assert exchanges_queries(two, share) == (at_once[0] < ring[0]) == (share < 1e6)
        assert gathered_queries(two, share) == min(ring, at_once)
    direct = dataclasses.replace(DGX, transport="direct")
    assert not exchanges_queries(placed_topology(direct, two.placement), 1e3)


def test_one_rank_sends_nothing():
    for cost in costs(LLAMA, 1).values():
        assert cost.sent_bytes == 0 and cost.time_s == cost.read_s and cost.head_groups == 1


def test_command(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["DeepSeek V3"]))
    options = ["--topology", "dgx_h100", "--nodes", "2", "--seq-len", "1M", "--model", str(tmp_path)]
    assert main(options) == 0
    out = capsys.readouterr().out
    assert all(f"  {way}  " in out for way in WAYS) and out.count("\n*") == 2 and "6.31 GB" in out
    assert main([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [way["way"] for way in found["ways"]] == list(WAYS) and found["ranks"] == 16
    assert found["model"]["cache_bytes_of_a_token"] == 2 * 61 * 576 and found["model"]["recurrent_layers"] == 0
    assert [way["way"] for way in found["prompt"]] == ["tokens shared", "tensor parallel"]


def test_command_with_more_ranks_than_recurrent_heads(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    options = ["--topology", "dgx_h100", "--seq-len", "64k", "--model", str(tmp_path), "--nodes"]
    for nodes, note in (("4", False), ("5", True)):
        assert main([*options, nodes]) == 0
        out = capsys.readouterr().out
        assert "4 layers, of which 1 attend, 3 are recurrent" in out and "6.29 MB of recurrent states" in out
        assert "  states  " in out and "index" not in out
        assert ("ranks beyond the 32 heads of a recurrent layer have none" in out) == note


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "is not a model's config.json"),
        ("[1]", "is not a model's config.json: it holds a list"),
        ('{"num_hidden_layers": 2}', "the model's config has hidden_size=None: a whole number is needed"),
    ],
)
def test_what_is_refused(tmp_path, capsys, text, message):
    (tmp_path / "config.json").write_text(text)
    assert main(["--topology", "dgx_h100", "--model", str(tmp_path / "config.json")]) == 1
    assert message in capsys.readouterr().err
