"""Training runs for test_deepspeed_training.py: one by DeepSpeed on all ranks, the same by plain torch on one."""

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from support.hf_models import VOCAB, tiny_model
from support.ranks import largest

STEPS = 3
TOKENS = 30  # no multiple of twice the ranks
EAGER = ("gpt_oss", "gemma2")  # Transformers' sdpa has neither sinks nor softcap


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its batches and how it is trained; on `world / sp` x `sp` ranks."""

    sp: int
    zero: int
    family: str = "llama"
    optimizer: str = "adamw"
    clip: float = 0.0
    accumulate: int = 1
    checkpointing: bool = False
    dropout: float = 0.0
    batches: str = "ignored"
    bf16: bool = False
    ulysses: int = 1
    loss_tile: int | None = None
    mlp_tile: int | None = None

    @property
    def reference(self):
        """The same without what the result does not depend on."""
        rest = {"checkpointing": False, "bf16": False, "ulysses": 1, "loss_tile": None, "mlp_tile": None}
        return replace(self, sp=1, zero=0, **rest)

    def model(self):
        model = tiny_model(self.family).train()
        if self.family in EAGER:
            model.set_attn_implementation("eager")
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = self.dropout
        return model

    def make_optimizer(self, model):
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        # eps: Adam divides by the gradient's size, so for gradients of rounding size two right runs differ
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)

    def steps(self):
        """Per step, per microbatch: the batch of all data-parallel ranks."""
        generator = torch.Generator().manual_seed(7)
        return [[self._batch(generator) for _ in range(self.accumulate)] for _ in range(STEPS)]

    def _batch(self, generator):
        shape = (4, TOKENS)
        ids = torch.randint(1, VOCAB, shape, generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if self.batches == "ignored":  # ranks differ in how many tokens have a label
            batch["labels"][:, :9] = -100
            batch["labels"][0, :21] = -100
        elif self.batches == "padded":
            mask = torch.arange(TOKENS) < torch.tensor([[30], [17], [23], [30]])
            batch["attention_mask"] = mask.long()
            batch["labels"] = ids.masked_fill(~mask, -100)
        elif self.batches == "packed":
            starts = torch.tensor([[0, 11, 12], [0, 0, 29], [0, 5, 14], [0, 0, 0]])
            positions = torch.arange(TOKENS).expand(shape).clone()
            for row, begins in enumerate(starts):
                for begin in begins:
                    positions[row, begin:] = torch.arange(TOKENS - begin)
            batch |= {"position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
        return batch


@functools.cache
def run_plain(case):
    """(losses, parameters) of the run on one rank, by plain torch, with Transformers' own attention and loss.

    Except for dropout: its mask is ours, so the reference is tree attention on one rank.
    """
    from megatron_tree.integrations.transformers.train import batch_shards
    from megatron_tree.integrations.transformers.train import train_on_shards as training

    model = case.model()
    if case.dropout:
        import megatron_tree.integrations.transformers  # noqa: F401

        training.train_on_shards(model)
    optimizer, losses, number = case.make_optimizer(model), [], 0
    for microbatches in case.steps():
        total = 0.0
        for batch in microbatches:
            if case.dropout:
                batch = batch_shards.shard_batch(batch, cp_group=None, dropout_seed=f"{number}/0")
            loss = model(**batch, **({} if case.dropout else {"use_cache": False})).loss / len(microbatches)
            loss.backward()
            total, number = total + loss.item(), number + 1
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def start(case, model=None):
    """(engine, SequenceParallel, model) of a case, on every rank."""
    import deepspeed
    from megatron_tree import TreeConfig
    from megatron_tree.integrations.deepspeed.training import register_sequence_parallel

    model = model or case.model()
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    config = TreeConfig(ulysses_size=case.ulysses) if case.ulysses > 1 else None
    tiles = {"loss_tile": case.loss_tile, "mlp_tile": case.mlp_tile}
    parallel = register_sequence_parallel(model, sp_size=case.sp, tree_config=config, **tiles)
    small = 50_000  # elements; the default buckets are gigabytes, which poisoned_empty fills
    zero = {"stage": case.zero, "reduce_bucket_size": small, "allgather_bucket_size": small}
    if case.zero == 3:
        zero |= {"stage3_prefetch_bucket_size": small, "stage3_param_persistence_threshold": 100}
    options = {
        "train_micro_batch_size_per_gpu": 4 // parallel.dp_size,
        "gradient_accumulation_steps": case.accumulate,
        "gradient_clipping": case.clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.bf16},
    }
    optimizer = case.make_optimizer(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, mpu=parallel, config=options)
    return engine, parallel, model


def train(engine, parallel, steps, *, first_step=0):
    """Losses of the steps, whose batches are those of all data-parallel ranks."""
    losses, number = [], first_step * len(steps[0])
    for microbatches in steps:
        total = 0.0
        for batch in microbatches:
            own = {name: x.chunk(parallel.dp_size)[parallel.dp_rank] for name, x in batch.items()}
            loss = engine(**parallel.shard_batch(own, dropout_seed=number)).loss
            engine.backward(loss)
            engine.step()
            total, number = total + loss.item() / len(microbatches), number + 1
        losses.append(total)
    return losses


def parameters(model, zero, *, master=False):
    """Name -> whole parameter, in any ZeRO stage; master: DeepSpeed's fp32 copy."""
    from deepspeed.utils import safe_get_full_fp32_param

    import deepspeed

    found = {}
    for name, p in model.named_parameters():
        if master:
            found[name] = safe_get_full_fp32_param(p)
        elif zero == 3:
            with deepspeed.zero.GatheredParameters([p]):
                found[name] = p.detach().clone()
        else:
            found[name] = p.detach().clone()
    return found


def largest_difference(a, b):
    return largest(float((a[name] - b[name]).abs().max()) for name in b)


@torch.no_grad()
def distance_moved(a, b, start):
    """|a - b| / |b - start| over all parameters together."""
    apart = sum(float(F.mse_loss(a[n], b[n], reduction="sum")) for n in b)
    moved = sum(float(F.mse_loss(start[n], b[n], reduction="sum")) for n in b)
    return (apart / moved) ** 0.5
