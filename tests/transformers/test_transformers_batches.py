"""What collators make of rows: the loss and the gradients of a plain model that gets the same batch."""

import contextlib
import os

import pytest
import torch
import torch.distributed as dist

import megatron_tree.integrations.transformers as tree_hf
from megatron_tree import CommError
from support.hf_models import prompt, tiny_model
from support.hf_training import averaged_gradients
from support.ranks import on_ranks
from support.rounding import assert_near

TOKENS = 24
SUMS = 2 * TOKENS * 10  # over the tokens of a gradient, after some ten operations of a layer that round as well


def _batches():
    ids = prompt(2, TOKENS)
    mask = torch.ones_like(ids)
    positions = torch.cat((torch.arange(10), torch.arange(100, 100 + TOKENS - 10))).expand(ids.shape)
    right = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [13]])).long()
    empty = mask * torch.tensor([[1], [0]])
    return {
        "gaps": {"input_ids": ids, "labels": ids, "attention_mask": mask, "position_ids": positions},
        "gaps, padding": {
            "input_ids": ids, "labels": ids.masked_fill(right == 0, -100), "attention_mask": right,
            "position_ids": positions * right,
        },
        "a row of padding": {
            "input_ids": ids, "labels": ids.masked_fill(empty == 0, -100), "attention_mask": empty,
        },
        "nothing but padding": {"input_ids": ids, "labels": torch.full_like(ids, -100), "attention_mask": 0 * ids},
    }  # fmt: skip


@on_ranks(2)
def test_gaps_in_positions_and_rows_of_padding():
    """With a mask, larger positions are of the same document, as in Transformers."""
    for name, batch in _batches().items():
        plain, model = tiny_model("llama").train(), tiny_model("llama").train()
        tree_hf.train_on_shards(model)
        loss = model(**tree_hf.shard_batch(batch, cp_group=dist.group.WORLD)).loss
        loss.backward()
        if name == "nothing but padding":
            assert loss.item() == 0 and not any(p.grad.any() for p in model.parameters())
            continue
        want = plain(**batch, use_cache=False).loss
        want.backward()
        assert loss.item() == pytest.approx(want.item(), rel=1e-6), name
        for (of, grad), p in zip(averaged_gradients(model).items(), plain.parameters(), strict=True):
            assert_near(grad, p.grad, SUMS, f"{name}: {of}")


@on_ranks(2)
def test_a_model_that_changes_after_it_is_registered():
    """More tokens, as by chat_template_path of TRL; another attention, which would see this rank's tokens only."""
    plain, model = tiny_model("llama").train(), tiny_model("llama").train()
    parallel = tree_hf.register_sequence_parallel(model)
    new = model.config.vocab_size
    model.resize_token_embeddings(new + 2)
    plain.resize_token_embeddings(new + 2)
    plain.load_state_dict(model.state_dict())
    ids = prompt(2, TOKENS)
    ids[0, 5] = new + 1
    batch = {"input_ids": ids, "labels": ids}
    loss = model(**parallel.shard_batch(batch)).loss
    loss.backward()
    want = plain(**batch, use_cache=False).loss
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    for (name, grad), p in zip(averaged_gradients(model).items(), plain.parameters(), strict=True):
        assert_near(grad, p.grad, SUMS, name)
    with pytest.raises(ValueError, match=f"the model has tokens 0 to {new + 1}"):
        parallel.shard_batch({"input_ids": ids + 2, "labels": ids})
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"attn_implementation='sdpa' .* call model.set_attn_implementation\('tree'\)"):
        model(**parallel.shard_batch(batch))


@on_ranks(2)
def test_a_batch_that_a_worker_of_the_loader_cuts():
    """A process forked from a rank has no connections of its own: an error at once, and the rank goes on."""
    parallel = tree_hf.register_sequence_parallel(tiny_model("llama"))
    batch = {"input_ids": prompt(2, TOKENS)}
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            try:
                parallel.shard_batch(batch)
            except CommError as error:
                os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 4096).decode()
    assert said.startswith("shard_batch in a process that is forked from a rank, such as a DataLoader's worker")
    os.waitpid(child, 0)
    parallel.shard_batch(batch)
