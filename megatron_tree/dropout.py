"""The mask of attention dropout: a pure function of which query meets which key, the same in every backend.

Pair (query position, key position, head, sequence) is the counter and the seed the key of Philox-4x32 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011); the pair is dropped when the first word is below p * 2**32. No
state and no order: whatever the grid of ranks, the cut into blocks and the backend, a pair has the same fate. Seven
rounds are the fewest for which the paper found no failure in BigCrush.

Dropout scales values, not probabilities: the weight exp(s_a - lse) meets keep_a / (1 - p) * v_a, so lse and the merge
of partial results stay those of attention without dropout. `energy` takes the weights made here in just this sense.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import Dropout

ROUNDS = 7
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def threshold(p: float) -> int:
    """The first word, 0 .. 2**32 - 1, that is kept."""
    return min(int(p * 2**32), _WORD)


def seed_words(seed: int) -> tuple[int, int]:
    """The lower and the upper 32 bits: Philox's key."""
    return seed & _WORD, seed >> 32 & _WORD


def philox(key: tuple[int, int], c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    """First word of Philox-4x32 of int64 counters, broadcast; each holds 32 bits (negative ones modulo 2**32)."""
    c0, c1, c2, c3 = (c & _WORD for c in (c0, c1, c2, c3))
    k0, k1 = key
    for _ in range(ROUNDS):
        high, low = _product(c2, _MULTIPLIERS[1])
        next_high, next_low = _product(c0, _MULTIPLIERS[0])
        c0, c1, c2, c3 = high ^ c1 ^ k0, low, next_high ^ c3 ^ k1, next_low
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of x * factor in int64: the factor goes in two halves, so that nothing overflows."""
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
    """What every pair's value is multiplied by: 1 / (1 - p) where it is kept, else 0.

    Args: q_positions int64 [s_q], k_positions int64 [s_k]; q_sequences int64 [s_q], the number of each query's packed
    document (None: one sequence). Returns: `dtype` [batch, num_heads, s_q, s_k]. Batch row r of document n has the
    sequence number r + n: rows of a batch, or packed documents, all differ.
    """
    device = q_positions.device
    heads = torch.arange(num_heads, device=device)[:, None, None] + dropout.first_head
    rows = torch.arange(batch, device=device)[:, None, None, None]
    sequences = rows if q_sequences is None else rows + q_sequences[:, None]
    word = philox(seed_words(dropout.seed), q_positions[:, None], k_positions, heads, sequences)
    return (word >= threshold(dropout.p)).to(dtype) / (1.0 - dropout.p)
