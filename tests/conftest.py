import gc
import importlib

import pytest
import torch

import support_matrix
from megatron_tree.core.log import logger
from support import ranks, turns
from support.ranks import close_pools, poisoned_empty, seed_everything

FOLDERS = {  # what all tests of a folder need
    "deepspeed": ("deepspeed", "transformers"),
    "megatron": ("megatron.core",),
    "serving": ("transformers",),
    "training": ("megatron.core",),
    "transformers": ("transformers",),
}
HTTP = "openai", "fastapi", "uvicorn"  # what modules need that import support.http_server
PATIENCE = 4  # slow tests may take so many times as long as others before they count as hung: they run on busy machines


def pytest_addoption(parser, pluginmanager):
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "an option of pytest-timeout, which is not installed here")
    parser.addoption(
        "--ptx",
        choices=("sm_80", "sm_90"),
        help="run the Triton kernels as they are compiled for this GPU, on the CPU (tests/ptx); default: interpreter",
    )


def pytest_configure(config):
    if arch := config.getoption("--ptx"):
        importlib.import_module("ptx.device").install(arch, str(config.cache.mkdir("ptx")))
    else:
        importlib.import_module("support.triton_interpreter")  # before anything imports Triton: see its docstring
    torch.set_num_threads(ranks.num_threads(default=min(2, torch.get_num_threads())))
    if hasattr(config, "workerinput"):  # one of pytest-xdist's processes
        turns.take_turns(config.workerinput["turns"])


def pytest_report_header():
    return f"torch: CPU level {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["turns"] = turns.new_folder().name


def _is_missing(package):
    """Imports it: ranks then find it imported, see support/ranks.py."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError:
        return True
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector):
    """Modules whose packages are not installed are skipped."""
    needed = ()
    if isinstance(collector, pytest.Module):
        needed += FOLDERS.get(collector.path.parent.name, ())
        needed += HTTP if "from support.http_server import" in collector.path.read_text() else ()
    for name in filter(_is_missing, needed):
        place = str(collector.path), 1, f"Skipped: needs {name}"
        return pytest.CollectReport(collector.nodeid, "skipped", place, [])


def pytest_itemcollected(item):
    """Tests that share a fixture of their module run in one process, so that it is made once."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    if any(definitions[-1].scope == "module" for definitions in fixtures):
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)  # last: until then nobody waits for them
    config.stash[support_matrix.COLLECTED] = items.copy()  # -m and -k take theirs out later
    arch = config.getoption("--ptx")
    reasons = {
        "gpu": None if torch.cuda.is_available() else "needs a GPU",
        "ptx": None if arch else "needs --ptx sm_80 or sm_90: make ptx",
        "without_ptx": "runs in processes of its own, which --ptx does not reach" if arch else None,
    }
    timed = config.pluginmanager.hasplugin("timeout")
    for item in items:
        for name, reason in reasons.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
        if timed and item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(PATIENCE * float(config.getini("timeout"))))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the time limit
def pytest_runtest_protocol(item):
    ranks.patience = PATIENCE if item.get_closest_marker("slow") else 1
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
def _same_logger():
    """Commands that run in this process give the logger a level and a handler of theirs: the next test has its own."""
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _poisoned_empty():
    with poisoned_empty():
        yield
