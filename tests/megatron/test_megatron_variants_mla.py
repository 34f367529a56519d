"""MLA whose latent travels: equal to one rank, the bytes it sends, when it is chosen, what it refuses."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from support.hosts import Hosts
from support.ranks import run_distributed

pytest.importorskip("megatron.core")

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_tree import TreeConfig, comm
from megatron_tree.attention.sequences import gather_shares
from megatron_tree.integrations import megatron as tree
from megatron_tree.integrations.megatron import mla as megatron_mla
from megatron_tree.integrations.megatron.mla import GatheredTreeAttention, LatentMLASelfAttention, use_mla_latent
from megatron_tree.integrations.megatron.mla_choice import choose_latent
from megatron_tree.plan import Shape, load_topology, place
from support.megatron_models import SEQ_LENGTH, Case, build_model, check, megatron


def options(**extra):
    return tuple(extra.items())


MLA = functools.partial(Case, mla="always")
CORE = options(recompute_granularity="selective", recompute_modules=["core_attn"])
UP_PROJ = options(recompute_granularity="selective", recompute_modules=["mla_up_proj"])
BOTH = options(recompute_granularity="selective", recompute_modules=["mla_up_proj", "core_attn"])
FULL = options(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.supports("MLA, the latent gathered (use_mla_latent)", with_="cp = 2, 4; with and without q_lora_rank")
def test_latent(cp):
    kinds = [(), options(q_lora_rank=None), options(qk_layernorm=True), options(rope_type="yarn")]
    kinds += [options(mtp_num_layers=1), options(window_size=(5, 0), window_attn_skip_freq=2, softmax_type="learnable")]
    check(cp, [MLA(cp=cp, extra=extra, batch=batch) for extra in kinds for batch in (1, 3)])


@pytest.mark.supports("MLA, the latent gathered (use_mla_latent)", with_="selective and full recompute")
def test_latent_with_recomputation():
    check(2, [MLA(cp=2, extra=extra) for extra in (CORE, UP_PROJ, BOTH, FULL)])


@pytest.mark.supports("MLA, the latent gathered (use_mla_latent)", with_="tensor parallelism 2 x cp 2")
def test_latent_with_tensor_parallelism():
    sequence_parallel = options(sequence_parallel=True)
    kinds = [(), sequence_parallel, sequence_parallel + UP_PROJ, sequence_parallel + options(q_lora_rank=None)]
    check(4, [MLA(cp=2, tp=2, extra=extra) for extra in kinds])


BATCH, LAYERS, LATENT_WORDS = 2, 2, 16 + 8


def _sent(rank, world, mla, dtype, tree_config=None):
    """(bytes that this rank sends in a forward and backward, the choice of its first layer)."""
    with megatron(tp=1, pp=1, cp=world):
        model = build_model(Case(cp=world, mla=mla, dtype=dtype, tree_config=tree_config))
        tokens = torch.zeros(BATCH, SEQ_LENGTH // world, dtype=torch.int64)
        for _ in range(2):  # at first the ranks also agree on their calls
            with comm.record() as log:
                model(tokens, tokens, None, labels=tokens).sum().backward()
        attention = getattr(model, "module", model).decoder.layers[0].self_attention
        return sum(sent.bytes for sent in log), attention.choice(SEQ_LENGTH // world, BATCH, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_on_the_wire_are_the_predicted_ones(dtype):
    for world in (2, 4):
        (latent, choice), *_ = run_distributed(_sent, world, "always", dtype)
        (expanded, _), *_ = run_distributed(_sent, world, "never", dtype)
        share = BATCH * SEQ_LENGTH // world * LATENT_WORDS * dtype.itemsize
        assert latent == LAYERS * choice.latent_bytes == LAYERS * 3 * (world - 1) * share
        assert expanded == LAYERS * choice.expanded_bytes
        assert latent < expanded


TOPOLOGY = """
name: made_up
transport: direct
host_size: 8
overhead_s: 0.0
memory_bandwidth: 1.0e+12
flops: {flops}
levels:
  - {{name: link, size: 0, latency_s: 0.0, bandwidth: {bandwidth}, port_bandwidth: {bandwidth}}}
