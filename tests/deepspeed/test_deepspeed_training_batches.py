"""What goes into sharded training: how a batch is cut, the loss over ranks, and what is refused."""

import types

import pytest
import torch
import torch.distributed as dist

import transformers
from megatron_tree.integrations.deepspeed.training import register_sequence_parallel
from megatron_tree.integrations.transformers.attention import TreeCache
from megatron_tree.integrations.transformers.train import batch_shards
from megatron_tree.integrations.transformers.train import train_on_shards as training
from support.hf_models import VOCAB, family_config, prompt, tiny_model
from support.ranks import run_distributed
from support.rounding import rounding

IDS = torch.arange(100, 106).expand(2, -1).clone()
LABELS = torch.cat((IDS[:1], IDS[1:].masked_fill(torch.arange(6) < 3, -100)))
ROWS = {"input_ids": IDS, "labels": LABELS}
TOKENS = torch.arange(10, 19)[None]
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3]])
PACKED = {"input_ids": TOKENS, "position_ids": POSITIONS, "labels": TOKENS}
PACKED |= {"cu_seq_lens_q": torch.tensor([0, 4, 5, 9]), "max_length_q": 4}  # of a collator for flash attention


def _said(call):
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def _registered(rank, world):
    """(by batch its shard, its documents and seed, what is said to bad registrations and batches)."""
    model = tiny_model("llama")
    said = [_said(lambda size=size: register_sequence_parallel(model, sp_size=size)) for size in (3, 0, True, "2")]
    parallel = register_sequence_parallel(model)
    assert (parallel.sp_size, parallel.dp_size) == (world, 1)
    ids = prompt(1, 8)
    said.append(_said(lambda: parallel.shard_batch({"input_ids": ids}, dropout_seed=0.5)))
    # a sampler of its own on every rank
    said.append(_said(lambda: parallel.shard_batch({"input_ids": prompt(1, 8, seed=rank)})))
    parallel = register_sequence_parallel(model)
    said.append(_said(lambda: parallel.shard_batch({"input_ids": ids} if rank else {})))
    found = []
    for batch, seed in ((ROWS, 5), (PACKED, None)):
        for name, token in (("input_ids", -1), ("labels", VOCAB)):  # in one rank's shard, and an error on all
            wrong = batch | {name: batch[name].clone()}
            wrong[name][-1, -1] = token
            said.append(_said(lambda wrong=wrong: register_sequence_parallel(model).shard_batch(wrong)))
        made = register_sequence_parallel(model).shard_batch(batch, dropout_seed=seed)
        shard = made.pop("sequence_shard")
        assert made.pop("use_cache") is False and made.pop("attention_mask").all()
        assert shard.num_tokens == made["input_ids"].shape[1]
        found.append((made, shard.documents, shard.dropout_seed))
    return found, said


def test_batches_are_cut_and_what_is_refused():
    (one, said), (two, said_by_two) = run_distributed(_registered, 2, fresh=True)
    # 6 tokens + 2 of padding in 4 chunks: rank 0 has chunks 0 and 3 (all padding), rank 1 has chunks 1 and 2
    (rows, documents, seed), (rows_of_two, _, _) = one[0], two[0]
    assert rows["input_ids"][:, :2].tolist() == [[100, 101]] * 2
    assert rows["labels"].tolist() == [[101, 102, -100, -100], [-100, -100, -100, -100]]
    assert rows_of_two["input_ids"].tolist() == [[102, 103, 104, 105]] * 2
    assert rows_of_two["position_ids"].tolist() == [[2, 3, 4, 5]] * 2
    assert rows_of_two["labels"].tolist() == [[103, 104, 105, -100]] * 2
    assert (documents, seed) == (None, "5/0")
    # two documents of 4 tokens lie on one rank each; one more token is padding on the second rank
    (packed, documents, _), (packed_of_two, _, _) = one[1], two[1]
    assert documents.lengths == (4, 1, 4) and documents.num_rows == 5
    assert packed["input_ids"].tolist() == [[10, 11, 12, 13, 14]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 3, 0]]
    assert packed_of_two["input_ids"][:, :4].tolist() == [[15, 16, 17, 18]]
    assert packed_of_two["labels"].tolist() == [[16, 17, 18, -100, -100]]
    words = [f"the model has tokens 0 to {VOCAB - 1}"] * 4
    expected = (
        "sp_size=3 must be a positive integer that divides the 2 ranks",
        "sp_size=0 must",
        "sp_size=True must",
        "sp_size='2' must",
        "dropout_seed=0.5 must be an integer",
        "different arguments: rank 0 has batch['input_ids']='torch.int64 [1, 8] with checksum",
        "input_ids must be int64",
        *words,
    )
    for texts in (said, said_by_two):
        for text, part in zip(texts, expected, strict=True):
            assert part in text


def test_every_layer_and_batch_drops_other_pairs():
    found = []
    for layer, seed in ((0, "5/0"), (1, "5/0"), (0, "5/1"), (0, "5/0")):
        shard = batch_shards.shard_batch({"input_ids": prompt(1, 8)}, cp_group=None, dropout_seed=seed)[
            "sequence_shard"
        ]
        module, (q, k, v) = types.SimpleNamespace(layer_idx=layer), torch.ones(3, 1, 8, 2, 4)
        found.append(
            training.attend_to_shard(module, q, k, v, shard=shard, dropout=0.5, options={"window_size": (-1, -1)})
        )
    first, of_another_layer, of_another_rank, again = found
    assert torch.equal(first, again)
    assert not torch.equal(first, of_another_layer) and not torch.equal(first, of_another_rank)


