"""Import paths of before the move into rooms: what users imported works still, and says where it is now."""

import importlib
import subprocess
import sys

import pytest

from megatron_tree.integrations import MOVED


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_path_is_the_new_module(old, new):
    sys.modules.pop(f"megatron_tree.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"megatron_tree.{old} is now megatron_tree.{new}$"):
        found = importlib.import_module(f"megatron_tree.{old}")
    assert found is importlib.import_module(f"megatron_tree.{new}")
    assert found.__spec__.name == found.__name__ == f"megatron_tree.{new}"


@pytest.mark.slow
def test_an_old_path_may_be_the_first_import_and_runs_no_module_twice():
    script = (
        "from megatron_tree.integrations.runner import Runner\n"
        "import megatron_tree.integrations.runner as old\n"
        "from megatron_tree.integrations.transformers import Runner as new\n"
        "assert Runner is new is old.Runner\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_path_that_never_was_is_refused():
    with pytest.raises(ModuleNotFoundError, match="megatron_tree.integrations.nothing"):
        importlib.import_module("megatron_tree.integrations.nothing")