"""


def test_auto(tmp_path):
    """The latent travels over slow links, not where compute is slow, and not under a pinned schedule."""
    configs = {}
    for name, flops, bandwidth in (("links", "1.0e+15", "1.0e+6"), ("compute", "1.0e+6", "1.0e+12")):
        configs[name] = tmp_path / f"slow_{name}.yaml"
        configs[name].write_text(TOPOLOGY.format(flops=flops, bandwidth=bandwidth))
    slow_links, slow_compute = (TreeConfig(topology=str(path)) for path in configs.values())
    pinned = TreeConfig(topology=slow_links.topology, grid=(1, 2))
    for config, latent in ((slow_links, True), (slow_compute, False), (pinned, False)):
        (sent, choice), *_ = run_distributed(_sent, 2, "auto", torch.float32, config)
        assert (sent == LAYERS * choice.latent_bytes) == latent


def chosen(world, *, in_a_node=8, heads=16, rows=2048, memory_budget=None):
    """The choice for DeepSeek's sizes: heads of 192 and 128 words, a latent of 512 and 64."""
    topology = load_topology("dgx_h100")
    placement = place(topology, tuple(str(r // in_a_node) for r in range(world)))
    sizes = {"batch": 1, "seq_len": rows * world, "bytes_per_word": 2, "topology": topology, "placement": placement}
    projection = 2 * rows * 512 * heads * (128 + 128)
    return choose_latent(
        world, Shape(heads, heads, 192, 128), 512 + 64, projection, memory_budget=memory_budget, **sizes
    )


def test_choice():
    slow = chosen(8, in_a_node=1)  # between nodes, little compute to hide it under: what is sent decides
    assert slow.latent and slow.latent_bytes == 3 * 7 * 2048 * 576 * 2 < slow.expanded_bytes
    fast = chosen(8)  # inside a node: the projections decide
    assert not fast.latent and fast.latent_bytes == slow.latent_bytes < fast.expanded_bytes
    assert not chosen(8, in_a_node=1, rows=32768).latent  # enough compute to hide it under
    assert not chosen(8, in_a_node=1, heads=1).latent  # 320 words of keys and values a token, less than the latent
    whole = 8 * 2048 * (16 * (192 + 128) + 576) * 2
    assert chosen(8, in_a_node=1, memory_budget=whole).latent
    refused = chosen(8, in_a_node=1, memory_budget=whole - 1)
    assert not refused.latent and f"memory_budget={whole - 1}" in refused.reason


def test_spec():
    plain = tree.get_gpt_layer_tree_spec(multi_latent_attention=True)
    latent = use_mla_latent(plain, latent="always").submodules.self_attention
    assert latent.module is LatentMLASelfAttention and latent.params["latent"] == "always"
    assert latent.submodules.core_attention.module is GatheredTreeAttention
    assert (
        plain.submodules.self_attention.module is MLASelfAttention
        and "latent" not in plain.submodules.self_attention.params
    )
    partial = functools.partial(
        MLASelfAttention, submodules=plain.submodules.self_attention.submodules
    )  # newer releases
    (again,) = use_mla_latent([partial])
    assert again.func is LatentMLASelfAttention and again.keywords["latent"] == "auto"
    # tree attention once more changes nothing, and what travels may be said again
    assert tree.use_tree_attention(latent) is latent
    assert use_mla_latent(latent, latent="never").params["latent"] == "never"


def test_specs_without_mla_or_tree_attention_are_refused():
    with pytest.raises(ValueError, match="no MLASelfAttention found in ModuleSpec"):
        use_mla_latent(tree.get_gpt_layer_tree_spec())
    with pytest.raises(ValueError, match="call use_tree_attention first"):
        use_mla_latent(gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True))
    with pytest.raises(ValueError, match="latent='sometimes' is unknown: choose one of 'auto', 'always', 'never'"):
        use_mla_latent(tree.get_gpt_layer_tree_spec(multi_latent_attention=True), latent="sometimes")


def _refusals(rank, world):
    """What an MLA layer refuses on every rank, by name."""
    messages = {}

    def note(name, run, *args, **kwargs):
        with pytest.raises(ValueError) as error:
            run(*args, **kwargs)
        messages[name] = str(error.value)

    with megatron(tp=1, pp=1, cp=world):
        note("p2p", build_model, Case(cp=world, mla="always", cp_comm_type="p2p"))
        note("grid", build_model, Case(cp=world, mla="always", tree_config=TreeConfig(grid=(2, 1))))
        note("finite", build_model, Case(cp=world, mla="always", tree_config=TreeConfig(check="finite")))
        hidden = torch.zeros(SEQ_LENGTH // world, BATCH, 64)
        for latent in ("auto", "always"):
            layer = build_model(Case(cp=world, mla=latent)).decoder.layers[0].self_attention
            note(f"{latent} inference", layer, hidden, None, inference_context=object())
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, SEQ_LENGTH], dtype=torch.int32))
        note("packed", layer, hidden, None, packed_seq_params=packed)
        padding = torch.zeros(BATCH, 1, 1, SEQ_LENGTH, dtype=torch.bool)
        padding[1, ..., -3:] = True
        layer.attn_mask_type = AttnMaskType.padding
        note("padded", layer, hidden, padding)
    return messages


