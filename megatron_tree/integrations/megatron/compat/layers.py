"""Layers: what builds a core attention, layer specs, and two corrections while layers are built."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import textwrap
from typing import Any
from unittest import mock

import torch.nn.functional as F
from torch import Tensor, nn

from ....core.log import say_once
from .release import UnsupportedMegatronError, has_module, lookup, megatron_version


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
