"""Log-probabilities of the labels of a shard: values and gradients of any loss of them are those of one rank."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import megatron_tree.integrations.transformers as tree_hf
import transformers
from megatron_tree import TreeConfig
from megatron_tree.integrations.transformers.train import loss as module
from support.hf_models import VOCAB, prompt, tiny_model
from support.hf_training import LargestTensor, averaged_gradients
from support.ranks import on_ranks, run_distributed
from support.rounding import assert_near, error

TOKENS = 21  # no multiple of twice the ranks
TEMPERATURE = 0.7


def _batch(kind):
    ids = prompt(4, TOKENS)
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][:, :5] = -100
    if kind == "padded":
        mask = torch.arange(TOKENS) < torch.tensor([[21], [13], [9], [20]])
        batch |= {"attention_mask": mask.long(), "labels": batch["labels"].masked_fill(~mask, -100)}
    elif kind == "packed":
        positions = torch.arange(TOKENS).expand(4, TOKENS).clone()
        for row, begin in ((0, 9), (1, 3), (1, 4), (3, 17)):
            positions[row, begin:] = torch.arange(TOKENS - begin)
        batch |= {"position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
    return batch


def _loss(log_probs, entropies):
    """As those of reinforcement learning: of pairs of rows, nonlinear in the log-probabilities of a row."""
    chosen, rejected = (log_probs * torch.linspace(0.5, 1.5, log_probs.shape[1])).sum(1).chunk(2)
    ratio = torch.exp(log_probs - log_probs.detach()).clamp(0.8, 1.2)
    return -F.logsigmoid(0.3 * (chosen - rejected)).mean() + (ratio - 0.01 * entropies).mean()


def _plain(model, batch):
    """(log-probabilities, entropies) [b, s] from whole logits."""
    logits = model(**{name: x for name, x in batch.items() if name != "labels"}, use_cache=False).logits / TEMPERATURE
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    every = logits.log_softmax(-1)
    values = (
        every.gather(-1, labels.clamp(min=0)[..., None])[..., 0],
        torch.distributions.Categorical(logits=logits).entropy(),
    )
    return [x.masked_fill(labels == -100, 0) for x in values]


def _model(family):
    """In evaluation: gpt2 has dropout. Gemma's norms, and the softmax of its attention, are in fp32 anyway."""
    return tiny_model(family).to(torch.float64 if family == "gpt2" else torch.float32)


