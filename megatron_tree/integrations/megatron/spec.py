"""Put tree attention into a Megatron model: through its layer spec, or through `cp_comm_type="tree"` alone."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from typing import Any

from ...core.config import TREE_CP_COMM_TYPES, TreeConfig, default_config
from ...core.errors import TreeError
from . import compat
from .attention import TreeDotProductAttention
from .documents import watch_batches
from .dsa import TreeDSAttention
from .recurrent import ShardedMixer

from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_module  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayer  # isort: skip


def use_tree_attention(layer_spec: Any, *, tree_config: TreeConfig | None = None) -> Any:
    """A copy of a layer or block spec with TreeDotProductAttention as every `core_attention`, or TreeDSAttention in
    place of Megatron's DSA, and with gated delta nets and Mamba mixers that run on shards of a sequence.

    The `cp_comm_type` of a layer then chooses its schedule; None means "tree". The spec of a hybrid stack has layers
    that a model may not use: beside attention of these kinds, another one is an error only when it is built.

    Args:
        layer_spec: ModuleSpec, block submodules, or any nesting of them in dataclasses, lists, dicts and
            functools.partial. It is not changed; parts without attention are shared with the result.
        tree_config: TreeConfig that fixes grid, backend or wire format of these layers.
    Returns: the same type as `layer_spec`; `layer_spec` itself if nothing has to change.
    Raises: ValueError if it has no core attention and no recurrent layer, or no attention that is plain and dense.
    """
    walk = SpecForTree(tree_config)
    result = walk(layer_spec)
    if not walk.found and walk.refused:
        raise not_plain_attention(walk.refused[0])
    if not walk.found:
        raise ValueError(
            f"no core_attention and no recurrent layer found in {type(layer_spec).__name__}: pass a layer spec, a "
            "block spec or a list of them"
        )
    return result


class TreeGPTLayer(TransformerLayer):
    """The layer that Megatron builds for this config, with tree attention in it.

    Its parts follow from the config that it is built with, so one spec serves every model.
    """

    def __init__(self, *, config: Any, layer_number: int = 1, **kwargs):
        for name in ("heterogeneous_block_specs", "experimental_attention_variant"):
            if getattr(config, name, None):
                raise ValueError(
                    f"{name}={getattr(config, name)!r} with get_gpt_layer_tree_spec, a spec of plain GPT layers: "
                    "use install(), or the patch, with Megatron's own spec"
                )
        groups = kwargs.get("pg_collection")
        specs = compat.decoder_layer_specs(
            config, vp_stage=kwargs.get("vp_stage"), pp_group=getattr(groups, "pp", None)
        )
        spec = use_tree_attention(specs[layer_number - 1])  # layer_number is 1-based, counted in this pipeline stage
        assert spec.module is TransformerLayer, spec.module
        parts = {**(spec.params or {}), "submodules": spec.submodules}
        super().__init__(config=config, layer_number=layer_number, **parts, **kwargs)


class _TreeLayerSpec(ModuleSpec):
    """The spec of a layer that follows the model's config; see `get_gpt_layer_tree_spec`."""

    def __call__(self, *args, tree_config: TreeConfig | None = None, **kwargs) -> Any:
        """Megatron's `get_gpt_layer_local_spec(...)`, same arguments, with tree attention in it."""
        if "config" in kwargs:  # Megatron builds a module by calling its spec
            return build_module(self, *args, **kwargs)
        local_spec = compat.lookup("megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_spec")
        return use_tree_attention(local_spec(*args, **kwargs), tree_config=tree_config)


get_gpt_layer_tree_spec = _TreeLayerSpec(module=TreeGPTLayer)
"""A function and a spec. Call it with the arguments of Megatron's `get_gpt_layer_local_spec` to get that spec with tree
attention. Or pass it as a spec, as Megatron-LM does for `--spec megatron_tree.integrations.megatron
get_gpt_layer_tree_spec`: then the layers follow the model's config (norms, MLA, experts, TransformerEngine)."""


def core_attention_for_tree(core_attention: Any) -> Any:
    """The replacement of a spec's `core_attention` in a layer with a tree; patched Megatron calls it.

    If it is not plain dense attention, building the replacement is a ValueError.
    """
    return core_attention if is_tree(core_attention) else SpecForTree(_installed_config).core_attention(core_attention)


class NotPlainAttention:
    """Stands in for core attention that tree attention can't replace: building it is an error."""

    def __init__(self, *args, replaces: Any, **kwargs):
        raise not_plain_attention(replaces)


