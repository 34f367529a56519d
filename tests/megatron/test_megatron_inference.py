"""MegatronRunner: a GPTModel served with its KV cache sharded over the context-parallel ranks."""

import functools
import types
from unittest import mock

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_tree.integrations import megatron as tree
from megatron_tree.integrations.megatron.attention import serving
from support import megatron_models, megatron_serving
from support.core_attention import Group, config, core_attention
from support.megatron_layouts import Run, build_chunks, config_of, in_layout, plain
from support.megatron_models import Case, build_model, megatron
from support.megatron_serving import FullForwards, check, compare, scenario, served, text_of
from support.ranks import largest, on_ranks, run_distributed
from support.tape import Tape, TapedSteps
from support_matrix import refused

EXPERTS = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": 1}
SERVED = "serving a GPTModel, its KV cache sharded (MegatronRunner)"


def case(**options):
    names = ("cp", "tp", "num_heads_kv", "positions", "dtype", "mla")
    fields = {name: options.pop(name) for name in names if name in options}
    return Case(**{"cp": 2, "tree": True, **fields}, extra=tuple(options.items()))


@pytest.mark.supports(SERVED, with_="ragged rows, prompts in chunks, speculation, forks; cp = 2, 4")
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_served_model_equals_full_forwards(world):
    check(world, [case(cp=world), case(cp=world, window_size=(5, 0), window_attn_skip_freq=2)])


@pytest.mark.supports(SERVED, with_="MHA, MQA, windows, sinks, qk_layernorm, experts, no_rope_freq")
@pytest.mark.supports(SERVED, with_="learned_absolute and no positions, rotary_interleaved")
def test_served_variants():
    cases = [case(num_heads_kv=8, qk_layernorm=True, softmax_type="off-by-one"), case(rotary_interleaved=True)]
    cases += [case(num_heads_kv=1, softmax_type="learnable", window_size=(5, 0)), case(positions="none", **EXPERTS)]
    check(2, [*cases, case(positions="learned_absolute"), case(no_rope_freq=[0, 1])])


@pytest.mark.slow
@pytest.mark.supports(SERVED, with_="tp = 2, cp = 2; ep = 2, cp = 2")
def test_served_beside_tensor_parallelism():
    check(4, [case(tp=2), case(tp=2, num_heads_kv=1, softmax_type="learnable"), case(tp=2, mla=True)])


@pytest.mark.supports(SERVED, with_="MLA, YaRN")
def test_served_multi_latent_attention():
    wide = {"kv_lora_rank": 64, "qk_layernorm": True}  # as of 15 tokens it pays to make keys
    check(2, [case(mla=True, **wide), case(mla=True, rope_type="yarn", q_lora_rank=None)])
    check(2, [case(mla=True, **wide)], tolerance=5e-2, same_tokens=False, options={"dtype": "int8"})


def _latents(rank, world):
    """Bytes of a token in all layers, and the error where the up-projection norms its input as TransformerEngine's."""
    with megatron(tp=1, pp=1, cp=1):
        runner = served(case(cp=1, mla=True))
        row = runner.add()
        runner.prefill(row, text_of(9, 1))
        each = runner.store.nbytes / runner.length(row)
        runner, text = served(case(cp=1, mla=True, qk_layernorm=True)), text_of(9, 1)
        want, fused = runner.prefill(runner.add(), text), 0
        for layer in runner.model.decoder.layers:
            attention, up = layer.self_attention, layer.self_attention.linear_kv_up_proj
            up.layer_norm_weight, attention.kv_layernorm = attention.kv_layernorm.weight, torch.nn.Identity()
            fused += 1
        got = runner.prefill(runner.add(), text)
    return each, fused, float((got - want).abs().max() / want.abs().max())


def test_latents_are_what_is_kept():
    ((each, fused, error),) = run_distributed(_latents, 1)
    assert each == 4 * 2 * (16 + 8) and fused == 2 and error < 1e-5


def _answers(run):
    (model,) = build_chunks(run, config_of(run))
    runner = FullForwards if run.cp == 1 else functools.partial(tree.MegatronRunner, page_size=2)
    return scenario(runner(model.eval()))


@pytest.mark.supports(SERVED, with_="tp = 2, cp = 2; ep = 2, cp = 2")
@on_ranks(2)
def test_served_beside_expert_parallelism():
    errors = []
    for dispatcher in ("alltoall", "allgather"):
        run = Run(ep=2, cp=2, config=(("num_moe_experts", 4), ("moe_token_dispatcher_type", dispatcher)))
        expected, found = (in_layout(layout, _answers) for layout in (plain(run), run))
        errors += [float((x - found[name]).abs().max() / x.abs().max()) for name, x in expected.items()]
    assert largest(errors) <= 1e-4, errors


