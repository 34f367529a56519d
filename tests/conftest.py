from support import triton_interpreter  # noqa: F401, I001  first: see its docstring

import pytest
import torch

from support.ranks import close_pools, poisoned_empty, seed_everything


def pytest_configure(config):
    torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_sessionfinish(session):
    close_pools()


@pytest.fixture(autouse=True)
def _fixed_seeds():
    seed_everything()


@pytest.fixture(autouse=True)
def _poisoned_empty():
    with poisoned_empty():
        yield
