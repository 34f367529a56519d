#!/usr/bin/env python3
"""Says what `bench kernels` needs on a machine with a GPU, and what is missing; then runs it. `make gpu` calls this.

usage: python3 launch/gpu.py [--rehearse] [options of megatron-tree bench kernels]

--rehearse runs all of it without a GPU: small shapes in Triton's interpreter, ranks over gloo.

It needs torch, triton and numpy, and what Triton compiles its launchers with: a C compiler and Python's headers. No
other package has to be there, and nothing is installed.
"""

import importlib.util
import os
import pathlib
import shutil
import sys
import sysconfig

REPO = pathlib.Path(__file__).resolve().parents[1]
NEEDED = {"torch": "with CUDA or ROCm", "triton": "the kernels", "numpy": "torch and triton"}
USEFUL = {"yaml": "two ranks", "matplotlib": "the plot", "pytest": "the tests over NCCL"}
USEFUL |= dict.fromkeys(("flash_attn_interface", "flashinfer", "flash_mla"), "beside ours")


def look() -> tuple[list[tuple[str, bool, str]], bool]:
    """(name, whether it is there, what for) of everything; and whether all that is needed is there."""
    python = ".".join(map(str, sys.version_info[:3]))
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]  # and no other
    header = pathlib.Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")  # where Triton looks
    needed = [(f"Python {python}", sys.version_info >= (3, 11), "3.11 or later")]
    needed += [(name, importlib.util.find_spec(name) is not None, what) for name, what in NEEDED.items()]
    needed += [("C compiler", any(map(shutil.which, compilers)), "Triton's launchers: gcc, clang, or CC=")]
    needed += [("Python.h", header.is_file(), f"Triton's launchers: {header} (package python3-dev)")]
    useful = [(name, importlib.util.find_spec(name) is not None, what) for name, what in USEFUL.items()]
    return needed + [(name, there, f"{what}; not needed") for name, there, what in useful], all(x[1] for x in needed)


def main() -> None:
    found, complete = look()
    print(f"{sys.executable}:")
    for name, there, what in found:
        print(f"  {'there  ' if there else 'MISSING'}  {name:<22} {what}")
    if not complete:
        sys.exit("error: install what is MISSING and needed, or name another Python: make gpu PYTHON=...")
    sys.stdout.flush()
    options, environment = sys.argv[1:], {}
    if "--rehearse" in options:
        options.remove("--rehearse")
        options[:0] = ["--device", "cpu", "--dtype", "fp16"]
        environment = {"TRITON_INTERPRET": "1"}
    path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "megatron_tree", "bench", "kernels", *options]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path} | environment)


if __name__ == "__main__":
    main()
