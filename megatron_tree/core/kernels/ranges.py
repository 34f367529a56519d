"""A mask of slices, in groups that any backend computes: their states are merged, their gradients added.

Inside a group no two slices share a query or a key. So a group is like packed documents, one per slice, and its keys'
positions are shifted until causality or a window describes what a slice shows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import Segment
from ..merge import empty_state, state_dtype
from ..spec import AttnSlice, AttnSpec
from .states import merge_into


class SliceGroup(NamedTuple):
    """Slices that are computed together, and their mask once their keys are shifted."""

    spec: AttnSpec
    slices: tuple[AttnSlice, ...]

    def segments(self, queries: tuple[Segment, ...], keys: tuple[Segment, ...]) -> dict | None:
        """The parts of segments that are in the group's slices; None if no slice has queries and keys of them."""
        for_queries, of_keys = _cut(self, queries, keys)
        return dict(q_segments=for_queries, k_segments=of_keys) if for_queries and of_keys else None


@functools.lru_cache(maxsize=64)
def slice_groups(spec: AttnSpec) -> tuple[SliceGroup, ...]:
    """The groups of a mask: slices of the same kind, each in the first group where it touches no other."""
    by_window: dict[tuple[int, int], list[list[AttnSlice]]] = {}
    for piece in sorted(piece for piece in spec.ranges if piece.pairs):
        left, right = piece.left, piece.right
        window = (-1 if left is None else left + right if right is not None else 0, -1 if right is None else 0)
        groups = by_window.setdefault(window, [])
        apart = next((group for group in groups if not any(map(piece.touches, group))), None)
        groups.append([piece]) if apart is None else apart.append(piece)
    return tuple(
        SliceGroup(dataclasses.replace(spec, ranges=None, causal=window[1] == 0, window_size=window), tuple(group))
        for window, groups in by_window.items()
        for group in groups
    )


@functools.lru_cache(maxsize=512)
def _cut(
    group: SliceGroup, queries: tuple[Segment, ...], keys: tuple[Segment, ...]
) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    cut: tuple[list[Segment], list[Segment]] = ([], [])
    for seq, piece in enumerate(group.slices):
        parts = [[s.part(*span) for s in side] for side, span in ((queries, piece.q_range), (keys, piece.k_range))]
        parts = [[s._replace(seq=seq) for s in side if s.length] for side in parts]
        if not all(parts):
            continue
        shift = piece.right if piece.right is not None else -piece.left if piece.left is not None else 0
        base = max(0, shift - piece.k_range[0])  # no position becomes negative
        for side, add, into in zip(parts, (base, base - shift), cut):
            into.extend(s._replace(pos=s.pos + add) for s in side)
    return tuple(sorted(cut[0])), tuple(sorted(cut[1]))


def attn_fwd(
    attend: Callable, q: Tensor, k: Tensor, v: Tensor, *, q_segments, k_segments, spec: AttnSpec, out_dim: int
) -> tuple[Tensor, Tensor]:
    """`Backend.attn_fwd` with the kernel `attend`, whose out has out_dim columns; out is merged, in fp32."""
    state = empty_state((*q.shape[:3], out_dim), dtype=state_dtype(q.dtype), device=q.device)
    for group in slice_groups(spec):
        if segments := group.segments(tuple(q_segments), tuple(k_segments)):
            merge_into(state, attend(q, k, v, **segments, spec=group.spec))
    return state


def attn_bwd(
    derive: Callable, dout, q, k, v, lse, delta, *, q_segments, k_segments, spec: AttnSpec, **own
) -> tuple[Tensor, Tensor, Tensor]:
    """`Backend.attn_bwd` with the kernel `derive`."""
    grads = tuple(torch.zeros(x.shape, dtype=state_dtype(q.dtype), device=q.device) for x in (q, k, v))
    for group in slice_groups(spec):
        if segments := group.segments(tuple(q_segments), tuple(k_segments)):
            parts = derive(dout, q, k, v, lse, delta, **segments, spec=group.spec, **own)
            for total, part in zip(grads, parts):
                total += part
    return grads
