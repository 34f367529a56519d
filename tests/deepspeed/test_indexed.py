"""init_inference of models whose queries see the keys that an index selects, with whole weights and with shares."""

import pytest
import torch

from megatron_tree.integrations import deepspeed as tree_deepspeed
from support.hf_architectures import assert_logits, random_model
from support.hf_models import glm5_next, plain, prompt
from support.ranks import on_ranks

NEW = 6


@pytest.mark.parametrize(
    ("name", "weights"), [("deepseek_v32", "replicated"), ("deepseek_v32", "sharded"), ("dots3_note", "replicated")]
)
@on_ranks(2, timeout=200.0)
def test_engine_equals_the_plain_model(name, weights):
    model, ids = random_model(name), prompt(1, 45)
    want = plain(model, ids, NEW)
    engine = tree_deepspeed.init_inference(model, weights=weights, page_size=2, prefill_chunk=16)
    result = tree_deepspeed.generate(engine, ids, max_new_tokens=NEW, keep_logits=True)
    assert result.prefill == "sharded"
    assert torch.equal(result.tokens, want[0])
    assert_logits(torch.stack(result.logits, 1), want[1], weights)


@pytest.mark.refuses("`deepseek_v32` with tp_size above 1", when="init_inference: AutoTP would split an index")
def test_tensor_parallelism_is_refused():
    with pytest.raises(ValueError, match="tp_size=2: DeepseekV32Config has layers with an index"):
        tree_deepspeed.init_inference(random_model("deepseek_v32"), tp_size=2)


def test_tensor_parallelism_of_pools_is_refused():
    model = glm5_next(layer_types=["indexed_attention"] * 3)  # recurrent layers have a refusal of their own
    with pytest.raises(ValueError, match="tp_size=2: Glm5NextTextConfig has layers with an index"):
        tree_deepspeed.init_inference(model, tp_size=2)
