"""What Trainer counts, gathers and seeds, on sets that its batches don't divide, with one and two sequence groups."""

import functools
import multiprocessing
import random

import numpy as np
import pytest
import torch

from support.ranks import largest, run_distributed
from support.trainers import ADDRESS, ARGUMENTS

pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState

import transformers
from support.hf_models import tiny_model

SAME = 4e-6
BF16 = 0.02
OPTIONS = ARGUMENTS | {
    "max_steps": 3,
    "learning_rate": 1e-3,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2,
    "include_num_input_tokens_seen": "non_padding",
}
RANKS = {"timeout": 500, "env": ADDRESS, "fresh": True}


def _rows(count):
    """Of several lengths, with different numbers of labels."""
    ids = [torch.arange(i, i + 9 + 5 * i % 17) * 37 % 131 for i in range(count)]
    return [
        {"input_ids": x, "labels": x.masked_fill(torch.arange(len(x)) < 3 * i % 8, -100)} for i, x in enumerate(ids)
    ]


class _Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from _rows(11)


def _padded(samples):
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    ids, labels = pad([x["input_ids"] for x in samples]), pad([x["labels"] for x in samples], padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": pad([torch.ones_like(x["labels"]) for x in samples])}


def _flat(samples):
    """One row with the samples as documents."""
    ids, labels = (torch.cat([x[name] for x in samples])[None] for name in ("input_ids", "labels"))
    positions = torch.cat([torch.arange(len(x["labels"])) for x in samples])[None]
    return {"input_ids": ids, "labels": labels.masked_fill(positions == 0, -100), "position_ids": positions}


def _random(samples):
    """Without half of the labels, by three generators."""
    batch = _padded(samples)
    keep = torch.rand(batch["labels"].shape) < 0.7 + 0.2 * random.random()
    keep &= torch.from_numpy(np.random.rand(*keep.shape) < 0.8)
    return batch | {"labels": batch["labels"].where(keep, -100)}


def _own_loss(outputs, labels, num_items_in_batch=None):
    return -(outputs.log_probs * (labels != -100)).sum() / num_items_in_batch


def _own_loss_of_logits(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


LOCAL = {"average_tokens_across_devices": False}
TRAINED = {
    "all": {"include_num_input_tokens_seen": "all"},
    "balanced": {"train_sampling_strategy": "batch_rebalance"},
    "random": {},
    "workers": {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "fork"},
    "stream": {"accelerator_config": {"dispatch_batches": False}},
    "local": LOCAL,
    "own_loss": LOCAL,
    "evaluated": {},
    "bf16": {"bf16": True},
}
EVALUATED = {"mean": {}, "flat": {}, "own_loss": {}, "local": LOCAL, "local_own_loss": LOCAL, "stream": {}}


def _make(name, trainer_class, folder, data, **options):
    multiprocessing.current_process()._config["daemon"] = False  # a loader's workers are its processes
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = OPTIONS | options.pop("arguments")
    options["data_collator"] = {"random": _random, "workers": _random, "flat": _flat}.get(name, _padded)
    if "own_loss" in name:
        options["compute_loss_func"] = _own_loss if "sp_size" in options else _own_loss_of_logits
    args = transformers.TrainingArguments(str(folder), **arguments)
    return trainer_class(tiny_model("llama"), args, train_dataset=data, eval_dataset=data, **options)


def _trained(trainer_class, folder, names, **options):
    """{name: (what is logged and counted, weights)}."""
    found = {}
    for name in names:
        data = _Stream() if name == "stream" else _rows(11)
        trainer = _make(name, trainer_class, folder / name, data, arguments=TRAINED[name], **options)
        if name == "evaluated":
            trainer.evaluate()
        trainer.train()
        state = trainer.state
        figures = {key: [x[key] for x in state.log_history if key in x] for key in ("loss", "grad_norm")}
        figures |= {"flos": [state.total_flos], "tokens": [state.num_input_tokens_seen]}
        found[name] = figures, {key: p.detach().clone() for key, p in trainer.model.named_parameters()}
    return found


def _evaluated(trainer_class, folder, batch_sizes, **options):
    """{name: losses of sets of 3, 5 and 7 rows}; batch_sizes: {name: of a group}."""
    found = {}
    for name, size in batch_sizes.items():
        arguments = EVALUATED[name] | {"per_device_eval_batch_size": size}
        sets = {str(count): _rows(count) for count in (3, 5, 7)}
        if name == "stream":
            sets = {"stream": _Stream()}
        trainer = _make(name, trainer_class, folder / name, sets, arguments=arguments, **options)
        found[name] = [trainer.evaluate()[f"eval_{key}_loss"] for key in sets]
    return found


def _plain(rank, world, folder, names):
    return _trained(transformers.Trainer, folder, names)


def _plain_evaluation(rank, world, folder, names, dp_size):
    """On one rank: batches are those of all groups, but where each group has its own mean."""
    sizes = {name: 2 if "local" in name else 2 * dp_size for name in names}
    return _evaluated(transformers.Trainer, folder, sizes)


def _sharded(rank, world, folder, trained, evaluated):
    from megatron_tree.integrations.transformers.train.trainer import Trainer

    found = _trained(Trainer, folder, trained, sp_size=2)
    return found, _evaluated(Trainer, folder, dict.fromkeys(evaluated, 2), sp_size=2)


def _check(tmp_path, dp_size, trained, evaluated):
    options = {"timeout": 500, "env": ADDRESS, "fresh": True}
    want = run_distributed(_plain, dp_size, tmp_path / "plain", trained, **options)[0]
    # where evaluate() comes first, Transformers leaves out what averages gradients
    want |= {"evaluated": want["all"]} if "evaluated" in trained else {}
    (losses,) = run_distributed(_plain_evaluation, 1, tmp_path / "losses", evaluated, dp_size, **options)
    for found, of_sets in run_distributed(_sharded, 2 * dp_size, tmp_path, trained, evaluated, **options):
        for name, (figures, weights) in want.items():
            same = BF16 if name == "bf16" else SAME
            for key, values in figures.items():
                if (name, key) != ("evaluated", "tokens"):
                    assert found[name][0][key] == pytest.approx(values, rel=same), (name, key)
            for key, p in weights.items():
                assert largest((found[name][1][key] - p).abs().flatten().tolist()) < same, (name, key)
        for name, values in losses.items():
            assert of_sets[name] == pytest.approx(values, rel=SAME), name


@pytest.mark.timeout(600)
@pytest.mark.supports(
    "`transformers.Trainer`",
    with_="dp = 2, sp = 2; sets that no batch divides; loaders' workers; evaluate before train",
)
def test_two_groups(tmp_path):
    _check(tmp_path, 2, ["all", "workers", "own_loss", "evaluated"], ["flat", "own_loss", "local"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.supports(
    "`transformers.Trainer`", with_="streams; batch_rebalance; average_tokens_across_devices=False; bf16"
)
@pytest.mark.parametrize("dp_size", [1, 2])
def test_everything(tmp_path, dp_size):
    _check(tmp_path, dp_size, list(TRAINED), [name for name in EVALUATED if dp_size == 1 or name != "stream"])
