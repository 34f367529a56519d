"""qk_clip and log_max_attention_logit: Megatron's own clip_qk after a step, against one rank with its own attention."""

import types
from unittest import mock

import pytest
import torch

from support import megatron_models
from support.megatron_models import Case, check, forward_backward, schedules

THRESHOLD = 0.02  # most heads are clipped
CLIP = (("qk_clip", True), ("qk_clip_threshold", THRESHOLD))
MICROBATCHES = 2


def clipped(case):
    """{layer and what: the largest logits of all microbatches, the projections after the clipping}, of a Case."""
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.optimizer.qk_clip import clip_qk

    build, plain, models, seen = megatron_models.build_model, FusedScaleMaskSoftmax.forward, [], []

    def softmax(self, scores, *args):
        i, j = torch.arange(scores.shape[-2])[:, None], torch.arange(scores.shape[-1])
        window = dict(case.extra).get("window_size")
        hidden = (j > i) | (j < i - window[0]) if window else j > i
        seen.append(scores.detach().masked_fill(hidden, float("-inf")).amax((0, 2, 3)))
        return plain(self, scores, *args)

    def kept(case, **options):
        if not models:
            models.append(build(case, **options))
        return models[0]

    with (
        mock.patch.object(megatron_models, "build_model", kept),
        mock.patch.object(FusedScaleMaskSoftmax, "forward", softmax),
    ):
        for _ in range(MICROBATCHES):  # the weights are the same: so is the maximum
            forward_backward(case)
    (model,) = models
    layers = model.decoder.layers
    for n, layer in enumerate(layers):
        if not case.is_tree:
            layer.self_attention.core_attention.current_max_attn_logits = torch.stack(seen[n :: len(layers)]).amax(0)
    chunk = types.SimpleNamespace(module=types.SimpleNamespace(module=model))
    logged = clip_qk([chunk], log_max_only=True)
    found = {}
    for n, layer in enumerate(layers):
        found[f"logits of layer {n}"] = layer.self_attention.core_attention.current_max_attn_logits.clone()
        assert logged >= float(found[f"logits of layer {n}"].max()) > THRESHOLD
    if not model.config.qk_clip:
        return None, found
    before = {name: p.clone() for name, p in model.named_parameters()}
    clip_qk([chunk])
    assert all(layer.self_attention.core_attention.current_max_attn_logits is None for layer in layers)
    after = {name: p.detach() for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert after, "nothing was clipped"
    return None, found | after


@pytest.mark.supports("qk_clip, log_max_attention_logit", with_="windows, MLA, Ulysses; cp = 2; tp = 2, cp = 2")
def test_clipping():
    cases = [Case(cp=2, extra=CLIP, **schedule) for schedule in (*schedules(2), {"cp_comm_type": "a2a"})]
    cases += [Case(cp=2, extra=(*CLIP, ("window_size", (5, 0)))), Case(cp=2, mla=True, extra=CLIP)]
    check(2, cases, run=clipped)


@pytest.mark.slow
@pytest.mark.supports("qk_clip, log_max_attention_logit", with_="windows, MLA, Ulysses; cp = 2; tp = 2, cp = 2")
def test_clipping_with_tensor_parallelism():
    # with tp > 1 and without MLA, Megatron-core 0.16's clip_qk itself fails (it takes the sizes of all ranks)
    log = (("log_max_attention_logit", True),)
    check(4, [Case(cp=2, tp=2, extra=log), Case(cp=2, tp=2, mla=True, extra=CLIP)], run=clipped)