@pytest.mark.supports(SERVED, with_="bf16, a cache in int8")
def test_served_in_less_precision():
    check(2, [case(dtype=torch.bfloat16)], tolerance=3e-2, same_tokens=False)
    check(2, [case()], tolerance=5e-2, same_tokens=False, options={"dtype": "int8"})


def _yarn(rank, world):
    numbers = {"yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 8}
    numbers |= {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0}
    numbers |= {"yarn_correction_range_round_to_int": True}
    make = megatron_models.transformer_config

    def with_yarn(*args, **kwargs):
        made = make(*args, **kwargs)
        for name, value in numbers.items():  # Megatron-core reads them, but its TransformerConfig has no such fields
            setattr(made, name, value)
        return made

    with mock.patch.object(megatron_models, "transformer_config", with_yarn):
        return compare(rank, world, [case(positions="yarn")], {})


@pytest.mark.supports(SERVED, with_="MLA, YaRN")
def test_served_with_yarn():
    for ((errors, equal),) in run_distributed(_yarn, 2):
        assert largest(errors.values()) <= 1e-4 and equal, errors


def _replayed(rank, world):
    def replaying(case, **options):
        runner = served(case, **options)
        runner._graphs = TapedSteps(runner)
        return runner

    cases = [{"window_size": (5, 0), "window_attn_skip_freq": 2}, {"mla": True}, {"positions": "learned_absolute"}]
    with mock.patch.object(megatron_serving, "served", replaying):
        found = compare(rank, world, [case(cp=1, **options) for options in cases], {})
        with pytest.raises(ValueError, match="masked_select makes the host wait"):  # by experts of several tokens
            compare(rank, world, [case(cp=1, **EXPERTS)], {})
        return found, Tape.replays


@pytest.mark.slow
def test_replayed_steps():
    """As in CUDA graphs, see cache/test_graph.py."""
    ((results, replays),) = run_distributed(_replayed, 1)
    for errors, equal in results:
        assert largest(errors.values()) <= 1e-4 and equal, errors
    assert replays >= 4


def _written_down(rank, world):
    found = compare(rank, world, [case()], {"record_steps": True})
    with pytest.raises(ValueError, match="record_steps=True can't be had for this model"):
        compare(rank, world, [case(tp=2, cp=1)], {"record_steps": True})  # Megatron's own layers send
    return found


def test_steps_that_are_written_down():
    """By CPU ranks, see cache/test_tape.py."""
    for ((errors, equal),) in run_distributed(_written_down, 2):
        assert largest(errors.values()) <= 1e-4 and equal, errors


def _fail_and_go_on(rank, world):
    """Logits after runs that failed between two layers, and of a runner that has seen no failure."""

    def fail(*args):
        raise RuntimeError("out of memory")

    with megatron(tp=1, pp=1, cp=world):
        found = []
        for failing in (True, False):
            runner = served(case(cp=world))
            rows = [runner.add()]
            runner.prefill(rows[0], text_of(9, 1))
            rows.append(runner.fork(rows[0]))
            if failing:
                lengths = [runner.length(row) for row in rows]
                handle = runner.model.decoder.layers[1].register_forward_pre_hook(fail)
                with pytest.raises(RuntimeError, match="out of memory"):
                    runner.step(rows[:1], torch.tensor([[3]]))
                with pytest.raises(RuntimeError, match="out of memory"):
                    runner.prefill(rows[1], text_of(8, 2))
                handle.remove()
                assert [runner.length(row) for row in rows] == lengths
                assert serving.get() is None
            found.append(runner.step(rows, torch.tensor([[4], [5]])))
        return found


def test_a_failure_takes_the_tokens_back():
    for after, undisturbed in run_distributed(_fail_and_go_on, 2):
        assert torch.allclose(after, undisturbed, atol=1e-5 * float(undisturbed.abs().max()))


def _train_serve_train(rank, world):
    with megatron(tp=1, pp=1, cp=world):
        model = build_model(case(cp=world))
        batch = megatron_models.compat.batch_on_this_cp_rank(megatron_models.whole_batch(case()))
        losses = []
        for serve in (True, False):
            model.train()
            losses.append(model(batch["tokens"], batch["positions"], None, labels=batch["labels"]).detach())
            if serve:
                runner = tree.MegatronRunner(model.eval(), page_size=2)
                row = runner.add()
                runner.prefill(row, text_of(9, 1))
                runner.step([row], torch.tensor([[3]]))
        with pytest.raises(ValueError, match=r"in training mode: call model.eval\(\)"):
            runner.step([row], torch.tensor([[3]]))
        assert runner.length(row) == 10
        return torch.equal(*losses)


def test_training_goes_on_as_if_nothing_had_been_served():
    assert all(run_distributed(_train_serve_train, 2))


@on_ranks(2)
def test_bad_prompts_are_errors_on_all_ranks(rank, world):
    with megatron(tp=1, pp=1, cp=world):
        runner = served(case(cp=world))
        row = runner.add()
        for tokens, message in (
            (text_of(9, 1 + rank), "digest of tokens"),
            (torch.zeros(9 if rank else 33, dtype=torch.int64), "would hold 33 tokens, but the model has 32 positions"),
            (text_of(9, 1)[:, None][:0], r"tokens must be int64 \[tokens\], got \[0, 1\]"),
        ):
            with pytest.raises(ValueError, match=message):
                runner.prefill(row, tokens)
        with pytest.raises(ValueError, match="name each row of the cache once"):
            runner.step([row, row], torch.zeros(2, 1, dtype=torch.int64))
        assert runner.length(row) == 0


def gpt_model(*, options=None, core=None, **attributes):
    """A GPTModel of nothing but what MegatronRunner looks at before it runs."""
    model = GPTModel.__new__(GPTModel)
    torch.nn.Module.__init__(model)
    model.config = config()
    for name, value in (options or {}).items():
        setattr(model.config, name, value)
    model.decoder = torch.nn.ModuleDict({"0": torch.nn.ModuleDict({"core_attention": core or core_attention()})})
    defaults = {"pre_process": True, "post_process": True, "position_embedding_type": "rope", "vocab_size": 8}
    for name, value in {**defaults, "max_sequence_length": 32, "training": False, **attributes}.items():
        setattr(model, name, value)
    return model


def refuses(feature, message, **arguments):
    return refused(feature, arguments, message, when="MegatronRunner is made")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        refuses("pipeline parallelism", "more tensor parallelism", options={"pipeline_model_parallel_size": 2}),
        refuses("cache_mla_latents", "set it to False", options={"cache_mla_latents": True}),
        refuses("mtp_num_layers", "without mtp_block_spec", options={"mtp_num_layers": 1}),
        refuses("tp_comm_overlap", "build the model for serving without it", options={"tp_comm_overlap": True}),
        refuses("cuda_graph_impl", "set it to 'none'", options={"cuda_graph_impl": "local"}),
        refuses("experimental_attention_variant", "of another kind", options={"experimental_attention_variant": "dsa"}),
        refuses("fp8, fp4", "fp8='hybrid'.*without it", options={"fp8": "hybrid"}),
        refuses("moe_expert_capacity_factor", "other rows", options={"moe_expert_capacity_factor": 1.0}),
        refuses("apply_rope_fusion", "set it to False", options={"apply_rope_fusion": True}),
        refuses("mrope positions", "position_embedding_type='mrope'", position_embedding_type="mrope"),
        refuses(
            "experts on more ranks than tp * cp",
            "experts on 4 ranks.*parallelism have 1",
            options={"num_moe_experts": 4, "expert_model_parallel_size": 4},
        ),
        refuses("a model in training mode", r"call model.eval\(\)", training=True),
        ({"use_fused_lce": True}, "cross_entropy_loss_fusion"),
        ({"core": core_attention(mask=AttnMaskType.no_mask)}, "causal self attention"),
        ({"core": core_attention(attention_type="cross")}, "cross attention"),
    ],
)
def test_runner_refuses_a_model(arguments, message):
    with pytest.raises(ValueError, match=message):
        tree.MegatronRunner(gpt_model(**arguments))


