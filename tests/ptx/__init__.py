"""Run the Triton kernels without a GPU: what the compiler made of them for sm_80 or sm_90 is executed in numpy.

`pytest --ptx sm_90` makes `device.install` stand in for the GPU. From a kernel's launch to its result:

    device.py      Triton compiles for a GPU that is not there; a launch runs the PTX on tensors of the CPU
    syntax.py      PTX text -> instructions, basic blocks, registers
    translate.py   a basic block -> Python source: numpy over all threads of many programs
    arithmetic.py  ... of plain instructions
    machine.py     programs that run in step; where they part, the batch is divided
    memory.py      global memory, which ends where the tensors do
    shared.py      shared memory: copies that arrive late, races between warps, fences between proxies
    boxes.py       copies by descriptor (TMA), and the mbarriers that they arrive at
    matrix.py      ldmatrix, stmatrix, fragments, and wgmma's descriptors and swizzles
    products.py    wgmma from its start to its wait
    faults.py      removes or changes instructions, to show what the emulator notices
    words.py       number formats

docs/kernels.md says what is checked, and what this can't show.
"""
