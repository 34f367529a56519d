"""What stands in for a CUDA graph where there is no GPU: operations are written down once, with their tensors and
numbers, and done again on the same memory. What a step has read on the host is done again as it was.

    runner._graphs = TapedSteps(runner)
"""

import contextlib
from unittest import mock

import torch
from torch.distributed import _functional_collectives  # noqa: F401  registers what c10d's operations need
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_tree.core.cache.graph import GraphedSteps, _described, _reads_on_host
from megatron_tree.core.kernels import native

FACTORIES = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}


class Tape(TorchDispatchMode):
    """In the place of a `cache.graph.CudaGraph` of run(), which returns a tensor.

    As in a capture, nothing is sent: collectives are written down only. Kernels that are not torch's are written down
    as they are launched.
    """

    replays, made_after = 0, []
    """Of all tapes since `begin`: the replays, and how many there had been when each tape was made."""
    only_replayed = ()
    """(owner, name) of functions that return nothing, or kernels, which are written down and not run meanwhile."""

    def __init__(self, run):
        super().__init__()
        Tape.made_after.append(Tape.replays)
        self._done, self._own, self._empty = [], set(), []
        with self._kernels(), self:
            self.logits = run()

    @classmethod
    def begin(cls):
        """Count anew."""
        cls.replays, cls.made_after = 0, []

    def replay(self):
        Tape.replays += 1
        for _, func, args, kwargs, before in self._done:
            given = _storages((args, kwargs))
            out = func(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(out), strict=True):
                if not isinstance(new, torch.Tensor):
                    if isinstance(new, torch.ScriptObject):
                        torch.distributed.Work.unbox(new).wait()
                elif old.untyped_storage().data_ptr() not in given:
                    old.copy_(new)

    def is_done(self):
        return True

    @property
    def signature(self):
        """All that was written down: names, numbers, shapes, and the addresses of what was there before."""
        return [(name, _described(args), _described(list(kwargs.items())), self._outside((args, kwargs)))
                for name, _, args, kwargs, _ in self._done]  # fmt: skip

    def _outside(self, tree):
        found = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
        return [x.data_ptr() for x in found if x.untyped_storage().data_ptr() not in self._own]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._schema.name, kwargs or {}
        assert not _reads_on_host(func, args), f"{name} makes the host wait for the device"
        if name.startswith("c10d::"):
            out = _not_sent(func, args)
        else:
            out = func(*args, **kwargs)
        self._write_down(name, func, args, kwargs, out)
        return out

    def _write_down(self, name, func, args, kwargs, out):
        with _disable_current_modes():  # a tensor may be given other memory later, by `x.data = y`
            args, kwargs, out = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs, out))
        self._own |= _storages(out) - _storages((args, kwargs))
        if name in FACTORIES:
            self._empty.append(out)  # kept: this memory is this step's
        else:
            self._done.append((name, func, args, kwargs, out))

    def _opaque(self, name, func, runs=True):
        """func, written down as one operation."""

        def call(*args, **kwargs):
            with _disable_current_modes():
                out = func(*args, **kwargs) if runs else None
            self._write_down(name, func, args, kwargs, out)
            return out

        return call

    @contextlib.contextmanager
    def _kernels(self):
        from megatron_tree.core.kernels.triton import decode, merge

        with contextlib.ExitStack() as stack:
            stack.enter_context(
                mock.patch.object(native, "attn_decode", self._opaque("native.attn_decode", native.attn_decode))
            )
            for module, kernel in ((decode, "attn_decode_kernel"), (merge, "merge_states_kernel")):
                stack.enter_context(mock.patch.object(module, kernel, _Launches(self, kernel, getattr(module, kernel))))
            for owner, name in self.only_replayed:
                func = getattr(owner, name)
                write_down = _Launches if hasattr(func, "fn") else Tape._opaque
                stack.enter_context(mock.patch.object(owner, name, write_down(self, name, func, runs=False)))
            yield


class TapedSteps(GraphedSteps):
    """Steps whose graphs are tapes."""

    def __init__(self, runner):
        super().__init__(runner, capture=Tape)


def _storages(tree):
    return {x.untyped_storage().data_ptr() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)}


class _Launches:
    """A Triton kernel whose launches are written down, with their grids."""

    def __init__(self, tape, name, kernel, runs=True):
        self._tape, self._name, self._kernel, self._runs = tape, name, kernel, runs

    def __getitem__(self, grid):
        return self._tape._opaque(f"{self._name}{list(grid)}", self._kernel[grid], self._runs)


def _not_sent(func, args):
    """What a collective returns that was not started: the tensors that it was to fill, and that it is done."""
    work = torch._C._distributed_c10d.FakeWork().boxed()
    filled = [x for x in args if isinstance(x, (torch.Tensor, list))]
    outs = [work if "Work" in str(kind.type) else filled[0] for kind in func._schema.returns]
    return outs[0] if len(outs) == 1 else tuple(outs)
