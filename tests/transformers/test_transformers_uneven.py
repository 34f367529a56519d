"""Ranks that make other numbers of steps under DDP: one CommError within the limit, whatever collective would wait."""

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import transformers
from megatron_tree import TreeConfig
from support.hf_models import SHAPE, prompt
from support.ranks import run_distributed

LIMIT_S = 4.0


def _uneven(rank, world, sp_size, what):
    """The error of this rank; the ranks of the last sequence group have fewer batches, or leave a backward out."""
    from megatron_tree.integrations.transformers import register_sequence_parallel

    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    parallel = register_sequence_parallel(model, sp_size=sp_size, tree_config=TreeConfig(timeout_s=LIMIT_S))
    wrapped = DistributedDataParallel(model)
    differs, error = parallel.dp_rank == parallel.dp_size - 1, None
    try:
        for step in range(3 - (differs and what == "batches")):
            ids = prompt(2, 16, seed=step)
            loss = wrapped(**parallel.shard_batch({"input_ids": ids, "labels": ids})).loss
            if not (differs and step == 1 and what == "backward"):
                loss.backward()
    except (RuntimeError, ValueError) as caught:
        error = caught
    store = distributed_c10d._get_default_store()  # nobody leaves before the others have their error
    store.set(f"over/{rank}", "")
    store.wait([f"over/{r}" for r in range(world)])
    return type(error).__name__, getattr(error, "ranks", ()), str(error)


@pytest.mark.parametrize(("world", "sp_size", "missing"), [(2, 1, (1,)), (4, 2, (2, 3))])
def test_uneven_batches(world, sp_size, missing):
    """DDP's broadcast of buffers, which begins a forward, would wait without a limit."""
    results = run_distributed(_uneven, world, sp_size, "batches", fresh=True, timeout=100)
    for rank, (kind, ranks, text) in enumerate(results):
        if rank in missing:
            assert kind == "NoneType"
        else:
            assert kind == "CommError" and ranks and set(ranks) <= set(missing), text
            assert f"did not respond within {LIMIT_S:g} s: shard_batch among ranks" in text, text


def test_a_backward_that_one_rank_leaves_out():
    """DDP's all-reduce of gradients would wait."""
    for kind, _, text in run_distributed(_uneven, 2, 1, "backward", fresh=True, timeout=100):
        assert kind in ("CommError", "ValueError") and "shard_batch" in text and "backward of the loss" in text, text
