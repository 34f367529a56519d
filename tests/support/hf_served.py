"""What every model has to do on several ranks: tokens, logits, losses and gradients are those of the plain model."""

import torch
import torch.distributed as dist

from megatron_tree import comm
from megatron_tree.integrations import transformers as tree_hf
from megatron_tree.integrations.transformers.split_model import split_model
from megatron_tree.integrations.transformers.split_rules import ROUTERS, SMALL, plan_layout
from support.hf_architectures import assert_logits
from support.hf_models import hf_generate, left_padded, plain, prompt

NEW = 6
LENGTHS = (33, 13)  # of ragged rows, before a step of 4 tokens, which crosses a boundary of Llama 4's chunks of 7


def check_served(model):
    """On this rank of the default group: `generate`, `model.generate`, left padding, ragged rows, and no cache."""
    ids, (padded, mask) = prompt(2, 37), left_padded(2, 17)
    want, of_padded = plain(model, ids, NEW), plain(model, padded, NEW, mask)
    with torch.no_grad():
        alone = [model(ids[:1]).logits[0], model(ids[1:, : LENGTHS[1] + 4]).logits[0]]

    def new_cache():
        return tree_hf.TreeCache(model.config, cp_group=dist.group.WORLD, page_size=2)

    model.set_attn_implementation("tree")
    result = tree_hf.generate(model, ids, cache=new_cache(), max_new_tokens=NEW, chunk_size=16, keep_logits=True)
    for what, (tokens, logits), (want_tokens, want_logits) in (
        ("generate", (result.tokens, torch.stack(result.logits, 1)), want),
        ("model.generate", hf_generate(model, ids, NEW, past_key_values=new_cache()), want),
        ("left padding", hf_generate(model, padded, NEW, mask, past_key_values=new_cache()), of_padded),
    ):
        assert_logits(logits, want_logits, what)
        assert torch.equal(tokens, want_tokens), what
    runner = tree_hf.Runner(model, new_cache(), chunk_size=16)
    rows = [runner.add(), runner.add()]
    for row, own, length in zip(rows, ids, LENGTHS):
        runner.prefill(row, own[:length])
    last = torch.stack([own[n : n + 4] for own, n in zip(ids, LENGTHS)])
    for own, truth in zip(runner.step(rows, last), alone):
        assert_logits(own, truth[-4:], "ragged rows")
    with torch.no_grad():
        assert_logits(model(ids, use_cache=False).logits[0], alone[0], "no cache")


def check_trained(make, **more):
    """Loss and gradients of a sequence that the ranks share. make() -> the model, the same each time, in evaluation
    mode, since dropout would differ. more: of the batch."""
    world = dist.get_world_size()
    batch = {"input_ids": prompt(2, 21), "labels": prompt(2, 21)} | more
    model = make()
    want = model(**batch, use_cache=False).loss
    want.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model = make()
    tree_hf.train_on_shards(model)
    got = model(**tree_hf.shard_batch(batch, cp_group=dist.group.WORLD)).loss
    got.backward()
    assert abs(float(got - want)) < 2e-5 * float(want)
    largest = max(float(g.abs().max()) for g in grads.values())
    for n, p in model.named_parameters():
        if n in grads:
            grad = torch.zeros_like(p) if p.grad is None else p.grad  # an expert that no token of this shard chose
            dist.all_reduce(grad)
            assert float((grad / world - grads[n]).abs().max()) <= 1e-4 * largest, n


def check_sharded(model):
    """Tokens and logits of a model whose weights all ranks share; a prompt runs whole on all ranks, or shared out."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ids = prompt(1, 45)
    want = plain(model, ids, 3)
    model.set_attn_implementation("tree")
    layout = plan_layout(model, world, rank)
    for name, parameter in model.named_parameters():
        whole = parameter.dim() == 1 or name in layout.of_first_rank  # norms and biases
        whole = whole or {*ROUTERS, *SMALL} & set(name.split("."))
        assert whole or layout.pieces[name].shape(parameter.shape).numel() <= 0.75 * parameter.numel(), name
    group = comm.neighbours(dist.group.WORLD, layout.heads.size, timeout_s=60.0)
    split_model(model, layout, dist.group.WORLD, timeout_s=60.0)
    options = {"token_group": dist.group.WORLD, "chunk_size": 34, "keep_logits": True}
    for model.weight_gathering.forced in (False, True):
        cache = tree_hf.TreeCache(model.config, cp_group=group, head_shares=layout.heads.shares, page_size=2)
        result = tree_hf.generate(model, ids, cache=cache, max_new_tokens=3, **options)
        assert_logits(torch.stack(result.logits, 1), want[1], f"generate, forced={model.weight_gathering.forced}")
        assert torch.equal(result.tokens, want[0])
