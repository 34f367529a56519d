"""Tree attention inside Megatron's other parallelisms: some optimizer steps equal a plain loop over the whole model."""

import dataclasses

import pytest
import torch

from support.ranks import run_distributed

pytest.importorskip("megatron.core")

from support.megatron_layouts import (
    STEPS,
    Run,
    check_training,
    in_layout,
    plain,
    train,
    train_plainly,
    whole_weight,
)

SEQUENCE_PARALLEL = (("sequence_parallel", True),)
# With two stages and virtual ones both neighbours are the same rank: Megatron then wants the exchanges one by one.
INTERLEAVED = (("overlap_p2p_comm", True), ("batch_p2p_comm", False))
SELECTIVE = (("recompute_granularity", "selective"), ("recompute_modules", ("core_attn",)))
FULL = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
EXPERTS = (
    ("num_moe_experts", 4),
    ("moe_router_topk", 2),
    ("moe_ffn_hidden_size", 24),
    ("moe_token_dispatcher_type", "alltoall"),
    ("moe_router_load_balancing_type", "aux_loss"),
    ("moe_aux_loss_coeff", 0.1),
    ("calculate_per_token_loss", False),  # with it Megatron 0.16 divides the aux loss by the ranks of the sequence
)


@pytest.mark.supports("tensor and sequence parallelism", with_="tp = 2, cp = 2; without Apex and TransformerEngine")
def test_tensor_and_sequence_parallelism():
    check_training(4, [Run(tp=2, cp=2, config=config) for config in ((), SEQUENCE_PARALLEL, SEQUENCE_PARALLEL + FULL)])


@pytest.mark.supports("pipeline parallelism, virtual stages", with_="pp = 2, cp = 2")
def test_pipeline_and_virtual_stages():
    check_training(4, [Run(pp=2, cp=2, num_layers=4), Run(pp=2, vp=2, cp=2, num_layers=4, config=INTERLEAVED)])


@pytest.mark.supports("DistributedDataParallel, distributed optimizer, microbatches, clip_grad", with_="cp = 2, dp = 2")
@pytest.mark.supports("calculate_per_token_loss", with_="on and off; cp = 2, dp = 2")
def test_data_parallelism():
    sharded = {"distributed_optimizer": True}
    by_microbatch = Run(cp=2, micro_batch=2, config=(("calculate_per_token_loss", False),))
    check_training(4, [Run(cp=2), Run(cp=2, **sharded), Run(cp=4), Run(cp=4, **sharded), by_microbatch])


@pytest.mark.supports("experts (MoE), expert parallelism", with_="ep = 2, cp = 2; also with tp = 2; alltoall, aux_loss")
def test_experts():
    layouts = [Run(ep=2, cp=2, config=EXPERTS), Run(ep=2, tp=2, cp=2, config=EXPERTS + SEQUENCE_PARALLEL)]
    check_training(4, [*layouts, Run(ep=2, cp=2, config=EXPERTS, distributed_optimizer=True)])


@pytest.mark.supports("hierarchical_context_parallel_sizes, cp_comm_type a2a+tree and a2a+p2p", with_="[2, 2]")
def test_hierarchical_context_parallelism():
    layouts = [Run(cp=4, hierarchical=(2, 2), cp_comm_type=name) for name in ("a2a+tree", "a2a+p2p")]
    check_training(4, [*layouts, Run(cp=2, cp_comm_type="a2a")])


def _gradients_of(rank, world, runs):
    return [in_layout(run, train)[0]["gradients"] for run in runs]


@pytest.mark.slow
@pytest.mark.supports("attention_dropout", with_="the same mask in recomputation")
def test_recomputation_draws_the_same_dropout():
    dropout = (("attention_dropout", 0.2),)
    kinds = [(), dropout, dropout + SELECTIVE, dropout + FULL]
    for gradients in run_distributed(_gradients_of, 2, [Run(cp=2, config=kind) for kind in kinds]):
        without, stored, *recomputed = gradients
        for name, expected in stored.items():
            assert all(torch.equal(again[name], expected) for again in recomputed), name
        assert not torch.allclose(stored["output_layer.weight"], without["output_layer.weight"], rtol=0.01)


@pytest.mark.slow
@pytest.mark.supports(
    "tensor, sequence, pipeline and context parallelism together", with_="2 x 2 x 2 ranks, 2 stages a rank"
)
def test_eight_ranks():
    together = {"num_layers": 4, "distributed_optimizer": True}
    layouts = [Run(tp=2, pp=2, cp=2, config=SEQUENCE_PARALLEL, **together)]
    layouts.append(Run(tp=2, pp=2, vp=2, cp=2, config=SEQUENCE_PARALLEL + INTERLEAVED + SELECTIVE, **together))
    check_training(8, layouts)


# --- low precision ---


def _errors_of_halves(rank, world, runs):
    """{what: (Frobenius) error against fp32} of every run and of Megatron's own attention in the same dtype."""
    truth = in_layout(plain(runs[0]), train_plainly)
    rows = []
    for run in runs:
        dense = dataclasses.replace(run, cp=1)
        rows.append([_distances(*in_layout(r, train), truth) for r in (run, dense)])
    return rows


def _distances(result, cuts, truth):
    found = {"losses": float((torch.tensor(result["losses"]) - torch.tensor(truth["losses"])).norm())}
    for name, cut in cuts.items():
        found[name] = float((result["gradients"][name] - cut(truth["gradients"][name])).norm())
    return found


@pytest.mark.slow
@pytest.mark.supports("bf16, fp16", with_="as close to fp32 as dense attention; cp = 4")
def test_halves_are_as_good_as_dense_halves():
    runs = [Run(cp=4, dtype=torch.bfloat16), Run(cp=4, dtype=torch.float16, loss_scale=2.0**8)]
    for run, (errors, dense) in zip(runs, run_distributed(_errors_of_halves, 4, runs)[0], strict=True):
        for what, error in errors.items():
            assert 0 < error <= 3 * dense[what], f"{what}: {error:.2e}, dense {dense[what]:.2e}, {run}"


def _scaled(rank, world, runs):
    """[applied steps, loss scales, losses, weights] of every run, and the losses of the plain loop."""
    results = [in_layout(run, train)[0] for run in runs]
    plainly = [in_layout(plain(run), train_plainly)["losses"] for run in runs]
    return [(r["applied"], r["scales"], r["losses"], r["weights"]) for r in results], plainly


@pytest.mark.slow
@pytest.mark.supports("dynamic loss scaling (fp16)", with_="an overflow on one rank is skipped by all; pp = 2, cp = 2")
def test_an_overflow_is_skipped_by_all_ranks_alike():
    layout = {"pp": 2, "cp": 2, "dtype": torch.float16}
    runs = [Run(**layout, loss_scale=2.0**10, skipped=(1, 3)), Run(**layout, loss_scale=2.0**40)]
    ranks = run_distributed(_scaled, 4, runs)
    for (one, always), (plainly, _) in ranks:
        applied, scales, losses, _ = one
        assert (applied, scales) == ([True, False, True], [2.0**10, 2.0**9, 2.0**9])
        assert losses == pytest.approx(plainly, rel=2e-3)
        applied, scales, _, weights = always
        assert (applied, scales) == ([False] * STEPS, [2.0**39, 2.0**38, 2.0**37])
        assert all(torch.equal(x.float(), whole_weight(name, x).half().float()) for name, x in weights.items())
    for first, second in ((0, 1), (2, 3)):  # the context-parallel ranks of a stage
        ours, theirs = ranks[first][0][0][3], ranks[second][0][0][3]
        assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
