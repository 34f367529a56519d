"""Other people's code: Megatron-core, Transformers and DeepSpeed, a package each.

Modules that users imported by an older path are found there still, with a ``DeprecationWarning``.
"""

import importlib
import importlib.abc
import importlib.util
import sys
import warnings

MOVED = {  # below megatron_tree
    "integrations.cache_files": "cache.files",
    "integrations.deepspeed_training": "integrations.deepspeed.training",
    "integrations.generation": "integrations.transformers.generation",
    "integrations.megatron_cpu": "integrations.megatron.cpu",
    "integrations.megatron_fusions": "integrations.megatron.fusions",
    "integrations.models": "integrations.transformers.models",
    "integrations.runner": "integrations.transformers.runner",
    "integrations.transformers_training": "integrations.transformers.training",
}


class _Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path, target=None):
        package, _, name = fullname.partition(".")
        if package == "megatron_tree" and name in MOVED:
            return importlib.util.spec_from_loader(fullname, self)
        return None

    def create_module(self, spec):
        new = f"megatron_tree.{MOVED[spec.name.partition('.')[2]]}"
        warnings.warn(f"{spec.name} is now {new}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = module.__spec__.loader_state  # the import system has put the old path's there


sys.meta_path.append(_Moved())
