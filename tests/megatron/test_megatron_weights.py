"""MegatronRunner with tensor parallelism alone: N ranks hold 1/N of the weights and of the cache each."""

import dataclasses
from unittest import mock

import pytest
import torch

from megatron_tree.core import comm
from megatron_tree.inference.generation.requests import Request
from megatron_tree.inference.generation.sampling import SamplingParams
from megatron_tree.inference.generation.scheduler import Scheduler
from megatron_tree.integrations import megatron as tree
from support import megatron_models
from support.megatron_models import Case, build_model, megatron
from support.megatron_serving import FullForwards, text_of
from support.ranks import largest, run_distributed
from support.scheduling import serve, tokens_of

SERVED = "serving a GPTModel, its weights and its KV cache over all ranks (MegatronRunner)"
PAGE, NEW, LONG, PROMPTS = 2, 3, 77, (9, 3, 40)
CHUNK = 34  # for the kernels of the prefill, and the rest for those of decoding
MIXED = (("num_moe_experts", 4), ("moe_token_dispatcher_type", "alltoall"), ("qk_layernorm", True))
MIXED += (("softmax_type", "learnable"), ("window_size", (5, 0)), ("window_attn_skip_freq", 2))
SMALL_MLPS = (("ffn_hidden_size", 16), ("add_bias_linear", True), ("add_qkv_bias", True))
GATHERED_EXPERTS = (("num_moe_experts", 4), ("moe_token_dispatcher_type", "allgather"), ("sequence_parallel", True))
GATHERED_EXPERTS += (("moe_shared_expert_intermediate_size", 32), ("softmax_type", "off-by-one"))
ON_EVERY_RANK = ("norm", "router", "linear_proj.bias", "linear_fc2.bias")


def case(tp, num_heads_kv, *extra):
    return Case(tp=tp, num_heads_kv=num_heads_kv, tree=True, extra=extra)


def _cut_from(model, whole):
    """Give a model this rank's parts of the whole model's parameters."""
    from megatron.core import parallel_state

    size, rank = (getattr(parallel_state, f"get_tensor_model_parallel_{x}")() for x in ("world_size", "rank"))
    for name, parameter in model.named_parameters():
        part = whole[name]
        for dim, n in enumerate(parameter.shape):
            if n != part.shape[dim]:
                halves = part.chunk(2 if "linear_fc1" in name else 1, dim)  # gate and value are cut one by one
                part = torch.cat([half.chunk(size, dim)[rank] for half in halves], dim)
        parameter.data.copy_(part)
    return model


def _answers(runner):
    """{what: logits} of a long row alone and of four rows together; the bytes that the cache held of the first."""
    row = runner.add()
    found = {"prompt": runner.prefill(row, text_of(LONG, 5))}
    found["step"] = runner.step([row], found["prompt"].argmax().view(1, 1))
    found["three tokens"] = runner.step([row], torch.tensor([[5, 7, 11]]))
    held = None if isinstance(runner, FullForwards) else runner.store.nbytes
    runner.crop(row, LONG + 1)
    rows = [row, *(runner.add() for _ in PROMPTS)]
    for late, n in zip(rows[1:], PROMPTS):
        found[f"prompt of {n}"] = runner.prefill(late, text_of(n, n))
    found["ragged rows"] = runner.step(rows, torch.tensor([[1], [2], [3], [4]]))
    for row in rows:
        runner.remove(row)
    return found, held


def _scheduled(runner, rank):
    """The tokens of requests that are served together, on rank 0."""
    scheduler = Scheduler(runner, None, max_rows=4, max_waiting=4)
    if rank:
        scheduler.run()
        return None
    requests = [Request(prompt=text_of(n, n), sampling=SamplingParams(max_tokens=NEW)) for n in PROMPTS]
    return [tokens_of(events) for events in serve(scheduler, requests)]


def _alone(runner, tokens):
    row, answer = runner.add(), []
    for _ in range(NEW):
        answer.append(int(runner.prefill(row, tokens).argmax()))
        tokens = torch.tensor(answer[-1:])
    return answer


