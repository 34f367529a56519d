"""Batches of sequence groups: what ranks draw for them, what is compared, and what Accelerate gathers of them."""

import multiprocessing
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from support.hf_models import prompt, tiny_model
from support.ranks import on_ranks, run_distributed
from support.trainers import ADDRESS

accelerate = pytest.importorskip("accelerate")

ROWS = [{"input_ids": torch.full((5,), 2 * i + 1)} for i in range(7)]


def _random(samples):
    """With labels that three generators take away."""
    ids = torch.stack([x["input_ids"] for x in samples])
    keep = (torch.rand(ids.shape) < 0.8) & (torch.from_numpy(np.random.rand(*ids.shape)) < 0.8)
    keep[:, random.randrange(5)] = False
    return {"input_ids": ids, "labels": ids.where(keep, -100)}


def _accelerator(**options):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**options))


def _epochs(loader, rank, workers):
    """Two epochs; between them a rank draws what the others don't."""
    found = []
    for _ in range(2):
        found += [torch.cat((batch["input_ids"], batch["labels"]), 1) for batch in loader]
        if rank:
            torch.rand(1), random.random(), np.random.rand(rank)
    return torch.cat(found)


def _loaded(rank, world, device_specific):
    """Batches of an Accelerate loop: on one rank without us."""
    from megatron_tree.integrations.transformers import register_sequence_parallel
    from megatron_tree.integrations.transformers.train.accelerated import prepare_data_loader

    multiprocessing.current_process()._config["daemon"] = False  # a loader's workers are its processes
    found = []
    for workers in ({}, {"num_workers": 1, "multiprocessing_context": "fork"}):
        accelerator = _accelerator()
        accelerate.utils.set_seed(3, device_specific=device_specific)
        loader = DataLoader(ROWS, 2, shuffle=True, collate_fn=_random, **workers)
        if world == 1:
            loader = accelerator.prepare(loader)
        else:
            state = torch.get_rng_state()
            parallel = register_sequence_parallel(tiny_model("llama"), sp_size=2)
            torch.set_rng_state(state)  # the tiny model has a seed of its own
            loader = prepare_data_loader(loader, accelerator, parallel)
        found.append(_epochs(loader, rank, workers))
    return found


def test_one_group_reads_what_one_rank_reads():
    """Whatever a rank draws in between."""
    options = {"env": ADDRESS, "fresh": True}
    (want,) = run_distributed(_loaded, 1, False, **options)
    for found in run_distributed(_loaded, 2, False, **options):
        for batches, truth in zip(found, want, strict=True):
            assert torch.equal(batches, truth)


def test_ranks_of_a_group_draw_the_same():
    """And groups do not, if their seeds differ."""
    one, same_as_one, two, same_as_two = run_distributed(_loaded, 4, True, env=ADDRESS, fresh=True)
    for first, second in ((one, same_as_one), (two, same_as_two)):
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    for x, y in zip(one, two, strict=True):
        dropped_by_one, dropped_by_two = (batches[:, 5:] == -100 for batches in (x, y))
        assert x.shape == y.shape and not torch.equal(dropped_by_one, dropped_by_two)


@on_ranks(4, env=ADDRESS, fresh=True)
def test_an_accelerator_counts_sequence_groups(rank):
    from megatron_tree.integrations.transformers import register_sequence_parallel
    from megatron_tree.integrations.transformers.train.accelerated import count_sequence_groups, prepare_data_loader

    accelerator = _accelerator()
    parallel = register_sequence_parallel(tiny_model("llama"), sp_size=2)
    count_sequence_groups(accelerator, parallel)
    loader = accelerator.prepare(DataLoader([torch.tensor(float(i)) for i in range(7)], 2))
    rows = [accelerator.gather_for_metrics(batch) for batch in loader]
    group = torch.tensor([10.0 * parallel.dp_rank, 1.0])
    with pytest.raises(ValueError, match="dispatch_batches=True: rank 0 would send"):
        prepare_data_loader(DataLoader(ROWS), _accelerator(dispatch_batches=True), parallel)
    found = {
        "metrics": torch.cat(rows).tolist(),
        "objects": accelerator.gather_for_metrics([f"group {parallel.dp_rank}"], use_gather_object=True),
        "gathered": accelerator.gather(group).tolist(),
        "numbers": accelerator.gather({"of": group[0]})["of"].tolist(),
        "sum": accelerator.reduce(group, reduction="sum").tolist(),
        "mean": accelerator.reduce(group, reduction="mean").tolist(),
        "place": (accelerator.process_index, accelerator.num_processes, accelerator.is_main_process),
    }
    assert found == {
        "metrics": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        "objects": ["group 0", "group 1"],
        "gathered": [0.0, 1.0, 10.0, 1.0],
        "numbers": [0.0, 10.0],
        "sum": [10.0, 2.0],
        "mean": [5.0, 1.0],
        "place": (rank // 2, 2, rank == 0),
    }, found


def _compared(rank, world, name):
    """What is said where ranks have the same batches but for one number in the third."""
    from megatron_tree.integrations.transformers import register_sequence_parallel

    model = tiny_model("llama").train()
    parallel = register_sequence_parallel(model)
    for number in range(3):
        ids = prompt(2, 13, seed=number)
        batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
        if (number, rank) == (2, 1):
            batch[name][1, 7] = {"labels": -100, "input_ids": 5}[name]
        try:
            model(**parallel.shard_batch(batch)).loss.backward()
        except ValueError as error:
            return number, str(error)
    dist.barrier()
    return None


@pytest.mark.parametrize("name", ["labels", "input_ids"])
def test_every_tensor_of_every_batch_is_compared(name):
    for number, said in run_distributed(_compared, 2, name, fresh=True):
        assert number == 2 and f"with different arguments: rank 0 has batch['{name}']='torch.int64 [2, 13]" in said


def test_checksums_are_of_bits_and_of_places():
    from megatron_tree.integrations.transformers.train.sequence_parallel import _checksum

    x = torch.arange(60.0).view(5, 12)
    others = [x.flip(0), x.flip(1), x.roll(1, 1), x + (x == 7) * 1e-5, -x, x.double(), x.bfloat16() + 1, x.t()]
    others += [x[:, [1, 0, *range(2, 12)]], x[[1, 0, 2, 3, 4]]]
    assert len({int(_checksum(y)) for y in [x, *others]}) == len(others) + 1
    assert int(_checksum(x.t().contiguous().t())) == int(_checksum(x))
    for dtype in (torch.bool, torch.uint8, torch.float16, torch.int64):
        assert int(_checksum(torch.ones(3, dtype=dtype))) != int(_checksum(torch.tensor([1, 0, 1], dtype=dtype)))
    assert int(_checksum(torch.empty(0))) == 0
