"""Caches in pages, as decode kernels read them."""

import torch


def paged(x, size, seed=0):
    """x [b, n, ...] in pages of `size` that lie in no order, with their block table; NaN (100 in 8 bits) in slots
    behind a row and in pages of nobody."""
    b, n, spare = x.shape[0], -(-x.shape[1] // size), float("nan") if x.dtype.itemsize > 1 else 100
    x = torch.nn.functional.pad(x, (*(0, 0) * (x.dim() - 2), 0, n * size - x.shape[1]), value=spare)
    table = torch.randperm(b * n + 3, generator=torch.Generator().manual_seed(seed))[: b * n].reshape(b, n).to(x.device)
    pages = torch.full((b * n + 3, size, *x.shape[2:]), spare, dtype=torch.float32, device=x.device).to(x.dtype)
    pages.view(torch.uint8)[table] = x.unflatten(1, (n, size)).contiguous().view(torch.uint8)
    return pages, table.to(torch.int32)
