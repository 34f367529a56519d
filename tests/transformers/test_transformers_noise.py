"""Random numbers of models on shards: every token has noise of its own, as large as in plain training."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.hf_models import VOCAB, prompt, tiny_model
from support.ranks import on_ranks
from support.trainers import ADDRESS, ARGUMENTS

pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState
from transformers.integrations.neftune import activate_neftune

import transformers

SHAPE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
GPT2 = SHAPE | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
LENGTH = 47


def _gpt2(dropped):
    torch.manual_seed(1)
    config = transformers.GPT2Config(**GPT2, resid_pdrop=dropped, embd_pdrop=dropped, attn_pdrop=dropped)
    return transformers.GPT2LMHeadModel(config).train()


def _batch(packed=False):
    ids = prompt(2, LENGTH)
    batch = {"input_ids": ids, "labels": ids}
    return batch | ({"position_ids": torch.arange(LENGTH).remainder(19).expand(ids.shape)} if packed else {})


def _everywhere(x):
    """x of all ranks."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def _alike(one, other):
    """Which part of two tensors is equal, of that which is in both."""
    equal = (one == other)[~(one.isnan() | other.isnan())]
    return float(equal.double().mean())


def _masks(model, run):
    """1 where the dropouts of the embeddings and of hidden states keep a number, 0 where not, NaN where there is none,
    in padding; in the order of the calls."""
    masks = []
    layers = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p]
    note = lambda module, args, out: masks.append((out != 0).float().where(args[0] != 0, torch.nan).flatten())  # noqa: E731
    handles = [layer.register_forward_hook(note) for layer in layers]
    run()
    for handle in handles:
        handle.remove()
    return torch.cat(masks)


@pytest.mark.parametrize(("packed", "checkpointed"), [(False, True), (True, False)])
@on_ranks(2)
def test_dropout_of_hidden_states_is_of_tokens(packed, checkpointed):
    """Ranks, and calls, differ in half of what they drop; what the ranks draw afterwards is the same."""
    from megatron_tree.integrations.transformers import register_sequence_parallel

    model = _gpt2(0.5)
    parallel = register_sequence_parallel(model)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(5)
    shards = [parallel.shard_batch(_batch(packed), dropout_seed=seed) for seed in range(2)]
    first, second = (_masks(model, lambda: model(**shard)) for shard in shards)  # noqa: B023
    state = torch.get_rng_state()
    run = lambda: model(**shards[0]).loss.backward()  # noqa: E731
    kept = _masks(model, run)
    grads = [p.grad.clone() for p in model.parameters()]
    torch.set_rng_state(state)
    if checkpointed:
        model.gradient_checkpointing_disable()
    model.zero_grad()
    again = _masks(model, run)
    torch.testing.assert_close(kept[: len(again)], again, equal_nan=True)  # and those of a recomputation follow
    for p, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad)
    chance = 6 * 0.5 / (5 * LENGTH * 32) ** 0.5  # standard deviations of at most as many numbers
    by_rank, by_call = _alike(*_everywhere(first)), _alike(first, second)
    assert [by_rank, by_call] == pytest.approx([0.5, 0.5], abs=chance), (by_rank, by_call)
    assert _alike(*_everywhere(torch.get_rng_state().float())) == 1.0


@on_ranks(2)
def test_noise_of_routers():
    """How much of a router's noise two ranks have alike."""
    from megatron_tree.integrations.transformers import register_sequence_parallel

    model, seen = tiny_model("mixtral").train(), []
    block = model.model.layers[0].mlp
    block.jitter_noise = 0.25
    parallel = register_sequence_parallel(model, mlp_tile=5)
    block.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    block.gate.register_forward_pre_hook(lambda module, args: seen.append(args[0].view(seen[-1].shape)))
    state = torch.get_rng_state()
    model(**parallel.shard_batch(_batch())).loss.backward()
    assert not torch.equal(state, torch.get_rng_state())
    alike = _alike(*_everywhere((seen[1] / seen[0]).detach()))
    assert alike < 0.01, alike


@pytest.mark.parametrize("packed", [False, True])
@on_ranks(2)
def test_noise_of_embeddings(packed):
    """NEFTune's size depends on the length of whole rows; the largest of a thousand numbers is near its bound."""
    from megatron_tree.integrations.transformers import register_sequence_parallel

    model, seen = tiny_model("llama").train(), []
    parallel = register_sequence_parallel(model)
    embeddings = model.get_input_embeddings()
    activate_neftune(model, 5.0)
    embeddings.register_forward_hook(lambda module, args, out: seen.append((out - module.weight[args[0]]).detach()))
    model(**parallel.shard_batch(_batch(packed)))
    assert embeddings.neftune_noise_alpha == 5.0
    model.eval()
    state = torch.get_rng_state()
    model(**parallel.shard_batch(_batch(packed)))
    assert torch.equal(state, torch.get_rng_state())
    allowed = 5.0 / (LENGTH * model.config.hidden_size) ** 0.5
    largest, alike = float(seen[0].abs().max()) / allowed, _alike(*_everywhere(seen[0]))
    assert 0.98 < largest < 1 + 1e-4 and alike < 0.01, (largest, alike)


@on_ranks(2, timeout=250, env=ADDRESS, fresh=True)
def test_a_resumed_run_goes_on_with_the_same_noise(rank, tmp_path):
    """Losses of a run with dropout, whole and from its checkpoint on."""
    from megatron_tree.integrations.transformers.train.trainer import Trainer

    ids = prompt(14, LENGTH)
    data = [{"input_ids": row, "labels": row} for row in ids]
    found = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        AcceleratorState._reset_state(reset_partial_state=True)
        saving = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}
        more = {"neftune_noise_alpha": 5.0, "gradient_accumulation_steps": 2}
        args = transformers.TrainingArguments(str(tmp_path), **ARGUMENTS | saving | more)
        trainer = Trainer(_gpt2(0.3), args, train_dataset=data)
        np.random.seed(rank)  # anything that one rank draws alone
        trainer.train(resume_from_checkpoint=resume)
        found.append([(x["loss"], x["grad_norm"]) for x in trainer.state.log_history if "loss" in x])
    whole, resumed = found
    assert len(whole) == 4 and whole == resumed, (whole, resumed)
