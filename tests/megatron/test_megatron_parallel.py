"""Tree attention inside Megatron's other parallelisms: some optimizer steps equal a plain loop over the whole model."""

import pytest
import torch

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
from support.ranks import run_distributed

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
    check_training(4, [Run(tp=2, cp=2, config=config) for config in ((), SEQUENCE_PARALLEL + FULL)])


@pytest.mark.supports("pipeline parallelism, virtual stages", with_="pp = 2, cp = 2")
def test_pipeline_and_virtual_stages():
    check_training(4, [Run(pp=2, cp=2, num_layers=4), Run(pp=2, vp=2, cp=2, num_layers=4, config=INTERLEAVED)])


@pytest.mark.supports("DistributedDataParallel, distributed optimizer, microbatches, clip_grad", with_="cp = 2, dp = 2")
@pytest.mark.supports("calculate_per_token_loss", with_="on and off; cp = 2, dp = 2")
def test_data_parallelism():
    sharded = {"distributed_optimizer": True}
    by_microbatch = Run(cp=2, micro_batch=2, config=(("calculate_per_token_loss", False),))
    check_training(4, [Run(cp=2), Run(cp=2, **sharded), Run(cp=4, **sharded), by_microbatch])


@pytest.mark.supports("experts (MoE), expert parallelism", with_="ep = 2, cp = 2; also with tp = 2; alltoall, aux_loss")
def test_experts():
    together = Run(ep=2, tp=2, cp=2, config=EXPERTS + SEQUENCE_PARALLEL)
    check_training(4, [together, Run(ep=2, cp=2, config=EXPERTS, distributed_optimizer=True)])


# of the microbatches; their sums are such that the ranks have no padding, which a loss of the experts would count
DOCUMENTS = ((70, 1, 2, 9, 3, 16, 11), (5, 120, 3))
ALL_TOKENS = (("moe_router_load_balancing_type", "global_aux_loss"),)


@pytest.mark.supports("dynamic context parallelism", with_="dp = 2, cp = 2; MLA; distributed optimizer")
def test_documents_over_data_and_context_ranks():
    check_training(4, [Run(documents=DOCUMENTS, cp=2, mla=True, distributed_optimizer=True)])


@pytest.mark.supports("dynamic context parallelism", with_="experts, global_aux_loss; dp = 2, cp = 2, ep = 2")
def test_experts_and_documents_over_data_and_context_ranks():
    config = tuple({**dict(EXPERTS + ALL_TOKENS), "calculate_per_token_loss": True}.items())
    check_training(4, [Run(documents=DOCUMENTS, cp=2, ep=2, config=config)])


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
