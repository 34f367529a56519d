"""Recurrent layers of a model that trains on shards: each runs with the batch's `SequenceShard`."""

from __future__ import annotations

import functools

from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from ....comm import outside_graphs
from ..architectures import layers_of
from ..train.batch_shards import current_shard
from .mixers import MixerRuns, wrap_mixers
from .recurrent import RecurrentRun


def find_mixers(model) -> dict[nn.Module, frozenset[str]]:
    """The recurrent layers of a model, with the functions that each has to call.

    Raises: ValueError unless they are those of the configuration.
    """
    expected = {i for i, layer in enumerate(layers_of(model.config)) if layer.num_states}
    mixers = wrap_mixers(model)
    if expected != {mixer.layer_idx for mixer in mixers} or len(expected) != len(mixers):
        raise ValueError(
            f"{type(model).__name__} has layers with a recurrent state ({', '.join(map(str, sorted(expected)))}), but "
            f"the functions that compute over tokens were found in {sorted(mixer.layer_idx for mixer in mixers)}: it "
            "can't be trained on shards. Train it with DeepSpeed or Trainer as they are, on whole sequences (without "
            "register_sequence_parallel)"
        )
    return mixers


def run_on_shards(model, mixers: dict[nn.Module, frozenset[str]]) -> dict[str, None]:
    """Make the recurrent layers of a model compute over shards. Returns the names under which they appear in
    `SequenceShard.used_by`."""
    MixerRuns(mixers, _begin, _end)
    if mixers:
        for number, layer in enumerate(model.get_decoder().layers):
            for module in layer.modules():
                if isinstance(module, GradientCheckpointingLayer) and not mixers.keys().isdisjoint(module.modules()):
                    module.__class__ = _holding_shard(type(module))
                    module.register_forward_pre_hook(outside_graphs(_pass_on), with_kwargs=True)
                # attention layers that share their weights have no number
                if getattr(module, "layer_idx", number) in (None, -1):
                    module.layer_idx = number
    return {used_by(mixer.layer_idx): None for mixer in mixers}


def used_by(layer_idx: int) -> str:
    """The name of a recurrent layer in `SequenceShard.used_by`."""
    return f"recurrent layer {layer_idx}"


def _begin(mixer: nn.Module, args, kwargs) -> RecurrentRun | None:
    if (shard := current_shard.get()) is None:
        if mixer.training and not any(isinstance(x, Cache) for x in (*args, *kwargs.values())):
            raise ValueError(
                f"{type(mixer).__name__} (layer_idx={mixer.layer_idx}) runs again, in the backward, without its "
                "shard: checkpoint whole decoder layers, as model.gradient_checkpointing_enable() does"
            )
        return None
    layout = "zigzag" if shard.documents is None else shard.documents
    return RecurrentRun(cp_group=shard.cp_group, layout=layout, config=shard.config)


def _end(mixer: nn.Module, *, failed: bool) -> None:
    if not failed:
        current_shard.get().used_by[used_by(mixer.layer_idx)] = None


def _pass_on(layer: nn.Module, args, kwargs) -> tuple:
    return args, kwargs | {"tree_shard": current_shard.get()}


@functools.cache
def _holding_shard(cls: type[nn.Module]) -> type[nn.Module]:
    """A class of layers that are recomputed in the backward, when the model's run is over: `_pass_on` puts the shard
    into their arguments.

    Transformers recomputes `forward`, without hooks, of the outermost class: this one.
    """

    def forward(self, *args, **kwargs):
        before = current_shard.get()
        current_shard.set(kwargs.pop("tree_shard", before))
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            current_shard.set(before)

    return type(cls.__name__, (cls,), {"forward": functools.wraps(cls.forward)(forward), "__module__": cls.__module__})
