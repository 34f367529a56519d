"""TRL's trainers on sharded sequences: SFT, DPO, KTO, GRPO, RLOO and reward models, by `SequenceParallelMixin`.

    class Mine(SequenceParallelMixin, DPOTrainer): ...
    Mine(model=model, args=DPOConfig(...), train_dataset=data, processing_class=tokenizer, sp_size=4).train()

They compute their losses from values of every token of whole sequences, for which they call a model with
`fused_lm_head=True`. Such a call runs the shards here, and every rank of a sequence group gets the values of all
tokens. So TRL's own loss and metrics are computed on every rank, as on data-parallel ranks that hold equal batches.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from transformers import set_seed

from ....core.comm import Ranks, outside_graphs
from ....core.comm.wire import share
from ..infer.cache import TreeCache
from .accelerated import gathers_once
from .batch_shards import IGNORED
from .loss import TokenValues, asking, gather_tokens
from .random_numbers import share_random_numbers
from .sequence_parallel import SequenceParallel
from .train_on_shards import train_on_shards

TRAINERS = {  # and the values of tokens that their losses and metrics read
    "SFTTrainer": ("log_probs", "entropies", "is_top1"),
    "DPOTrainer": ("log_probs", "entropies", "mean_logits", "is_top1", "log_sum_sq_probs"),
    "KTOTrainer": ("log_probs", "entropies", "mean_logits"),
    "GRPOTrainer": ("log_probs", "entropies"),
    "RLOOTrainer": ("log_probs", "entropies"),
    "RewardTrainer": (),
}
ONLINE = ("GRPOTrainer", "RLOOTrainer")
REFUSED = {  # of their configurations, with the values that work
    "cache_implementation": (None, "completions are generated over a sharded cache"),
    "cast_lm_head_to_fp32": (False, "the head computes in tiles"),
    "use_transformers_continuous_batching": (False, "completions are generated over a sharded cache"),
}


def trainer_of(classes: list[type]) -> str | None:
    """The name of TRL's class among the classes of a trainer."""
    names = (cls.__name__ for cls in classes if cls.__module__.startswith("trl.trainer.") and cls.__name__ in TRAINERS)
    return next(names, None)


def modules() -> list[ModuleType]:
    """Those of TRL that gather what ranks have, as far as they are imported."""
    return [module for name, module in sys.modules.items() if name.startswith(("trl.trainer.", "trl.generation."))]


def check_arguments(name: str, args, given: dict) -> None:
    """Raise ``ValueError`` for options of TRL that don't work on shards."""
    for option, (allowed, reason) in REFUSED.items():
        if (value := getattr(args, option, None)) not in (None, allowed):
            raise ValueError(f"{option}={value!r} doesn't work on shards: {reason}. Set it to {allowed!r}")
    if name in ONLINE and hasattr(given.get("processing_class"), "image_processor"):
        raise ValueError(
            f"{name} on shards trains on text: pass a tokenizer as processing_class, not a processor of images"
        )
    if name in ONLINE and args.neftune_noise_alpha is not None:
        raise ValueError(
            f"neftune_noise_alpha={args.neftune_noise_alpha}: {name} would add noise by the length of padded prompts, "
            "which shards don't have. Leave it out"
        )
    if name == "SFTTrainer":
        for option in ("compute_loss_func", "label_smoothing_factor"):
            if value := given.get(option) or getattr(args, option, None):
                raise ValueError(
                    f"{option}={value!r}: SFTTrainer computes it from logits of whole sequences, which no rank has. "
                    "Leave it out, or use the Trainer of integrations.transformers.train.trainer"
                )


