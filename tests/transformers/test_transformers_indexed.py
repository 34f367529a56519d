"""Transformers' models whose queries see the keys that an index selects: exact in training, or refused by name."""

from types import SimpleNamespace

import pytest
import torch

from support.ranks import run_distributed

pytest.importorskip("transformers")

import megatron_tree.integrations.transformers as tree_hf
from support.hf_architectures import INDEXED, assert_logits, random_model
from support.hf_models import prompt
from support.hf_served import check_trained

FAST = ("deepseek_v32", "hy_v4")  # without and with layers that share a selection


def _cases(with_):
    def marks(name):
        found = [pytest.mark.supports(f"`{name}`", with_=with_)]
        return found if name in FAST else [*found, pytest.mark.slow]

    return [pytest.param(name, marks=marks(name), id=name) for name in INDEXED]


def _training(rank, world, name):
    check_trained(lambda: random_model(name))


def _packed(rank, world, name):
    """Documents shorter and longer than what an index selects."""
    lengths = (4, 21, 1, 16)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    more = {"input_ids": prompt(1, 42), "labels": prompt(1, 42), "position_ids": positions}
    check_trained(lambda: random_model(name), **more)


def _recomputed(rank, world, name):
    def make():
        model = random_model(name).train()
        model.gradient_checkpointing_enable()
        return model

    check_trained(make)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", _cases("training on shards; 2 and 4 ranks"))
def test_training(name, world):
    run_distributed(_training, world, name)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", FAST)
def test_packed_documents(name, world):
    run_distributed(_packed, world, name)


@pytest.mark.parametrize("name", FAST)
def test_recomputed_layers(name):
    run_distributed(_recomputed, 2, name)


@pytest.mark.parametrize("name", _cases("evaluation without a cache"))
def test_no_cache(name):
    model, ids = random_model(name), prompt(2, 21)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        model.set_attn_implementation("tree")
        assert_logits(model(ids, use_cache=False).logits, want, "no cache")
        with pytest.raises(ValueError, match="padding in layers with an index needs a TreeCache"):
            model(ids, attention_mask=torch.arange(21).expand(2, -1) > 2, use_cache=False)


def test_another_formula_is_refused(monkeypatch):
    model, ids = random_model("deepseek_v32"), prompt(1, 9)
    tree_hf.train_on_shards(model)
    import transformers.models.deepseek_v32.modeling_deepseek_v32 as modeling

    monkeypatch.setattr(modeling, "F", SimpleNamespace(**vars(modeling.F) | {"relu": torch.abs}))
    with pytest.raises(ValueError, match=r"DeepseekV32Indexer \(layer_idx=0\) scores keys in another way .*abs after"):
        model(**tree_hf.shard_batch({"input_ids": ids, "labels": ids}, cp_group=None))
