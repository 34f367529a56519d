"""Everything this package knows about versions of Megatron-core, in one place.

Written against megatron-core 0.16.1, the release that the tests run. What other releases do differently is known from
reading them (0.13 to 0.20), and handled by looking at signatures and attributes:

- process groups reach core attention as `pg_collection` (older: `model_comm_pgs`; oldest: not at all);
- newer releases hand core attention further arguments (`name`, `num_splits`, ...);
- fields of TransformerConfig that older releases lack (softmax_type, window_size, window_attn_skip_freq);
- up to 0.16, TransformerLayer reads a list-valued `cp_comm_type` one place too far (see `fixed_cp_comm_type_list`).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import queue
import textwrap
from typing import Any

MINIMUM_VERSION = (0, 13)
CP_COMM_TYPES = ("tree", "p2p", "all_gather")  # what tree attention makes of `cp_comm_type`
# Arguments of newer releases that carry no meaning for attention: a name for logs, a kernel's split hint.
HARMLESS_ARGUMENTS = frozenset({"name", "num_splits"})


class UnsupportedMegatronError(ImportError):
    """megatron-core is missing, too old, or lacks something this integration needs. The message names it."""


def megatron_version() -> str:
    """Version of the installed megatron-core.

    Raises: UnsupportedMegatronError if it is not installed or older than 0.13.
    """
    try:
        package_info = importlib.import_module("megatron.core.package_info")
    except ImportError as error:
        raise UnsupportedMegatronError(
            f"megatron-core cannot be imported ({error}): install megatron_tree with its extra, "
            "pip install 'megatron_tree[megatron]'"
        ) from error
    version = (package_info.MAJOR, package_info.MINOR)
    if version < MINIMUM_VERSION:
        raise UnsupportedMegatronError(
            f"megatron-core {package_info.__version__} is too old: "
            f"{'.'.join(map(str, MINIMUM_VERSION))} or newer is needed"
        )
    return package_info.__version__


def lookup(path: str) -> Any:
    """The object at `package.module:name`.

    Raises: UnsupportedMegatronError that names the path, if this release of megatron-core has no such thing.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedMegatronError(
            f"megatron-core {megatron_version()} has no {path}, which is needed here"
        ) from error


def attention_classes() -> tuple[type, ...]:
    """The attention layers that build a core attention from `submodules.core_attention`."""
    paths = (
        "megatron.core.transformer.attention:Attention",
        "megatron.core.transformer.multi_latent_attention:MultiLatentAttention",
    )
    classes = tuple(lookup(path) for path in paths)
    for cls in classes:
        missing = {"submodules", "cp_comm_type"} - set(inspect.signature(cls.__init__).parameters)
        if missing:
            raise UnsupportedMegatronError(
                f"megatron-core {megatron_version()}: "
                f"{cls.__module__}.{cls.__name__} takes no argument {sorted(missing)}"
            )
    return classes


def process_groups(pg_collection: Any, model_comm_pgs: Any) -> tuple[Any, Any]:
    """(tensor-parallel group, context-parallel group), from whichever argument this release passes."""
    groups = pg_collection if pg_collection is not None else model_comm_pgs
    if groups is None:
        parallel_state = importlib.import_module("megatron.core.parallel_state")
        return parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()
    for name in ("tp", "cp"):
        if getattr(groups, name, None) is None:
            raise ValueError(
                f"pg_collection has no process group {name!r}: TreeDotProductAttention needs 'tp' and 'cp'"
            )
    return groups.tp, groups.cp


def refuse_unknown_arguments(where: str, arguments: dict[str, Any]) -> None:
    """Raise a ValueError for an argument that is set, may change the result, and is unknown here."""
    unknown = sorted(name for name, value in arguments.items() if value is not None and name not in HARMLESS_ARGUMENTS)
    if unknown:
        raise ValueError(
            f"{where} got {', '.join(unknown)}, which megatron_tree does not know (megatron-core "
            f"{megatron_version()}): unset the Megatron option behind it for layers with tree attention"
        )


def window_of_layer(config: Any, layer_number: int) -> tuple[int, int]:
    """The sliding window (left, right) of this layer (1-based), or (-1, -1) if it has none.

    Megatron's rule: with `window_attn_skip_freq` n every n-th layer attends to everything; with a list, layer i has a
    window where entry i is true.
    """
    window = getattr(config, "window_size", None)
    if not window:
        return (-1, -1)
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise ValueError(
            f"window_size={window!r} in the TransformerConfig must be a pair (left, right); -1 means unbounded"
        )
    skip = getattr(config, "window_attn_skip_freq", None)
    if skip is None:
        windowed = True
    elif isinstance(skip, int):
        windowed = layer_number % skip != 0
    elif isinstance(skip, (list, tuple)):
        windowed = bool(skip[layer_number - 1])
    else:
        raise ValueError(
            f"window_attn_skip_freq={skip!r} in the TransformerConfig must be an int or a list with one entry a layer"
        )
    return tuple(window) if windowed else (-1, -1)


def sharded_parameters(
    module: Any, prefix: str, axes: dict[str, int], sharded_offsets: tuple, metadata: dict | None, tp_group: Any
):
    """Sharded state dict of a module whose parameters `axes` names by their tensor-parallel axis."""
    make = lookup("megatron.core.transformer.utils:make_sharded_tensors_for_checkpoint")
    groups = {}
    if metadata and metadata.get("dp_cp_group") is not None and "tp_group" in inspect.signature(make).parameters:
        groups = {"tp_group": tp_group, "dp_cp_group": metadata["dp_cp_group"]}
    state = {name: p for name, p in module.state_dict(prefix="", keep_vars=True).items() if name in axes}
    return make(state, prefix, axes, sharded_offsets, **groups)


@contextlib.contextmanager
def no_manager_process():
    """While a checkpoint is saved synchronously: keep Megatron's writers from starting a process for their results.

    They would spawn one per rank, which imports torch anew, lives as long as the rank, and outlives it if the rank is
    killed. A synchronous save puts and gets the results in this very process, so a plain queue does. No effect on
    releases that have no such queue.
    """
    writer = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    if getattr(writer, "_results_queue", "absent") is not None:
        yield
        return
    writer._results_queue = queue.Queue()
    try:
        yield
    finally:
        writer._results_queue = None


def misreads_cp_comm_type_list() -> bool:
    """Whether this release indexes a list-valued `cp_comm_type` with the 1-based layer number."""
    init = inspect.unwrap(lookup("megatron.core.transformer.transformer_layer:TransformerLayer").__init__)
    source = "".join(textwrap.dedent(inspect.getsource(init)).split())
    return "cp_comm_type[self.layer_number]" in source


@contextlib.contextmanager
def fixed_cp_comm_type_list(config: Any):
    """While a TransformerLayer is built: put the list where a 1-based index finds each layer's own entry."""
    original = getattr(config, "cp_comm_type", None)
    if not isinstance(original, list):
        yield
        return
    config.cp_comm_type = [original[0], *original]
    try:
        yield
    finally:
        config.cp_comm_type = original
