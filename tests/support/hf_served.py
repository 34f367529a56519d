"""What every served model has to do: its tokens and logits are those of the plain model, whatever runs it."""

import torch
import torch.distributed as dist

from megatron_tree.integrations import transformers as tree_hf
from support.hf_models import hf_generate, left_padded, plain, prompt


def check_served(model, *, new_tokens, padded, short, steps, limit):
    """On this rank of the default group: `generate`, `model.generate`, left padding, ragged rows, and no cache.

    padded: tokens of the longest padded row. short: those of the shorter ragged row, the last `steps` in one step.
    """
    ids, (padded, mask) = prompt(2, 37), left_padded(2, padded)
    want, of_padded = plain(model, ids, new_tokens), plain(model, padded, new_tokens, mask)
    with torch.no_grad():
        alone = [model(ids[:1]).logits[0], model(ids[1:, :short]).logits[0]]

    def close(got, want, what):
        error = float((got - want).abs().max() / want.abs().max())
        assert error < limit, f"{what}: {error:.1e}"

    def new_cache():
        return tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD, block_size=2)

    model.set_attn_implementation("tree")
    result = tree_hf.generate(model, ids, cache=new_cache(), max_new_tokens=new_tokens, chunk_size=16, keep_logits=True)
    for what, (tokens, logits), (want_tokens, want_logits) in (
        ("generate", (result.tokens, torch.stack(result.logits, 1)), want),
        ("model.generate", hf_generate(model, ids, new_tokens, past_key_values=new_cache()), want),
        ("left padding", hf_generate(model, padded, new_tokens, mask, past_key_values=new_cache()), of_padded),
    ):
        close(logits, want_logits, what)
        assert torch.equal(tokens, want_tokens), what
    runner = tree_hf.Runner(model, new_cache(), chunk_size=16)
    rows, lengths = [runner.add(), runner.add()], (37 - steps, short - steps)
    for row, own, length in zip(rows, ids, lengths):
        runner.prefill(row, own[:length])
    last = torch.stack([own[n : n + steps] for own, n in zip(ids, lengths)])
    for own, truth in zip(runner.step(rows, last), alone):
        close(own, truth[-steps:], "ragged rows")
    with torch.no_grad():
        close(model(ids, use_cache=False).logits[0], alone[0], "no cache")
