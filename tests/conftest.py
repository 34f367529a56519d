from support import triton_interpreter  # noqa: F401, I001  first: see its docstring

import gc

import pytest
import torch

from support import turns
from support.ranks import close_pools, poisoned_empty, seed_everything


def pytest_configure(config):
    torch.set_num_threads(min(2, torch.get_num_threads()))
    if hasattr(config, "workerinput"):  # one of pytest-xdist's processes
        turns.take_turns(config.workerinput["turns"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["turns"] = turns.new_folder().name


def pytest_itemcollected(item):
    """Tests that share a fixture of their module run in one process, so that it is made once."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    if any(definitions[-1].scope == "module" for definitions in fixtures):
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the time limit
def pytest_runtest_protocol(item):
    with turns.turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_collection_finish(session):
    gc.freeze()  # all that was imported: collections leave it alone


def pytest_sessionfinish(session):
    close_pools()


@pytest.fixture(autouse=True)
def _fixed_seeds():
    seed_everything()


@pytest.fixture(autouse=True)
def _poisoned_empty():
    with poisoned_empty():
        yield
