"""Arguments of core attention, fields of TransformerConfig, and batches."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from typing import Any

from .release import lookup, megatron_lm_arguments, megatron_version

# Arguments of newer releases that do not change the result: a name for logs, the number of splits in a kernel.
HARMLESS_ARGUMENTS = frozenset({"name", "num_splits"})


def layer_groups(config: Any, pg_collection: Any) -> tuple[Any, Any]:
    """(tensor-parallel group, context-parallel group) of a layer; by default those of Megatron's parallel state.

    The latter is None for one rank. Raises: ValueError if it has not `config.context_parallel_size` ranks.
    """
    if pg_collection is None:
        parallel_state = importlib.import_module("megatron.core.parallel_state")
        tp_group = parallel_state.get_tensor_model_parallel_group()
        cp_group = parallel_state.get_context_parallel_group()
    else:
        for name in ("tp", "cp"):
            if getattr(pg_collection, name, None) is None:
                raise ValueError(
                    f"pg_collection has no process group {name!r}: a layer with a tree needs 'tp' and 'cp'"
                )
        tp_group, cp_group = pg_collection.tp, pg_collection.cp
    cp_size = config.context_parallel_size
    if cp_size == 1:
        return tp_group, None  # the configuration decides, even if the group has more ranks
    if cp_group.size() != cp_size:
        raise ValueError(
            f"context_parallel_size={cp_size} in the TransformerConfig, but the context-parallel group has "
            f"{cp_group.size()} ranks: initialize Megatron's parallel state with the same size"
        )
    return tp_group, cp_group


def token_group(model: Any) -> Any:
    """The ranks that run the same tokens when a model is served: tensor- and context-parallel ones."""
    group = getattr(getattr(model, "pg_collection", None), "tp_cp", None)
    state = importlib.import_module("megatron.core.parallel_state")
    return state.get_tensor_and_context_parallel_group() if group is None else group


def hierarchical_sizes(config: Any, cp_group: Any) -> tuple[int, int]:
    """(Ulysses ranks, ranks of the rest) of a layer whose `cp_comm_type` has two parts, as in "a2a+tree".

    They are the config's `hierarchical_context_parallel_sizes`, or else those of Megatron's parallel state. The first
    counts neighbouring ranks of cp_group; None: one rank.
    Raises: ValueError if there are no two sizes, or their product is not the size of the group.
    """
    world = 1 if cp_group is None else cp_group.size()
    if world == 1:
        return 1, 1
    sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
    if not sizes:
        parallel_state = importlib.import_module("megatron.core.parallel_state")
        groups = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False)
        sizes = [group.size() for group in groups or ()]
    if len(sizes) != 2 or any(size < 1 for size in sizes) or math.prod(sizes) != world:
        raise ValueError(
            f"hierarchical_context_parallel_sizes={list(sizes) or None}: a cp_comm_type of two parts, as 'a2a+tree', "
            f"needs two sizes whose product is the {world} context-parallel ranks: set it to [ranks of the first part, "
            "ranks of the second] in the TransformerConfig (Megatron-LM: --hierarchical-context-parallel-sizes)"
        )
    return tuple(sizes)


def batch_on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """This rank's share of every tensor of a batch [b, s, ...], zigzag; Megatron's `get_batch_on_this_cp_rank`."""
    split = lookup("megatron.core.utils:get_batch_on_this_cp_rank")
    if "is_hybrid_cp" not in inspect.signature(split).parameters:
        return split(batch)
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    return split(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())


def context_parallel_group(module: Any = None) -> Any:
    """The context-parallel group of a model or an attention layer, by default that of Megatron's parallel state."""
    groups = getattr(module, "pg_collection", None)
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    return getattr(groups, "cp", None) or parallel_state.get_context_parallel_group()


def data_groups() -> tuple[Any, Any]:
    """(data-parallel group, that of data and context parallelism) of Megatron's parallel state."""
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    data_group = parallel_state.get_data_parallel_group
    return data_group(), data_group(with_context_parallel=True)


def modules_with(name: str) -> list[Any]:
    """Megatron's modules that have a function of this name, of their own or imported."""
    return [x for path, x in list(sys.modules.items()) if path.startswith("megatron.core.") and name in vars(x)]


def group_of_batch(packed_seq_params: Any, cp_group: Any) -> Any:
    """The ranks that a batch names (hybrid or dynamic context parallelism), else cp_group; None for one rank."""
    if getattr(packed_seq_params, "local_cp_size", None) == 1:
        return None
    return getattr(packed_seq_params, "cp_group", None) or cp_group


def cuts_packed_rows_as_a_whole() -> bool:
    """Whether Megatron-LM cuts packed batches zigzag as a whole, wherever documents begin, instead of one by one."""
    args = megatron_lm_arguments()
    return bool(getattr(args, "dataloader_inter_document_masking", False)) and not getattr(args, "sft", False)


def loads_causal_masks() -> bool:
    """Whether the Megatron-LM script that runs loads masks that are causal and nothing else."""
    args = megatron_lm_arguments()
    return args is not None and not getattr(args, "reset_attention_mask", True)


def refuse_unknown_arguments(where: str, arguments: dict[str, Any]) -> None:
    """Raise a ValueError for an unknown argument that is set and may change the result."""
    unknown = sorted(name for name, value in arguments.items() if value is not None and name not in HARMLESS_ARGUMENTS)
    if unknown:
        raise ValueError(
            f"{where} got {', '.join(unknown)}, which tree attention does not support (megatron-core "
            f"{megatron_version()}): unset the option of Megatron that sets it"
        )


def check_layout(holder: Any, *names: str) -> None:
    """Raise a ValueError if an option of newer releases (a field of the configuration, or of a packed batch) cuts
    sequences in another way than zigzag, the only one of releases without it."""
    for name in names:
        layout = getattr(holder, name, None) or "zigzag"
        if layout != "zigzag":
            raise ValueError(
                f"{name}={layout!r}: layers with a tree take sequences that are cut zigzag: set {name}='zigzag', or "
                "the cp_comm_type of these layers to one without a tree"
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
