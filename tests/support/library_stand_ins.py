"""torch's operators of cuDNN and FlashAttention on the CPU, with dense attention inside. torch checks names and types
of arguments by its own schemas, and what is here shapes, strides and values."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import ClassVar

import torch

from megatron_tree.core.kernels import aten, decoders, libraries


def check_rows(*tensors):
    """What the kernels need of tensors [..., d], and don't always check."""
    for x in tensors:
        assert x.shape[-1] % 8 == 0 and x.shape[-1] == tensors[0].shape[-1] and x.stride(-1) == 1
        rows = [stride for n, stride in zip(x.shape[:-1], x.stride()) if n > 1]
        assert x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in rows), x.stride()


def band(n: int, m: int, causal: bool, window=(-1, -1)) -> torch.Tensor:
    """flash-attn's mask, bool [n, m]: aligned at the last query and the last key; -1 is unbounded."""
    distance = torch.arange(m) - torch.arange(n)[:, None] - (m - n)
    left, right = window[0], 0 if causal else window[1]
    keep = torch.ones(n, m, dtype=torch.bool) if left < 0 else distance >= -left
    return keep if right < 0 else keep & (distance <= right)


def dense_forward(q, k, v, keep, scale):
    """[b, h, s, d], keep bool [..., s_q, s_k] -> out in their dtype, lse [b, h, s]."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = (q.double() @ k.mT * scale).masked_fill(~keep, float("-inf"))
    return (s.softmax(-1) @ v).to(q.dtype), s.logsumexp(-1).float()


def dense_backward(dout, q, k, v, out, lse, keep, scale):
    """From the lse and the `out` that are given, of which only rowsum(dout * out) counts."""
    group = q.shape[1] // k.shape[1]
    wide = [x.double().repeat_interleave(group, 1) for x in (k, v)]
    p = torch.exp(q.double() @ wide[0].mT * scale - lse.double()[..., None]).masked_fill(~keep, 0)
    delta = (dout.double() * out.double()).sum(-1, keepdim=True)
    ds = p * (dout.double() @ wide[1].mT - delta) * scale
    sums = (x.unflatten(1, (-1, group)).sum(2) for x in (ds.mT @ q.double(), p.mT @ dout.double()))
    return tuple(x.to(q.dtype) for x in (ds @ wide[0], *sums))


class Cudnn:
    """aten's cuDNN operators; their causal masks are used on squares only."""

    @staticmethod
    def forward(q, k, v, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale=None):
        assert bias is None and with_lse and dropout == 0.0 and not debug
        check_rows(q, k, v)
        assert not causal or q.shape[2] == k.shape[2]
        out, lse = dense_forward(q, k, v, band(q.shape[2], k.shape[2], causal), scale)
        nothing = torch.empty(0)
        return out, lse[..., None], nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing

    @staticmethod
    def backward(dout, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, dropout, causal, *, scale=None):
        assert bias is cu_q is cu_k is None and (max_q, max_k, dropout) == (q.shape[2], k.shape[2], 0.0)
        check_rows(dout, q, k, v, out)
        assert lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
        keep = band(q.shape[2], k.shape[2], causal)
        return dense_backward(dout, q, k, v, out, lse[..., 0], keep, scale)


