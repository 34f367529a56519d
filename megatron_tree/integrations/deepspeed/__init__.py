"""Tree attention under DeepSpeed: what users import.

`init_inference` for generation, `register_sequence_parallel` for training.
"""

from ..transformers.infer.engine import generate
from .inference import init_comm, init_distributed, init_inference
from .training import SequenceParallelMpu, register_sequence_parallel

__all__ = [
    "SequenceParallelMpu",
    "generate",
    "init_comm",
    "init_distributed",
    "init_inference",
    "register_sequence_parallel",
]
