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
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...comm import outside_graphs
from ...comm.wire import share
from .cache import TreeCache
from .log_probs import TokenValues, asking, gather_tokens
from .parallel import SequenceParallel
from .token_tiles import IGNORED
from .training import train_on_shards

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
    "cast_lm_head_to_fp32": (False, "the head computes in tiles"),
    "use_transformers_continuous_batching": (False, "completions are generated over a sharded cache"),
    "scale_rewards": (("group", "none"), "rewards are gathered once for each rank that shares a sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "rewards are gathered once for each rank that shares one"),
    "normalize_advantages": (False, "advantages are gathered once for each rank that shares a sequence"),
    "top_entropy_quantile": (1.0, "entropies are gathered once for each rank that shares a sequence"),
}


def trainer_of(classes: list[type]) -> str | None:
    """The name of TRL's class among the classes of a trainer."""
    names = (cls.__name__ for cls in classes if cls.__module__.startswith("trl.trainer.") and cls.__name__ in TRAINERS)
    return next(names, None)


def check_arguments(name: str, args, given: dict) -> None:
    """Raise ``ValueError`` for options of TRL that don't work on shards."""
    for option, (allowed, reason) in REFUSED.items():
        value = getattr(args, option, None)
        if value is not None and value not in (allowed if isinstance(allowed, tuple) else (allowed,)):
            raise ValueError(f"{option}={value!r} doesn't work on shards: {reason}. Set it to {allowed!r}")
    if name in ONLINE and hasattr(given.get("processing_class"), "image_processor"):
        raise ValueError(
            f"{name} on shards trains on text: pass a tokenizer as processing_class, not a processor of images"
        )
    if name == "SFTTrainer":
        for option in ("compute_loss_func", "label_smoothing_factor"):
            if value := given.get(option) or getattr(args, option, None):
                raise ValueError(
                    f"{option}={value!r}: SFTTrainer computes it from logits of whole sequences, which no rank has. "
                    "Leave it out, or use the Trainer of integrations.transformers.trainer"
                )


