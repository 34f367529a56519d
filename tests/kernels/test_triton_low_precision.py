"""bf16 and fp16 in the compiled Triton kernels: on a GPU, or without one under --ptx (tests/ptx)."""

import pytest
import torch

from megatron_tree.core.kernels.triton import host
from megatron_tree.tools.bench.low_precision import DECODING, TRAINING, check_decoding, check_training
from support.triton_inputs import DEVICE, skip_without

pytestmark = pytest.mark.skipif(host.interpreting(), reason="the interpreter computes bf16 wrongly: use --ptx or a GPU")
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("case", TRAINING)
def test_training(case, dtype):
    check_training(TRAINING[case], LOW[dtype], DEVICE, "triton")


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("case", DECODING)
def test_decoding(case, dtype):
    skip_without(DECODING[case].stored)
    check_decoding(DECODING[case], LOW[dtype], DEVICE, "triton")