def not_plain_attention(module: Any) -> ValueError:
    return ValueError(
        f"core_attention {module} has submodules of its own, so it is not plain dense attention: "
        "tree attention would compute something else"
    )


class SpecCopy:
    """Copies a nesting of specs with some parts replaced; a part that occurs twice is copied once."""

    def __init__(self):
        self._done: dict[int, tuple[Any, Any]] = {}  # keeps the original alive: its id must not be reused

    def __call__(self, node: Any) -> Any:
        if id(node) not in self._done:
            self._done[id(node)] = (node, self._rebuild(node))
        return self._done[id(node)][1]

    def _field(self, name: str, value: Any) -> Any:
        """The field of a dataclass in the copy."""
        return self(value)

    def _rebuild(self, node: Any) -> Any:
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            result = copy.copy(node)
            for field in dataclasses.fields(node):
                object.__setattr__(result, field.name, self._field(field.name, getattr(node, field.name)))
            same = all(getattr(result, field.name) is getattr(node, field.name) for field in dataclasses.fields(node))
            return node if same else result
        if isinstance(node, functools.partial):
            args, kwargs = self(node.args), self(node.keywords)
            same = args is node.args and kwargs is node.keywords
            return node if same else functools.partial(node.func, *args, **kwargs)
        if isinstance(node, dict):
            items = {key: self(value) for key, value in node.items()}
            same = all(items[key] is node[key] for key in items)
            return node if same else items
        if isinstance(node, (list, tuple)):
            items = [self(item) for item in node]
            if all(new is old for new, old in zip(items, node, strict=True)):
                return node
            return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)
        return node


class MixersForTree(SpecCopy):
    """Replaces the mixers with a recurrent state."""

    def __init__(self, tree_config: TreeConfig | None):
        super().__init__()
        self.tree_config = tree_config
        self.found = False  # something that was replaced, or is ours

    def _rebuild(self, node: Any) -> Any:
        if not isinstance(node, ModuleSpec):
            return super()._rebuild(node)
        ours = tree_mixer(node.module)
        if ours is None:
            return super()._rebuild(node)
        self.found = True
        params = {**(node.params or {})} | ({} if self.tree_config is None else {"tree_config": self.tree_config})
        if ours is node.module and params == node.params:
            return node
        return dataclasses.replace(node, module=ours, params=params)


class SpecForTree(MixersForTree):
    """Replaces every `core_attention`, too."""

    def __init__(self, tree_config: TreeConfig | None):
        super().__init__(tree_config)
        self.refused: list[Any] = []  # modules of core attention that is not plain attention

    def _field(self, name: str, value: Any) -> Any:
        return self.core_attention(value) if name == "core_attention" and value is not None else self(value)

    def core_attention(self, old: Any) -> Any:
        if getattr(old, "module", None) is NotPlainAttention:
            return old
        indexed = isinstance(old, ModuleSpec) and (old.module is TreeDSAttention or compat.is_indexed(old.module))
        if getattr(old, "submodules", None) is not None and not indexed:
            self.refused.append(old.module)
            return ModuleSpec(module=NotPlainAttention, params={"replaces": old.module})
        self.found = True
        if is_tree(old) and self.tree_config in (None, getattr(old, "params", {}).get("tree_config")):
            return old
        params = {} if self.tree_config is None else {"tree_config": self.tree_config}
        if indexed:
            return dataclasses.replace(old, module=TreeDSAttention, params={**(old.params or {}), **params})
        return ModuleSpec(module=TreeDotProductAttention, params=params)


def tree_mixer(module: Any) -> type | None:
    """The mixer over a sharded sequence that replaces a mixer of Megatron's, ours for ours; None for anything else."""
    if isinstance(module, type) and issubclass(module, ShardedMixer):
        return module
    name = compat.mixer_name(module)
    if name is None:
        return None
    # they derive from Megatron's classes, whose packages a model without such layers does not need
    if name == "GatedDeltaNet":
        from .gated_delta_net import TreeGatedDeltaNet

        return TreeGatedDeltaNet
    from .mamba import TreeMambaMixer

    return TreeMambaMixer


def is_tree(core_attention: Any) -> bool:
    """Whether a `core_attention` entry of a spec builds TreeDotProductAttention, or a subclass of it."""
    module = get_module(core_attention) if isinstance(core_attention, ModuleSpec) else core_attention
    return isinstance(module, type) and issubclass(module, TreeDotProductAttention)


