"""Loss and MLPs in tiles: the same losses and gradients, without the large tensors."""

import pytest
import torch

import megatron_tree.integrations.transformers  # noqa: F401
import transformers
from megatron_tree.core import log
from megatron_tree.integrations.transformers.train import batch_shards, token_tiles
from megatron_tree.integrations.transformers.train import train_on_shards as training
from support.hf_architectures import random_model
from support.hf_models import prompt, tiny_model
from support.hf_training import LargestTensor
from support.rounding import assert_near, rounding

TILES = {"loss_tile": 7, "mlp_tile": 5}
WHOLE = {"loss_tile": 0, "mlp_tile": 0}
SUMS = 60 * 10  # over the tokens of a gradient, after some ten operations of a layer that round as well


def _gradients(model, options, *, dtype=torch.float32, tokens=30, checkpointing=False):
    """(loss, name -> gradient, output) of a batch of two rows, whose first labels are left out."""
    model = model.to(dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    training.train_on_shards(model, **options)
    ids = prompt(2, tokens)
    labels = ids.clone()
    labels[0, :9] = -100
    output = model(**batch_shards.shard_batch({"input_ids": ids, "labels": labels}, cp_group=None))
    (3 * output.loss).backward()  # as loss scales and accumulation do
    return output.loss.item(), {name: p.grad for name, p in model.named_parameters()}, output


def _check_gradients(make, checkpointing):
    loss, gradients, output = _gradients(make(), TILES, checkpointing=checkpointing)
    want_loss, want, whole = _gradients(make(), WHOLE)
    assert output.logits is None and whole.logits is not None
    assert loss == pytest.approx(want_loss, rel=rounding(SUMS))
    for name, gradient in gradients.items():
        if want[name] is None:  # router's biases
            assert gradient is None, name
            continue
        assert_near(gradient, want[name], SUMS, name)


@pytest.mark.parametrize("family", ["llama", "gemma2", "smollm2", "phi3"])  # gemma2: a softcap; smollm2: tied weights
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_those_without_tiles(family, checkpointing):
    _check_gradients(lambda: tiny_model(family), checkpointing)


# a router that returns scores, too; dense layers and shared experts; experts that return their input
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "longcat_flash"])
def test_experts_in_tiles(name):
    _check_gradients(lambda: random_model(name), checkpointing=name in ("mixtral", "gpt_oss"))


