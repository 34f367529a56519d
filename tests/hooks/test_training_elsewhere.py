"""The blocks of docs/training-elsewhere.md run as they are written: loops end with the weights of one rank's loop."""

import functools
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.ranks import as_launched, largest, run_distributed
from support.trainers import OFFLINE

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
pytest.importorskip("trl", reason="TRL is an optional package")

PAGE = Path(__file__).parents[2] / "docs" / "training-elsewhere.md"
LOOPS, TRAINERS = ("DDP", "FSDP2", "Accelerate"), ("Transformers' Trainer", "TRL")
SAME = 1e-3  # of the distance that AdamW has moved the weights; it enlarges the rounding of tiny gradients


def _blocks():
    """{heading: its first block}."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    found = {section.splitlines()[0]: re.search(r"```python\n(.*?)```", section, re.DOTALL) for section in sections}
    return {heading: block[1] for heading, block in found.items() if block}


def _model():
    from support.hf_models import SHAPE

    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SHAPE | {"pad_token_id": 0, "eos_token_id": 0, "bos_token_id": None})
    return transformers.LlamaForCausalLM(config)


def _batches(dp_rank=0, dp_size=1):
    from support.hf_models import prompt

    for seed in range(4):
        ids = prompt(2, 21, seed=seed)
        yield {"input_ids": ids, "labels": ids.masked_fill(ids % 3 == 0, -100)}


def _names():
    """What the loops take for granted."""
    from accelerate import Accelerator
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    from megatron_tree.integrations.transformers import register_sequence_parallel
    from megatron_tree.integrations.transformers.train.accelerated import prepare_data_loader

    return {
        "dist": dist, "torch": torch, "batches": _batches, "model": _model(),
        "DistributedDataParallel": DistributedDataParallel, "init_device_mesh": init_device_mesh,
        "fully_shard": functools.partial(fully_shard, mp_policy=MixedPrecisionPolicy(torch.float32)),
        "register_sequence_parallel": register_sequence_parallel,
        "Accelerator": Accelerator,
        "prepare_data_loader": prepare_data_loader, "loader": DataLoader(list(_batches()), batch_size=None),
    }  # fmt: skip


def _weights(model):
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return torch.cat([p.detach().flatten() for p in whole])


def _error_of_a_loss(block):
    """Of the gradients, averaged over the ranks, with the mean cross entropy as the loss."""
    names, plain = _names(), _model()
    batch, model = next(_batches()), names["model"]
    parallel = names["register_sequence_parallel"](model)
    count = (batch["labels"][:, 1:] != -100).sum()
    exec(
        block.replace("0.9", "1.0"),
        names | {"parallel": parallel, "batch": batch, "your_loss": lambda x: -x.sum() / count},
    )
    plain(**batch).loss.backward()
    grads, wanted = (torch.cat([p.grad.flatten() for p in x.parameters()]) for x in (model, plain))
    dist.all_reduce(grads)
    return float((grads / dist.get_world_size() - wanted).norm() / wanted.norm())


def _run(rank, world, folder):
    from accelerate.state import AcceleratorState

    plain, blocks = _model(), _blocks()
    sys.argv = ["program", str(folder), __file__]  # the arguments of whole programs: a model, and a text
    os.chdir(folder)
    begun = _weights(plain)
    optimizer = torch.optim.AdamW(plain.parameters())
    for batch in _batches():
        plain(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ended = {}
    for heading in (*LOOPS, *TRAINERS):
        AcceleratorState._reset_state(reset_partial_state=True)
        with as_launched():
            names = _names() if heading in LOOPS else {}
            exec(blocks[heading], names)
            ended[heading] = _weights(names["model"])
        if heading in TRAINERS:
            assert names["trainer"].state.global_step == names["args"].max_steps
        names = None  # while all ranks are in the group that these objects hold
    moved_by = (_weights(plain) - begun).norm()
    errors = {heading: float((ended[heading] - _weights(plain)).norm() / moved_by) for heading in LOOPS}
    errors["a loss"] = _error_of_a_loss(blocks["Losses of your own"])
    moved = {heading: largest((ended[heading] - begun).abs().tolist()) for heading in TRAINERS}
    return errors, moved, {heading: float(x.double().sum()) for heading, x in ended.items()}


def test_blocks_of_the_page(tmp_path):
    from support.byte_tokens import byte_tokenizer

    _model().save_pretrained(tmp_path)
    byte_tokenizer(size=129).save_pretrained(tmp_path)
    cases = run_distributed(_run, 2, tmp_path, env=OFFLINE, fresh=True, timeout=250)
    for errors, moved, sums in cases:
        assert set(errors) == {*LOOPS, "a loss"} and largest(errors.values()) < SAME, errors
        assert all(x > 0 for x in moved.values()), moved
        assert sums == cases[0][2], "ranks have different weights"


def test_every_file_that_the_page_names_is_there():
    named = re.findall(r"`(tests/[\w/]+\.py)`", PAGE.read_text())
    assert named and all(os.path.exists(PAGE.parents[1] / name) for name in named)
