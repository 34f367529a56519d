"""The modeling files of Transformers: what they call parts of models, and adapters in the place of their functions."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from importlib import import_module

from torch import nn
from transformers.pytorch_utils import Conv1D

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ....core.comm import outside_graphs

PROJECTIONS = (nn.Linear, Conv1D)  # the latter, of GPT-2, has transposed weights
MLPS = (  # projections to the neurons, the first of two is the gate; and the one from them
    (("gate_proj", "up_proj"), "down_proj"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("w1", "w3"), "w2"),
    (("input_linear",), "output_linear"),
)
INSTEAD = "Use attn_implementation='sdpa' or 'eager', and the model's own cache"


def model_class(config) -> type | None:
    """The causal language model of a configuration, or that of images and text; None if there is none, or several."""
    found = (
        auto._model_mapping.get(type(config), None) for auto in (AutoModelForCausalLM, AutoModelForImageTextToText)
    )
    return next((model for model in found if isinstance(model, type)), None)


def modeling_file(config) -> dict[str, object]:
    """What the modeling file of a model, which need not be a causal language model, has by name."""
    model = model_class(config)
    name = type(config).__module__.replace(".configuration_", ".modeling_") if model is None else model.__module__
    return vars(sys.modules.get(name) or import_module(name))


def check_read(names: Mapping[str, object], read: Mapping[str, str]) -> None:
    """Raise ``ValueError`` unless functions of a modeling file are those whose mathematics is known.

    names: of the file. read: by class, for its `forward`, or "class.method": the digest of the source.
    """
    for key, known in read.items():
        owner, _, method = key.partition(".")
        function = getattr(names.get(owner), method or "forward", None)
        source = "" if function is None else inspect.getsource(inspect.unwrap(function))
        digest = hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
        if digest != known:
            raise ValueError(
                f"{key} of this version of Transformers ({digest}) is not one that attn_implementation='tree' knows "
                f"({known}): its queries may see other keys. {INSTEAD}"
            )


def replace(owner: type | dict, name: str, adapter: Callable) -> None:
    """Put adapter(original, ...) in the place of a method of a class, or of a function of a modeling file, for all
    models of this process; a second call changes nothing."""
    original = owner[name] if isinstance(owner, dict) else getattr(owner, name)
    if hasattr(original, "of_tree"):
        return

    @outside_graphs
    @functools.wraps(original)
    def call(*args, **kwargs):
        return adapter(original, *args, **kwargs)

    call.of_tree = True
    if isinstance(owner, dict):
        owner[name] = call
    else:
        setattr(owner, name, call)


def patch(names: dict[str, object], patches: Mapping[str, Callable]) -> set[str]:
    """Put adapters in their places in a modeling file.

    names: of the file. patches: by the name of a function, or "class.method" of all classes that have it themselves,
        "*" standing for any letters: the adapter, see `replace`.
    Returns: the keys of patches that have a place in the file.
    """
    found = set()
    for key, adapter in patches.items():
        owner, _, function = key.rpartition(".")
        if not owner:
            places = [(names, function)] if function in names else []
        else:
            classes = [x for name, x in names.items() if isinstance(x, type) and fnmatchcase(name, owner)]
            places = [(x, name) for x in classes for name in list(vars(x)) if fnmatchcase(name, function)]
        for place in places:
            replace(*place, adapter)
        found |= {key} if places else set()
    return found
