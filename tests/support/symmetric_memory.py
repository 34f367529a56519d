"""What stands in for torch's symmetric memory where there is no GPU: files that the ranks of one host map."""

import math
import time

import numpy as np
import torch

HALF = 1 << 12  # numbers of fp32


class Handle:
    """In the place of a `_SymmetricMemory`: all ranks' buffers, and for every pair of them a signal, which is 0 or 1.

    As torch's kernels do, `put_signal` waits for 0 and leaves 1, and `wait_signal` waits for 1 and leaves 0; a barrier
    puts one to all others, then waits for one of each.
    """

    def __init__(self, path, rank, world):
        """path: of an empty file, the same on all ranks; the first rank to come gives it its size."""
        self.rank, self.world_size = rank, world
        self._buffers = torch.from_file(f"{path}.numbers", shared=True, size=world * 2 * HALF).view(world, 2, HALF)
        signals = torch.from_file(f"{path}.signals", shared=True, size=world * world, dtype=torch.uint8)
        self._signals = signals.view(world, world).numpy()  # of (to, from)

    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        assert dtype == torch.float32 and math.prod(sizes) + storage_offset <= self._buffers[rank].numel()
        return self._buffers[rank].view(-1)[storage_offset:][: math.prod(sizes)].view(sizes)

    def put_signal(self, to, channel=0, timeout_ms=0):
        self._exchange((to, self.rank), 0, 1, timeout_ms)

    def wait_signal(self, of, channel=0, timeout_ms=0):
        self._exchange((self.rank, of), 1, 0, timeout_ms)

    def barrier(self, channel=0, timeout_ms=0):
        others = [r for r in range(self.world_size) if r != self.rank]
        for act in (self.put_signal, self.wait_signal):
            for r in others:
                act(r, channel, timeout_ms)

    def _exchange(self, at, expected, new, timeout_ms):
        end = time.monotonic() + (timeout_ms / 1000 if timeout_ms else math.inf)
        while self._signals[at] != expected:
            if time.monotonic() > end:
                raise RuntimeError("CUDA error: unspecified launch failure")
            time.sleep(1e-5)
        self._signals[at] = np.uint8(new)


def stand_in(path, rank, world):
    """(this rank's memory, the handle), as `comm.symmetric` gets them from torch."""
    handle = Handle(path, rank, world)
    return handle.get_buffer(rank, (2, HALF), torch.float32), handle
