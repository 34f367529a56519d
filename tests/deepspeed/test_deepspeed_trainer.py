"""Transformers' Trainer on sharded sequences: losses, gradient norms and weights of plain Transformers on one rank."""

from pathlib import Path

import pytest
import torch

from support.ranks import largest, on_ranks, run_distributed
from support.refusals import refused_with
from support.trainers import ADDRESS, ARGUMENTS

pytest.importorskip("accelerate")
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState

import transformers
from megatron_tree.integrations.deepspeed.inference import init_comm
from support.deepspeed_cases import parameters
from support.hf_models import tiny_model

STEPS = 4
LENGTH = 41  # no multiple of twice the ranks
OPTIONS = ARGUMENTS | {
    "max_steps": STEPS,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "eval_strategy": "steps",
    "eval_steps": 2,  # and on with training
}


def _model():
    return tiny_model("llama")


def _text():
    """Bytes of this file's own text, in which samples differ in how many tokens have a label."""
    data = Path(__file__).read_bytes()
    ids = [torch.tensor(list(data[i : i + LENGTH])) % 131 for i in range(0, LENGTH * 14, LENGTH)]
    labels = [row.masked_fill(torch.arange(LENGTH) < int(row[0]) % 30, -100) for row in ids]
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def _run(trainer_class, batch_size, folder, **options):
    """([loss of each step], [gradient norm of each step], losses of the evaluations, weights)."""
    deepspeed_config = options.pop("deepspeed", None)
    arguments = OPTIONS | options.pop("arguments", {})
    sizes = {"per_device_train_batch_size": batch_size, "per_device_eval_batch_size": batch_size}
    model, data = _model(), _text()  # first: after the arguments, ZeRO 3 would split its weights as they are made
    args = transformers.TrainingArguments(str(folder), deepspeed=deepspeed_config, **sizes, **arguments)
    trainer = trainer_class(model=model, args=args, train_dataset=data, eval_dataset=data[:5], **options)
    trainer.train()
    found = {name: [log[name] for log in trainer.state.log_history if name in log] for name in ("loss", "grad_norm")}
    evaluation = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    return found["loss"], found["grad_norm"], evaluation, model, trainer


def _plain(rank, world, folder):
    losses, norms, evaluation, model, _ = _run(transformers.Trainer, 2, folder)
    return losses, norms, evaluation, {name: p.detach() for name, p in model.named_parameters()}


def _sharded(rank, world, folder, stages, sp_size, as_ulysses, want):
    from megatron_tree.integrations.transformers.train.trainer import Trainer

    init_comm(60.0)  # as TrainingArguments do under the deepspeed launcher
    for zero in stages:
        config = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": zero, "reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000},
        }
        if zero == 3:
            config["zero_optimization"] |= {
                "stage3_prefetch_bucket_size": 1000,
                "stage3_param_persistence_threshold": 9,
            }
        options = {"sp_size": sp_size}
        if as_ulysses:  # a user of Accelerate's sequence parallelism changes the import of Trainer only
            options = {"arguments": {"parallelism_config": ParallelismConfig(sp_size=sp_size, sp_backend="deepspeed")}}
            options |= {"loss_tile": 7, "mlp_tile": 7}
        losses, norms, evaluation, model, trainer = _run(
            Trainer, 2 * sp_size // world, folder / str(zero), deepspeed=config, **options
        )
        assert trainer.sequence_parallel.sp_size == sp_size
        assert trainer.get_total_train_batch_size(trainer.args) == 4
        assert losses == pytest.approx(want[0], abs=2e-5), f"ZeRO {zero}"
        assert zero == 0 or norms == pytest.approx(want[1], rel=1e-4), f"ZeRO {zero}"  # 0 reports none
        assert evaluation == pytest.approx(want[2], abs=2e-5), f"ZeRO {zero}"
        for name, p in parameters(model, zero).items():
            assert largest((p - want[3][name]).abs().flatten().tolist()) < 2e-5, f"ZeRO {zero}: {name}"
        AcceleratorState._reset_state(reset_partial_state=True)