class Flash:
    """aten's flash operators: [b, s, h, d], or with cu_q and cu_k [rows, h, d] and lse [h, rows]; lse to the base e."""

    calls: ClassVar[list] = []
    """The bands of calls: (causal, left, right), and the number of documents."""

    @staticmethod
    def documents(q, k, cu_q, cu_k, max_q, max_k, causal, window) -> list[tuple[slice, slice, torch.Tensor]]:
        """Rows of q and k of each document and its mask, in which each query sees something."""
        Flash.calls.append(((causal, *window), 1 if cu_q is None else len(cu_q) - 1))
        if cu_q is None:
            assert cu_k is None and q.dim() == k.dim() == 4 and (max_q, max_k) == (q.shape[1], k.shape[1])
            bounds = [[0, max_q], [0, max_k]]
        else:
            assert q.dim() == k.dim() == 3 and cu_q.shape == cu_k.shape
            assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (cu_q, cu_k))
            bounds = [cu_q.tolist(), cu_k.tolist()]
            assert [x[0] for x in bounds] == [0, 0] and [x[-1] for x in bounds] == [len(q), len(k)]
            assert [max(y - x for x, y in itertools.pairwise(b)) for b in bounds] == [max_q, max_k]
        spans = zip(*([slice(*pair) for pair in itertools.pairwise(b)] for b in bounds))
        found = [(x, y, band(x.stop - x.start, y.stop - y.start, causal, window)) for x, y in spans]
        assert all(keep.any(1).all() for *_, keep in found)
        return found

    @staticmethod
    def forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=-1,
        window_size_right=-1, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        assert dropout == 0.0 and not debug
        check_rows(q, k, v)
        window, nothing = (window_size_left, window_size_right), torch.empty(0)
        if seqused_k is not None or block_table is not None:
            assert cu_q is cu_k is None and not causal and window == (-1, -1) and max_q == q.shape[1]
            out, lse = Flash.decode(q, k, v, max_k, scale, seqused_k, block_table)
            return out, lse, nothing, nothing, nothing
        parts = []
        for of_q, of_k, keep in Flash.documents(q, k, cu_q, cu_k, max_q, max_k, causal, window):
            some = [x.unsqueeze(0) if cu_q is not None else x for x in (q, k, v)]
            some = [x[:, rows].transpose(1, 2) for x, rows in zip(some, (of_q, of_k, of_k))]
            parts.append(dense_forward(*some, keep, scale))
        out, lse = (torch.cat(x, 2) for x in zip(*parts))
        out = out.transpose(1, 2).contiguous()
        return out.view(q.shape), lse if cu_q is None else lse[0], nothing, nothing, nothing

    @staticmethod
    def decode(q, k, v, max_k, scale, lengths, table):
        assert lengths.dtype == torch.int32 and lengths.shape == (len(q),) and lengths.is_contiguous()
        if table is not None:
            assert table.dtype == torch.int32 and table.is_contiguous() and len(table) == len(q)
            assert max_k == table.shape[1] * k.shape[1]
            k, v = (x[table.long()].flatten(1, 2) for x in (k, v))
        assert max_k == k.shape[1]
        keep = (torch.arange(max_k) < lengths[:, None])[:, None, None]
        k, v = (x.masked_fill(~keep[:, 0, 0, :, None, None], 0) for x in (k, v))
        out, lse = dense_forward(*(x.transpose(1, 2) for x in (q, k, v)), keep, scale)
        return out.transpose(1, 2), lse.masked_fill(lengths[:, None, None] == 0, float("inf"))

    @staticmethod
    def backward(
        dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, *, scale=None,
        window_size_left=-1, window_size_right=-1,
    ):  # fmt: skip
        assert dropout == 0.0 and lse.is_contiguous()
        assert lse.shape == ((*q.shape[:1], q.shape[2], q.shape[1]) if cu_q is None else (q.shape[1], len(q)))
        check_rows(dout, out, q, k, v)
        window = (window_size_left, window_size_right)
        given = [x.unsqueeze(0) if cu_q is not None else x for x in (dout, q, k, v, out)]
        lse = lse.unsqueeze(0) if cu_q is not None else lse
        parts = []
        for of_q, of_k, keep in Flash.documents(q, k, cu_q, cu_k, max_q, max_k, causal, window):
            some = [x[:, rows].transpose(1, 2) for x, rows in zip(given, (of_q, of_q, of_k, of_k, of_q))]
            parts.append(dense_backward(*some, lse[..., of_q], keep, scale))
        grads = (torch.cat(x, 2).transpose(1, 2).contiguous() for x in zip(*parts))
        return tuple(grad.view(x.shape) for grad, x in zip(grads, (q, k, v)))


@contextlib.contextmanager
def stand_ins_of_libraries(monkeypatch) -> Iterator[list]:
    """The operators on the CPU; a machine where each library is installed; what torch's flash kernel became."""
    registered = torch.library.Library("aten", "IMPL")
    for name, operators in (("_scaled_dot_product_cudnn_attention", Cudnn), ("_flash_attention", Flash)):
        forward = name if operators is Cudnn else f"{name}_forward"
        registered.impl(forward, operators.forward, "CPU")
        registered.impl(f"{name}_backward", operators.backward, "CPU")
    activated = []
    for name, stand_in in {
        "list_flash_attention_impls": lambda: ["FA3", "FA4"],
        "activate_flash_attention_impl": activated.append,
        "restore_flash_attention_impl": lambda: activated.append(None),
        "current_flash_attention_impl": lambda: activated[-1] if activated else None,
    }.items():
        monkeypatch.setattr(torch.nn.attention, name, stand_in, raising=False)
    monkeypatch.setattr(aten, "GPUS", ("cpu",))
    monkeypatch.setattr(libraries, "_cudnn_takes", lambda device, dtype, head_dim: True)
    monkeypatch.setattr(libraries, "_installed", lambda module: True)
    monkeypatch.setattr(decoders, "installed", lambda module: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    Flash.calls.clear()
    try:
        yield activated
    finally:
        registered._destroy()
