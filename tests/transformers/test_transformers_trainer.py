"""Transformers' Trainer on shards under DDP and FSDP2: losses, norms and weights of plain Trainer on one rank."""

import os
from pathlib import Path

import pytest
import torch

from megatron_tree import prefix_tree
from support.ranks import largest, run_distributed
from support.trainers import ADDRESS, ARGUMENTS

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.big_modeling import _attach_context_parallel_hooks
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

import transformers
from support.hf_models import tiny_model

LENGTH = 41  # no multiple of twice the ranks
SAME = 4e-6  # 3e-7 where it was measured
FULL = "FULL_STATE_DICT"
OPTIONS = ARGUMENTS | {
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "max_grad_norm": 0.3,
    "eval_strategy": "steps",
    "eval_steps": 2,  # and on with training
}


def _text():
    """Samples of this file's own text, of several lengths, that differ in how many tokens have a label; the last step
    of an epoch has fewer."""
    data = Path(__file__).read_bytes()
    rows = [torch.tensor(list(data[i : i + LENGTH - i % 7])) % 131 for i in range(0, LENGTH * 14, LENGTH)]
    return [{"input_ids": row, "labels": row.masked_fill(torch.arange(len(row)) < 9, -100)} for row in rows]


def _padded(samples):
    """A batch with padding on the right."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([sample["input_ids"] for sample in samples], batch_first=True)
    labels = pad([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)
    mask = pad([torch.ones_like(sample["input_ids"]) for sample in samples], batch_first=True)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _packed(samples):
    """Two documents in every row."""
    ids = torch.stack([sample["input_ids"][:30] for sample in samples])
    positions = torch.cat((torch.arange(11), torch.arange(19))).expand(ids.shape)
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def _tree(samples):
    """The rows of `_padded`."""
    weights = [(sample["labels"] != -100).float() for sample in samples]
    return {"prefix_tree": prefix_tree([sample["input_ids"] for sample in samples], weights=weights)}


COLLATORS = {"padded": _padded, "packed": _packed, "tree": _tree}
PLAIN = {"tree": "padded"}  # what a plain trainer gets instead


def _train(trainer_class, folder, collator, batch_size, *, fsdp=None, resume=None, lora=False, args=None, **options):
    """({name: its values in the steps}, trained parameters)."""
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # Accelerate sets it for a run with FSDP
    sizes = {"per_device_train_batch_size": batch_size, "per_device_eval_batch_size": batch_size}
    more = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": fsdp}} if fsdp else {}
    args = transformers.TrainingArguments(str(folder), **OPTIONS | sizes | more | (args or {}))
    if fsdp:  # Accelerate has FSDP for ranks with devices only
        assert args.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    model, data = tiny_model("llama"), _text()
    if lora:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        torch.manual_seed(5)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2))
    options |= {"train_dataset": data, "eval_dataset": data[:5], "data_collator": COLLATORS[collator]}
    trainer = trainer_class(model=model, args=args, **options)
    if fsdp and not args.bf16:  # what is exact, through a policy nevertheless
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.float32)
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    found = {name: [x[name] for x in history if name in x] for name in ("loss", "grad_norm", "eval_loss")}
    weights = {}
    for name, p in trainer.model.named_parameters():
        if p.requires_grad:
            weights[name] = (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
    return found, weights


def _plain(rank, world, folder, runs):
    return {run: _train(transformers.Trainer, folder, PLAIN.get(run[0], run[0]), 2, lora=run[1]) for run in runs}


def _sharded(rank, world, folder, cases, want):
    from megatron_tree.integrations.transformers.train.trainer import Trainer

    for collator, lora, sp_size, fsdp, sizes in cases:
        options = {"fsdp": fsdp, "lora": lora, "loss_tile": 7}
        if sizes is None:
            options["sp_size"] = sp_size
        else:
            options["args"] = {"parallelism_config": ParallelismConfig(**sizes)}
        found, weights = _train(Trainer, folder, collator, 2 * sp_size // world, **options)
        _compare(found, weights, *want[collator, lora])


def _resumed(rank, world, folder, sp_size, fsdp, resume, want):
    """All steps with a checkpoint after two of them or, from there, the others; on any ranks."""
    from megatron_tree.integrations.transformers.train.trainer import Trainer

    saving = {} if resume else {"save_strategy": "steps", "save_steps": 2}
    options = {"resume": str(folder / "checkpoint-2") if resume else None, "sp_size": sp_size, "fsdp": fsdp}
    save, written = torch.save, set()

    def note_and_save(x, file, *values, **named):
        written.add(os.path.basename(str(file)))
        save(x, file, *values, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", note_and_save)
        found, weights = _train(Trainer, folder, "padded", 2 * sp_size // world, args=saving, **options)
    assert rank == 0 or not written & {"pytorch_model_fsdp.bin", "optimizer.bin"}, written  # one process writes each
    _compare(found, weights, *want["padded", False])


def _in_bf16(rank, world, folder, want):
    """With DDP and FSDP2."""
    from megatron_tree.integrations.transformers.train.trainer import Trainer

    for fsdp in (None, FULL):
        options = {"fsdp": fsdp, "sp_size": 2, "loss_tile": 7, "args": {"bf16": True}}
        found, _ = _train(Trainer, folder, "padded", 1, **options)
        for name, values in found.items():
            assert values == pytest.approx(want["padded", False][0][name], rel=2**-5), (fsdp, name)


def _compare(found, weights, want_found, want_weights):
    for name, values in found.items():
        skipped = len(want_found[name]) - len(values)  # before a resumed run
        assert values and values == pytest.approx(want_found[name][skipped:], rel=SAME), name
    assert want_weights.keys() == weights.keys()
    for name, p in weights.items():
        assert largest((p - want_weights[name]).abs().flatten().tolist()) < SAME, name


CASES = (
    ("padded", False, 2, None, None),
    ("tree", False, 2, None, None),
    ("packed", False, 2, FULL, {"dp_shard_size": 2, "cp_size": 2}),
)


def _check(tmp_path, cases):
    runs = {case[:2] for case in cases}
    (want,) = run_distributed(_plain, 1, tmp_path / "plain", runs, timeout=250, env=ADDRESS, fresh=True)
    run_distributed(_sharded, 4, tmp_path, cases, want, timeout=500, env=ADDRESS, fresh=True)


def _accelerated(rank, world):
    """(losses, weights) of a loop with Accelerator; what is said where it removes masks; whose samples a rank got."""
    from megatron_tree.integrations.transformers import register_sequence_parallel
    from megatron_tree.integrations.transformers.train.accelerated import prepare_data_loader

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model = Accelerator(cpu=True), tiny_model("llama").train()
    parallel = register_sequence_parallel(model, sp_size=world // 2 or 1)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5))
    loader = DataLoader(_text()[:8], batch_size=2 // parallel.dp_size, collate_fn=_padded)
    losses = []
    for batch in prepare_data_loader(loader, accelerator, parallel):
        loss = wrapped(**parallel.shard_batch(batch)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    _attach_context_parallel_hooks(model)  # as prepare does with cp_size
    with pytest.raises(ValueError, match="does not pass its mask on to 0, 1"):
        model(**parallel.shard_batch(batch))
    AcceleratorState._reset_state(reset_partial_state=True)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def _refusals(rank, world, folder):
    from megatron_tree.integrations.transformers.train.trainer import Trainer

    said = []
    for options in (
        {"fsdp": True},
        {"parallelism_config": ParallelismConfig(tp_size=2)},
        {"parallelism_config": ParallelismConfig(dp_shard_size=2, cp_size=2)},
        {"parallelism_config": ParallelismConfig(sp_size=3)},
    ):
        args = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], **options)
        with pytest.raises(ValueError) as error:
            Trainer(tiny_model("llama"), args)
        said.append(str(error.value))
    return said


def _on_one_rank(rank, world, folder):
    return (
        _refusals(rank, world, folder),
        _plain(rank, world, folder, {case[:2] for case in CASES}),
        _accelerated(rank, world),
    )


def _on_four_ranks(rank, world, folder, want):
    _sharded(rank, world, folder, CASES, want)
    _in_bf16(rank, world, folder, want)
    return _accelerated(rank, world)


@pytest.mark.supports(
    "`transformers.Trainer`", with_="DDP, FSDP2; dp = 2, sp = 2; padded, packed, tree; bf16; ParallelismConfig"
)
@pytest.mark.supports("Accelerate", with_="`Accelerator`, DDP; dp = 2, sp = 2; padded")
@pytest.mark.timeout(600)
def test_trainer_and_accelerate(tmp_path):
    """ParallelismConfig means our sequence ranks, with the masks of padding and packed documents."""
    options = {"timeout": 250, "env": ADDRESS, "fresh": True}  # once: processes take seconds to start
    ((said, want, (losses, weights)),) = run_distributed(_on_one_rank, 1, tmp_path / "plain", **options)
    refused = (
        "Accelerate uses DistributedType.MULTI_CPU here, not FSDP2",
        "tp_size=2",
        "'dp_shard': 2, 'cp': 2, 'sp': 1, 'tp': 1}: their product is not the number of ranks, 1",
        "sp_size=3 must be a positive integer that divides the 1 ranks",
    )
    for text, want_text in zip(said, refused, strict=True):
        assert want_text in text
    for found, moved in run_distributed(_on_four_ranks, 4, tmp_path, want, **options):
        assert len(found) == 4 and found == pytest.approx(losses, rel=SAME)
        assert all((moved[name] - p).abs().max() < SAME for name, p in weights.items())


@pytest.mark.slow
@pytest.mark.supports("`transformers.Trainer`", with_="FSDP2, replicas of shards (HSDP); LoRA; sp = 4")
def test_trainer_with_lora_and_replicas(tmp_path):
    cases = (
        ("padded", True, 4, None, None),
        ("packed", True, 2, FULL, None),
        ("padded", False, 2, FULL, {"dp_replicate_size": 2, "sp_size": 2}),
        ("packed", False, 4, FULL, {"cp_size": 4}),
        ("packed", False, 2, None, {"dp_replicate_size": 2, "sp_size": 2}),
    )
    _check(tmp_path, cases)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [None, FULL, "SHARDED_STATE_DICT"])
def test_a_run_is_resumed_on_the_same_and_on_another_mesh(tmp_path, fsdp):
    (want,) = run_distributed(_plain, 1, tmp_path / "plain", {("padded", False)}, timeout=250, env=ADDRESS, fresh=True)
    for world, sp_size, resume in ((4, 2, False), (4, 2, True), (4, 4, True), (2, 2, True)):
        run = tmp_path, sp_size, fsdp, resume, want
        run_distributed(_resumed, world, *run, timeout=250, env=ADDRESS, fresh=True)