def count_batches(args, parallel: SequenceParallel) -> None:
    """Make a configuration of online training count the batches of sequence groups, and not of ranks.

    Raises: ValueError if these have not all answers to their prompts, and for vLLM in ranks that share sequences.
    """
    if parallel.sp_size > 1 and args.use_vllm and args.vllm_mode == "colocate":
        raise ValueError(
            f"vllm_mode='colocate': vLLM would run on {parallel.dp_size} sequence groups as on ranks. Set it to "
            "'server', or leave out use_vllm: completions are generated over a sharded cache"
        )
    local = args.per_device_train_batch_size * args.steps_per_generation
    sizes = [("per_device_train_batch_size * steps_per_generation", local, args.num_generations)]
    if args.eval_strategy != "no":
        number = getattr(args, "num_generations_eval", None) or args.num_generations
        sizes.append(("per_device_eval_batch_size", args.per_device_eval_batch_size, number))
    for option, size, number in sizes:
        if size * parallel.dp_size % number:
            raise ValueError(
                f"{option}={size} times {parallel.dp_size} sequence groups must be a multiple of the {number} answers "
                "to a prompt"
            )
    args.generation_batch_size = local * parallel.dp_size


@dataclass(frozen=True, kw_only=True)
class FusedValues(TokenValues):
    """The values that a call with fused_lm_head=True returns."""

    labels: Tensor
    """int64 [b, s] of the whole batch, not shifted."""
    left: Tensor | None
    """int64 [b, 1]: padding before each row, which its shard doesn't have."""

    def output(self, values: Tensor):
        """TRL's output of the values [b, t, names] of the batch that was sharded."""
        from trl.trainer.utils import FusedCausalLMOutput

        if self.left is not None:
            whole = F.pad(values, (0, 0, 0, self.labels.shape[1] - values.shape[1]))
            rows = torch.arange(whole.shape[1], device=values.device) - self.left
            values = whole.gather(1, rows.clamp(min=0)[..., None].expand_as(whole)).masked_fill(rows[..., None] < 0, 0)
        found = dict(zip(self.names, values[:, :-1].unbind(-1), strict=True))
        found["entropy"], mask = found.pop("entropies"), self.labels[:, 1:] != IGNORED
        if "is_top1" in found:
            found["is_top1"] = (found["is_top1"] > 0) & mask
        loss = -found["log_probs"].sum() / mask.sum().clamp(min=1)
        return FusedCausalLMOutput(loss=loss, label_mask=mask, **found)


class FusedCalls:
    """Hooks that answer a model's calls with fused_lm_head=True from shards of their batches."""

    def __init__(self, trainer, names: tuple[str, ...], temperature: float):
        self.trainer = trainer
        self.options = {"names": names, "temperature": temperature}

    def register(self, model) -> None:
        model.register_forward_pre_hook(outside_graphs(self._begin), with_kwargs=True, prepend=True)
        model.register_forward_hook(outside_graphs(self._end), with_kwargs=True)

    def _begin(self, model, args, kwargs):
        if not kwargs.get("fused_lm_head"):
            return None
        batch, passed = _batch_of(kwargs)
        wanted = {**self.options, "labels": batch["labels"]}
        batch, left = _without_left_padding(batch)
        shard = self.trainer.sequence_parallel.shard_batch(batch, dropout_seed=self.trainer.dropout_seed())
        return (), passed | asking(shard, FusedValues(**wanted, left=left))

    def _end(self, model, args, kwargs, output):
        wanted = getattr(kwargs.get("sequence_shard"), "token_values", None)
        if not isinstance(wanted, FusedValues):
            return None
        values = gather_tokens(output.loss, kwargs)
        if values.requires_grad:
            self.trainer.made.append(values.grad_fn)
        return wanted.output(values)


def _batch_of(kwargs: dict) -> tuple[dict, dict]:
    """A call's batch, and what the model gets beside it; PEFT adds arguments that are None."""
    passed = {name: kwargs[name] for name in ("output_router_logits", "return_dict") if name in kwargs}
    own = {"fused_lm_head", "use_cache", "margin", *passed}
    return {name: x for name, x in kwargs.items() if name not in own and x is not None}, passed


