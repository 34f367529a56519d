"""The recurrent layers ("mixers") of Transformers' models, made to compute over tokens that are spread over ranks.

They compute across tokens in a few functions of their modeling files: a short convolution, and a delta rule or a
state-space model. `wrap_mixers` puts wrappers in their places, which pass calls on as they are, but inside a
`RecurrentRun` take the adapters of recurrent.py.

| function | models |
| --- | --- |
| `torch_chunk_gated_delta_rule` | Qwen3-Next, Qwen3.5, OLMo Hybrid |
| `chunk_kimi_delta_attention` | Kimi Linear, Bailing |
| `mamba2_chunk_scan` | Mamba 2, Bamba, Falcon-H1, Granite, Nemotron-H, Zamba 2 |
| `mamba_selective_scan` | Mamba, Falcon Mamba, Jamba, Zamba |
| `causal_conv1d_fn` | all of these, LFM2, LFM3 |
| `ZayaCCAProjection`, a module | ZAYA |
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Collection, Mapping

from torch import nn

from ....comm import outside_graphs
from .recurrent import RecurrentRun, convolution, delta_rule, mamba1, mamba2
from .zaya import cca_projection

current_run: contextvars.ContextVar[RecurrentRun | None] = contextvars.ContextVar("tree_recurrent_run", default=None)
"""Of the mixer that runs; None: it has all tokens itself."""


def _no_fusion(run: RecurrentRun, original: Callable, *args, **options) -> None:
    """A whole layer in one kernel: the layer calls its parts instead."""


ADAPTERS: dict[str, Callable] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2,
    "mamba_selective_scan": mamba1,
}
FUSED = {"mamba2_split_conv1d_scan_combined": _no_fusion, "mamba_inner_fn": _no_fusion}
CLASSES = {"ZayaCCAProjection": cca_projection}
"""Modules without such functions, whose forward is wrapped."""


def wrap_mixers(model: nn.Module) -> dict[nn.Module, frozenset[str]]:
    """Put the wrappers in their places, for all models of the same classes in this process; a second call changes
    nothing. Returns the model's mixers with the functions that each has to call in a run."""
    mixers = {}
    for module in model.modules():
        cls = type(module)
        if (name := cls.__name__) in CLASSES:
            if not hasattr(cls.forward, "of_tree"):
                cls.forward = _wrapper(name, CLASSES[name], cls.forward)
            mixers[module] = frozenset([name])
            continue
        forward = inspect.unwrap(cls.forward)
        if not inspect.isfunction(forward):
            continue
        names = forward.__globals__  # of the modeling file
        called = set(forward.__code__.co_names) & names.keys()
        for name, adapter in (ADAPTERS | FUSED).items():
            if name in called and not hasattr(names[name], "of_tree"):
                names[name] = _wrapper(name, adapter, names[name])
        if needed := called & ADAPTERS.keys():
            mixers[module] = frozenset(needed)
    return mixers


def _wrapper(name: str, adapter: Callable, original: Callable) -> Callable:
    @outside_graphs
    @functools.wraps(original)
    def call(*args, **kwargs):
        run = current_run.get()
        if run is None:
            return original(*args, **kwargs)
        run.used.append(name)
        if run.is_whole and name not in FUSED:
            return original(*args, **kwargs)
        return adapter(run, original, *args, **kwargs)

    call.of_tree = True
    return call


class MixerRuns:
    """Hooks that give a mixer the `RecurrentRun` in which its functions compute.

    Args:
        mixers: as `wrap_mixers` returns them.
        begin: begin(mixer, args, kwargs) -> the run that a mixer begins; None: none of these.
        end: end(mixer, failed) after a run.
    """

    def __init__(self, mixers: Mapping[nn.Module, Collection[str]], begin: Callable, end: Callable):
        self._begin, self._end, self._needed = begin, end, mixers
        self._run: RecurrentRun | None = None
        for mixer in mixers:
            mixer.register_forward_pre_hook(outside_graphs(self._before), with_kwargs=True)
            mixer.register_forward_hook(outside_graphs(self._after), always_call=True)

    def _before(self, mixer: nn.Module, args, kwargs) -> None:
        self._run = self._begin(mixer, args, kwargs)
        if self._run is not None:
            current_run.set(self._run)

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
