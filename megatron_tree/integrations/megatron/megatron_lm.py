"""Run one of Megatron-LM's own scripts with tree attention, on GPUs or on CPU ranks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import runpy
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from . import compat
from .cpu import megatron_on_cpu
from .documents import dispatch_batch, use_dispatched_documents
from .norm import SequenceParallelNorm
from .spec import install

DISPATCH = "--dispatch-documents"
# Options that Megatron-LM's parser needs on CPU ranks. An option counts as given if the user set it, to whatever value.
CPU_OPTIONS = {
    "--distributed-backend": "gloo",
    "--transformer-impl": "local",
    "--use-cpu-initialization": None,
    "--no-gradient-accumulation-fusion": None,
    "--no-masked-softmax-fusion": None,
    "--no-persist-layer-norm": None,
    "--no-rope-fusion": None,
}


def run_script(script: Path, arguments: list[str]) -> None:
    """Run a script of Megatron-LM as `python script arguments` would, with `install()` before it.

    With the option --dispatch-documents, packed batches are those of `dispatched_batches`. Without a GPU the script
    runs on the CPU: options in CPU_OPTIONS that `arguments` lacks are added, and printed. Put the
    script's folder first on `sys.path` before megatron_tree is imported: then `megatron.core` is that of its checkout.

    Raises: UnsupportedMegatronError for a release that lacks what is needed; whatever the script raises.
    """
    install()
    compat.name_missing_transformer_engine()
    _let_dataset_helpers_compile()
    dispatches = DISPATCH in arguments
    arguments = [argument for argument in arguments if argument != DISPATCH]
    given, added = {argument.partition("=")[0] for argument in arguments}, []
    if not torch.cuda.is_available():
        missing = ([name, value] for name, value in CPU_OPTIONS.items() if name not in given)
        added = [word for option in missing for word in option if word is not None]
    if added and os.environ.get("RANK", "0") == "0":
        print(f"no GPU: the ranks run on the CPU, with these options added: {' '.join(added)}", flush=True)
    batches = dispatched_batches() if dispatches else contextlib.nullcontext()
    with megatron_lm_on_cpu(), batches, mock.patch.object(sys, "argv", [str(script), *arguments, *added]):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except ModuleNotFoundError as error:
            error.add_note(f"Megatron-LM's scripts need more packages than megatron-core: pip install {error.name}")
            raise


@contextlib.contextmanager
def dispatched_batches() -> Iterator[None]:
    """Scripts that cut packed batches (`--sft`) dispatch those of all data ranks over all data- and context-parallel
    ranks, by `dispatch_batch`. Raises: ValueError without --calculate-per-token-loss, at the first batch, and for
    models that `use_dispatched_documents` refuses."""
    utils = importlib.import_module("megatron.core.utils")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(utils, "get_thd_batch_on_this_cp_rank", _dispatch))
        for model in compat.model_classes():
            stack.enter_context(mock.patch.object(model, "__init__", _prepared(model.__init__)))
        yield


def _prepared(original):
    @functools.wraps(original)
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        use_dispatched_documents(self)

    return init


def _dispatch(batch: dict, cu_seqlens: Any, cu_seqlens_padded: Any, max_seqlen: Any) -> tuple[dict, Any]:
    """Has the signature of Megatron's `get_thd_batch_on_this_cp_rank`. A document's padding stays with it."""
    args = compat.megatron_lm_arguments()
    if not args.calculate_per_token_loss:
        raise ValueError(f"{DISPATCH}: ranks have different numbers of labels; add --calculate-per-token-loss")
    multiple_of = args.tensor_model_parallel_size if args.sequence_parallel else 1
    bounds = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    return dispatch_batch(batch, bounds, over_data=True, multiple_of=multiple_of)


@contextlib.contextmanager
def megatron_lm_on_cpu() -> Iterator[bool]:
    """`megatron_on_cpu`, and the other CUDA calls that Megatron-LM's training loop makes unconditionally.

    `initialize_megatron` asserts that there is CUDA, sets its groups up only if there is a device, loads CUDA kernels,
    and warms up fused functions with random numbers, which here would come from the generator of the weights.
    torch.compile is turned off. With `sequence_parallel`, norms are SequenceParallelNorm. Nothing happens with CUDA.
    """
    with megatron_on_cpu() as active, contextlib.ExitStack() as stack:
        if active:
            norm = compat.lookup("megatron.core.transformer.torch_norm:WrappedTorchNorm")
            # as of a recent GPU: older ones ask for CUDA_DEVICE_MAX_CONNECTIONS=1
            properties = types.SimpleNamespace(name="cpu", major=10, minor=0, total_memory=0)
            replacements: list[tuple[Any, str, Any]] = [
                (torch.cuda, "device_count", lambda: 1),
                (torch.cuda, "set_device", lambda device: None),
                (torch.cuda, "get_device_properties", lambda device=None: properties),
                (torch._dynamo.config, "disable", True),
                (norm, "__new__", _with_sequence_parallelism(norm.__new__)),
                *compat.training_replacements(),
            ]
            for target, name, replacement in replacements:
                stack.enter_context(mock.patch.object(target, name, replacement))
        yield active


def _with_sequence_parallelism(original):
    def new(cls, config: Any, hidden_size: int, eps: float = 1e-5, *args, **kwargs):
        if config.sequence_parallel:
            return SequenceParallelNorm(config, hidden_size, eps)
        return original(cls, config, hidden_size, eps, *args, **kwargs)

    return new


def _let_dataset_helpers_compile() -> None:
    """Let the Makefile of Megatron's dataset helpers find this Python, and the copy of pybind11's headers in torch.

    It asks `python3-config` for the suffix of extension modules, which may be missing, or another Python's.
    """
    os.environ.setdefault("MAKEFLAGS", f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}")
    if importlib.util.find_spec("pybind11") is None:
        folders = (Path(torch.__file__).parent / "include", sysconfig.get_path("include"))
        os.environ["CPPFLAGS"] = " ".join([os.environ.get("CPPFLAGS", ""), *(f"-I{folder}" for folder in folders)])