def _without_left_padding(batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """The batch whose rows begin with their first token, and [b, 1] the padding before it; None if there was none."""
    mask = batch.get("attention_mask")
    if mask is None or mask[:, 0].all():
        return batch, None
    left = (mask.cumsum(1) == 0).sum(1, keepdim=True)
    width = int(mask.sum(1).max())
    rows = torch.arange(max(width, 1), device=mask.device) + left
    inside, rows = rows < mask.shape[1], rows.clamp(max=mask.shape[1] - 1)
    fill = {"labels": IGNORED}
    return {name: x.gather(1, rows).where(inside, fill.get(name, 0)) for name, x in batch.items()}, left


class PooledScores:
    """Hooks that make a sequence classifier score shards: a row's score is that of its last token, on one rank."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.active, self.shard, self.last = False, None, None

    def register(self, model) -> None:
        if not isinstance(getattr(model, "score", None), torch.nn.Module):
            raise ValueError(f"{type(model).__name__} has no module named score: its rewards can't be gathered")
        model.register_forward_pre_hook(outside_graphs(self._begin), with_kwargs=True, prepend=True)
        model.score.register_forward_hook(outside_graphs(self._pool))
        model.register_forward_hook(outside_graphs(self._end), always_call=True)

    def _begin(self, model, args, kwargs):
        if not self.active:
            return None
        batch, passed = _batch_of(kwargs)
        ids, parallel = batch["input_ids"], self.trainer.sequence_parallel
        self.shard = parallel.shard_batch(batch, dropout_seed=self.trainer.dropout_seed())
        padding = model.config.get_text_config().pad_token_id
        if padding is None:  # Transformers takes the last one, and one row only
            self.last = torch.full((len(ids),), ids.shape[1] - 1, device=ids.device)
        else:
            self.last = (torch.arange(ids.shape[1], device=ids.device) * (ids != padding)).argmax(1)
        return (), passed | self.shard

    def _pool(self, head, args, scores: Tensor) -> Tensor | None:
        """Scores [b, s / p, n] of tokens -> those of the rows at every token, whichever the model then takes."""
        if self.shard is None:
            return None
        whole = gather_tokens(scores, self.shard)
        if whole.requires_grad:
            self.trainer.made.append(whole.grad_fn)
        return whole[torch.arange(len(whole), device=whole.device), self.last][:, None].expand_as(scores)

    def _end(self, model, args, output) -> None:
        self.shard = None


class Online:
    """Generation and rewards of a trainer that samples its own completions: equal on the ranks of a sequence group."""

    def __init__(self, trainer, model):
        self.trainer, self.model, self.parallel = trainer, model, trainer.sequence_parallel
        set_seed(trainer.args.seed + self.parallel.dp_rank)  # which TRL has set by ranks
        for name in ("_generate_and_score_completions", "_generate", "_generate_single_turn"):
            setattr(trainer, name, functools.partial(getattr(self, name), getattr(trainer, name)))

    def _generate_and_score_completions(self, plain, inputs):
        """By the random numbers of the group's first rank, which all ranks then go on with."""
        share_random_numbers(self.parallel.sp_group)
        with gathers_once(self.parallel, *modules()):
            result = plain(inputs)
        share_random_numbers(self.parallel.sp_group)
        return result

    def _generate(self, plain, prompts):
        """What the group's first rank has generated."""
        return tuple(share(list(plain(prompts)), Ranks.of(self.parallel.sp_group)))

    def _generate_single_turn(self, plain, *args, **kwargs):
        cache = TreeCache(self.model.config, cp_group=self.parallel.sp_group, tree_config=self.parallel.tree_config)
        training = self.model.training
        self.model.eval()
        self.model.generate = functools.partial(self.model.generate, past_key_values=cache)
        try:
            return plain(*args, **kwargs)
        finally:
            del self.model.generate
            self.model.train(training)


def prepare(trainer, name: str, model):
    """Make a trainer compute its loss from shards, once it has its models. Returns a context in which it does."""
    if name == "RewardTrainer":
        scores = PooledScores(trainer)
        scores.register(model)
        return functools.partial(_activated, scores)
    calls = FusedCalls(trainer, TRAINERS[name], getattr(trainer, "temperature", 1.0))
    calls.register(model)
    reference = getattr(trainer, "ref_model", None)
    if reference is not None:
        reference = trainer.accelerator.unwrap_model(reference)
        train_on_shards(reference)
        calls.register(reference)
    if name in ONLINE:
        Online(trainer, model)
    return contextlib.nullcontext


@contextlib.contextmanager
def _activated(scores: PooledScores):
    scores.active = True
    try:
        yield
    finally:
        scores.active = False
