"""verl's forward of packed sequences with tree attention over two ranks against each sequence alone on one."""

import dataclasses
import importlib.util
import os
import sys
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("tensordict", reason="verl needs tensordict")
if importlib.util.find_spec("verl") is None:
    pytest.skip("needs verl", allow_module_level=True)

from megatron.core.transformer.transformer_config import TransformerConfig

from support import megatron_models
from support.megatron_models import VOCAB, Case, build_model, gradients_over_cp, megatron, transformer_config
from support.ranks import on_ranks

LENGTHS = (13, 27, 5, 3)


def _log_probs_of_labels(logits, labels):
    return logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def _alone(texts):
    """(log-probabilities of all next tokens, gradients) with Megatron's own attention, one sequence after another."""
    model, found = build_model(Case(local_spec=True)), []
    for text in texts:
        positions = torch.arange(len(text))[None]
        found.append(_log_probs_of_labels(model(text[None], positions, None)[0, :-1], text[1:]))
    torch.cat(found).sum().backward()
    return [x.detach() for x in found], gradients_over_cp(model)


def _as_megatron_bridge(case, **options):
    """The config as Megatron-Bridge's providers and verl make it: options are set one by one, finalize() checks them.

    verl/workers/engine/megatron/transformer_impl.py, megatron/bridge/models/transformer_config.py
    """
    config = transformer_config(dataclasses.replace(case, cp=1, cp_comm_type="p2p"), **options)
    for name, value in {"context_parallel_size": case.cp, "cp_comm_type": "tree"}.items():
        setattr(config, name, value)
    TransformerConfig.__post_init__(config)
    return config


def _through_verl(texts, world):
    from verl.models.mcore.model_forward import gptmodel_forward_model_engine

    with mock.patch.object(megatron_models, "transformer_config", _as_megatron_bridge):
        model = build_model(Case(cp=world, local_spec=True))
    ids = torch.nested.as_nested_tensor(texts, layout=torch.jagged)
    found = gptmodel_forward_model_engine(
        model,
        ids,
        {},
        logits_processor=lambda logits, label: {"log_probs": _log_probs_of_labels(logits, label)},
        logits_processor_args={"label": ids},  # verl rolls them
    )["log_probs"]
    found = [x[:-1] for x in found.unbind()]  # nothing follows a sequence's last token: verl masks it out
    torch.cat(found).sum().backward()
    return [x.detach() for x in found], gradients_over_cp(model)


@on_ranks(2, fresh=True)
def test_sequences_that_verl_packs_give_what_each_gives_alone(world):
    texts = [torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    with megatron(tp=1, pp=1, cp=1):
        right, gradients = _alone(texts)
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "megatron_tree.integrations.verl"
    ray = mock.patch.dict(sys.modules, ray=mock.MagicMock())  # verl starts processes with it; its forward does not
    with ray, megatron(tp=1, pp=1, cp=world):
        found, over_ranks = _through_verl(texts, world)
    for mine, truth in zip(found, right, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-5)
    for name, truth in gradients.items():
        error, scale = (float(x.abs().max()) for x in (over_ranks[name] - truth, truth))
        assert error <= 3e-5 * max(scale, 1e-3), (name, error, scale)
