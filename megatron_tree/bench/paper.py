"""What the Tree Attention paper (arXiv 2408.04093) publishes: its setups, formulas and numbers, nothing of ours."""

from __future__ import annotations

from typing import NamedTuple

# Figure 3: one attention block of 16 heads of 128 on 1, 8 and 16 DGX H100 nodes, bf16, 80k to 5.12M tokens, relative to
# the ring at 80k tokens. The text gives one number, the rest is in the plot only.
HEADS, HEAD_DIM, BYTES_PER_WORD = 16, 128, 2
NODES = (1, 8, 16)
SEQ_LENS = tuple(80_000 << i for i in range(7))
SPEEDUP_128_GPUS_5M = 8  # "close to x8 speedups when we use 128 GPUs on a sequence length of 5.12M" (section 6.1)

# Figure 4: peak memory of one attention block on two RTX 4090. The text gives by how much the ring's is larger:
MEMORY_GAP_MB = {2048: 524, 4096: 1040}  # by hidden size; it does not say at which length
MEMORY_SEQ_LEN = 128_000  # at which equations 8 and 9 give the first number


class Decoded(NamedTuple):
    """One line of tables 1 and 2: seconds for a prompt and 10 new tokens, mean and standard error of 10 runs."""

    topology: str
    ranks: int
    model: str
    seq_len: int
    tree: tuple[float, float]
    ring: tuple[float, float]


TABLES = (
    Decoded("dgx_h100", 8, "Llama 3.1 8B", 32_000, (0.60, 0.15), (2.57, 0.35)),
    Decoded("dgx_h100", 8, "Llama 3.1 8B", 64_000, (1.08, 0.10), (4.42, 0.38)),
    Decoded("dgx_h100", 8, "Llama 3.1 8B", 128_000, (2.68, 0.28), (6.38, 0.58)),
    Decoded("dgx_h100", 8, "Llama 3.1 8B", 256_000, (2.89, 0.62), (8.19, 1.07)),
    Decoded("mi300x", 4, "Llama 3.1 8B", 32_000, (1.05, 0.01), (3.57, 0.25)),
    Decoded("mi300x", 4, "Llama 3.1 8B", 64_000, (2.36, 0.01), (7.33, 0.25)),
    Decoded("mi300x", 4, "Llama 3.1 8B", 128_000, (6.43, 0.25), (16.40, 0.40)),
    Decoded("mi300x", 4, "Llama 3.1 8B", 256_000, (15.30, 4.93), (35.12, 5.02)),
    Decoded("rtx4090x2", 2, "Llama 3.2 1B", 8_000, (0.34, 0.05), (1.38, 0.07)),
    Decoded("rtx4090x2", 2, "Llama 3.2 1B", 16_000, (0.58, 0.07), (2.77, 0.04)),
    Decoded("rtx4090x2", 2, "Llama 3.2 1B", 20_000, (0.74, 0.01), (3.47, 0.04)),
    Decoded("rtx4090x2", 2, "Llama 3.2 1B", 32_000, (1.01, 0.02), (5.45, 0.03)),
)
NEW_TOKENS = 10


class Model(NamedTuple):
    """Sizes of the models of tables 1 and 2 (Llama's published configurations)."""

    layers: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    parameters: float


MODELS = {
    "Llama 3.1 8B": Model(32, 32, 8, 128, 8.03e9),
    "Llama 3.2 1B": Model(16, 32, 8, 64, 1.24e9),
}


def ring_words(b: int, t: int, d: int, p: int) -> float:
    """Equation 10: elements that the ring moves in a decode step."""
    return 2 * b * t * d * p


def tree_words(b: int, d: int, n_h: int, p: int) -> float:
    """Equation 14: elements that the tree's all-reduces move in a decode step."""
    return 2 * (p - 1) / p * (b * d + 2 * b * n_h)


def ring_memory_words(b: int, t: int, d: int) -> int:
    """Equation 8: elements that the ring holds on a device."""
    return 4 * b * t * d + 2 * b * d


def tree_memory_words(b: int, t: int, d: int, n_h: int) -> int:
    """Equation 9: elements that the tree holds on a device."""
    return 2 * b * t * d + 2 * b * d + 2 * b * n_h
