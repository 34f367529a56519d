"""One layer's shard of a KV cache: which slots this rank holds, and their keys, values and positions.

New tokens go to ranks in blocks, round robin, so that every rank's share grows evenly. Rank-local: no communication.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROWTH = 8  # a full buffer grows by 1/GROWTH of its size: at most that much memory is spare


def slot_owner(slots: Tensor, world: int, block_size: int) -> Tensor:
    """The rank that owns each slot (int64, any shape): blocks of block_size slots go round robin."""
    return torch.div(slots, block_size, rounding_mode="floor") % world


class ShardedKVLayer:
    """The rows of one layer's KV cache that live on this rank.

    Args: rank, world: this rank's place in the group the cache is sharded over; block_size: neighbouring slots that go
    to one rank. Keys [b, n, h_kv, d], values [b, n, h_kv, d_v]; positions int64 [b or 1, n], -1 = hidden (padding).
    """

    def __init__(self, rank: int, world: int, block_size: int = 16):
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} is not one of world={world} ranks")
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be at least 1")
        self.rank, self.world, self.block_size = rank, world, block_size
        self.reset()

    def reset(self) -> None:
        """Forget every token and free the memory."""
        self.num_tokens = 0
        self._k = self._v = self._slots = self._positions = None

    def append(self, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor | None = None) -> None:
        """Keep this rank's part of new tokens that every rank was given.

        k [b, n, h_kv, d], v [b, n, h_kv, d_v]; slots int64 [n], their places in the whole cache; positions [n] or
        [b, n], default the slots.
        """
        self._check(k, v, slots)
        mine = slot_owner(slots, self.world, self.block_size) == self.rank
        if not bool(mine.all()):
            k, v = k[:, mine], v[:, mine]
            positions = positions if positions is None else positions[..., mine]
            slots = slots[mine]
        self.append_own(k, v, slots, positions)

    def append_own(self, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor | None = None) -> None:
        """Keep rows that are this rank's already, whatever their slots: a prefill with the sequence sharded."""
        self._check(k, v, slots)
        n = slots.shape[0]
        positions = (slots if positions is None else positions).to(torch.int64)
        positions = positions[None] if positions.dim() == 1 else positions
        if tuple(positions.shape) not in ((1, n), (k.shape[0], n)):
            raise ValueError(f"positions has shape {tuple(positions.shape)}: give [{n}] or [{k.shape[0]}, {n}]")
        self._reserve(self.num_tokens + n, k, v, positions)
        new = slice(self.num_tokens, self.num_tokens + n)
        self._k[:, new], self._v[:, new], self._slots[new] = k, v, slots
        self._positions[:, new] = positions
        self.num_tokens += n

    def _check(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)} must be [batch, tokens, num_heads_kv, head_dim]"
            )
        if tuple(slots.shape) != (k.shape[1],):
            raise ValueError(f"slots has shape {tuple(slots.shape)} for {k.shape[1]} tokens: give one slot per token")
        if self._k is not None and (k.shape[0], k.shape[2:]) != (self._k.shape[0], self._k.shape[2:]):
            raise ValueError(
                f"k {tuple(k.shape)} does not fit the cache's [{self._k.shape[0]}, *, {tuple(self._k.shape[2:])}]"
            )

    def _reserve(self, need: int, k: Tensor, v: Tensor, positions: Tensor) -> None:
        rows = positions.shape[0]
        if self._k is None:
            # the first rows are the prompt: exactly that and one block
            self._allocate(need + self.block_size, k, v, k.shape[0], rows)
            return
        rows = max(rows, self._positions.shape[0])
        if need > self._k.shape[1]:
            self._allocate(
                max(need, self._k.shape[1] + self._k.shape[1] // GROWTH + self.block_size), k, v, k.shape[0], rows
            )
        elif rows > self._positions.shape[0]:
            self._positions = self._positions.expand(rows, -1).clone()

    def _allocate(self, capacity: int, k: Tensor, v: Tensor, batch: int, rows: int) -> None:
        old, n = (self._k, self._v, self._slots, self._positions), self.num_tokens
        self._k = k.new_empty((batch, capacity, *k.shape[2:]))
        self._v = v.new_empty((batch, capacity, *v.shape[2:]))
        self._slots = torch.full((capacity,), -1, dtype=torch.int64, device=k.device)
        self._positions = torch.full((rows, capacity), -1, dtype=torch.int64, device=k.device)
        if n:
            self._k[:, :n], self._v[:, :n] = old[0][:, :n], old[1][:, :n]
            self._slots[:n], self._positions[:, :n] = old[2][:n], old[3][:, :n]

    @property
    def k(self) -> Tensor:
        """Keys of this rank's tokens [b, num_tokens, h_kv, d], a view; set by the first append."""
        return self._k[:, : self.num_tokens]

    @property
    def v(self) -> Tensor:
        """Values of this rank's tokens [b, num_tokens, h_kv, d_v], a view."""
        return self._v[:, : self.num_tokens]

    @property
    def positions(self) -> Tensor:
        """Positions of this rank's tokens, int64 [b or 1, num_tokens]; -1 = hidden."""
        return self._positions[:, : self.num_tokens]

    @property
    def slots(self) -> Tensor:
        """Slots in the whole cache of this rank's tokens, int64 [num_tokens]."""
        return self._slots[: self.num_tokens]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held by tokens; spare capacity (at most 1/8 and a block) is not counted."""
        return 0 if self._k is None else self.k.numel() * self.k.element_size() + self.v.numel() * self.v.element_size()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of keys and values allocated, spare capacity included."""
        return 0 if self._k is None else self._k.nbytes + self._v.nbytes

    def crop(self, num_slots: int) -> None:
        """Forget every token at slot num_slots or later (rejected speculation, a shorter conversation)."""
        if self._k is None:
            return
        keep = self.slots < num_slots
        if not bool(keep.all()):
            n = int(keep.sum())
            for x, dim in ((self._k, 1), (self._v, 1), (self._slots, 0), (self._positions, 1)):
                x.narrow(dim, 0, n).copy_(x.narrow(dim, 0, self.num_tokens).index_select(dim, keep.nonzero()[:, 0]))
            self.num_tokens = n

    def reorder(self, index: Tensor) -> None:
        """Replace batch row i by row index[i] (beam search); index int64 [new b]."""
        if self._k is None:
            return
        self._k, self._v = self._k.index_select(0, index), self._v.index_select(0, index)
        if self._positions.shape[0] > 1:
            self._positions = self._positions.index_select(0, index)
