"""Everything this package knows about versions of Megatron-core, in one place.

Written against megatron-core 0.16.1, the release that the tests run; the slow tests build and run a model with every
release from 0.14 to 0.19. What they do differently is handled by looking at signatures and attributes:

- process groups reach core attention as `pg_collection` (older: `model_comm_pgs`; oldest: not at all);
- newer releases hand core attention further arguments (`name`, `num_splits`, ...);
- fields of TransformerConfig that older releases lack (softmax_type, window_size, window_attn_skip_freq);
- up to 0.16, TransformerLayer reads a list-valued `cp_comm_type` one place too far (see `fixed_cp_comm_type_list`);
- 0.14 to 0.16 take TransformerEngine for installed where MLA is built (see `mla_without_transformer_engine`);
- from 0.18 on, `get_batch_on_this_cp_rank` takes `is_hybrid_cp` (see `batch_on_this_cp_rank`);
- from 0.16 on, packed batches may be sharded in other ways than document by document (see `refuse_other_packings`).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import queue
import sys
import textwrap
from typing import Any

import torch

from ...log import say_once

MINIMUM_VERSION = (0, 13)
# What tree attention makes of `cp_comm_type`.
CP_COMM_TYPES = ("tree", "p2p", "all_gather", "a2a", "a2a+tree", "a2a+p2p")
TREE_CP_COMM_TYPES = ("tree", "a2a+tree")  # those of them that no other core attention takes
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


def token_group(model: Any) -> Any:
    """The ranks that run the same tokens when a model is served: tensor- and context-parallel ones."""
    group = getattr(getattr(model, "pg_collection", None), "tp_cp", None)  # older: no such attribute
    state = importlib.import_module("megatron.core.parallel_state")
    return state.get_tensor_and_context_parallel_group() if group is None else group


def hierarchical_sizes(config: Any, cp_group: Any) -> tuple[int, int]:
    """(Ulysses ranks, ranks of the rest) of a layer whose `cp_comm_type` has two parts, as in "a2a+tree".

    Args:
        config: TransformerConfig; its `hierarchical_context_parallel_sizes`, or else those that Megatron's parallel
            state was initialized with. The first size counts neighbouring ranks of `cp_group`.
        cp_group: context-parallel group; None for one rank.
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


