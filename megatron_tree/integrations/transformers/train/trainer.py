"""Transformers' `Trainer`, the sequence sharded by tree attention: with DDP, FSDP2 and DeepSpeed.

    from megatron_tree.integrations.transformers.train.trainer import Trainer  # instead of transformers' own

    args = TrainingArguments(...)                               # DDP; or fsdp=True, or deepspeed="zero3.json"
    Trainer(model=model, args=args, train_dataset=data, sp_size=4).train()

`sp_size` may also come from `TrainingArguments(parallelism_config=ParallelismConfig(sp_size=4))`, or cp_size=4, which
Accelerate would answer with DeepSpeed's Ulysses or a context parallelism without masks. Batches, steps and the loss are
those of a run on ranks / sp_size data-parallel ranks. A trainer of your own takes it as its first base class: `class
Mine(SequenceParallelMixin, Theirs)`. What goes backward must come from the mixin's loss alone; a trainer with another
loss is refused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
from dataclasses import replace

import torch
import torch.nn.functional as F

import transformers
from transformers import PreTrainedModel

from ....core.comm import in_step
from ....core.config import TreeConfig
from . import trl
from .accelerated import (
    count_sequence_groups,
    counts_processes,
    drop_repeated,
    gathers_once,
    launched_with,
    read_parallelism,
    repeats_only,
)
from .batch_shards import IGNORED, with_tokens
from .loss import LogProbs, gather_tokens, token_log_probs
from .sequence_parallel import register_sequence_parallel

if os.environ.get("DS_ACCELERATOR") == "cpu":  # before TrainingArguments start DeepSpeed's communication
    from ...deepspeed.inference import skip_shared_memory_op

    skip_shared_memory_op()


class SequenceParallelMixin:
    """Makes a `Trainer` train on shards; see the module.

    Args:
        sp_size: neighbouring ranks that share a sequence; default that of args.parallelism_config, or all ranks.
        tree_config: of the attention.
        loss_tile, mlp_tile: tokens whose logits, or MLPs, are computed at a time; see `train_on_shards`.
        others: the trainer's own; of a PeftModel the base model is registered. Batches may hold what
            `SequenceParallel.shard_batch` takes.
    Attributes: sequence_parallel: the `SequenceParallel`.
    Raises: ValueError before anything is sent, as `register_sequence_parallel`, for FSDP1, and for what needs whole
        logits: compute_metrics, another loss. In the first step for a compute_loss that adds something to the mixin's
        loss, or replaces it with one that `token_log_probs` has no part in.
    """

    def __init__(
        self,
        *values,
        sp_size: int | None = None,
        tree_config: TreeConfig | None = None,
        loss_tile: int | None = None,
        mlp_tile: int | None = None,
        **options,
    ):
        given = _by_name(type(self), values) | options
        model, args = given.get("model"), given.get("args")
        name = trl.trainer_of(_bases(type(self)))
        _check_loss(type(self), args, name)
        _check_arguments(given, name)
        _ = args.device  # starts the process group
        fsdp = bool(args.fsdp) or launched_with("FSDP")
        of_config, args.parallelism_config = read_parallelism(args.parallelism_config, fsdp=fsdp)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT, with the adapters
        trained = base.base_model if name == "RewardTrainer" and isinstance(base, PreTrainedModel) else base
        register = register_sequence_parallel
        self._initialized = contextlib.nullcontext
        if args.deepspeed_plugin is not None:
            from ...deepspeed import training as with_deepspeed

            register = with_deepspeed.register_sequence_parallel
            self._initialized = lambda: with_deepspeed.initialized_with(self.sequence_parallel)
        sp_size = of_config if sp_size is None else sp_size
        tiles = {"loss_tile": loss_tile, "mlp_tile": mlp_tile}
        self.sequence_parallel = register(trained, sp_size=sp_size, tree_config=tree_config, **tiles)
        if name in trl.ONLINE:
            trl.count_batches(args, self.sequence_parallel)
        self._seed = (0, 0)  # the step, and batches in it
        self._name, self._base = name, base
        self.made = []  # the graph nodes of the losses that have not gone backward
        super().__init__(*values, **options)
        self.can_return_loss = True
        _ = self._of_trl

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if (self.args.fsdp or launched_with("FSDP")) and not self.accelerator.is_fsdp2:
            raise ValueError(
                f"fsdp_config={self.args.fsdp_config}: Accelerate uses {self.accelerator.distributed_type} here, not "
                "FSDP2: set version=2 or, on the CPU, leave fsdp out"
            )
        count_sequence_groups(self.accelerator, self.sequence_parallel)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        prepare = self.accelerator.prepare

        def prepare_for_shards(*objects, **options):
            with self._initialized():
                return prepare(*objects, **options)

        self.accelerator.prepare = prepare_for_shards
        backward = self.accelerator.backward

        def backward_of_shards(loss, **options):
            made = list(self.made)
            self.made.clear()
            if not _comes_from(loss, made):
                raise ValueError(
                    f"{type(self).__name__} trains on a loss that SequenceParallelMixin has not computed: its "
                    "compute_loss, or another method, replaces that loss or adds something to it. Return what "
                    f"super().compute_loss returns. {OTHER_LOSS}"
                )
            return backward(loss, **options)

        self.accelerator.backward = backward_of_shards

    @functools.cached_property
    def _of_trl(self):
        """A context in which TRL's loss is computed from shards; None if the trainer isn't TRL's."""
        return None if self._name is None else trl.prepare(self, self._name, self._base)

    def _precompute_ref_logps(self, *values):
        """As TRL's, in its `__init__`."""
        with self._of_trl():
            return super()._precompute_ref_logps(*values)

    def train(self, *values, **options):
        """As Transformers'. Raises: ValueError after an `evaluate` with DeepSpeed, whose engine has no optimizer."""
        if self.deepspeed is not None:
            raise ValueError(
                "train() after evaluate() or another train() with DeepSpeed: the model is part of an engine already. "
                "To evaluate before the first step, set TrainingArguments(eval_on_start=True)"
            )
        # evaluate() has prepared the model without DDP, and marked it as prepared
        if vars(self.model).pop("_is_accelerate_prepared", False):
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        with gathers_once(self.sequence_parallel, *trl.modules()):  # TRL's callbacks
            return super().train(*values, **options)

    def _save_optimizer_and_scheduler(self, *values):
        """As Transformers', with FSDP the weights, too; and so are the next three."""
        with counts_processes(self.accelerator):
            super()._save_optimizer_and_scheduler(*values)

    def _load_optimizer_and_scheduler(self, *values):
        with counts_processes(self.accelerator):
            super()._load_optimizer_and_scheduler(*values)

    def _load_from_checkpoint(self, *values, **options):
        with counts_processes(self.accelerator):
            super()._load_from_checkpoint(*values, **options)

    def _load_best_model(self):
        with counts_processes(self.accelerator):
            super()._load_best_model()

    def get_total_train_batch_size(self, args) -> int:
        """Sequences of a step."""
        return self._train_batch_size * args.gradient_accumulation_steps * self.sequence_parallel.dp_size

    def _get_dataloader(self, *values, **options):
        """As Transformers', which seeds workers and balances batches by what args says about ranks."""
        args, parallel = self.args, self.sequence_parallel
        counted = {"world_size": parallel.dp_size, "process_index": parallel.dp_rank}
        self.args = copy.copy(args)
        self.args.__class__ = type(type(args).__name__, (type(args),), counted)
        try:
            loader = super()._get_dataloader(*values, **options)
        finally:
            self.args = args
        if not options.get("is_training") and self._name in (None, "SFTTrainer"):  # others gather values of all rows
            drop_repeated(loader)
        return loader

    def floating_point_ops(self, inputs) -> float:
        """This rank's part of those of a batch."""
        return super().floating_point_ops(self._tokens(inputs)) / self.sequence_parallel.sp_size

    def _track_num_input_tokens(self, inputs) -> None:
        super()._track_num_input_tokens(self._tokens(inputs))

    def _tokens(self, inputs):
        """A batch to count: the tokens that rows of a prefix tree share are there once."""
        return with_tokens(inputs) if self._name is None else inputs  # TRL's may be lists

    def _get_num_items_in_batch(self, batch_samples: list, device) -> torch.Tensor | None:
        """Tokens with a label in the batches of a step, on all data-parallel ranks."""
        if self._of_trl is not None:
            return super()._get_num_items_in_batch(batch_samples, device)
        if not batch_samples or not {"labels", "prefix_tree"} & set(batch_samples[0]):
            return None
        count = sum(map(_num_labels, batch_samples)).to(device)
        return self.accelerator.gather(count).sum() if self.args.average_tokens_across_devices else count

    def training_step(self, *values, **options):
        """The forward and backward of a batch: if one rank fails in it, the others say so, too."""
        with in_step(self.sequence_parallel.sp_group, torch.distributed.group.WORLD):
            return super().training_step(*values, **options)

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch=None):
        """The loss of a batch that is equal on the ranks of a sequence group: the mean over all ranks' tokens or, with
        average_tokens_across_devices=False, over the group's ranks."""
        if self._of_trl is not None:
            with self._of_trl():
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not {"labels", "prefix_tree"} & set(inputs):
            raise ValueError(f"the batches have {sorted(inputs)} and no labels: choose a data_collator that makes them")
        if self.compute_loss_func is not None:
            if "prefix_tree" in inputs:
                raise ValueError(
                    "compute_loss_func does not know of prefix_tree: write a compute_loss, with the rows' values "
                    "tree.next_of_rows(self.token_log_probs(model, inputs).log_probs)"
                )
            outputs = self.token_log_probs(model, inputs)
            labels = F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
            if num_items_in_batch is not None and self.args.average_tokens_across_devices:
                loss = loss * self.sequence_parallel.dp_size  # as Transformers does: gradients are averaged
            return (loss, outputs) if return_outputs else loss
        # the steps of an evaluation are not added up
        options = {"num_items_in_batch": num_items_in_batch if self.model.training else None}
        if self.args.label_smoothing_factor:
            options["label_smoothing"] = self.args.label_smoothing_factor
        outputs = model(**self._shard(inputs), **options)
        # a copy: if the model's own output goes to engine.backward, DeepSpeed's ZeRO 0 divides it by the accumulation
        loss = outputs.loss.clone()
        if loss.requires_grad:
            self.made.append(loss.grad_fn)
        return (loss, outputs) if return_outputs else loss

    def token_log_probs(self, model, inputs: dict, *, temperature: float = 1.0, entropy: bool = False) -> LogProbs:
        """Log-probabilities of a batch's labels, [b, s] of all its tokens, for the loss of a compute_loss of your own.

        Token i's are those of label i + 1; 0 where that is -100. Every rank of a sequence group has all of them, and
        computes the same loss; its gradient is averaged over the data-parallel ranks.
        """
        shard = self._shard(inputs)
        local = token_log_probs(model, shard, temperature=temperature, entropy=entropy)
        whole = LogProbs(*(None if x is None else gather_tokens(x, shard) for x in local))
        self.made += [x.grad_fn for x in whole if x is not None and x.requires_grad]
        return whole

    def dropout_seed(self) -> int:
        """Another one for every call of the model, which a resumed run goes on with."""
        step, number = self._seed if self._seed[0] == self.state.global_step else (self.state.global_step, 0)
        self._seed = step, number + 1
        return (self.args.seed << 64) + (step << 32) + number

    def _shard(self, inputs: dict) -> dict:
        seed = self.dropout_seed() if self.model.training else None
        shard = self.sequence_parallel.shard_batch(inputs, dropout_seed=seed)
        if self.args.average_tokens_across_devices:
            return shard
        of_group = shard["sequence_shard"].changed(loss_group=self.sequence_parallel.sp_group)
        return shard | {"sequence_shard": of_group}

    def prediction_step(self, model, inputs, prediction_loss_only: bool, ignore_keys=None):
        """The loss of an evaluation's batch."""
        if not prediction_loss_only:
            raise ValueError(
                "predict needs logits of whole sequences, which no rank has: call evaluate(), or set "
                "TrainingArguments(prediction_loss_only=True)"
            )
        if repeats_only(self.accelerator):
            inputs = _without_labels(inputs)
        if "prefix_tree" in inputs:  # Trainer looks for labels
            with torch.no_grad():
                loss = self.compute_loss(model, inputs)
        else:
            loss, *_ = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if self._of_trl is None and self.args.average_tokens_across_devices:
            loss = self.accelerator.gather(loss).mean()  # a compute_loss_func has that of its own tokens
        return loss, None, None


