"""`tree_recurrence`: a recurrent layer's kernel over the whole sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import comm
from ..attention.sequences import layouts_of
from ..config import TreeConfig, check_positive
from ..duals import goes_backward, has_tangents
from ..layout import Layout, Segment
from ..merge import AffineMaps, state_dtype
from .scan import Chains, Scan, nothing

Kernel = Callable[[tuple[Tensor, ...], Tensor, Tensor | None], tuple[Tensor, Tensor]]


class Decay(NamedTuple):
    """A recurrence whose states decay: S_t = exp(log_decay_t) S_{t-1} + U_t, with outputs readout_t S_t."""

    log_decay: Tensor
    """[b, s_local, h], or [b, s_local, h, d] where each row of the state has its own."""
    readout: Tensor
    """[b, s_local, h, d]."""


@comm.public_call
def tree_recurrence(
    kernel: Kernel,
    inputs: Sequence[Tensor],
    v: Tensor,
    *,
    head_dim: int,
    cp_group,
    layout: Layout = "zigzag",
    decay: Decay | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    schedule: str = "auto",
    config: TreeConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A recurrent layer over a sequence that is sharded across ranks, exactly. Collective, differentiable.

    A rank runs the segments that nothing on other ranks lies before, in order, with their states. The outputs and the
    final state of others are affine in the initial state S: o_t + R_t S and M S + U. The kernel itself gives all four
    in one call, with values [v | 0] and the initial state [0 | 1]; `tree_scan` then gives every segment its S.

    Args:
        kernel: kernel(inputs, v, initial_state) -> (out [b, t, h, d_v], final_state [b, h, d, d_v]) of t tokens, linear
            in (v, initial_state); None means a state of zeros. d_v is that of its v: it is called with
            d_v + head_dim, too. Batches of several segments are as large as needed. Other tensors of which it makes use
            have gradients on ranks with tokens only.
        inputs: its other tensors, each [b, s_local, ...] and cut along axis 1 with v.
        v: [b, s_local, h, d_v], this rank's values; rows of padding may hold anything finite.
        head_dim: d, the rows of a head's state.
        cp_group: the process group over which the sequence is sharded, or a 1-D DeviceMesh; None for one rank.
        layout: as in `tree_attn_func`, or of packed documents: states begin with zeros in every document; of a prefix
            tree, too (`dispatch_prefix_tree`): with those where a run of its tokens leaves another.
        decay: where states only decay, how: the kernel is then called once for d_v alone.
        initial_state: [b, h, d, d_v], the sequence's, equal on all ranks; default: zeros. Not with several documents.
        return_final_state: whether to return what the sequence leaves behind. Not with several documents.
        schedule: of `tree_scan`.
        config: `check`, `timeout_s`, `transport`, `topology` and `tune` are used.

    Returns: (out [b, s_local, h, d_v] in the dtype of the kernel's, 0 in rows of padding; final state [b, h, d, d_v] on
        every rank, or None). States are float32, float64 for float64. Gradients of initial_state are those of this
        rank's share: their sum over the ranks is the whole.
    Raises: ``ValueError`` on every rank for shapes that don't fit, or calls that differ between ranks.
    Source: docs/recurrent.md; any kernel of the form of `chunk_gated_delta_rule` (flash-linear-attention).
    """
    ranks = comm.Ranks.of(cp_group, v.device, config)
    (layout,) = layouts_of(layout, ranks, "tree_recurrence", v=v)
    with ranks.call("tree_recurrence", differentiable=True) as call:
        _check(inputs, v, decay)
        d = check_positive("head_dim", head_dim)
        chains = Chains.of(v, "v", ranks, layout)
        b, _, h, d_v = v.shape
        update = torch.empty(0, b, h, d, d_v, dtype=state_dtype(v.dtype), device=v.device)
        shape = (d, d) if decay is None else tuple(decay.log_decay.shape[3:])
        maps = AffineMaps(d, d_v, shape)
        scan = Scan.checked(chains.rest, maps, update, initial_state, return_final_state, schedule, ranks)
        given = v, *inputs, initial_state, *(decay or ())
        call.agree(
            layout=layout,
            tokens=v.shape[1] if isinstance(layout, str) else None,
            dtype=v.dtype,
            tangents=has_tangents(*given),
            goes_backward=goes_backward(*given),
            **scan.agreed,
        )
        return _Layer(kernel, tuple(inputs), v, decay, d).run(chains, scan, initial_state)