@pytest.mark.refuses('MLA with latent="always" and a pinned schedule', when="the model is built")
@pytest.mark.refuses('MLA with latent="always" and packed or padded batches', when="the forward")
@pytest.mark.refuses("inference contexts in MLA with cp > 1", when="the forward")
def test_refusals():
    for messages in run_distributed(_refusals, 2):
        assert "latent=\"always\" in an MLA layer, but cp_comm_type='p2p': leave one of the two out" in messages["p2p"]
        assert 'latent="always" in an MLA layer, but grid=(2, 1) is pinned' in messages["grid"]
        assert 'latent="always" in an MLA layer, but check="finite" looks at keys and values' in messages["finite"]
        for latent in ("auto", "always"):
            assert "run inference with context_parallel_size=1" in messages[f"{latent} inference"]
        for name in ("packed", "padded"):
            assert "the batch is padded or packed" in messages[name] and 'use latent="auto"' in messages[name]


def _nodes(rank, world, hosts, transport):
    """Whether shares gathered over hosts, and their gradients, are those of one level, and how much crossed hosts."""
    with Hosts(hosts):
        torch.manual_seed(rank)
        x = torch.randn(2, 3, 5, requires_grad=True)
        whole = gather_shares(x, dist.group.WORLD, 1, config=TreeConfig(transport=transport))
        expected = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(expected, x.detach())
        weight = torch.arange(whole.numel(), dtype=x.dtype).view_as(whole) * (rank + 1)
        (whole * weight).sum().backward()
        own = torch.arange(whole.numel(), dtype=x.dtype).view_as(whole).chunk(world, 1)[rank]
        return torch.equal(whole, torch.cat(expected, 1)), torch.equal(x.grad, own * sum(range(1, world + 1)))


@pytest.mark.parametrize("transport", ["direct", "builtin"])
def test_shares_are_gathered_over_nodes(transport):
    for hosts in ((0, 0, 1, 1), (0, 1, 0, 1), (1, 0, 0, 1)):
        assert run_distributed(_nodes, 4, hosts, transport) == [(True, True)] * 4


def _kept(rank, world):
    """Bytes that the whole sequence's keys and values take after a forward, per layer: [(key, value)]."""
    seen = []

    class Seen(GatheredTreeAttention):
        def attend(self, q, k, v, **options):
            seen.append((k, v))
            return super().attend(q, k, v, **options)

    with megatron(tp=1, pp=1, cp=world), mock.patch.object(megatron_mla, "GatheredTreeAttention", Seen):
        model = build_model(Case(cp=world, mla="always"))
        tokens = torch.zeros(BATCH, SEQ_LENGTH // world, dtype=torch.int64)
        model(tokens, tokens, None, labels=tokens)
        assert all(k.shape[1] == SEQ_LENGTH for k, _ in seen)
        return [[x.untyped_storage().size() for x in pair] for pair in seen]


def test_nothing_of_the_whole_sequence_is_kept():
    assert run_distributed(_kept, 2) == [[[0, 0]] * LAYERS] * 2
