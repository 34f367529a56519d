"""GPTModel on several ranks against the same model on one: schedules, layouts, recomputation, the plugin, bf16.

Every test is one call of a rank function, which goes through many cases with one process group.
"""

import dataclasses

import pytest
import torch

from megatron_tree import TreeConfig
from support.megatron_models import Case, build_model, check, megatron, reference_of, run_all, schedules
from support.ranks import run_distributed


@pytest.mark.supports("cp_comm_type tree, p2p, all_gather", with_="MHA, GQA, MQA; cp = 4")
def test_every_schedule_equals_one_rank():
    others = [Case(cp=4, num_heads_kv=h, batch=1) for h in (8, 1)]
    check(4, [Case(cp=4, **schedule) for schedule in schedules(4)] + others)


@pytest.mark.supports("sliding windows (window_size, window_attn_skip_freq)", with_="cp = 2")
@pytest.mark.supports("sinks (softmax_type off-by-one, learnable)", with_="cp = 2; also with windows")
def test_sinks_and_windows():
    window = (("window_size", (5, 0)),)
    skipping = (*window, ("window_attn_skip_freq", 2))
    listed = (*window, ("window_attn_skip_freq", [0, 1]))
    sinks = [(("softmax_type", name),) for name in ("off-by-one", "learnable")]
    kinds = [window, skipping, listed, *sinks, (*skipping, *sinks[1])]
    cases = [Case(cp=2, extra=extra) for extra in kinds[:-1]]
    check(2, cases + [Case(cp=2, extra=kinds[-1], **schedule) for schedule in schedules(2)])


@pytest.mark.supports("activation recomputation (recompute_granularity)", with_="selective and full; cp = 4")
def test_recomputation():
    selective = (("recompute_granularity", "selective"), ("recompute_modules", ["core_attn"]))
    full = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
    check(4, [Case(cp=4, extra=extra, **schedule) for extra in (selective, full) for schedule in schedules(4)[:2]])


@pytest.mark.supports("install(), Megatron's own layer specs", with_="cp = 2")
@pytest.mark.supports("a cp_comm_type for each layer", with_="install(); cp = 2")
def test_plugin_needs_only_the_configuration():
    plugin = {"cp": 2, "install": True}
    cases = [Case(**plugin, cp_comm_type=types) for types in (("tree", "p2p"), ("all_gather", "tree"))]
    plugin["local_spec"] = True
    cases += [Case(**plugin, tree_config=TreeConfig(grid=(1, 2))), Case(**plugin, cp_comm_type=("tree", "tree"))]
    check(2, cases)


def _sink_shards(rank, world, tp, cp):
    """Where the learnable sinks of the first layer go in a checkpoint: ours (cp) and Megatron's own (cp = 1)."""
    from megatron.core import parallel_state

    shards = []
    for size in (cp, 1):
        with megatron(tp=tp, pp=1, cp=size):
            model = build_model(Case(tp=tp, cp=size, extra=(("softmax_type", "learnable"),)))
            dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
            state = model.sharded_state_dict(metadata={"dp_cp_group": dp_cp})
            (shard,) = [item for key, item in state.items() if "layers.0" in key and "softmax_offset" in key]
            shards.append((shard.key, shard.global_shape, shard.global_offset, shard.replica_id))
    return shards


@pytest.mark.supports("learnable sinks in checkpoints", with_="under Megatron's key; tp = 2, cp = 2")
def test_sinks_are_stored_as_megatron_stores_them():
    ranks = run_distributed(_sink_shards, 4, 2, 2)
    assert all(ours == megatrons for ours, megatrons in ranks)
    assert {ours[2] for ours, _ in ranks} == {(0, 0), (0, 4)}


def _bf16_errors(rank, world, cases):
    """Errors (Frobenius norm) of tree and dense bf16 against fp32, same weights: [(name, tree, dense)] by case."""
    reference = reference_of(cases[0])
    truth, dense = run_all([dataclasses.replace(reference, dtype=torch.float32), reference])
    rows = []
    for result in run_all(cases):
        names = [("losses", result[0], dense[0], truth[0])]
        names += [(name, result[1][name], dense[1][name], true) for name, true in truth[1].items()]
        rows.append([(name, float((a - c).norm()), float((b - c).norm())) for name, a, b, c in names])
    return rows


@pytest.mark.supports("bf16, fp16", with_="as close to fp32 as dense attention; cp = 4")
def test_bf16_is_as_good_as_dense_bf16():
    cases = [Case(cp=4, dtype=torch.bfloat16, **schedule) for schedule in schedules(4)]
    for case, rows in zip(cases, run_distributed(_bf16_errors, 4, cases)[0], strict=True):
        for name, error, dense in rows:
            limit = 2 if name == "losses" else 3
            assert error <= limit * dense, f"{name}: {error:.2e}, dense bf16 {dense:.2e}, {case}"
