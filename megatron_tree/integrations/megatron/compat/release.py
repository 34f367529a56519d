"""Which release of Megatron-core is installed, and what is looked up in it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from typing import Any

MINIMUM_VERSION = (0, 16)


# Megatron-core warns of every optional package that it does without; docs/megatron-lm.md says what those would bring.
_NOTICES = r".*Apex (is|are) not installed"


class UnsupportedMegatronError(ImportError):
    """megatron-core is missing, too old, or lacks something this integration needs. The message names it."""


@contextlib.contextmanager
def hide_import_notices() -> Iterator[None]:
    """Import Megatron-core without its warnings that TransformerEngine and Apex are missing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NOTICES, module=r"megatron\.core\.")
        yield


def megatron_version() -> str:
    """Version of the installed megatron-core.

    Raises: UnsupportedMegatronError if it is not installed or older than 0.16.
    """
    try:
        package_info = importlib.import_module("megatron.core.package_info")
    except ImportError as error:
        raise UnsupportedMegatronError(
            f"megatron-core cannot be imported ({error}): install megatron_tree with its extra, "
            "pip install 'megatron_tree[megatron]'"
        ) from error
    version = (package_info.MAJOR, package_info.MINOR)
    if version < MINIMUM_VERSION:
        raise UnsupportedMegatronError(
            f"megatron-core {package_info.__version__} is too old: "
            f"{'.'.join(map(str, MINIMUM_VERSION))} or newer is needed"
        )
    return package_info.__version__


def lookup(path: str) -> Any:
    """The object at `package.module:name`.

    Raises: UnsupportedMegatronError that names the path, if this release of megatron-core has no such thing, or the
        package that is not installed and that it imports.
    """
    module, _, name = path.partition(":")
    try:
        with hide_import_notices():
            return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package not in ("", module.partition(".")[0]):
            raise UnsupportedMegatronError(
                f"{module} imports a package that is not installed: pip install {package}"
            ) from error
        raise UnsupportedMegatronError(
            f"megatron-core {megatron_version()} has no {path}, which is needed here ({error})"
        ) from error


def has_module(name: str) -> bool:
    """Whether this release of megatron-core has a module of this name, in a package that it has or has not."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def is_patched() -> bool:
    """Whether this megatron-core has a patch of patches/megatron-lm: it then looks `cp_comm_type` up in a table."""
    return hasattr(importlib.import_module("megatron.core.transformer.spec_utils"), "CORE_ATTENTION_OF_CP_COMM_TYPE")


def megatron_lm_arguments() -> Any:
    """The command line of the Megatron-LM script that runs; None outside one."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