@pytest.mark.refuses("core attention that is not tree attention", when="MegatronRunner is made")
def test_runner_refuses_other_models():
    groups = types.SimpleNamespace(tp=Group(1), cp=Group(1))
    other = DotProductAttention(config(), 1, AttnMaskType.causal, "self", pg_collection=groups)
    with pytest.raises(ValueError, match="0.core_attention is DotProductAttention.*use_tree_attention"):
        tree.MegatronRunner(gpt_model(core=other))
    with pytest.raises(ValueError, match="model is a Linear: MegatronRunner serves a GPTModel"):
        tree.MegatronRunner(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 9}, "vocab_size=9 must be from 1 to the model's 8"),
        ({"page_size": 0}, "page_size=0"),
        ({"schedule": "tree"}, "schedule='tree'"),
    ],
)
def test_runner_refuses_options(options, message):
    model = gpt_model()
    model.weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=message):
        tree.MegatronRunner(model, token_group=Group(1), **options)


@pytest.mark.refuses("StaticInferenceContext, after the prompt (use MegatronRunner)", when="the forward")
@on_ranks(1)
def test_megatrons_own_context_is_refused():
    from megatron.core.inference.contexts import StaticInferenceContext

    with megatron(tp=1, pp=1, cp=1):
        model = build_model(case(cp=1)).eval()
        context = StaticInferenceContext(1, 32)
        serve = {"inference_context": context, "runtime_gather_output": True}
        with torch.no_grad():
            model(text_of(5, 1)[None], torch.arange(5)[None], None, **serve)
            context.increment_sequence_len_offset(5)
            with pytest.raises(ValueError, match="to decode with a KV cache use MegatronRunner"):
                model(text_of(1, 1)[None], torch.tensor([[5]]), None, **serve)
