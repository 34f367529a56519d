"""DeepSpeed training of Transformers models on sharded sequences equals training on one rank with plain torch."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

import deepspeed
from megatron_tree.integrations.deepspeed.training import register_sequence_parallel
from support.deepspeed_cases import Case, distance_moved, largest_difference, parameters, run_plain, start, train
from support.ranks import largest, run_distributed
from transformers import AutoModelForCausalLM

MATRIX = {f"dp {4 // sp} x sp {sp}, ZeRO {zero}": Case(sp=sp, zero=zero) for sp in (1, 2, 4) for zero in range(4)}
FAST = {
    "sinks, experts in tiles": Case(sp=2, zero=3, family="gpt_oss", loss_tile=7, mlp_tile=5),
    "attention dropout, checkpointing": Case(sp=2, zero=3, dropout=0.2, checkpointing=True),
    "packed documents, window": Case(sp=2, zero=1, batches="packed", family="mistral"),
    "loss and MLPs in tiles, tied weights, accumulation": Case(
        sp=2, zero=0, family="smollm2", accumulate=2, loss_tile=7, mlp_tile=5
    ),
}
SLOW = {
    "recurrent layers, ZeRO 3, checkpointing": Case(sp=2, zero=3, family="falcon_h1", checkpointing=True),
    "recurrent layers, tiles": Case(sp=4, zero=1, family="falcon_h1", loss_tile=7, mlp_tile=5),
    "loss and MLPs in tiles, ZeRO 2": Case(sp=2, zero=2, family="gemma2", loss_tile=7, mlp_tile=5),
    "gradient clipping": Case(sp=2, zero=3, clip=0.3),
    "Ulysses x tree": Case(sp=4, zero=1, ulysses=2),
    "latent attention": Case(sp=4, zero=1, family="deepseek_v3"),
    "padding on the right": Case(sp=2, zero=1, batches="padded"),
}
IN_BF16 = {sp: Case(sp=sp, zero=3, bf16=True, optimizer="sgd") for sp in (1, 2)}
SAME = 1e-5  # a step moves a parameter by up to 1e-3; processors round differently
SLOW_FAMILIES = ("qwen2", "gpt_oss")  # a window in some layers and biases; sinks and experts


class Bf16(NamedTuple):
    """A bf16 run beside the fp32 one."""

    loss: float  # largest difference of the losses
    moved_apart: float  # distance of the fp32 masters' ends, by that of start and end
    is_fp32: bool  # the masters hold more than bf16 can
    dtype: torch.dtype  # of the model


def _run_all(rank, world, cases, in_bf16, folder):
    results = {}
    for name, case in cases.items():
        want_losses, want = run_plain(case.reference)
        engine, parallel, model = start(case)
        assert engine.train_batch_size() == 4 * case.accumulate
        losses = train(engine, parallel, case.steps())
        apart = largest(abs(a - b) for a, b in zip(losses, want_losses, strict=True))
        results[name] = apart, largest_difference(parameters(model, case.zero), want)
        engine.destroy()
    for name, case in in_bf16.items():
        want_losses, want = run_plain(case.reference)
        engine, parallel, model = start(case)
        before = dict(case.model().named_parameters())
        losses = train(engine, parallel, case.steps())
        master = parameters(model, case.zero, master=True)
        is_fp32 = any(not torch.equal(x, x.bfloat16().float()) for x in master.values())
        apart = largest(abs(a - b) for a, b in zip(losses, want_losses, strict=True))
        results[name] = Bf16(apart, distance_moved(master, want, before), is_fp32, next(model.parameters()).dtype)
        engine.destroy()
    if folder:
        results["resumed"] = _resume(Case(sp=2, zero=3), folder)
        results["zero.Init"] = _zero_init(Case(sp=2, zero=3))
        results["evaluate, generate"] = _evaluate_and_generate(Case(sp=2, zero=0))
    return results


def _resume(case, folder):
    """A step, a checkpoint, the others in a new engine: apart from all steps in a row by."""
    first, parallel, _ = start(case)
    train(first, parallel, case.steps()[:1])
    first.save_checkpoint(folder)
    first.destroy()
    model = case.model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    second, parallel, model = start(case, model)
    second.load_checkpoint(folder)
    train(second, parallel, case.steps()[1:], first_step=1)
    apart = largest_difference(parameters(model, case.zero), run_plain(case.reference)[1])
    second.destroy()
    return apart


def _zero_init(case):
    """A model whose parameters are partitioned as they are made."""
    whole = case.model()
    whole.config.pad_token_id = None  # else Transformers zeroes that row, of a parameter that has none any more
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 4, "zero_optimization": {"stage": 3}}):
        model = AutoModelForCausalLM.from_config(whole.config).train()
    for p, value in zip(model.parameters(), whole.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
            p.data.copy_(value.data)
    engine, parallel, model = start(case, model)
    train(engine, parallel, case.steps())
    apart = largest_difference(parameters(model, 3), run_plain(case.reference)[1])
    engine.destroy()
    return apart


def _evaluate_and_generate(case):
    """(loss without gradients - plain loss, equal tokens): the model after its training."""
    from megatron_tree.integrations.transformers.attention import TreeCache

    engine, parallel, model = start(case)
    batch = case.steps()[0][0]
    engine.eval()
    with torch.no_grad():
        own = {name: x.chunk(parallel.dp_size)[parallel.dp_rank] for name, x in batch.items()}
        loss = engine(**parallel.shard_batch(own)).loss.item()
        plain = case.model().eval()
        want = plain(**batch, use_cache=False).loss.item()
        ids = batch["input_ids"][:1, :6]
        cache = TreeCache(model.config, cp_group=parallel.sp_group)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
        same = torch.equal(model.generate(ids, past_key_values=cache, **options), plain.generate(ids, **options))
    sampler = engine.deepspeed_io(list(range(8))).data_sampler
    assert (sampler.num_replicas, sampler.rank) == (parallel.dp_size, parallel.dp_rank)
    with pytest.raises(ValueError, match="called with another mpu: pass this one"):
        register_sequence_parallel(model, sp_size=1).shard_batch(batch)
    engine.destroy()
    return abs(loss - want), same


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every rank found, by the case's name: all runs share one start of two ranks."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    extensions = tmp_path_factory.mktemp("extensions")
    env = {"TORCH_EXTENSIONS_DIR": str(extensions)}
    found = run_distributed(_run_all, 2, FAST, IN_BF16, folder, env=env, fresh=True, timeout=280)
    assert list(extensions.iterdir()) == [], "DeepSpeed compiled an op"
    return found


def test_two_data_parallel_groups_of_two_sequence_ranks():
    name = "dp 2 x sp 2, ZeRO 3"
    for found in run_distributed(_run_all, 4, {name: MATRIX[name]}, {}, None, fresh=True, timeout=280):
        assert largest(found[name]) < SAME


@pytest.mark.parametrize("name", FAST)
def test_parameters_equal_those_of_one_rank(results, name):
    for loss, apart in (found[name] for found in results):
        assert loss < SAME
        assert apart < SAME


def test_bf16_is_as_exact_as_without_sharding_and_keeps_fp32_masters(results):
    for found in results:
        without, sharded = found[1], found[2]
        assert sharded.loss < 0.02
        assert sharded.moved_apart < 1.3 * without.moved_apart < 0.13
        assert sharded.is_fp32 and sharded.dtype == torch.bfloat16


def test_a_checkpoint_is_resumed(results):
    for found in results:
        assert found["resumed"] < SAME


def test_parameters_partitioned_from_the_start(results):
    assert largest(found["zero.Init"] for found in results) < SAME


def test_evaluation_and_generation_of_the_trained_model(results):
    for found in results:
        loss, same = found["evaluate, generate"]
        assert loss < SAME and same


def _slow_cases(family):
    """Every layout, ZeRO stage and optimizer, with clipping and without; and what CI has for one stage only."""
    for name, case in MATRIX.items():
        yield f"{name}, clipped", replace(case, family=family, optimizer="sgd", clip=0.3)
        together = replace(case, family=family, accumulate=2, checkpointing=True)
        if case.sp == 4 and family != "gpt_oss":  # other data-parallel ranks have other masks than the reference
            together = replace(together, dropout=0.1)
        yield f"{name}, together", together
        if case.sp > 1:
            if family != "gpt_oss":  # Transformers' own gpt-oss does not keep packed documents apart
                yield f"{name}, packed", replace(case, family=family, optimizer="sgd", batches="packed")
            yield f"{name}, Ulysses", replace(case, family=family, ulysses=2)


@pytest.mark.slow
def test_more_variants():
    for found in run_distributed(_run_all, 4, SLOW, {}, None, fresh=True, timeout=290):
        assert not {name: apart for name, apart in found.items() if not largest(apart) <= SAME}


@pytest.mark.slow
@pytest.mark.parametrize("family", SLOW_FAMILIES)
def test_every_layout(family):
    cases = dict(_slow_cases(family))
    for found in run_distributed(_run_all, 4, cases, {}, None, fresh=True, timeout=290):
        assert not {name: apart for name, apart in found.items() if not largest(apart) <= SAME}