def _without_labels(batch: dict) -> dict:
    """A batch that counts in no loss."""
    if (tree := batch.get("prefix_tree")) is not None:
        return {**batch, "prefix_tree": replace(tree, weights=torch.zeros_like(tree.weights))}
    return {name: torch.full_like(x, IGNORED) if name == "labels" else x for name, x in batch.items()}


def _num_labels(batch: dict) -> torch.Tensor:
    """Tokens of a batch with a label; of a prefix tree their weights."""
    if (tree := batch.get("prefix_tree")) is not None:
        return tree.weights.sum()
    return (batch["labels"][:, 1:] != -100).sum()


WHOLE_LOGITS = ("compute_metrics", "preprocess_logits_for_metrics", "model_init")
OTHER_LOSS = "To train on another loss, use whole sequences, or a loop of your own with register_sequence_parallel"


def _bases(trainer: type) -> list[type]:
    """The classes behind the mixin, in the order in which a method is looked up."""
    return list(trainer.__mro__[trainer.__mro__.index(SequenceParallelMixin) + 1 :])


def _by_name(trainer: type, values: tuple) -> dict:
    """Positional arguments by the names that the first class without *args gives them."""
    for cls in _bases(trainer):
        parameters = inspect.signature(cls.__init__).parameters.values()
        if "__init__" in vars(cls) and all(p.kind is not p.VAR_POSITIONAL for p in parameters):
            return dict(zip([p.name for p in parameters][1:], values, strict=False))
    return {}