def _check(inputs: Sequence[Tensor], v: Tensor, decay: Decay | None) -> None:
    if v.dim() != 4 or not v.shape[3] or not v.is_floating_point():
        raise ValueError(f"v must be [b, s_local, h, d_v] of floating-point numbers, got {v.dtype} {list(v.shape)}")
    tensors = {f"inputs[{i}]": (x, 2) for i, x in enumerate(inputs)}
    if decay is not None:
        tensors |= {"decay.log_decay": (decay.log_decay, 3), "decay.readout": (decay.readout, 3)}
    for name, (x, dims) in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.shape[:dims] != v.shape[:dims]:
            raise ValueError(f"{name} {list(x.shape)} must begin as v {list(v.shape)}, with {list(v.shape[:dims])}")


class _Layer:
    """This rank's part of a layer."""

    def __init__(self, kernel: Kernel, inputs: tuple[Tensor, ...], v: Tensor, decay: Decay | None, head_dim: int):
        self.kernel, self.inputs, self.v, self.decay, self.head_dim = kernel, inputs, v, decay, head_dim
        self.dtype = state_dtype(v.dtype)

    def run(self, chains: Chains, scan: Scan, initial_state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """scan: of `chains.rest`."""
        rank = scan.ranks.rank
        segments, linked = chains.segments[rank], scan.chains.linked[rank]
        outs, ends = {}, {-1: None if initial_state is None else initial_state.to(self.dtype)}
        for wave in chains.waves[rank]:
            run = functools.partial(self._from_states, states={i: ends[before] for i, before in wave.items()})
            for i, (out, end) in each(segments, list(wave), run):
                outs[i], ends[i] = out, end
        parts = dict(each(segments, [i for i in linked if i not in outs], self._parts))
        with torch.autocast(self.v.device.type, enabled=False):
            maps = self._stacked([parts[i][2:] if i in parts else self._constant(ends[i], scan) for i in linked], scan)
            made = *outs.values(), *(x for out, response, _, _ in parts.values() for x in (out, response))
            states, final = scan.run(*maps, initial_state, self.v, *self.inputs, *(self.decay or ()), *made)
            for i, state in zip(linked, states):
                if i in parts:
                    outs[i] = _with_state(*parts[i][:2], state)
            return joined(segments, outs, self.v, states), final

    def _from_states(
        self, of_rows: OfRows, numbers: list[int], states: dict[int, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """The outputs and final states of segments that begin with these states; None: zeros."""
        state = None if states[numbers[0]] is None else torch.cat([states[i] for i in numbers])
        if self.decay is None or state is None:
            out, final = self.kernel(tuple(map(of_rows, self.inputs)), of_rows(self.v), state)
            return out, final.to(self.dtype)
        out, response, transition, update = self._decaying(of_rows)
        with torch.autocast(self.v.device.type, enabled=False):
            transition = transition.reshape(*transition.shape, *(1,) * (4 - transition.dim()))
            return _with_state(out, response, state), transition * state + update

    def _parts(self, of_rows: OfRows, numbers: list[int]) -> tuple[Tensor, ...]:
        return self._maps(of_rows) if self.decay is None else self._decaying(of_rows)

    def _maps(self, of_rows: OfRows) -> tuple[Tensor, ...]:
        """The outputs [b, t, h, d_v] for a state of zeros, their response [b, t, h, d] to the state, and M and U."""
        v, d = of_rows(self.v), self.head_dim
        state = torch.eye(d, v.shape[3] + d, dtype=self.dtype, device=v.device).roll(v.shape[3], 1)
        state = state.expand(v.shape[0], v.shape[2], *state.shape)
        out, final = self.kernel(tuple(map(of_rows, self.inputs)), F.pad(v, (0, d)), state)
        out, response = out.to(self.dtype).split((v.shape[3], d), -1)
        update, transition = final.to(self.dtype).split((v.shape[3], d), -1)
        return out, response, transition, update

    def _decaying(self, of_rows: OfRows) -> tuple[Tensor, ...]:
        """The same where states decay: R_t = readout_t exp(sum of log_decay until t), M = exp(sum of all)."""
        out, final = self.kernel(tuple(map(of_rows, self.inputs)), of_rows(self.v), None)
        decay = of_rows(self.decay.log_decay).to(self.dtype).cumsum(1).exp()
        response = of_rows(self.decay.readout).to(self.dtype) * (decay if decay.dim() == 4 else decay[..., None])
        return out.to(self.dtype), response, decay[:, -1], final.to(self.dtype)

    def _constant(self, end: Tensor, scan: Scan) -> tuple[Tensor, Tensor]:
        """The map of a segment whose final state is known."""
        return end.new_zeros(*end.shape[:2], *scan.maps.transition_shape), end

    def _stacked(self, maps: list[tuple[Tensor, Tensor]], scan: Scan) -> tuple[Tensor, Tensor]:
        """M and U of all segments in the scan."""
        if maps:
            return tuple(map(torch.stack, zip(*maps)))
        b, _, h, d_v = self.v.shape
        update = self.v.new_zeros(0, b, h, self.head_dim, d_v, dtype=self.dtype)
        return update.new_zeros(0, b, h, *scan.maps.transition_shape), update


def _with_state(out: Tensor, response: Tensor, state: Tensor) -> Tensor:
    """o_t + R_t S."""
    return (response.transpose(1, 2) @ state).transpose(1, 2) + out


OfRows = Callable[[Tensor], Tensor]
"""x [b, s_local, ...] -> [n * b, t, ...]: the rows of n segments of one length, as batches."""


def each(
    segments: Sequence[Segment], numbers: Sequence[int], run: Callable[[OfRows, list[int]], tuple[Tensor, ...]]
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """(number, tensors [b, ...] that run(of_rows, numbers) gives) of some segments; segments of one length run as one
    batch."""
    by_length: dict[int, list[int]] = {}
    for i in numbers:
        by_length.setdefault(segments[i].length, []).append(i)
    for length, together in by_length.items():
        rows = [slice(segments[i].row, segments[i].row + length) for i in together]
        results = run(functools.partial(_of_rows, rows=rows), together)
        yield from zip(together, zip(*(x.chunk(len(together)) for x in results)))


def _of_rows(x: Tensor, rows: Sequence[slice]) -> Tensor:
    return x[:, rows[0]] if len(rows) == 1 else torch.cat([x[:, part] for part in rows])


def joined(segments: Sequence[Segment], outs: dict[int, Tensor], like: Tensor, *others: Tensor) -> Tensor:
    """The rows of all segments, outs[i] [b, t, ...], as [b, s_local, ...]; 0 in padding.

    like: a tensor with the shape and dtype of the result. others: what the result depends on besides (`nothing`).
    """
    rows, end = [], 0
    for i, segment in enumerate(segments):
        rows += [like.new_zeros(len(like), segment.row - end, *like.shape[2:]), outs[i].to(like.dtype)]
        end = segment.row + segment.length
    rows.append(like.new_zeros(len(like), like.shape[1] - end, *like.shape[2:]))
    return torch.cat([*rows, nothing(like, (len(like), 0, *like.shape[2:]), *others)], 1)
