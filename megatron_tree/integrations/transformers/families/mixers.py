"""The recurrent layers ("mixers") of a model, which compute over tokens that are spread over ranks.

They compute across tokens in a few functions of their modeling files, for which the table of families has adapters.
`wrap_mixers` puts these in their places; `MixerRuns` gives a layer the `RecurrentRun` in which they work: of the shard
of a batch (`run_on_shards`), or of a pass over a cache (`follow_passes`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping

from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from ....core.comm import outside_graphs
from ..architectures import layers_of
from ..train.batch_shards import current_shard
from .recurrent import RecurrentRun, current_pass, current_run, leave_unfused
from .table import FAMILIES, patch


def wrap_mixers(model: nn.Module) -> dict[nn.Module, frozenset[str]]:
    """Put the adapters in their places, for all models of the same classes in this process; a second call changes
    nothing. Returns the model's mixers with what each has to call in a run, by its name in the table."""
    functions, methods = FAMILIES["recurrent"].mixer_patches, FAMILIES["zaya"].mixer_patches
    needed = {name for name, adapter in functions.items() if adapter is not leave_unfused}
    mixers = {}
    for module in model.modules():
        cls = type(module)
        if own := patch({cls.__name__: cls}, methods):
            mixers[module] = frozenset(own)
            continue
        forward = inspect.unwrap(cls.forward)
        if not inspect.isfunction(forward):
            continue
        names = forward.__globals__  # of the modeling file
        called = functions.keys() & set(forward.__code__.co_names)
        patch(names, {name: functions[name] for name in called})
        if used := called & needed & names.keys():
            mixers[module] = frozenset(used)
    return mixers


class MixerRuns:
    """Hooks that give a mixer the `RecurrentRun` in which its functions compute.

    They are methods, so that a deep copy of the model has its own.

    Args:
        mixers: as `wrap_mixers` returns them.
        begin: begin(mixer, args, kwargs) -> the run that a mixer begins; None: none of these.
        end: end(mixer, failed) after a run.
    """

    def __init__(self, mixers: Mapping[nn.Module, Collection[str]], begin: Callable, end: Callable):
        self._begin, self._end, self._needed = begin, end, mixers
        self._run: RecurrentRun | None = None
        for mixer in mixers:
            mixer.register_forward_pre_hook(self._before, with_kwargs=True)
            mixer.register_forward_hook(self._after, always_call=True)

    @outside_graphs
    def _before(self, mixer: nn.Module, args, kwargs) -> None:
        self._run = self._begin(mixer, args, kwargs)
        if self._run is not None:
            current_run.set(self._run)

    @outside_graphs
    def _after(self, mixer: nn.Module, args, output) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        current_run.set(None)
        if output is not None:
            _check_used(mixer, self._needed[mixer], run)
        self._end(mixer, failed=output is None)


def _check_used(mixer: nn.Module, needed: Collection[str], run: RecurrentRun) -> None:
    """Raise ``ValueError`` for a mixer that ended a run without one of the functions."""
    if missing := sorted(set(needed) - set(run.used)):
        raise ValueError(
            f"{type(mixer).__name__} (layer_idx={mixer.layer_idx}) did not call {', '.join(missing)} of its modeling "
            "file: it computes across tokens elsewhere, where a shard's tokens are all it sees. Use Transformers' own "
            "kernels for it (use_kernels=False)"
        )


def follow_passes(model: nn.Module) -> list[int]:
    """Make the recurrent layers of a model run in the `RecurrentPass` of the moment; a second call changes nothing.
    Returns their numbers: those of layers whose functions can be wrapped, and of compressors (compressed.py)."""
    mixers = wrap_mixers(model)
    if not getattr(model, "follows_passes", False):
        model.follows_passes = True
        MixerRuns(mixers, _begin_in_pass, _end_in_pass)
    compressing = [i for i, layer in enumerate(layers_of(model.config)) if layer.block_size]
    return sorted([*compressing, *(mixer.layer_idx for mixer in mixers)])


def _begin_in_pass(mixer: nn.Module, args, kwargs) -> RecurrentRun | None:
    of_pass = current_pass.get()
    return None if of_pass is None else of_pass.begin(mixer)


def _end_in_pass(mixer: nn.Module, *, failed: bool) -> None:
    current_pass.get().end(mixer, failed=failed)


def find_mixers(model) -> dict[nn.Module, frozenset[str]]:
    """The recurrent layers of a model, with the functions that each has to call.

    Raises: ValueError unless they are those of the configuration.
    """
    expected = {i for i, layer in enumerate(layers_of(model.config)) if layer.num_states and not layer.block_size}
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
    MixerRuns(mixers, _begin_on_shard, _end_on_shard)
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


def _begin_on_shard(mixer: nn.Module, args, kwargs) -> RecurrentRun | None:
    if (shard := current_shard.get()) is None:
        if mixer.training and not any(isinstance(x, Cache) for x in (*args, *kwargs.values())):
            raise ValueError(
                f"{type(mixer).__name__} (layer_idx={mixer.layer_idx}) runs again, in the backward, without its "
                "shard: checkpoint whole decoder layers, as model.gradient_checkpointing_enable() does"
            )
        return None
    return RecurrentRun(**shard.where)


def _end_on_shard(mixer: nn.Module, *, failed: bool) -> None:
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
