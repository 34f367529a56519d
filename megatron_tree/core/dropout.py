"""The mask of attention dropout: a pure function of the seed, the head and the positions, the same in every backend.

(query position, key position, head, sequence) is the counter and the seed is the key of Philox-4x32 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011). A pair is dropped if the first word is below p * 2**32. The
generator has no state, so the decision does not depend on the grid of ranks, the blocks or the backend. Seven rounds
are the fewest for which the paper found no failure in BigCrush.

Dropout scales values, not probabilities: the weight exp(s_a - lse) multiplies keep_a / (1 - p) * v_a, so lse and the
merge of partial results are those of attention without dropout. `energy` applies the weights in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import Dropout

ROUNDS = 7
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def threshold(p: float) -> int:
    """The smallest first word, 0 .. 2**32 - 1, that is kept."""
    return min(int(p * 2**32), _WORD)


def seed_words(seed: int) -> tuple[int, int]:
    """The lower and the upper 32 bits of the seed: Philox's key."""
    return seed & _WORD, seed >> 32 & _WORD


def philox(key: tuple[int, int], c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    """First word of Philox-4x32 for int64 counters, which are broadcast and taken modulo 2**32."""
    c0, c1, c2, c3 = (c & _WORD for c in (c0, c1, c2, c3))
    k0, k1 = key
    for _ in range(ROUNDS):
        high, low = _product(c2, _MULTIPLIERS[1])
        next_high, next_low = _product(c0, _MULTIPLIERS[0])
        c0, c1, c2, c3 = high ^ c1 ^ k0, low, next_high ^ c3 ^ k1, next_low
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of x * factor in int64; the factor is split into two halves to avoid overflow."""
    upper, lower = x * (factor >> 16), x * (factor & 0xFFFF)  # below 2**48
    upper = upper + (lower >> 16)
    return upper >> 16, (upper & 0xFFFF) << 16 | lower & 0xFFFF


def keep_weights(
    dropout: Dropout,
    *,
    batch: int,
    num_heads: int,
    q_positions: Tensor,
    k_positions: Tensor,
    q_sequences: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The factor of every pair's value: 1 / (1 - p) if the pair is kept, else 0.

    Args:
        q_positions: int64 [s_q].
        k_positions: int64 [s_k].
        q_sequences: int64 [s_q], the number of each query's packed document. None: one sequence.

    Returns: `dtype` [batch, num_heads, s_q, s_k]. Document n in batch row r has the sequence number r + n, so rows of a
    batch, or packed documents, get different masks.
    """
    device = q_positions.device
    heads = torch.arange(num_heads, device=device)[:, None, None] + dropout.first_head
    rows = torch.arange(batch, device=device)[:, None, None, None]
    sequences = rows if q_sequences is None else rows + q_sequences[:, None]
    word = philox(seed_words(dropout.seed), q_positions[:, None], k_positions, heads, sequences)
    return (word >= threshold(dropout.p)).to(dtype) / (1.0 - dropout.p)
