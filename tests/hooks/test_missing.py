"""A hook into a package that is missing says what to install."""

import importlib
import sys

import pytest

pytest.importorskip("transformers")  # Automodel's hook needs both


@pytest.mark.parametrize(
    ("hook", "package", "name"),
    [
        ("diffusers", "diffusers", "diffusers"),
        ("torchtitan", "torchtitan.models.common.attention", "torchtitan"),
        ("automodel", "nemo_automodel.components.distributed.context_parallel.sharder", "nemo-automodel"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, hook, package, name):
    module = f"megatron_tree.integrations.{hook}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package.partition(".")[0], None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{module} needs {name} .*: pip install {name}"):
        importlib.import_module(module)