def megatron_lm_arguments() -> Any:
    """The command line of the Megatron-LM script that runs; None outside one."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def refuse_other_packings(packed_seq_params: Any) -> None:
    """Raise a ValueError for a packed batch that is not sharded document by document over the whole cp group."""
    if getattr(packed_seq_params, "local_cp_size", None) is not None or getattr(packed_seq_params, "cp_group", None):
        raise ValueError(
            "packed_seq_params has a context-parallel group of its own (hybrid or dynamic context parallelism): tree "
            "attention takes the whole group for every batch; turn --hybrid-context-parallel off"
        )
    args = megatron_lm_arguments()
    if getattr(args, "dataloader_inter_document_masking", False) and not getattr(args, "sft", False):
        raise ValueError(
            "--dataloader-inter-document-masking zigzags the packed sequence as a whole: tree attention takes packed "
            "batches that are zigzagged document by document; turn it off (documents of --sft are supported)"
        )


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


@contextlib.contextmanager
def loading_torch_adam(optimizer: Any):
    """While a checkpoint is loaded into a fresh distributed optimizer: let it load torch's Adam.

    That is what it has without Apex and TransformerEngine. `sharded_state_dict(is_loading=True)` then reads the step
    counts of a state that is not there before the first step; `load_state_dict` looks for them among the tensors,
    though they are stored apart, and gives all parameters one count, which each of them would advance. No effect on
    other optimizers.
    """
    distributed = lookup("megatron.core.optimizer.distrib_optimizer:DistributedOptimizer")
    with contextlib.ExitStack() as stack:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            inner = getattr(part, "optimizer", None)
            if isinstance(part, distributed) and isinstance(inner, torch.optim.Adam):
                for parameter in (p for group in inner.param_groups for p in group["params"]):
                    zeros = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                    inner.state[parameter] = {"step": torch.tensor(0.0), **zeros}
                part._set_main_param_and_optimizer_states = _setter_that_keeps_the_step(part)
                stack.callback(delattr, part, "_set_main_param_and_optimizer_states")
                stack.callback(_part_step_counts, inner)
        yield


def _part_step_counts(adam: torch.optim.Adam) -> None:
    for state in adam.state.values():
        state["step"] = state["step"].clone()


def _setter_that_keeps_the_step(part: Any):
    original = part._set_main_param_and_optimizer_states

    def setter(model_param, tensors):
        group, place = part.model_param_group_index_map[model_param]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
        return original(model_param, {"step": state["step"], **tensors})

    return setter


def is_patched() -> bool:
    """Whether this megatron-core has a patch of patches/megatron-lm: it then looks `cp_comm_type` up in a table."""
    return hasattr(importlib.import_module("megatron.core.transformer.spec_utils"), "CORE_ATTENTION_OF_CP_COMM_TYPE")


def decoder_layer_specs(config: Any, *, vp_stage: int | None, pp_group: Any) -> list[Any]:
    """Megatron's own spec of every decoder layer of a pipeline stage, from the config alone.

    Args:
        vp_stage: virtual pipeline stage. pp_group: pipeline group, None for that of the parallel state.
    """
    specs = "megatron.core.models.gpt.gpt_layer_specs"
    wants_te = config.transformer_impl == "transformer_engine"
    if wants_te and not lookup(f"{specs}:HAVE_TE"):
        say_once("transformer_impl='transformer_engine', but TransformerEngine is not installed: Megatron's own layers")
        wants_te = False
    make = lookup(f"{specs}:get_gpt_decoder_block_spec")
    qk_l2_norm = getattr(config, "qk_l2_norm", getattr(megatron_lm_arguments(), "qk_l2_norm", False))  # 0.14: no field
    arguments = {"normalization": config.normalization, "qk_l2_norm": qk_l2_norm, "vp_stage": vp_stage}
    if pp_group is not None and "pp_rank" in inspect.signature(make).parameters:
        arguments["pp_rank"] = pp_group.rank()
    return make(config, use_transformer_engine=wants_te, **arguments).layer_specs


def misreads_cp_comm_type_list() -> bool:
    """Whether this release indexes a list-valued `cp_comm_type` with the 1-based layer number."""
    init = inspect.unwrap(lookup("megatron.core.transformer.transformer_layer:TransformerLayer").__init__)
    source = "".join(textwrap.dedent(inspect.getsource(init)).split())
    return "cp_comm_type[self.layer_number]" in source


@contextlib.contextmanager
def fixed_cp_comm_type_list(config: Any):
    """While a TransformerLayer is built: put the list where a 1-based index finds each layer's own entry.

    Layers of multi-token prediction come after the list's end; they get its last entry.
    """
    original = getattr(config, "cp_comm_type", None)
    if not isinstance(original, list):
        yield
        return
    config.cp_comm_type = [original[0], *original, *original[-1:] * (getattr(config, "mtp_num_layers", None) or 0)]
    try:
        yield
    finally:
        config.cp_comm_type = original


@contextlib.contextmanager
def mla_without_transformer_engine():
    """While an MLA layer is built: make known that TransformerEngine is missing, if it is.

    From 0.14 to 0.16 the layer compares its parts with stand-ins of TransformerEngine's classes and fails. No effect on
    other releases.
    """
    mla = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    wrong = getattr(mla, "HAVE_TE", False) and not lookup("megatron.core.extensions.transformer_engine:HAVE_TE")
    if wrong:
        mla.HAVE_TE = False
    try:
        yield
    finally:
        if wrong:
            mla.HAVE_TE = True


def checkpoint_without_output(config: Any) -> Any:
    """Megatron's checkpoint whose outputs are discarded after use, and made again in the backward."""
    quantized = getattr(config, "fp8", None) or getattr(config, "fp4", None)  # None turns it off, False does not
    return lookup("megatron.core.tensor_parallel.random:CheckpointWithoutOutput")(fp8=quantized)