def _loss(rank, world):
    """A rank without any label: its loss is that of the others, its gradient 0."""
    batch = {"input_ids": prompt(1, 8), "labels": torch.full((1, 8), -100)}

    logits = torch.arange(12.0).view(1, 4, 3).requires_grad_()
    labels = torch.tensor([[0, 2, -100, -100]]) if rank == 1 else torch.full((1, 4), -100)
    shard = batch_shards.shard_batch(batch, cp_group=dist.group.WORLD)["sequence_shard"]
    loss = training.loss_over_all_ranks(logits, labels, 3, sequence_shard=shard)
    loss.backward()
    none = torch.full((1, 4), -100)
    empty = training.loss_over_all_ranks(logits, none, 3, sequence_shard=shard)
    return loss.item(), logits.grad, empty.item()


def test_the_loss_is_the_mean_over_all_ranks_and_its_gradient_averages_to_the_right_one():
    logits = torch.arange(12.0).view(4, 3).requires_grad_()
    want = torch.nn.functional.cross_entropy(logits[:2], torch.tensor([0, 2]))
    want.backward()
    (loss, zero, empty), (same, grad, _) = run_distributed(_loss, 2)
    assert loss == same == pytest.approx(want.item(), rel=rounding(len(logits.flatten())))
    assert empty == 0.0 and not zero.any()
    torch.testing.assert_close((zero + grad)[0] / 2, logits.grad)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": prompt(2, 8), "token_type_ids": prompt(2, 8)}, r"batch has \['token_type_ids'\]"),
        ({"input_ids": prompt(2, 8).float()}, r"input_ids must be int64 .* got torch.float32 \[2, 8\]"),
        ({"input_ids": prompt(2, 8), "labels": prompt(2, 7)}, r"labels \[2, 7\] must have the shape"),
        ({"input_ids": prompt(2, 8), "labels": prompt(2, 8).int()}, "labels must be an int64 tensor, got torch.int32"),
        ({"input_ids": prompt(2, 8), "position_ids": prompt(3, 8)}, r"position_ids \[3, 8\] must have the shape"),
        (
            {"input_ids": prompt(1, 4), "attention_mask": torch.tensor([[0, 1, 1, 1]])},
            "padding must be on the right",
        ),
        (
            {"input_ids": prompt(1, 4), "labels": prompt(1, 4), "attention_mask": torch.tensor([[1, 1, 1, 0]])},
            "labels of padding .* must be -100",
        ),
        (
            {
                "input_ids": prompt(1, 4),
                "position_ids": torch.tensor([[0, 1, 0, 1]]),
                "attention_mask": torch.tensor([[1, 1, 1, 0]]),
            },
            "packed documents.* leave out the mask",
        ),
        (
            {
                "input_ids": prompt(1, 4),
                "position_ids": torch.tensor([[0, 1, 0, 1]]),
                "cu_seq_lens_q": torch.tensor([0, 3, 4]),
            },
            r"cu_seq_lens_q=\[0, 3, 4\], but documents in position_ids begin at \[0, 2\]",
        ),
    ],
)
def test_batches_that_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        batch_shards.shard_batch(batch, cp_group=None)


def test_models_and_calls_that_are_refused():
    with pytest.raises(ValueError, match=r"Linear: pass the Transformers model itself"):
        training.train_on_shards(torch.nn.Linear(2, 2))
    encoder = transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=20)
    with pytest.raises(ValueError, match="decoder-only"):
        training.train_on_shards(transformers.T5ForConditionalGeneration(encoder))
    config = family_config("gpt_oss")
    config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits=True"):
        training.train_on_shards(transformers.AutoModelForCausalLM.from_config(config))
    model = tiny_model("llama").train()
    for _ in range(2):  # twice is once
        training.train_on_shards(model)
    batch = {"input_ids": prompt(2, 8), "labels": prompt(2, 8)}
    with pytest.raises(ValueError, match="call it with the result of shard_batch"):
        model(**batch)
    made = batch_shards.shard_batch(batch, cp_group=None)
    longer = batch_shards.shard_batch({"input_ids": prompt(2, 9)}, cp_group=None)
    with pytest.raises(ValueError, match=r"'input_ids': \[2, 8\].*, but the shard has \[2, 9\] tokens"):
        model(**(made | {"sequence_shard": longer["sequence_shard"]}))
    with pytest.raises(ValueError, match="neither a cache nor an attention_mask"):
        model(**(made | {"attention_mask": torch.tensor([[1] * 7 + [0]] * 2)}))
    with pytest.raises(ValueError, match="neither a cache nor"):
        model(**(made | {"use_cache": True, "past_key_values": TreeCache(model.config)}))
    with pytest.raises(ValueError, match="output_router_logits=True"):
        model(**made, output_router_logits=True)
    count = int((made["labels"] != -100).sum())
    assert model(**made, num_items_in_batch=2 * count).loss.item() == pytest.approx(model(**made).loss.item() / 2)
    with torch.autocast("cpu", torch.bfloat16):  # queries and keys come in fp32 from rotary embeddings
        assert model(**made).loss.item() == pytest.approx(model(**made).loss.item(), rel=0.02)
    plain = tiny_model("llama")(**batch).loss.item()
    assert model.eval()(**batch).loss.item() == pytest.approx(plain), "evaluation of plain batches"
    model.train()
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"layer_idx=0\): attention dropout=0.1 needs a dropout_seed"):
        model(**made)


def test_a_layer_that_does_not_attend_is_an_error():
    model = tiny_model("llama").train()
    training.train_on_shards(model)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(ValueError, match=r"does not pass its mask on to 1 \(layers by number\)"):
        model(**batch_shards.shard_batch({"input_ids": prompt(2, 8)}, cp_group=None))


def test_registration_without_a_process_group():
    with pytest.raises(ValueError, match="no process group: call .*init_distributed"):
        register_sequence_parallel(tiny_model("llama"), sp_size=1)