def _gathered(runner):
    """Bytes of this rank that others gather in a step, by us and by Megatron's layers."""
    by_megatron, module = [], "megatron.core.transformer.attention.all_gather_last_dim_from_tensor_parallel_region"
    with mock.patch(module, lambda x: by_megatron.append(x.nbytes)), comm.record() as log:
        runner.step([runner.add()], torch.tensor([[3]]))
    # a message for each of the others, or once to shared memory
    ours = [x.bytes // (1 if x.op.startswith("shared") else x.ranks - 1) for x in log if "gather" in x.op]
    return sum(ours) + sum(by_megatron)


def _sent(runner, forced):
    """Bytes that this rank sends, to run a chunk with its own tokens or not; by us and by Megatron's layers."""
    runner.weight_gathering.forced, runner.chunk_size = forced, LONG
    row, all_reduce, summed = runner.add(), torch.distributed.all_reduce, []
    counted = lambda x, **options: summed.append(x.nbytes) or all_reduce(x, **options)  # noqa: E731
    with mock.patch("torch.distributed.all_reduce", counted), comm.record() as log:
        runner.prefill(row, text_of(LONG, 5))
    runner.remove(row)
    world = runner.weight_gathering.world
    return sum(x.bytes for x in log) + sum(summed) * 2 * (world - 1) // world


def _compare(rank, world, cases):
    """By case: relative errors, whether tokens are equal, bytes of weights here and of all, bytes of the cache, what a
    step of one row gathers, and what a chunk sends."""
    results = []
    with mock.patch.object(megatron_models, "SEQ_LENGTH", 128):
        for of_case in cases:
            with megatron(tp=1, pp=1, cp=1):
                extra = tuple(x for x in of_case.extra if x[0] != "sequence_parallel")
                model = build_model(dataclasses.replace(of_case, tp=1, tree=False, extra=extra)).eval()
                whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
                plain = FullForwards(model)
                expected, _ = _answers(plain)
                tokens = [_alone(plain, text_of(n, n)) for n in PROMPTS]
            with megatron(tp=world, pp=1, cp=1):
                model = _cut_from(build_model(of_case).eval(), whole)
                runner, errors, same = tree.MegatronRunner(model, page_size=PAGE, chunk_size=CHUNK), {}, True
                for forced in (True, False):  # whether every rank runs its own tokens of a chunk
                    runner.weight_gathering.forced = forced
                    got, held = _answers(runner)
                    for name, x in expected.items():
                        errors[name, forced] = float((x - got[name]).abs().max() / x.abs().max())
                        same = same and torch.equal(x.argmax(-1), got[name].argmax(-1))
                runner.weight_gathering.forced = None
                served, gathered = _scheduled(runner, rank), _gathered(runner)
                sent = (
                    {forced: _sent(runner, forced) for forced in (True, False, None)},
                    runner.weight_gathering.plan(LONG),
                )
                model.decoder.final_layernorm.weight.tensor_model_parallel = True  # of a kind that is unknown
                assert tree.MegatronRunner(model).weight_gathering is None
            on_every = sum(p.nbytes for name, p in whole.items() if any(x in name for x in ON_EVERY_RANK))
            of_all, own = (sum(p.nbytes for p in ps) - on_every for ps in (whole.values(), model.parameters()))
            results.append((errors, same and served in (None, tokens), own, of_all, held, gathered, sent))
    return results


@pytest.mark.supports(SERVED, with_="tp = 2, 4; fewer KV heads than ranks; the scheduler")
@pytest.mark.supports(SERVED, with_="MQA, MLA, sinks, windows, qk_layernorm, experts, sequence_parallel")
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [case(2, 2, *SMALL_MLPS, ("sequence_parallel", True))]),
        pytest.param(4, [case(4, 1, *MIXED)], marks=pytest.mark.slow),
        pytest.param(2, [case(2, 1), case(2, 8, *SMALL_MLPS), case(2, 1, *GATHERED_EXPERTS)], marks=pytest.mark.slow),
        pytest.param(4, [case(4, 2), case(4, 4, *GATHERED_EXPERTS)], marks=pytest.mark.slow),
        pytest.param(4, [Case(tp=4, mla=True, tree=True)], marks=pytest.mark.slow),
    ],
)
def test_a_rank_holds_its_part_of_weights_and_cache(world, cases):
    for of_case, *results in zip(cases, *run_distributed(_compare, world, cases, timeout=280.0)):
        options = dict(of_case.extra)
        for errors, same, own, of_all, _, gathered, (sent, plan) in results:
            assert largest(errors.values()) <= 1e-4 and same, f"{errors} in {of_case}"
            assert own * world == of_all, of_case
            if not of_case.mla and world > of_case.num_heads_kv:  # queries, keys and values once
                columns = (of_case.num_heads + 2 * of_case.num_heads_kv) * 8
                assert gathered == 4 * 2 * columns // world, of_case  # of 2 layers
            if "num_moe_experts" not in options:  # their tokens are sent by Megatron
                assert sent[None] == sent[plan.shares_tokens] == min(sent.values()), of_case
            if options.get("ffn_hidden_size") == 16:
                assert plan.shares_tokens == (of_case.num_heads_kv == 2) and all(plan.gathers), plan
                assert sent[True] == pytest.approx(plan.sharing, rel=0.03), of_case
                assert sent[False] == pytest.approx(plan.otherwise, rel=0.03), of_case
        held, of_token = (
            [result[4] for result in results],
            4 * 2 * (16 + 8 if of_case.mla else of_case.num_heads_kv * 16),
        )
        if of_case.extra != MIXED:  # windows are kept otherwise
            assert sum(held) == of_token * (LONG + 4), of_case
            assert max(held) <= sum(held) / world + of_token * PAGE, of_case
