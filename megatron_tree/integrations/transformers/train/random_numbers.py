"""Random numbers of a model that trains on shards, and of the ranks that share a sequence.

The ranks of a sequence draw the same numbers, for batches and samples; `share_random_numbers` makes them. What a model
draws is of tokens, of which each rank has its own: dropout of embeddings and hidden states, the noise of routers and of
NEFTune. `draw_by_rank` gives it numbers of its rank. Attention dropout does not depend on the ranks (`dropout_seed`).
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from ....core.comm import Ranks, group_rank, group_size, outside_graphs
from ....core.comm.wire import share
from .batch_shards import SequenceShard


def _generators() -> list[torch.Generator]:
    """What torch draws from on the CPU and, if it is in use, on the current GPU."""
    if not torch.cuda.is_initialized():
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


def share_random_numbers(group) -> None:
    """Make Python, numpy and torch draw on all ranks what they draw on the group's first one. Collective."""
    if (ranks := Ranks.of(group)).size == 1:
        return
    name, keys, *position = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *position],
        "torch": [x.get_state().tolist() for x in _generators()],
    }
    states = share(states, ranks)
    version, inner, gauss = states["python"]
    random.setstate((version, tuple(inner), gauss))
    np.random.set_state(tuple(states["numpy"]))
    for generator, state in zip(_generators(), states["torch"], strict=True):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))


class DrawsByRank:
    """Hooks around the forward of a model that trains on a shard: it draws other numbers on every rank.

    Afterwards the generators go on from where they were before, one number later if the model has drawn any. So ranks
    that drew the same still do, and what the states of a checkpoint restore includes what the model draws.
    """

    def __init__(self):
        self.noise, self.drawn = None, []

    def begin(self, model, args, kwargs) -> None:
        shard = kwargs.get("sequence_shard")
        if shard is None or not model.training:
            return
        self._scale_noise(model.get_input_embeddings(), shard)
        if group_size(shard.cp_group) == 1:
            return
        rank = group_rank(shard.cp_group).to_bytes(8, "little")
        with torch._C._DisableFuncTorch():  # states are plain tensors, within torch.func too
            for generator in _generators():
                state = generator.get_state()
                digest = hashlib.blake2b(state.numpy().tobytes() + rank, digest_size=8).digest()
                generator.manual_seed(int.from_bytes(digest, "big") >> 1)  # below 2**63
                self.drawn.append((generator, state, generator.get_state()))

    def end(self, model, args, output) -> None:
        """Also after an error."""
        if self.noise is not None:
            embeddings, embeddings.neftune_noise_alpha = self.noise
            self.noise = None
        with torch._C._DisableFuncTorch():
            while self.drawn:
                generator, state, seeded = self.drawn.pop()
                used = not torch.equal(generator.get_state(), seeded)
                generator.set_state(state)
                if used:
                    torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator)

    def _scale_noise(self, embeddings: torch.nn.Module, shard: SequenceShard) -> None:
        """NEFTune divides its noise by the root of the length of what it gets: here of whole rows, not of a shard."""
        alpha = getattr(embeddings, "neftune_noise_alpha", None)
        if alpha is None:
            return
        width = shard.whole_shape[1] if shard.prefix_tree is None else int(shard.row_lengths)
        self.noise = embeddings, alpha
        embeddings.neftune_noise_alpha = alpha * (shard.num_tokens / width) ** 0.5


def draw_by_rank(model) -> None:
    """Make the model draw other random numbers on every rank of a sequence when it trains on a shard."""
    draws = DrawsByRank()
    model.register_forward_pre_hook(outside_graphs(draws.begin), with_kwargs=True)
    model.register_forward_hook(outside_graphs(draws.end), always_call=True)
