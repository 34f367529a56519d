"""BertModel and T5Model on 2 ranks against the same on one: padding, attention both ways, cross attention."""

import functools

import pytest
import torch
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec

from megatron_tree import shard_sequence, unshard_sequence
from megatron_tree.integrations import megatron as tree
from support.megatron_models import VOCAB, Case, check, gradients_over_cp, schedules, set_weights, transformer_config

LENGTHS, ENCODER_LENGTHS = (32, 19, 6), (48, 5, 33)  # tokens of every row, the rest is padding


def text(lengths, seed):
    """tokens, labels and which of them count, [b, s]."""
    generator, shape = torch.Generator().manual_seed(seed), (len(lengths), max(lengths))
    tokens, labels = (torch.randint(0, VOCAB, shape, generator=generator) for _ in range(2))
    return tokens, labels, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def spec(case, local):
    return tree.use_tree_attention(local, tree_config=case.tree_config) if case.is_tree else local


def run(model, forward, valid):
    """(losses of the tokens that count, gradients); forward(model, share) gives losses [b, s/cp]."""
    from megatron.core import parallel_state

    set_weights(model)
    group = parallel_state.get_context_parallel_group()
    share = functools.partial(shard_sequence, cp_group=group, dim=1)
    losses = forward(model, share)
    (losses * share(valid)).sum().backward()
    return unshard_sequence(losses.detach(), group, 1)[valid], gradients_over_cp(model)


OPTIONS = {"normalization": "LayerNorm", "gated_linear_unit": False, "activation_func": torch.nn.functional.gelu}


def bert(case):
    tokens, labels, valid = text(LENGTHS, 1)
    config = transformer_config(case, **OPTIONS)
    if case.is_tree:  # by the plugin: without TransformerEngine the model asks for Megatron's own core attention
        tree.install(tree_config=case.tree_config)
    try:
        model = BertModel(
            config=config,
            num_tokentypes=0,
            transformer_layer_spec=bert_layer_local_spec,
            vocab_size=VOCAB,
            max_sequence_length=max(LENGTHS),
            position_embedding_type="rope",
            add_binary_head=False,
        )
    finally:
        tree.uninstall()
    return run(model, lambda model, share: model(*map(share, (tokens, valid)), lm_labels=share(labels))[0], valid)


def t5(case):
    encoder_tokens, _, encoder_valid = text(ENCODER_LENGTHS, 2)
    tokens, labels, valid = text(LENGTHS, 3)
    config = transformer_config(case, **OPTIONS)
    model = T5Model(
        config=config,
        encoder_config=config,
        transformer_encoder_layer_spec=spec(case, encoder_model_with_local_spec()),
        transformer_decoder_layer_spec=spec(case, decoder_model_with_local_spec()),
        vocab_size=VOCAB,
        max_sequence_length=max(ENCODER_LENGTHS),
        position_embedding_type="rope",
    )
    s, s_kv = max(LENGTHS), max(ENCODER_LENGTHS)
    hidden = ~encoder_valid[:, None, None]  # keys of the encoder, [b, 1, 1, s_kv]; True = hidden
    later = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)

    def forward(model, share):
        masks = hidden, share(later[:, 0])[:, None], hidden
        if not case.is_tree:  # Megatron's own softmax takes masks with all rows
            masks = (
                hidden.expand(-1, -1, s_kv, -1),
                later.expand(len(LENGTHS), -1, -1, -1),
                hidden.expand(-1, -1, s, -1),
            )
        return model(share(encoder_tokens), share(tokens), *masks, lm_labels=share(labels))

    return run(model, forward, valid)


@pytest.mark.supports("BertModel, T5Model", with_="rotary positions, padding; cp = 2")
def test_bert():
    pinned = [schedule for schedule in schedules(2) if "cp_comm_type" not in schedule]
    check(2, [Case(cp=2, num_heads_kv=h, **schedule) for h in (8, 2) for schedule in pinned], run=bert)


@pytest.mark.supports("BertModel, T5Model", with_="rotary positions, padding; cp = 2")
def test_t5():
    check(2, [Case(cp=2, num_heads_kv=8, **schedule) for schedule in schedules(2)], run=t5)
