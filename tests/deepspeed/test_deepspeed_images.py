"""DeepSpeed and Transformers' Trainer train models of images and text on shards: four steps of one rank."""

import pytest
import torch

import deepspeed
import transformers
from megatron_tree.integrations.deepspeed.training import register_sequence_parallel
from support.deepspeed_cases import parameters
from support.hf_images import batches, image_model
from support.ranks import on_ranks
from support.trainers import ADDRESS

STEPS, SAME = 4, 1e-6  # of losses; weights have four steps of SGD, whose gradients are sums over all tokens


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)  # the gradients' size matters


def _batch(name):
    """Padded rows with images; in fp32."""
    batch, _ = batches(name, image_model(name))["padded"]
    return {key: x.float() if x.is_floating_point() else x for key, x in batch.items()}


def _plain(name):
    """(losses, weights) of one rank."""
    model, losses = image_model(name, torch.float32), []
    optimizer, batch = _sgd(model), _batch(name)
    for _ in range(STEPS):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def _compare(losses, weights, want):
    assert losses == pytest.approx(want[0], rel=SAME)
    for name, truth in want[1].items():
        assert (weights[name] - truth).abs().max() <= 4 * SAME * truth.abs().max().clamp(min=1.0), name


@pytest.mark.slow
@pytest.mark.supports("DeepSpeed, ZeRO 3", with_="images: training; 2 ranks; MLPs in tiles")
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
@on_ranks(2, fresh=True)
def test_zero_3(name):
    model, batch, losses = image_model(name, torch.float32), _batch(name), []
    parallel = register_sequence_parallel(model, mlp_tile=8)
    small = 50_000  # elements; the default buckets are gigabytes, which poisoned_empty fills
    zero = {"stage": 3, "reduce_bucket_size": small, "stage3_prefetch_bucket_size": small}
    zero |= {"stage3_param_persistence_threshold": 100}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_optimization": zero}
    config |= {"zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=_sgd(model), mpu=parallel, config=config)
    for _ in range(STEPS):
        loss = engine(**parallel.shard_batch(batch)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    _compare(losses, parameters(model, 3), _plain(name))


@pytest.mark.slow
@pytest.mark.supports("`transformers.Trainer`", with_="images: training; 2 ranks")
@on_ranks(2, fresh=True, env=ADDRESS)
def test_trainer(world, tmp_path):
    from megatron_tree.integrations.transformers.train.trainer import Trainer

    name = "qwen3_vl"
    model, batch = image_model(name, torch.float32), _batch(name)
    options = {"per_device_train_batch_size": 2, "remove_unused_columns": False, "max_grad_norm": 0.0, "use_cpu": True}
    options |= {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "max_steps": STEPS}
    trainer = Trainer(
        model=model,
        args=transformers.TrainingArguments(str(tmp_path), **options, lr_scheduler_type="constant"),
        train_dataset=[{"row": i} for i in range(8)],
        data_collator=lambda rows: dict(batch),
        optimizers=(_sgd(model), None),
        sp_size=world,
    )
    trainer.train()
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    _compare(losses, dict(model.named_parameters()), _plain(name))