def test_second_derivatives_are_refused():
    rows, weight = torch.randn(5, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    out = token_tiles.rows_in_tiles(lambda x: (x * weight) ** 3, (rows,), [weight], 2)
    for x, gradient in zip((rows, weight), torch.autograd.grad(out.sum(), (rows, weight), create_graph=True)):
        with pytest.raises(ValueError, match="tiles have no second derivatives: leave out loss_tile"):
            torch.autograd.grad(gradient.sum(), x, retain_graph=True)


def test_bf16_gradients_are_summed_in_fp32():
    _, exact, _ = _gradients(tiny_model("llama"), WHOLE, tokens=200)

    def error(options):
        model = tiny_model("llama")
        _, found, _ = _gradients(model, options, dtype=torch.bfloat16, tokens=200)
        return {name: float((found[name].float() - exact[name]).norm()) for name in exact}

    whole, tiled = error(WHOLE), error({"loss_tile": 3, "mlp_tile": 3})
    assert all(tiled[name] < 1.5 * whole[name] for name in whole)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_nothing_has_all_tokens_and_the_vocabulary(family):
    config = tiny_model(family, positions=4096).config
    wide = type(config)(**config.to_diff_dict() | {"vocab_size": 1000, "intermediate_size": 500})
    tokens = 2 * 512
    largest = {}
    for name, options in (("tiled", {"loss_tile": 64, "mlp_tile": 64}), ("whole", WHOLE)):
        torch.manual_seed(1)
        with LargestTensor() as seen:
            _gradients(transformers.AutoModelForCausalLM.from_config(wide), options, tokens=tokens // 2)
        largest[name] = seen.elements
    chosen = getattr(wide, "num_experts_per_tok", 1)
    assert largest["whole"] == chosen * tokens * wide.vocab_size  # or gates and inputs of experts, which are as many
    # what is left: the scores of the dense attention of the kernels' blocks, weights, hidden states
    assert largest["tiled"] < chosen * tokens * wide.intermediate_size / 4


def test_the_loss_of_long_shards_is_tiled_unless_it_is_forbidden(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(token_tiles, "ELEMENTS", 20 * model.config.vocab_size)
    for tokens, options, deferred in ((10, {}, False), (11, {}, True), (11, {"loss_tile": 0}, False)):
        _, _, output = _gradients(tiny_model("llama"), options, tokens=tokens)
        assert (output.logits is None) == deferred


class _Biased(transformers.LlamaForCausalLM):
    """A model that adds a bias for each word to its logits, between head and loss."""

    def forward(self, *args, labels=None, **kwargs):
        head, kwargs["logits_to_keep"] = self.lm_head, 0
        hidden = self.model(*args, **{k: v for k, v in kwargs.items() if k != "logits_to_keep"}).last_hidden_state
        logits = head(hidden) + torch.linspace(0, 1, self.config.vocab_size)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss)


def test_other_uses_of_the_logits(monkeypatch, caplog):
    """By themselves, long shards of such a model have whole logits, which is said once; tiles are refused."""
    config = tiny_model("llama").config
    losses = []
    monkeypatch.setattr(log, "_said", set())
    for elements in (2**26, 4, 4):
        torch.manual_seed(1)
        monkeypatch.setattr(token_tiles, "ELEMENTS", elements)
        losses.append(_gradients(_Biased(config), {})[0])
    (said,) = [record.getMessage() for record in caplog.records if record.name == "megatron_tree"]
    assert "of a shard are computed whole, as the model uses them in __add__" in said
    assert losses[0] == pytest.approx(losses[1], rel=rounding(SUMS))
    with pytest.raises(ValueError, match="loss_tile=7: the model uses its logits in __add__"):
        _gradients(_Biased(config), {"loss_tile": 7})


def _as_accelerate(model):
    """A model's forward under the bf16 of Accelerate, Trainer and TRL; [rows of the head's calls]."""
    operations = pytest.importorskip("accelerate.utils.operations")
    rows, plain = [], model.lm_head.forward

    def counted(hidden):
        rows.append(hidden.shape[:-1].numel())
        return plain(hidden)

    model.lm_head.forward = counted
    model.forward = operations.convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    return rows


class _ByShape(transformers.LlamaForCausalLM):
    """A model that takes the size of the vocabulary, and what it divides by, from its logits."""

    def forward(self, *args, labels=None, **kwargs):
        logits = self.lm_head(self.model(*args, **kwargs).last_hidden_state)
        assert logits.is_floating_point() and logits.dim() == logits.ndim == 3 and logits.size(1) == labels.shape[1]
        assert hasattr(logits, "view") and not hasattr(logits, "sequence_lengths")
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits.float())


@pytest.mark.parametrize("kind", [transformers.LlamaForCausalLM, _ByShape])
def test_who_only_asks_for_the_dtype_or_shape_leaves_the_tiles(kind, monkeypatch):
    """Those that were asked for, and those that long shards have by themselves."""
    config = tiny_model("llama").config
    monkeypatch.setattr(token_tiles, "ELEMENTS", 7 * config.vocab_size)
    for options in ({"loss_tile": 7}, {}):
        torch.manual_seed(1)
        model = kind(config)
        rows = _as_accelerate(model)
        loss, gradients, output = _gradients(model, options)
        assert max(rows) == 7 and sum(rows) == 2 * 60 and output.logits is None
        torch.manual_seed(1)
        want_loss, want, _ = _gradients(transformers.LlamaForCausalLM(config), WHOLE)
        assert loss == pytest.approx(want_loss, rel=2**-7)
        for name, gradient in gradients.items():
            assert float((gradient - want[name]).norm()) < 0.1 * float(want[name].norm()), name


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"loss_tile": -1}, "loss_tile=-1 must be a number of tokens"),
        ("llama", {"mlp_tile": True}, "mlp_tile=True must be a number of tokens"),
        ("gpt2", {"mlp_tile": 8}, "mlp_tile=8: GPT2LMHeadModel has 0 MLPs of linear layers"),  # with dropout
    ],
)
def test_what_is_refused(family, options, message):
    with pytest.raises(ValueError, match=message):
        training.train_on_shards(tiny_model(family), **options)


def test_a_head_of_another_kind():
    model = tiny_model("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="the head of LlamaForCausalLM is no nn.Linear of the model itself"):
        training.train_on_shards(model, loss_tile=8)
    training.train_on_shards(model)  # its logits are whole, as ever
