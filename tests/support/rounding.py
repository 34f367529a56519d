"""How far a result may lie from another one: limits that follow from dtype, length of sums and size of the tensor.

A sum of n terms, in whatever order a processor adds them, is off by about eps * sqrt(n) of its size, since roundings
have random signs. An entry that cancels out is measured by the largest one of its tensor.
"""

import math

import torch

MARGIN = 4  # between a typical error and the largest one of all entries


def rounding(length, dtype=torch.float32):
    """The largest relative error to be expected of sums of `length` terms in `dtype`."""
    return MARGIN * torch.finfo(dtype).eps * math.sqrt(length)


def error(x, want):
    """Largest error of x, relative to the largest entry of `want`; infinities must be the same."""
    x, want = x.detach().double(), want.detach().double()
    assert x.shape == want.shape, (x.shape, want.shape)
    gap = torch.where(x == want, 0.0, x - want).abs()
    size = want.abs().where(want.isfinite(), 0.0)
    return float(gap.max() / size.max().clamp(min=torch.finfo(torch.float64).tiny)) if gap.numel() else 0.0


def assert_near(x, want, length, what="", dtype=torch.float32):
    """x is `want`, apart from the rounding of sums of `length` terms."""
    found, limit = error(x, want), rounding(length, dtype)
    assert found <= limit, f"{what}: an error of {found:.2e} of the largest entry, allowed is {limit:.2e}"
