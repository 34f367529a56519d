"""A whole prompt on ranks that share a model's weights: what each way computes and sends; and the table in the docs."""

from pathlib import Path

import pytest

from megatron_tree.plan import load_topology, place, plan_scan
from megatron_tree.plan.cost import placed_topology
from megatron_tree.plan.model import Index, ModelSizes
from megatron_tree.plan.prompt import plan_prompt
from megatron_tree.plan.recurrent import Recurrent
from megatron_tree.plan.scan import ScanSizes, scans
from megatron_tree.plan.step import plan_step
from support.published_models import MODELS

LLAMA, DEEPSEEK = (ModelSizes.of(config) for config in MODELS.values())
DGX = load_topology("dgx_h100")
S = 1 << 20
DELTA = Recurrent(36, 32, 16, 33_718_464, 4096 * 2052, 128, 128, 128, 128 * 128, 8192, 4096, 4)
DOCS = Path(__file__).resolve().parents[2] / "docs" / "planner.md"


def costs(model, ranks, seq_len=S):
    shared, tensor = plan_prompt(model, DGX, [n // 8 for n in range(ranks)], seq_len=seq_len)
    assert (shared.way, tensor.way) == ("tokens shared", "tensor parallel")
    return shared, tensor


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_products(ranks):
    """Two operations for a weight and token; S^2 / 2 pairs of keys of 192 numbers and values of 128."""
    for cost in costs(LLAMA, ranks):
        assert cost.weights_s == pytest.approx(2 * (LLAMA.words(1) - LLAMA.lm_head) * S / ranks / DGX.flops)
        assert cost.index_s == cost.recurrent_s == cost.states_bytes == 0
        parts = cost.weights_s, cost.attention_s, cost.index_s, cost.recurrent_s, cost.moved_s
        assert cost.time_s == sum(parts)
    for cost in costs(DEEPSEEK, ranks):
        assert cost.attention_s >= 61 * S * S * 128 * 320 / ranks / DGX.flops * 0.999


def test_heads_that_ranks_cannot_share():
    """64 ranks for 32 heads: half of them have one, the others none; tokens are shared by all."""
    model = LLAMA._replace(num_heads=32)
    shared, tensor = costs(model, 64)
    assert tensor.attention_s == pytest.approx(80 * S * S * 256 / DGX.flops)
    assert shared.attention_s < 0.6 * tensor.attention_s


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_bytes(ranks):
    """Tensor parallel: sums of hidden states after attention and MLPs. Tokens shared: the weights of attention, and of
    MLPs or their tokens, whichever are fewer; keys and queries by the grid."""
    shared, tensor = costs(LLAMA, ranks)
    part = 2 * (ranks - 1) / ranks
    assert tensor.moved_bytes == pytest.approx(2 * 2 * 80 * S * 8192 * part) and tensor.keys_bytes == 0
    weights = LLAMA.words(1) - LLAMA.lm_head
    hidden = S * 8192 * part / ranks  # of the embedding
    assert shared.moved_bytes == pytest.approx(80 * (weights / 80) * part + hidden)
    keys = 80 * 2 * 2 * 1024 * S * (ranks - 1) / ranks
    assert shared.keys_bytes <= keys * 1.001
    sparse, _ = costs(DEEPSEEK, ranks)
    copies = 58 * 2 * 8 * 7168 * S / ranks * part
    assert copies < sparse.moved_bytes < copies + (DEEPSEEK.words(1) + S * 7168) * part


@pytest.mark.parametrize("ranks", [8, 64])
def test_recurrent_layers(ranks):
    """Their bytes don't depend on the length. One layer of Qwen3-Next at 8 ranks: 12.9 MB for states, against 3.76 GB
    to gather its tokens."""
    model = LLAMA._replace(recurrent=DELTA, mixers=80 + 36)
    shared, tensor = costs(model, ranks)
    placement = place(DGX, [n // 8 for n in range(ranks)])
    sizes = ScanSizes(2, 32, 128 * 128, 128 * 128, True)
    by_name = {c.schedule: c.cost for c in scans(placed_topology(DGX, placement), sizes)}
    cost = by_name[plan_scan(ranks, **sizes._asdict(), topology=DGX, placement=placement)]
    halo = 2 * 3 * 8192 * 2
    assert shared.states_bytes == pytest.approx(36 * (cost.bytes + halo)) and tensor.states_bytes == 0
    assert costs(model, ranks, seq_len=1 << 14)[0].states_bytes == shared.states_bytes
    if ranks == 8:
        assert shared.states_bytes / 36 == pytest.approx(12.9e6, rel=0.01)
        assert pytest.approx(3.76e9, rel=0.01) == 2 * 2048 * S * 7 / 8
    once = 36 * 32 * S * 4 * (128 * 128 + 64 * 256) / DGX.flops
    assert shared.recurrent_s == pytest.approx(2 * once / ranks + 36 * (cost.time_s + halo / 5e10), rel=0.1)
    assert tensor.recurrent_s == pytest.approx(once / min(ranks, 32))
    decays = model._replace(recurrent=DELTA._replace(map_numbers=1))
    assert costs(decays, ranks)[0].recurrent_s < shared.recurrent_s


def test_an_index():
    """A rank that has its tokens scores its queries; one with all tokens all of them, and both attend to 2,048 keys."""
    model = DEEPSEEK._replace(index=Index(61, 64, 128, 2048, 0))
    shared, tensor = costs(model, 8)
    pairs = S * S / 2
    assert tensor.index_s == pytest.approx(2 * 61 * pairs * 64 * 128 / DGX.flops) == pytest.approx(8 * shared.index_s)
    selected = 2 * 61 * 128 * (S * 2048 - 2048**2 / 2) * (576 + 512) / DGX.flops
    assert tensor.attention_s == pytest.approx(selected / 8) and shared.attention_s >= selected / 8
    assert shared.keys_bytes == pytest.approx(2 * 61 * (576 + 128) * S * 7 / 8)
    none, _ = costs(model, 8, seq_len=1024)
    assert none.attention_s > 0


def test_one_rank():
    for model in (LLAMA, DEEPSEEK, LLAMA._replace(recurrent=DELTA)):
        for cost in costs(model, 1):
            assert cost.moved_bytes == cost.keys_bytes == cost.states_bytes == cost.moved_s == 0 < cost.time_s


def published(ranks, model):
    """The rows of the two tables of docs/planner.md."""
    hosts, mi300x = [n // 8 for n in range(ranks)], load_topology("mi300x")
    steps = {cost.way: cost for cost in plan_step(model, mi300x, hosts, seq_len=S)}
    cells = []
    for way in ("sharded", "repeated", "Helix", "DCP", "tensor parallel"):
        cost = steps[way]
        read = cost.weight_bytes + cost.cache_bytes + cost.index_bytes + cost.state_bytes
        held, read, sent = cost.held_bytes / 1e9, read / 1e9, cost.attention_bytes / 1e6
        cells.append(f"{held:.3g}, {read:.3g} GB; {sent:.3g} MB; {cost.time_s * 1e3:.3g} ms")
    prompts = []
    for cost in plan_prompt(model, mi300x, hosts, seq_len=S):
        sent = cost.moved_bytes + cost.keys_bytes + cost.states_bytes
        prompts.append(f"{sent / 1e9:,.3g} GB, {cost.time_s:,.3g} s")
    return cells, prompts


@pytest.mark.parametrize(("name", "kind"), [("DeepSeek V3.2", "deepseek_v32"), ("Qwen3-Next-80B", "qwen3_next")])
@pytest.mark.parametrize("ranks", [8, 64])
def test_tables_in_the_docs(name, kind, ranks):
    config = pytest.importorskip("transformers").CONFIG_MAPPING[kind]()
    text = DOCS.read_text()
    for cells in published(ranks, ModelSizes.of(config.to_dict())):
        assert " | ".join([f"| {name}, {ranks}", *cells]) + " |" in text
