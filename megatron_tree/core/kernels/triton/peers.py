"""States that ranks read in one another's memory: `put_state` and `merge_peers`, one launch each (comm/symmetric.py).

A rank's memory is fp32 [2, n], two halves that are used in turn. `turns` int32 [2] says which one: `put_state` reads
turns[0] and writes it to turns[1]; `merge_peers` reads that, and writes the other half's number to turns[0]. So no
program reads what another one of its launch writes, and a launch is the same in every turn: CUDA graphs may have it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs, host
from .merge import _states_at_once, _store_state, _with_states

BLOCK = 1024  # numbers of a state that a program copies


@triton.jit(do_not_specialize=["num_numbers", "half"])
def put_state_kernel(STATE, HERE, TURNS, num_numbers, half, BLOCK: tl.constexpr):
    """HERE [2, half] = STATE, at the beginning of the half whose turn it is."""
    turn = tl.load(TURNS)
    if tl.program_id(0) == 0:
        tl.store(TURNS + 1, turn)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(HERE + turn * half + i, tl.load(STATE + i, mask=i < num_numbers), mask=i < num_numbers)


@triton.jit(do_not_specialize=["num_states", "first", "half"])
def merge_peers_kernel(
    PEERS, TURNS, OUT, num_states, first, half, E: tl.constexpr, COLS: tl.constexpr, STATES: tl.constexpr
):  # fmt: skip
    """OUT row r = merge over i of row first + r of the state in the memory at the address PEERS[i]."""
    r = tl.program_id(0)
    c = tl.arange(0, COLS)
    turn = tl.load(TURNS + 1)
    if r == 0:
        tl.store(TURNS, 1 - turn)
    at = turn * half + (first + r) * (E + 1)
    top = float("-inf")
    den = 0.0
    num = tl.zeros((COLS,), tl.float32)
    for begin in range(0, num_states, STATES):
        i = begin + tl.arange(0, STATES)
        state = tl.load(PEERS + i, mask=i < num_states, other=0).to(tl.pointer_type(tl.float32)) + at
        lse = tl.load(state + E, mask=i < num_states, other=float("-inf"))
        mask = (i < num_states)[:, None] & (c < E)[None, :]
        out = tl.load(state[:, None] + c[None, :], mask=mask, other=0.0)
        top, den, num = _with_states(top, den, num, lse, out)
    _store_state(OUT + r.to(tl.int64) * (E + 1), c, top, den, num, E)


@host.on_its_device
def put_state(state: Tensor, here: Tensor, turns: Tensor) -> None:
    """Copy a contiguous fp32 state, not empty, into this rank's memory `here`, fp32 [2, n]."""
    num_numbers, half = state.numel(), here.shape[1]
    assert state.is_contiguous() and state.dtype == here.dtype == torch.float32 and 0 < num_numbers <= half
    put_state_kernel[(-(-num_numbers // BLOCK),)](state, here, turns, num_numbers, half, BLOCK=BLOCK, num_warps=4)


@host.on_its_device
def merge_peers(peers: Tensor, turns: Tensor, first: int, num_rows: int, width: int, half: int) -> Tensor:
    """Merge rows first .. first + num_rows - 1 (at least one) of the states [rows, width] that all ranks have put.

    peers: int64 [ranks], the addresses of their memory, each fp32 [2, half]. Returns fp32 [num_rows, width]: the bits
    of `merge_packed`, whose order of sums it has.
    """
    cols = configs.power_of_2(width - 1)
    out = torch.empty(num_rows, width, dtype=torch.float32, device=peers.device)
    merge_peers_kernel[(num_rows,)](
        peers, turns, out, len(peers), first, half, E=width - 1, COLS=cols, STATES=_states_at_once(cols), num_warps=4
    )
    return out
