"""A small decoder over the sharded cache that needs torch alone: what the runner of a cache does, in little time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache import ShardedCache
from ..cache.forward import ForwardPass
from ..cache.runner import RowRunner
from ..comm import group_rank, group_size
from ..config import TreeConfig

VOCAB = 128


class SmallRunner(RowRunner):
    """A decoder of random weights, the same on every rank, and its rows.

    Args:
        heads: query heads and KV heads. windows: of every layer, how many of the last tokens a query sees; None: all.
        page_size, cache_dtype: of the cache. options: of `RowRunner`.
    """

    def __init__(
        self,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 16,
        windows: Sequence[int | None] = (None, None),
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
        cache_dtype: str = "auto",
        cp_group=None,
        config: TreeConfig | None = None,
        **options,
    ):
        place = dict(rank=group_rank(cp_group), world=group_size(cp_group))
        store = ShardedCache(list(windows), page_size=page_size, dtype=cache_dtype, **place)
        (h, h_kv), width, generator = heads, heads[0] * head_dim, torch.Generator().manual_seed(1)

        def weight(rows: int, columns: int) -> Tensor:
            return (2 * torch.randn(rows, columns, generator=generator) / rows**0.5).to(device, dtype)

        self._heads, self._windows, self._words = (h, h_kv, h_kv), windows, weight(VOCAB, width)
        self._layers = [(weight(width, (h + 2 * h_kv) * head_dim), weight(width, width)) for _ in windows]
        self._periods = (1e4 ** torch.linspace(0, 1, width)).to(device)
        super().__init__(
            store,
            cp_group=cp_group,
            token_group=cp_group,
            device=torch.device(device),
            vocab_size=VOCAB,
            max_positions=None,
            config=config,
            **options,
        )

    def _run(self, forward: ForwardPass, tokens: Tensor, positions: Tensor, keep: list[int] | None) -> Tensor:
        x = self._words[tokens] + torch.sin(positions[..., None] / self._periods).to(self._words.dtype)
        for layer, (projection, weight) in enumerate(self._layers):
            window = self._windows[layer]
            heads = (torch.nn.functional.layer_norm(x, x.shape[-1:]) @ projection).unflatten(-1, (sum(self._heads), -1))
            q, k, v = heads.split(self._heads, 2)
            forward.write(layer, k, v)
            sides = (-1, -1) if window is None else (window - 1, 0)
            out = forward.attend(layer, q, config=self.config, window_size=sides)
            x = x + torch.tanh(out.flatten(2) @ weight)
        return (x if keep is None else x[:, keep]) @ self._words.t()