def count_batches(args, parallel: SequenceParallel) -> None:
    """Make a configuration of online training count the batches of sequence groups, and not of ranks.

    Raises: ValueError if the answers to one prompt would be on several sequence groups.
    """
    local = args.per_device_train_batch_size * args.steps_per_generation
    sizes = [("per_device_train_batch_size * steps_per_generation", local, args.num_generations)]
    if args.eval_strategy != "no":
        number = getattr(args, "num_generations_eval", None) or args.num_generations
        sizes.append(("per_device_eval_batch_size", args.per_device_eval_batch_size, number))
    for option, size, number in sizes:
        if parallel.sp_size > 1 and size % number:
            raise ValueError(
                f"{option}={size} must be a multiple of the {number} answers to a prompt: on shards, a sequence group "
                "has all answers to its prompts"
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

    def __init__(self, parallel: SequenceParallel, names: tuple[str, ...], temperature: float, made: list):
        self.parallel, self.made, self.calls = parallel, made, itertools.count()
        self.options = {"names": names, "temperature": temperature}

    def register(self, model) -> None:
        model.register_forward_pre_hook(outside_graphs(self._begin), with_kwargs=True, prepend=True)
        model.register_forward_hook(outside_graphs(self._end), with_kwargs=True)

    def _begin(self, model, args, kwargs):
        if not kwargs.get("fused_lm_head"):
            return None
        passed = {name: kwargs[name] for name in ("output_router_logits",) if name in kwargs}
        own = {"fused_lm_head", "use_cache", *passed}
        batch = {name: x for name, x in kwargs.items() if name not in own and x is not None}
        wanted = {**self.options, "labels": batch["labels"]}
        batch, left = _without_left_padding(batch)
        shard = self.parallel.shard_batch(batch, dropout_seed=next(self.calls))
        return (), passed | asking(shard, FusedValues(**wanted, left=left))

    def _end(self, model, args, kwargs, output):
        wanted = getattr(kwargs.get("sequence_shard"), "token_values", None)
        if not isinstance(wanted, FusedValues):
            return None
        values = gather_tokens(output.loss, kwargs)
        if values.requires_grad:
            self.made.append(values.grad_fn)
        return wanted.output(values)


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

    def __init__(self, parallel: SequenceParallel, made: list):
        self.parallel, self.made, self.calls = parallel, made, itertools.count()
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
        batch = {name: x for name, x in kwargs.items() if name not in ("use_cache", "margin")}
        self.shard, ids = self.parallel.shard_batch(batch, dropout_seed=next(self.calls)), batch["input_ids"]
        padding = model.config.get_text_config().pad_token_id
        if padding is None:  # Transformers takes the last one, and one row only
            self.last = torch.full((len(ids),), ids.shape[1] - 1, device=ids.device)
        else:
            self.last = (torch.arange(ids.shape[1], device=ids.device) * (ids != padding)).argmax(1)
        return (), self.shard

    def _pool(self, head, args, scores: Tensor) -> Tensor | None:
        """Scores [b, s / p, n] of tokens -> those of the rows at every token, whichever the model then takes."""
        if self.shard is None:
            return None
        whole = gather_tokens(scores, self.shard)
        if whole.requires_grad:
            self.made.append(whole.grad_fn)
        return whole[torch.arange(len(whole), device=whole.device), self.last][:, None].expand_as(scores)

    def _end(self, model, args, output) -> None:
        self.shard = None


class Online:
    """Generation and rewards of a trainer that samples its own completions: equal on the ranks of a sequence group."""

    def __init__(self, trainer, model):
        self.trainer, self.model, self.parallel = trainer, model, trainer.sequence_parallel
        for name in ("_generate", "_generate_single_turn", "_calculate_rewards"):
            setattr(trainer, name, functools.partial(getattr(self, name), getattr(trainer, name)))

    def _generate(self, plain, prompts):
        """What the group's first rank has generated, by its random numbers, which all ranks then go on with."""
        self._share_random_numbers()
        state = self.trainer.state
        seen = state.num_input_tokens_seen
        result = plain(prompts)
        state.num_input_tokens_seen = seen + (state.num_input_tokens_seen - seen) // self.parallel.sp_size
        mode = "train" if self.model.training else "eval"
        self.trainer._metrics[mode]["num_tokens"] = [state.num_input_tokens_seen]
        self._share_random_numbers()
        return tuple(share(list(result), self.parallel.sp_group))

    def _share_random_numbers(self) -> None:
        on_gpu = torch.cuda.is_available()
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]
        states = share([state.tolist() for state in states], self.parallel.sp_group)
        torch.set_rng_state(torch.tensor(states[0], dtype=torch.uint8))
        if on_gpu:
            torch.cuda.set_rng_state(torch.tensor(states[1], dtype=torch.uint8))

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

    def _calculate_rewards(self, plain, *args, **kwargs) -> Tensor:
        """[ranks * rows, functions]: those that the first rank of each sequence group has computed."""
        rewards = plain(*args, **kwargs).unflatten(0, (self.parallel.dp_size, self.parallel.sp_size, -1))
        return rewards[:, :1].expand_as(rewards).flatten(0, 2)


def prepare(trainer, name: str, model):
    """Make a trainer that was just created compute its loss from shards. Returns a context in which it does."""
    parallel, made = trainer.sequence_parallel, trainer.made
    if hasattr(trainer, "_tp_size"):
        trainer._tp_size = parallel.sp_size  # ranks with equal batches, whose tokens TRL counts once
    if name == "RewardTrainer":
        scores = PooledScores(parallel, made)
        scores.register(model)
        return functools.partial(_activated, scores)
    calls = FusedCalls(parallel, TRAINERS[name], getattr(trainer, "temperature", 1.0), made)
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