def _on_shards(rank, world, sp, family, kinds):
    """The largest error of values and of gradients, which are averaged over all ranks, for each kind of batch."""
    group, found = dist.new_subgroups(sp)[0], {}
    for kind in kinds:
        batch = _batch(kind)
        plain, model = _model(family), _model(family)
        plain.set_attn_implementation("eager")
        tree_hf.train_on_shards(model)
        parts = [{name: x[i :: world // sp] for name, x in batch.items()} for i in range(world // sp)]
        losses = [_loss(*_plain(plain, part)) for part in parts]
        (sum(losses) / len(losses)).backward()
        mine = parts[rank // sp]
        shard = tree_hf.shard_batch(
            mine, cp_group=group, loss_group=dist.group.WORLD, tree_config=TreeConfig(backend="reference")
        )
        local = module.token_log_probs(model, shard, temperature=TEMPERATURE, entropy=True, tile=5)
        assert local.log_probs.shape == shard["labels"].shape and local.log_probs.dtype == model.dtype
        values = [module.gather_tokens(x, shard) for x in local]
        loss = _loss(*values)
        loss.backward()
        errors = [error(x, want) for x, want in zip(values, _plain(plain, mine), strict=True)]
        errors.append(error(loss, losses[rank // sp]))
        averaged = averaged_gradients(model).values()
        errors += [error(grad, p.grad) for grad, p in zip(averaged, plain.parameters(), strict=True)]
        found[kind] = max(errors)
    return found


@pytest.mark.parametrize(
    ("family", "world", "sp", "limit"),
    [("gpt2", 2, 2, 1e-11), ("gpt2", 4, 2, 1e-11), ("gemma2", 2, 2, 1e-5)],
)
def test_values_and_gradients_equal_those_of_one_rank(family, world, sp, limit):
    kinds = ("plain", "padded", "packed") if family == "gemma2" else ("plain", "padded")
    for found in run_distributed(_on_shards, world, sp, family, kinds):
        assert max(found.values()) < limit, found


@pytest.mark.parametrize("change", [None, lambda logits: 3 * torch.tanh(logits / 3)])
def test_log_probs_of_hidden_states(change):
    torch.manual_seed(1)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 9, 8), (30, 8), (30,))]
    hidden, weight, bias = leaves
    labels = torch.randint(0, 30, (2, 9))
    labels[0, :3] = -100
    options = {"bias": bias, "change": change, "temperature": TEMPERATURE, "entropy": True, "tile": 4}
    found = module.log_probs_of_hidden(hidden, weight, labels, **options)
    logits = F.linear(hidden, weight, bias)
    logits = (logits if change is None else change(logits)) / TEMPERATURE
    want = (
        logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0],
        torch.distributions.Categorical(logits=logits).entropy(),
    )
    want = [x.masked_fill(labels == -100, 0) for x in want]
    for x, truth in zip(found, want, strict=True):
        assert_near(x, truth, 30, dtype=torch.float64)
    gradients = [torch.autograd.grad(_loss(*values), leaves) for values in (found, want)]
    for x, truth in zip(*gradients, strict=True):
        assert_near(x, truth, 30 * 18, dtype=torch.float64)


def test_nothing_has_all_tokens_and_the_vocabulary():
    config = transformers.LlamaConfig(**tiny_model("llama").config.to_diff_dict() | {"vocab_size": 2000})
    ids, largest = prompt(2, 200), {}
    for tile in (16, None):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
        tree_hf.train_on_shards(model)
        shard = tree_hf.shard_batch({"input_ids": ids, "labels": ids}, cp_group=None)
        with LargestTensor() as seen:
            values = module.token_log_probs(model, shard, entropy=True, tile=tile)
            _loss(*(module.gather_tokens(x, shard) for x in values)).backward()
        largest[tile] = seen.elements
    assert largest[None] == 400 * 2000
    assert largest[16] < 400 * 2000 / 4  # weights, and scores of attention


@on_ranks(2)
def test_label_smoothing_equals_that_of_transformers():
    batch, model, plain = _batch("padded"), tiny_model("gemma2"), tiny_model("gemma2")
    plain.set_attn_implementation("eager")
    outputs = plain(**{name: x for name, x in batch.items() if name != "labels"}, use_cache=False)
    want = transformers.trainer_pt_utils.LabelSmoother(0.1)(outputs, batch["labels"], shift_labels=True)
    tree_hf.train_on_shards(model, loss_tile=7)
    group = dist.group.WORLD
    loss = model(**tree_hf.shard_batch(batch, cp_group=group), label_smoothing=0.1).loss
    loss.backward()
    want.backward()
    errors = [abs(loss.item() - want.item())]
    averaged = averaged_gradients(model).values()
    errors += [error(grad, p.grad) for grad, p in zip(averaged, plain.parameters(), strict=True)]
    worst = max(errors)
    assert worst < 1e-5, worst


def test_what_is_refused():
    ids = prompt(1, 9)
    model = tiny_model("llama")
    tree_hf.train_on_shards(model, loss_tile=0)
    shard = tree_hf.shard_batch({"input_ids": ids, "labels": ids}, cp_group=None)
    for options, message in (
        ({"temperature": 0}, "temperature=0"),
        ({"tile": 0}, "tile=0"),
        ({"tile": 4}, "logits whole"),
    ):
        with pytest.raises(ValueError, match=message):
            module.token_log_probs(model, shard, **options)
    with pytest.raises(ValueError, match="and no labels"):
        module.token_log_probs(model, tree_hf.shard_batch({"input_ids": ids}, cp_group=None))
    assert module.token_log_probs(model, shard).log_probs.shape == (1, 9) and ids.max() < VOCAB