# The plugin ----------------------------------------------------------------------------------------------------------

_patches: dict[tuple[type, str], tuple[Any, Any]] = {}  # (class, method) -> (its own, ours)
_installed_config: TreeConfig | None = None


def install(*, tree_config: TreeConfig | None = None) -> None:
    """Build every attention layer whose `cp_comm_type` is "tree" or "a2a+tree" with TreeDotProductAttention, and run
    gated delta nets and Mamba mixers with such a type on shards of the sequence.

    From now on `TransformerConfig(context_parallel_size=..., cp_comm_type="tree")` is all that a user sets, with any
    layer spec (local, TransformerEngine, MLA). Other layers are unchanged. A list in `cp_comm_type` then also works in
    the releases of Megatron-core that index it wrongly. A second call only replaces `tree_config`.

    Args:
        tree_config: TreeConfig that fixes grid, backend or wire format; None: that of the file in
            $MEGATRON_TREE_CONFIG, if there is one.
    Raises: UnsupportedMegatronError that names what this release of megatron-core lacks, ValueError for a bad file;
        nothing is changed then.
    """
    global _installed_config
    if tree_config is None:
        default_config()  # raises for a bad file, before a model is built
    if not _patches:
        compat.megatron_version()
        attention, models = compat.attention_classes(), compat.model_classes()
        layer = compat.lookup("megatron.core.transformer.transformer_layer:TransformerLayer")
        mamba = compat.lookup("megatron.core.ssm.mamba_layer:MambaLayer")
        config = compat.lookup("megatron.core.transformer.transformer_config:TransformerConfig")
        misread = compat.misreads_cp_comm_type_list()  # the last thing that may raise
        for cls in attention:
            _wrap(cls, _with_tree_submodules)
        _wrap(mamba, _with_mixers_for_tree)
        _wrap(layer, _with_mixers_and_fixed_list if misread else _with_mixers_for_tree)
        for cls in models:
            _wrap(cls, _of_checked_model)
        _replace(config, "__post_init__", compat.checked_without_exchange(config.__post_init__))
    _installed_config = tree_config


def uninstall() -> None:
    """Undo `install`. Does nothing without a previous `install`.

    Raises: TreeError if another patch has replaced the same constructors since then; undo that patch first.
    """
    global _installed_config
    replaced = {f"{cls.__name__}.{name}": getattr(cls, name) is ours for (cls, name), (_, ours) in _patches.items()}
    covered = [name for name, is_ours in replaced.items() if not is_ours]
    if covered:
        raise TreeError(f"{', '.join(covered)} was replaced after install(): undo that patch first, then uninstall()")
    while _patches:
        (cls, name), (original, _) = _patches.popitem()
        setattr(cls, name, original)
    _installed_config = None


def is_installed() -> bool:
    """Whether `install` is in effect."""
    return bool(_patches)


def _wrap(cls: type, make) -> None:
    original = cls.__init__
    _replace(cls, "__init__", functools.wraps(original)(make(original, inspect.signature(original))))


def _replace(cls: type, name: str, ours: Any) -> None:
    _patches[cls, name] = (getattr(cls, name), ours)
    setattr(cls, name, ours)


def _with_tree_submodules(original, signature):
    def init(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs)
        spec = call.arguments["submodules"]
        if call.arguments.get("cp_comm_type") in TREE_CP_COMM_TYPES and not is_tree(spec.core_attention):
            call.arguments["submodules"] = use_tree_attention(spec, tree_config=_installed_config)
        with compat.mla_without_transformer_engine():
            return original(*call.args, **call.kwargs)

    return init


def _of_checked_model(original, signature):
    def init(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        compat.check_context_parallel(given["config"], given.get("pg_collection"))
        original(self, *args, **kwargs)
        if compat.cuts_packed_rows_as_a_whole():
            watch_batches(self)

    return init


def _with_fixed_list(original, signature):
    def init(self, *args, **kwargs):
        with compat.fixed_cp_comm_type_list(signature.bind(self, *args, **kwargs).arguments["config"]):
            return original(self, *args, **kwargs)

    return init


def _with_mixers_and_fixed_list(original, signature):
    return _with_mixers_for_tree(_with_fixed_list(original, signature), signature)


def _with_mixers_for_tree(original, signature):
    def init(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs)
        if compat.uses_tree(call.arguments["config"]):
            call.arguments["submodules"] = MixersForTree(_installed_config)(call.arguments["submodules"])
        return original(*call.args, **call.kwargs)

    return init