def _check(tmp_path, world, stages, sp_size, as_ulysses=False):
    (want,) = run_distributed(_plain, 1, tmp_path / "plain", timeout=250, env=ADDRESS, fresh=True)
    assert want[0][-1] < want[0][0] - 0.2, "it does not learn"
    run_distributed(_sharded, world, tmp_path, stages, sp_size, as_ulysses, want, timeout=500, env=ADDRESS, fresh=True)


@pytest.mark.supports(
    "`transformers.Trainer`", with_="ZeRO 3; sp = 2; ParallelismConfig; evaluation, accumulation; tiles"
)
@pytest.mark.timeout(600)
def test_trainer_with_the_import_changed(tmp_path):
    _check(tmp_path, 2, (3,), 2, as_ulysses=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.supports("`transformers.Trainer`", with_="ZeRO 0 to 3; dp = 2, sp = 2; evaluation, accumulation, clipping")
def test_trainer_in_every_zero_stage(tmp_path):
    _check(tmp_path, 4, (0, 1, 2, 3), 2)


class _Other(transformers.Trainer):
    """Loss and order of arguments of its own, as TRL's trainers have them."""

    def __init__(self, model, ref_model=None, args=None, **options):
        super().__init__(model, args, **options)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 5 * model(**inputs).loss


def _refusals(folder):
    from megatron_tree.integrations.transformers.train import trainer as module

    Trainer = module.Trainer
    zero = {"deepspeed": {"zero_optimization": {"stage": 1}}}

    def make(arguments, options, trainer_class=Trainer, *values):
        args = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], **arguments)
        return trainer_class(*(values or (_model(),)), args=args, **options)

    Mine = type("Mine", (module.SequenceParallelMixin, _Other), {})
    with_loss = _model()
    with_loss.loss_function = print
    for message, arguments, options, *values in (
        ("compute_metrics=", zero, {"compute_metrics": print}),
        ("sp_size=2", zero, {"sp_size": 2}),
        ("use_liger_kernel=True", zero | {"use_liger_kernel": True}, {}),
        ("the loss_function of LlamaForCausalLM is <built-in function print>", zero, {}, Trainer, with_loss),
        ("_Other has a compute_loss of its own", zero, {}, Mine, _model(), None),
    ):
        with refused_with(message):
            make(arguments, options, *values)
    with refused_with("model and args"):
        Trainer(args=None)
    positional = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], **zero)
    with refused_with("model_init=<built-in function print>"):
        Trainer(_model(), positional, None, None, None, None, print)
    trainer = make(zero, {})
    with refused_with("the batches have ['input_ids'] and no labels"):
        trainer.compute_loss(trainer.model, {"input_ids": torch.ones(1, 4, dtype=torch.int64)})
    with refused_with("predict needs logits"):
        trainer.prediction_step(trainer.model, {}, False)


class _Wrapped(torch.nn.Module):
    """As a PeftModel holds the model."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def get_base_model(self):
        return self.base_model

    def forward(self, input_ids=None, labels=None, **options):
        return self.base_model(input_ids=input_ids, labels=labels, **options)


def _losses_in_training(folder):
    from megatron_tree.integrations.transformers.train.trainer import Trainer

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            self.seen = loss.item()
            return self.change(loss, outputs)

    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], max_steps=1, logging_steps=1, save_strategy="no", disable_tqdm=True,
        deepspeed={"zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": "auto"},
    )  # fmt: skip
    for change, accepted in (
        (lambda loss, outputs: 2 * loss, True),
        (lambda loss, outputs: loss + outputs.logits.logsumexp(-1).mean(), False),
        (lambda loss, outputs: outputs.logits.logsumexp(-1).mean(), False),
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer = Own(_Wrapped(_model()), args, train_dataset=_text())
        trainer.change = change
        if accepted:
            trainer.train()
            assert trainer.state.log_history[0]["loss"] == pytest.approx(2 * trainer.seen)
        else:
            with pytest.raises(ValueError, match="Own trains on a loss that SequenceParallelMixin has not computed"):
                trainer.train()


@on_ranks(1, timeout=250, env=ADDRESS, fresh=True)
def test_what_the_trainer_refuses_and_that_only_the_mixins_loss_is_trained_on(tmp_path):
    _refusals(tmp_path)
    _losses_in_training(tmp_path)
