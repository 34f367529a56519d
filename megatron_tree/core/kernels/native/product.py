"""`product`: of a few rows with weights, on a CPU. It reads these as fast as memory gives them; libraries are made for
many rows (on processors of AMD MKL takes twice as long, for one row to eight)."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ...log import say_once
from ...tape import launch
from . import load_library

ROWS = 1, 2, 4, 8
DTYPES = torch.float32, torch.bfloat16, torch.float16


class _Product(ctypes.Structure):
    """`Product` of product.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "width", "num_out", "weights_row")),
        *((name, ctypes.c_void_p) for name in ("x", "weights", "bias", "out")),
    ]


def product(x: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """x [rows, n] times weights [m, n], plus bias [m]: [rows, m] in their dtype, summed in fp32. None if that is for
    torch: other numbers of rows, shapes, dtypes or layouts, several threads, no C compiler."""
    rows, width, num_out = *x.shape, len(weights)
    is_known = rows in ROWS and x.dtype in DTYPES and x.device.type == "cpu"
    fits = (weights.shape[1], weights.stride(1), weights.dtype) == (width, 1, x.dtype)
    if not (is_known and fits) or torch.get_num_threads() > 1 or (bias is not None and bias.shape != (num_out,)):
        return None
    if isinstance(library := _library(weights.dtype), str):
        say_once(f"products with weights are left to torch: {library}")
        return None
    out = torch.empty(rows, num_out)
    tensors = x.float().contiguous(), weights, None if bias is None else bias.float().contiguous(), out
    tensors = [None if y is None else y.detach() for y in tensors]  # `y.data = z` gives y other memory
    call = _Product(rows, width, num_out, weights.stride(0), *(None if y is None else y.data_ptr() for y in tensors))
    call.tensors = tensors  # their memory is kept
    launch(library.multiply, call)
    return out.to(x.dtype)


def _of_one_operation(*args: Tensor, **options) -> Tensor | None:
    """addmm(bias, x, weights.t()), or mm without a bias."""
    *bias, x, weights = args
    return None if options else product(x, weights.t(), *bias)


PRODUCTS = {torch.ops.aten.mm.default: _of_one_operation, torch.ops.aten.addmm.default: _of_one_operation}
"""The kernels of a `Tape`."""


@functools.lru_cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | str:
    """The kernel for weights of a dtype, or why there is none."""
    library = load_library("product.c", dtype)
    if not isinstance(library, str):
        library.multiply.argtypes, library.multiply.restype = [ctypes.POINTER(_Product)], None
    return library
