"""How much of the package one call enters: files, functions, and calls of Python functions, on the first of 4 ranks.

Each number has a little room. Who needs more should first look for what can be bound once.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_tree
from megatron_tree import TreeConfig, tree_attn_func, tree_decode
from support.ranks import run_distributed

PACKAGE = str(Path(megatron_tree.__file__).parent)
REPEATED = 40
LIMITS = {  # files, functions, calls
    "training, first": (39, 480, 5300),
    "training, repeated": (25, 170, 530),
    "decoding, first": (33, 205, 640),
    "decoding, repeated": (20, 43, 52),
}


def _entered(call):
    files, functions, count = set(), set(), 0

    def profile(frame, event, arg):
        nonlocal count
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            files.add(code.co_filename)
            functions.add((code.co_filename, code.co_qualname))
            count += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(files), len(functions), count


def _counts(rank, world):
    group, config = dist.group.WORLD, TreeConfig(topology="ethernet", tune=False)
    q, k, v = (torch.randn(1, 256, heads, 64, requires_grad=True) for heads in (8, 2, 2))
    query, cache = torch.randn(1, 1, 8, 64), torch.randn(2, 1, 100, 2, 64)

    def train():
        out = tree_attn_func(q, k, v, cp_group=group, config=config)
        out.backward(out.detach())

    def decode():
        tree_decode(query, *cache, cp_group=group, config=config)

    found = {}
    for name, call in (("training", train), ("decoding", decode)):
        found[f"{name}, first"] = _entered(call)
        for _ in range(REPEATED):
            call()
        found[f"{name}, repeated"] = min(_entered(call) for _ in range(3))
    return found


def test_what_one_call_enters():
    found = run_distributed(_counts, 4, fresh=True)[0]
    print(found)
    over = {name: (found[name], limit) for name, limit in LIMITS.items() if any(map(int.__gt__, found[name], limit))}
    assert not over, over