def _check_arguments(given: dict, name: str | None) -> None:
    """name: of TRL's trainer."""
    args = given.get("args")
    if given.get("model") is None or args is None:
        raise ValueError("model and args are needed: model_init and default arguments don't work on shards")
    for option in WHOLE_LOGITS:
        if value := given.get(option):
            raise ValueError(f"{option}={value!r} needs logits of whole sequences, which no rank has: leave it out")
    if name is not None:
        trl.check_arguments(name, args, given)


def _check_loss(trainer: type, args, name: str | None) -> None:
    """Raise ``ValueError`` for a trainer or arguments with a loss of their own."""
    for cls in _bases(trainer):
        if cls is transformers.Trainer or name is not None:
            break
        if "compute_loss" in vars(cls):
            raise ValueError(
                f"{cls.__name__} has a compute_loss of its own, which SequenceParallelMixin replaces with the mean "
                "cross entropy of all ranks' tokens. If it only reads the loss, move it to a subclass of "
                f"{trainer.__name__}, where super().compute_loss is the mixin's. {OTHER_LOSS}"
            )
    liger = getattr(args, "liger_kernel_config", None) or {}
    if getattr(args, "use_liger_kernel", False) and liger.get("fused_linear_cross_entropy", True):
        raise ValueError(
            "use_liger_kernel=True replaces the loss: leave it out (loss_tile saves the logits' memory), or set "
            'liger_kernel_config={"fused_linear_cross_entropy": False}'
        )


def _comes_from(loss: torch.Tensor, made: list) -> bool:
    """Whether the graph of a loss ends in the nodes `made`, and nowhere else."""
    waiting, seen, reached = [loss.grad_fn], set(), False
    while waiting:
        node = waiting.pop()
        if node in made:
            reached = True
        elif node is not None and node not in seen:
            seen.add(node)
            if not node.next_functions:
                return False
            waiting += [before for before, _ in node.next_functions]
    return reached


class Trainer(SequenceParallelMixin, transformers.Trainer):
    """Transformers' `Trainer` on sharded sequences, see `SequenceParallelMixin`."""
