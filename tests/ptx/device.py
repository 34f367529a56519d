"""A GPU that is not there: Triton compiles for it, and a launch runs the PTX on the tensors of the CPU it is given.

PTX is not assembled into machine code here: tests/kernels/test_triton_compile.py does that.
"""

import os

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_tree.tools.bench.precompile import AbsentGPU

from .boxes import TensorMap
from .machine import Kernel
from .memory import GlobalMemory
from .syntax import parse

ARCHES = {"sm_80": 80, "sm_90": 90}
MULTIPROCESSORS = 132
launches: list[Kernel] = []  # of every launch since the list was last cleared
kernels: dict[str, Kernel] = {}  # by the hash of what was compiled


def install(arch: str, cache: str) -> None:
    """From now on every launch is emulated, for one of `ARCHES`; compiled PTX is kept in the folder `cache`.

    The process must not have imported Triton under TRITON_INTERPRET.
    """
    os.environ["TRITON_CACHE_DIR"] = cache
    triton.runtime.driver.set_active(AbsentGPU(GPUTarget("cuda", ARCHES[arch], 32)))
    CUDABackend.make_cubin = lambda self, src, metadata, opt, capability: b""
    compile_and_cache = triton.JITFunction.run

    def run(self, *args, grid, warmup=False, **kwargs):
        compiled = compile_and_cache(self, *args, grid=grid, warmup=True, **kwargs)
        if not warmup:
            _launch(self, compiled, grid, args, kwargs)
        return compiled

    triton.JITFunction.run = run
    from megatron_tree.core.kernels.triton import host

    host.DEVICES = ("cpu",)
    host._multiprocessors_of = lambda index: MULTIPROCESSORS
    host._arch_of = lambda index: arch.replace("_", "")


def _passed(arguments: tuple, kinds: tuple):
    """The arguments that are not compiled in, those of tuples one by one."""
    for x, kind in zip(arguments, kinds, strict=True):
        if isinstance(kind, tuple):
            yield from _passed(x, kind)
        elif kind != "constexpr":
            yield x


def _launch(function, compiled, grid, args, kwargs) -> None:
    if compiled.hash not in kernels:
        metadata = compiled.metadata
        kernels[compiled.hash] = Kernel(parse(compiled.asm["ptx"]), 32 * metadata.num_warps, metadata.shared)
    kernel = kernels[compiled.hash]
    known = {name: x for name, x in kwargs.items() if name in function.signature.parameters}
    given = function.signature.bind(*args, **known)
    given.apply_defaults()
    passed = list(_passed(tuple(given.arguments.values()), tuple(compiled.src.signature.values())))
    tensors = [x.base if isinstance(x, TensorDescriptor) else x for x in passed]
    memory = GlobalMemory([x for x in tensors if isinstance(x, torch.Tensor)])
    numbers, descriptors = [], iter(getattr(compiled.metadata, "tensordesc_meta", ()))
    for x in passed:
        if isinstance(x, TensorDescriptor):
            tensor_map = TensorMap.of(x, next(descriptors), memory.address(x.base))
            numbers += [tensor_map, *x.shape, *x.strides]
        else:
            numbers.append(memory.address(x) if isinstance(x, torch.Tensor) else x)
    numbers += [0] * (len(kernel.program.params) - len(numbers))  # scratch memory that no kernel of ours asks for
    shape = tuple(grid(given.arguments) if callable(grid) else grid)
    launches.append(kernel)
    kernel.run(shape + (1,) * (3 - len(shape)), numbers, memory)
    memory.give_back()
