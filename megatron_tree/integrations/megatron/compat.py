"""Everything this package knows about versions of Megatron-core and Megatron-LM.

Written against megatron-core 0.16.1, the release that the tests run. The slow tests build and run a model with every
release from 0.16 to 0.19. Differences are found by looking at signatures and attributes, not at the version.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import math
import queue
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core import comm
from ...core.arguments import suggestion
from ...core.config import CP_COMM_TYPES, TREE_CP_COMM_TYPES
from ...core.log import say_once

MINIMUM_VERSION = (0, 16)


# Megatron-core warns of every optional package that it does without; docs/megatron-lm.md says what those would bring.
_NOTICES = r".*Apex (is|are) not installed"


class UnsupportedMegatronError(ImportError):
    """megatron-core is missing, too old, or lacks something this integration needs. The message names it."""


@contextlib.contextmanager
def hide_import_notices() -> Iterator[None]:
    """Import Megatron-core without its warnings that TransformerEngine and Apex are missing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NOTICES, module=r"megatron\.core\.")
        yield


def megatron_version() -> str:
    """Version of the installed megatron-core.

    Raises: UnsupportedMegatronError if it is not installed or older than 0.16.
    """
    try:
        package_info = importlib.import_module("megatron.core.package_info")
    except ImportError as error:
        raise UnsupportedMegatronError(
            f"megatron-core cannot be imported ({error}): install megatron_tree with its extra, "
            "pip install '.[megatron]' in the checkout"
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

    Raises: UnsupportedMegatronError that names the path, if this release of megatron-core has no such thing, or the
        package that is not installed and that it imports.
    """
    module, _, name = path.partition(":")
    try:
        with hide_import_notices():
            return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package not in ("", module.partition(".")[0]):
            raise UnsupportedMegatronError(
                f"{module} imports a package that is not installed: pip install {package}"
            ) from error
        raise UnsupportedMegatronError(
            f"megatron-core {megatron_version()} has no {path}, which is needed here ({error})"
        ) from error


def has_module(name: str) -> bool:
    """Whether this release of megatron-core has a module of this name, in a package that it has or has not."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def is_patched() -> bool:
    """Whether this megatron-core has a patch of patches/megatron-lm: it then looks `cp_comm_type` up in a table."""
    return hasattr(importlib.import_module("megatron.core.transformer.spec_utils"), "CORE_ATTENTION_OF_CP_COMM_TYPE")


def megatron_lm_arguments() -> Any:
    """The command line of the Megatron-LM script that runs; None outside one."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


# arguments of core attention, fields of TransformerConfig, and batches


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


def check_context_parallel(config: Any, pg_collection: Any) -> None:
    """Raise a ValueError for a model whose layers no `cp_comm_type` would reach: of a name that nobody knows, or with a
    tree in a configuration for one rank, so that each rank of the group would attend to its own shard alone."""
    kinds = config.cp_comm_type if isinstance(config.cp_comm_type, list) else [config.cp_comm_type]
    known = (*CP_COMM_TYPES, "allgather", None)  # the latter of newer releases
    for kind in kinds:
        if kind not in known:
            choices = ", ".join(map(repr, CP_COMM_TYPES))
            raise ValueError(f"cp_comm_type={kind!r} is none of {choices}{suggestion([kind], CP_COMM_TYPES)}")
    group = getattr(pg_collection, "cp", None)
    if group is None:
        state = importlib.import_module("megatron.core.parallel_state")
        group = state.get_context_parallel_group(check_initialized=False)
    size = 1 if group is None else group.size()
    if config.context_parallel_size == 1 < size and any(kind in TREE_CP_COMM_TYPES for kind in kinds):
        raise ValueError(
            f"context_parallel_size=1 in the TransformerConfig, with cp_comm_type={config.cp_comm_type!r} and a "
            f"context-parallel group of {size} ranks: set context_parallel_size={size}, or leave cp_comm_type out if "
            "every rank has whole sequences"
        )


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


# layers: what builds a core attention, layer specs, and two corrections while layers are built


def attention_classes() -> tuple[type, ...]:
    """The attention layers that build a core attention from `submodules.core_attention`."""
    paths = [
        "megatron.core.transformer.attention:Attention",
        "megatron.core.transformer.multi_latent_attention:MultiLatentAttention",
    ]
    absorbed = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
    if has_module(absorbed):  # from 0.19 on, for DSA
        paths.append(f"{absorbed}:AbsorbedMLASelfAttention")
    classes = tuple(lookup(path) for path in paths)
    for cls in classes:
        missing = {"submodules", "cp_comm_type"} - set(inspect.signature(cls.__init__).parameters)
        if missing:
            raise UnsupportedMegatronError(
                f"megatron-core {megatron_version()}: "
                f"{cls.__module__}.{cls.__name__} takes no argument {sorted(missing)}"
            )
    return classes


def model_classes() -> tuple[type, ...]:
    """The models that take packed batches; of hybrid stacks, MambaModel is HybridModel from 0.18 on."""
    hybrid = "megatron.core.models.hybrid.hybrid_model"
    named = f"{hybrid}:HybridModel" if has_module(hybrid) else "megatron.core.models.mamba.mamba_model:MambaModel"
    return lookup("megatron.core.models.gpt.gpt_model:GPTModel"), lookup(named)


def decoder_layer_specs(config: Any, *, vp_stage: int | None, pp_group: Any) -> list[Any]:
    """Megatron's own spec of every decoder layer of a (virtual) pipeline stage; pp_group None: the parallel state's."""
    specs = "megatron.core.models.gpt.gpt_layer_specs"
    wants_te = config.transformer_impl == "transformer_engine"
    if wants_te and not lookup(f"{specs}:HAVE_TE"):
        say_once("transformer_impl='transformer_engine', but TransformerEngine is not installed: Megatron's own layers")
        wants_te = False
    make = lookup(f"{specs}:get_gpt_decoder_block_spec")
    arguments = {"normalization": config.normalization, "qk_l2_norm": config.qk_l2_norm, "vp_stage": vp_stage}
    if pp_group is not None:
        arguments["pp_rank"] = pp_group.rank()
    return make(config, use_transformer_engine=wants_te, **arguments).layer_specs


def misreads_cp_comm_type_list() -> bool:
    """Whether this release indexes a list-valued `cp_comm_type` with the 1-based layer number."""
    init = inspect.unwrap(lookup("megatron.core.transformer.transformer_layer:TransformerLayer").__init__)
    source = "".join(textwrap.dedent(inspect.getsource(init)).split())
    return "cp_comm_type[self.layer_number]" in source


@contextlib.contextmanager
def fixed_cp_comm_type_list(config: Any):
    """While a TransformerLayer is built: shift the list so that a 1-based index finds each layer's own entry.

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
    """While an MLA layer is built: two corrections for Megatron's own layers.

    The layer passes the sizes of keys and values to its core attention, whose own constructor takes no such arguments.
    Up to 0.16 it also has a flag that TransformerEngine is installed even if it is not; then it compares its
    parts with placeholders of TransformerEngine's classes and fails.
    """
    mla = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    core = lookup("megatron.core.transformer.dot_product_attention:DotProductAttention")
    with contextlib.ExitStack() as stack:
        if getattr(mla, "HAVE_TE", False) and not lookup("megatron.core.extensions.transformer_engine:HAVE_TE"):
            stack.enter_context(mock.patch.object(mla, "HAVE_TE", False))
        if "v_channels" not in inspect.signature(core.__init__).parameters:
            stack.enter_context(mock.patch.object(core, "__init__", _with_head_sizes(core.__init__)))
        yield


def _with_head_sizes(original):
    def init(self, *args, k_channels: int | None = None, v_channels: int | None = None, **kwargs):
        original(self, *args, **kwargs)
        if v_channels is not None:  # the size of the result; that of keys matters to the scale alone, which MLA passes
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return init


def name_missing_transformer_engine() -> None:
    """Let the placeholders of TransformerEngine's layers say what is missing when a model is built with them.

    Without TransformerEngine, Megatron-core has mocks in their place, whose errors name neither.
    """
    for name, placeholder in vars(importlib.import_module("megatron.core.extensions.transformer_engine")).items():
        if name.startswith("TE") and isinstance(placeholder, mock.NonCallableMock):
            placeholder.module = placeholder.side_effect = _missing_layer(name)  # in a spec, and called


def _missing_layer(name: str) -> type:
    def init(self, *args, **kwargs):
        raise UnsupportedMegatronError(
            f"{name} is a layer of TransformerEngine, which is not installed: install it (it needs a GPU), or choose "
            "layers without it (Megatron-LM: --transformer-impl local, or a --spec of Megatron's own layers)"
        )

    return type(name, (), {"__init__": init})


def sequence_parallel_switches(model: nn.Module) -> list[tuple[Any, str]]:
    """(object, attribute) of all that is True in a model built with `sequence_parallel`; [] without."""
    owners = {id(x): x for module in model.modules() for x in (module, getattr(module, "config", None))}
    names = ("sequence_parallel", "reduce_scatter_embeddings")
    return [(x, name) for x in owners.values() for name in names if getattr(x, name, False) is True]


@contextlib.contextmanager
def switched_off(switches: list[tuple[Any, str]]):
    """Context in which these attributes are False."""
    for owner, name in switches:
        setattr(owner, name, False)
    try:
        yield
    finally:
        for owner, name in switches:
            setattr(owner, name, True)


def normed_input(projection: nn.Module, x: Tensor, config: Any) -> Tensor:
    """What a projection multiplies with its weight: some of TransformerEngine's apply the layer's norm themselves."""
    weight, bias = getattr(projection, "layer_norm_weight", None), getattr(projection, "layer_norm_bias", None)
    if weight is None:
        return x
    weight = weight + 1 if config.layernorm_zero_centered_gamma else weight
    if config.normalization == "RMSNorm":
        return F.rms_norm(x, weight.shape, weight, config.layernorm_epsilon)
    return F.layer_norm(x, weight.shape, weight, bias, config.layernorm_epsilon)


# Mixers with a recurrent state: their kernels, and what Megatron checks of them under context parallelism. Megatron
# computes a gated delta net in one forward, which gated_delta_net.py writes anew. Mamba's convolution and scan have
# methods of their own, which mamba.py replaces. Both were read in the releases of `READ`.


READ = ("0.16", "0.17", "0.18", "0.19")

MIXERS = {
    "megatron.core.ssm.gated_delta_net": "GatedDeltaNet",
    "megatron.core.ssm.gated_delta_net.gdn": "GatedDeltaNet",  # 0.19
    "megatron.core.ssm.mamba_mixer": "MambaMixer",
}
"""Modules of Megatron's mixers, and their names there."""


def mixer_name(module: Any) -> str | None:
    """The name of a mixer of Megatron's that can run on shards of a sequence; None for anything else.

    Raises: UnsupportedMegatronError for a release whose mixers were not read.
    """
    name = MIXERS.get(getattr(module, "__module__", None))
    if name is None or getattr(module, "__qualname__", None) != name:
        return None
    if not megatron_version().startswith(tuple(f"{release}." for release in READ)):
        raise UnsupportedMegatronError(
            f"megatron-core {megatron_version()}: its {name} is not known to compute what it does in "
            f"{', '.join(READ)}, so it can't run on shards of a sequence: use one of these releases, or another "
            "cp_comm_type in this layer"
        )
    return name


def is_recurrent(module: Any) -> bool:
    """Whether a module is a layer of Megatron's with a recurrent state."""
    names = ("MambaMixer", "GatedDeltaNet", "GatedDeltaNet2", "GatedDeltaProductMixer")  # the last two from 0.20 on
    return any(cls.__name__ in names for cls in type(module).__mro__)


def uses_tree(config: Any) -> bool:
    """Whether any layer of this configuration has a `cp_comm_type` with a tree."""
    kinds = getattr(config, "cp_comm_type", None)
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return config.context_parallel_size > 1 and any(kind in TREE_CP_COMM_TYPES for kind in kinds)


def cp_comm_type_of_layer(config: Any, layer_number: int) -> str | None:
    """The `cp_comm_type` of a layer, 1-based over all pipeline stages; of layers after the list's end the last."""
    kinds = config.cp_comm_type
    return kinds[min(layer_number, len(kinds)) - 1] if isinstance(kinds, list) else kinds


def exchanges_heads(mixer: type) -> bool:
    """Whether this mixer has context parallelism of Megatron's own: Mamba, and gated delta nets from 0.18 on."""
    is_mamba = any(cls.__name__ == "MambaMixer" for cls in mixer.__mro__)
    return is_mamba or _named(mixer, "get_parameter_local_cp") is not None


class OneRank:
    """Stands in for the context-parallel group of a mixer of Megatron's, which is to compute as on one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def as_on_one_rank(pg_collection: Any) -> Any:
    """A copy of process groups, with a context-parallel group of one rank."""
    if pg_collection is None:
        return None  # Megatron says that it must be given
    groups = copy.copy(pg_collection)
    groups.cp = OneRank()
    return groups


def _named(mixer: type, name: str) -> Any:
    """What the module of this class, or of a class that it derives from, calls by this name; None without."""
    modules = (vars(sys.modules[cls.__module__]) for cls in mixer.__mro__ if cls.__module__.startswith("megatron."))
    return next((names[name] for names in modules if names.get(name) is not None), None)


def gated_delta_rule(mixer: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The kernel that a GatedDeltaNet calls: fla's, or Megatron's own in torch (`deterministic_mode`)."""
    kind = "torch_chunk_gated_delta_rule" if mixer.config.deterministic_mode else "chunk_gated_delta_rule"
    return getattr(mixer, "gated_delta_rule", None) or _named(type(mixer), kind)  # an attribute from 0.18 on


def l2norm(mixer: Any) -> Callable[[Tensor], Tensor]:
    """fla's norm of queries and keys over their last dimension."""
    return _named(type(mixer), "l2norm")


def chunk_scan(mixer: Any) -> Callable[..., Any]:
    """mamba_ssm's `mamba_chunk_scan_combined`, with the dtype of states that newer releases pass."""
    scan = _named(type(mixer), "mamba_chunk_scan_combined")
    if _named(type(mixer), "MAMBA_HAS_STATE_DTYPE"):
        return functools.partial(scan, state_dtype=mixer.mamba_training_ssm_states_dtype)
    return scan


def short_convolution(mixer: Any, weight: Tensor, bias: Tensor | None, activation: Callable) -> Callable:
    """The causal convolution of every channel and the activation after it, by the kernel that this mixer has.

    weight: [c, 1, width]. bias: [c]. Returns a function [b, t, c] -> [b, t, c].
    """
    width, fuses = weight.shape[-1], mixer.activation in ("silu", "swish") and not mixer.config.deterministic_mode
    if fuses and (kernel := _named(type(mixer), "causal_conv1d_fn")) is not None:  # causal_conv1d's

        def convolve(x: Tensor) -> Tensor:
            x = x.transpose(1, 2).contiguous()
            return kernel(x=x, weight=weight.squeeze(1), bias=bias, activation=mixer.activation).transpose(1, 2)

    elif fuses and (kernel := _named(type(mixer), "causal_conv1d")) is not None:  # fla's

        def convolve(x: Tensor) -> Tensor:
            return kernel(x=x, weight=weight.squeeze(1), bias=bias, activation=mixer.activation)[0]

    else:

        def convolve(x: Tensor) -> Tensor:
            padded = F.pad(x.transpose(1, 2), (width - 1, 0))
            return activation(F.conv1d(padded, weight, bias, groups=len(weight))).transpose(1, 2)

    return convolve


def checked_without_exchange(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """`TransformerConfig.__post_init__` for gated delta nets whose ranks do not exchange heads, and for DSA.

    Megatron refuses context parallelism for the former up to 0.17, and from 0.18 on wants heads that the ranks divide;
    for the latter up to 0.18, and then wants cp_comm_type "allgather". Where all layers have a tree the options of
    these are checked as on one rank; all others as for any attention.
    """

    @functools.wraps(post_init)
    def checked(config: Any) -> None:
        kinds = config.cp_comm_type if isinstance(config.cp_comm_type, list) else [config.cp_comm_type]
        trees = config.context_parallel_size > 1 and all(kind in TREE_CP_COMM_TYPES for kind in kinds)
        if config.experimental_attention_variant not in ("gated_delta_net", "dsa") or not trees:
            return post_init(config)
        others = copy.copy(config)
        others.experimental_attention_variant = None
        post_init(others)
        world, config.context_parallel_size = config.context_parallel_size, 1
        try:
            post_init(config)
        finally:
            config.context_parallel_size = world

    return checked


# Layers whose queries select keys by an index: DSA (`experimental_attention_variant="dsa"`). Its indexer projects
# tokens to index queries, weights and index keys; then it scores all keys of the rank. Ours takes what it has
# projected. It was read in the releases of `DSA_READ`: 0.16 has no method that ends there; from 0.19 on the layer takes
# the latents of MLA without their up-projection, and sums the indexer's loss where losses are per token.


DSA_READ = ("0.16", "0.17", "0.18", "0.19", "0.20")
_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"

DSA_OFF = {
    "softmax_type": ("vanilla",),
    "window_size": (None,),
    "qk_clip": (False,),
    "log_max_attention_logit": (False,),
    "dsa_indexer_topk_freq": (1, None),
    "dsa_indexer_scoring_relu": (True,),
}
"""Options that Megatron's DSA does not read, then those that ours does not have, and the values that they may have."""


def is_indexed(module: Any) -> bool:
    """Whether a module is Megatron's core attention to the keys that an index selects.

    Raises: UnsupportedMegatronError for a release whose DSA was not read.
    """
    if getattr(module, "__module__", None) != _DSA or getattr(module, "__qualname__", None) != "DSAttention":
        return False
    if not megatron_version().startswith(tuple(f"{release}." for release in DSA_READ)):
        raise UnsupportedMegatronError(
            f"megatron-core {megatron_version()}: its DSAttention is not known to compute what it does in "
            f"{', '.join(DSA_READ)}, so it can't run on shards of a sequence: use one of these releases"
        )
    return True


def refuse_indexed(config: Any) -> None:
    """Raise a ValueError for options with which DSA with a tree would not be what the user expects."""
    for name, off in DSA_OFF.items():
        if (value := getattr(config, name, off[0])) not in off:
            raise ValueError(
                f"{name}={value!r} in a layer with DSA (experimental_attention_variant='dsa'), which has no such "
                f"option with a tree: set it to {off[0]!r}"
            )
    recomputes = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
    attention = lookup("megatron.core.transformer.attention:Attention")
    passed = inspect.signature(attention._checkpointed_attention_forward).parameters
    if recomputes and "core_attention_extra_kwargs" not in passed:
        raise ValueError(
            "recompute_modules has 'core_attn', for which Megatron (up to 0.18) does not pass DSA its tokens: leave it "
            "out, or recompute whole layers (recompute_granularity='full')"
        )


class _Projected(NamedTuple):
    """What stands in for the scores of all keys: of these the indexer only takes the largest."""

    q: Tensor
    weights: Tensor
    k: Tensor

    def topk(self, *_: Any, **__: Any) -> tuple[None, _Projected]:
        return None, self


def project_index(indexer: nn.Module, x: Tensor, qr: Tensor, positions: Tensor, length: int) -> tuple[Tensor, ...]:
    """Index queries [s, b, h, d], their weights [s, b, h] and index keys [s, b, d] of this rank's tokens.

    Args:
        x: [s, b, hidden], qr: [s, b, r]; with sequence parallelism shards of these.
        positions: int64 [s], of the tokens, for the rotary embedding; less than length.
    """
    with _rotated_at(indexer.rotary_pos_emb, positions, length):
        if hasattr(indexer, "forward_before_topk"):
            q, k, weights = indexer.forward_before_topk(x, qr)
            return q, weights, k
        with mock.patch.object(indexer, "_compute_index_scores", _Projected):
            return indexer.forward_with_scores(x, qr)[1]


@contextlib.contextmanager
def _rotated_at(embedding: nn.Module, positions: Tensor, length: int):
    """While an indexer runs: its rotary embedding's table has the rows of these positions."""
    whole = embedding(length, packed_seq=True)  # not cut for the ranks
    table, *scale = whole if isinstance(whole, tuple) else (whole,)
    rows = table[positions]

    def forward(*_: Any, **__: Any) -> Any:
        return (rows, *scale) if scale else rows

    with mock.patch.object(embedding, "forward", forward):
        yield


def attach_index_loss(
    out: Tensor, divergence: Tensor, *, coeff: float, count: int, layer_number: int, config: Any, cp_group: Any
) -> Tensor:
    """out, whose backward adds the gradient of the indexer's loss, which is noted for Megatron's log.

    Megatron's loss is a mean over tokens, from 0.19 on a sum where losses are per token. What each rank contributes
    here adds up, after all that Megatron does to gradients, to what one rank has: they are summed over the ranks of a
    sequence, or averaged (not `calculate_per_token_loss`), for which from 0.19 on the schedules make up.

    Args:
        divergence: the sum over this rank's queries. count: queries of all ranks of the batch.
        cp_group: those ranks.
    """
    world, per_token, loss = comm.group_size(cp_group), config.calculate_per_token_loss, divergence * coeff
    newer = _sums_per_token()
    if not (newer and per_token):
        loss = loss / count
    logged = loss.detach()
    if not per_token:
        loss = loss * (world / config.context_parallel_size if newer else world)
    elif not newer:
        loss = loss * (world / config.context_parallel_size)
    log = lookup(f"{_DSA}:DSAIndexerLossLoggingHelper")
    log.save_loss_to_tracker(logged, layer_number, config.num_layers, reduce_group=cp_group)
    return lookup(f"{_DSA}:DSAIndexerLossAutoScaler").apply(out, loss)


def index_epsilon() -> float:
    """What Megatron adds to probabilities before their logarithm in the indexer's loss: from 0.19 on nothing."""
    return 0.0 if _sums_per_token() else 1e-10


def _sums_per_token() -> bool:
    return "calculate_per_token_loss" in inspect.signature(lookup(f"{_DSA}:compute_dsa_indexer_loss")).parameters


# distributed checkpoints


def sharded_parameters(
    module: Any, prefix: str, axes: dict[str, int], sharded_offsets: tuple, metadata: dict | None, tp_group: Any
):
    """Sharded state dict of a module; `axes` maps the names of parameters to their tensor-parallel axes."""
    make = lookup("megatron.core.transformer.utils:make_sharded_tensors_for_checkpoint")
    groups = {}
    if metadata and metadata.get("dp_cp_group") is not None:
        groups = {"tp_group": tp_group, "dp_cp_group": metadata["dp_cp_group"]}
    state = {name: p for name, p in module.state_dict(prefix="", keep_vars=True).items() if name in axes}
    return make(state, prefix, axes, sharded_offsets, **groups)


@contextlib.contextmanager
def no_manager_process():
    """While a checkpoint is saved synchronously: keep Megatron's writers from starting a process for their results.

    There would be one process per rank, which imports torch again, lives as long as the rank, and survives it if the
    rank is killed. A synchronous save passes the results inside one process, so a plain queue is enough. No effect on
    releases without such a queue.
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

    Without Apex and TransformerEngine it uses torch's Adam. `sharded_state_dict(is_loading=True)` then reads step
    counts that do not exist before the first step. `load_state_dict` looks for them among the tensors, though they are
    stored separately, and gives all parameters one shared count, which each of them would advance. No effect on other
    optimizers.
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
                stack.callback(_separate_step_counts, inner)
        yield


def _separate_step_counts(adam: torch.optim.Adam) -> None:
    for state in adam.state.values():
        state["step"] = state["step"].clone()


def _setter_that_keeps_the_step(part: Any):
    original = part._set_main_param_and_optimizer_states

    @torch.no_grad()  # one of Megatron's callers has no such guard
    def setter(model_param, tensors):
        group, place = part.model_param_group_index_map[model_param]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
        return original(model_param, {"step": state["step"], **tensors})

    return setter


# what Megatron's own modules do with CUDA, and its replacement on CPU ranks: (object, attribute, replacement)


Replacements = list[tuple[Any, str, Any]]


def core_replacements() -> Replacements:
    """In megatron.core: the random state, and what its experts do. They complement those in torch itself."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    replacements: Replacements = [
        (random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda new_state, *args, **kwargs: torch.set_rng_state(new_state)),
        (dispatcher, "maybe_move_tensor_to_cpu", _as_on_cpu),
    ]
    # the router of 0.16 asks whether it is None, and only TransformerEngine's import sets it
    if not hasattr(moe_utils, "te_general_gemm"):
        replacements.append((moe_utils, "te_general_gemm", None))
    return replacements


def training_replacements() -> Replacements:
    """In megatron.training, the training loop of Megatron-LM: the assertion that there is CUDA, kernels, a warm-up."""
    initialize = lookup("megatron.training.training:initialize_megatron")
    lookup("megatron.training.training:set_jit_fusion_options")
    training = importlib.import_module("megatron.training.training")
    replacements: Replacements = [
        (training, "initialize_megatron", functools.partial(initialize, allow_no_cuda=True)),
        (training, "set_jit_fusion_options", lambda **sizes: None),
    ]
    kernels = getattr(importlib.import_module("megatron.training.initialize"), "fused_kernels", None)  # up to 0.16
    return [*replacements, (kernels, "load", lambda args: None)] if kernels is not None else replacements


def _as_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
