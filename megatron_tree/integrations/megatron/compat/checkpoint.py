"""Distributed checkpoints of Megatron-core."""

from __future__ import annotations

import contextlib
import importlib
import queue
from typing import Any

import torch

from .release import lookup


def sharded_parameters(
    module: Any, prefix: str, axes: dict[str, int], sharded_offsets: tuple, metadata: dict | None, tp_group: Any
):
    """Sharded state dict of a module; `axes` maps the names of parameters to their tensor-parallel axes."""
    make = lookup("megatron.core.transformer.utils:make_sharded_tensors_for_checkpoint")
    groups = {}
    if metadata and metadata.get("dp_cp_group") is not None:
        groups = {"tp_group": tp_group, "dp_cp_group": metadata["dp_cp_group"]}
    state = {name: p for name, p in module.state_dict(prefix="", keep_vars=True).items() if name in axes}
    return make(state, prefix, axes, sharded_offsets, **groups)


@contextlib.contextmanager
def no_manager_process():
    """While a checkpoint is saved synchronously: keep Megatron's writers from starting a process for their results.

    There would be one process per rank, which imports torch again, lives as long as the rank, and survives it if the
    rank is killed. A synchronous save passes the results inside one process, so a plain queue is enough. No effect on
    releases without such a queue.
    """
    writer = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    if getattr(writer, "_results_queue", "absent") is not None:
        yield
        return
    writer._results_queue = queue.Queue()
    try:
        yield
    finally:
        writer._results_queue = None


@contextlib.contextmanager
def loading_torch_adam(optimizer: Any):
    """While a checkpoint is loaded into a fresh distributed optimizer: let it load torch's Adam.

    Without Apex and TransformerEngine it uses torch's Adam. `sharded_state_dict(is_loading=True)` then reads step
    counts that do not exist before the first step. `load_state_dict` looks for them among the tensors, though they are
    stored separately, and gives all parameters one shared count, which each of them would advance. No effect on other
    optimizers.
    """
    distributed = lookup("megatron.core.optimizer.distrib_optimizer:DistributedOptimizer")
    with contextlib.ExitStack() as stack:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            inner = getattr(part, "optimizer", None)
            if isinstance(part, distributed) and isinstance(inner, torch.optim.Adam):
                for parameter in (p for group in inner.param_groups for p in group["params"]):
                    zeros = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                    inner.state[parameter] = {"step": torch.tensor(0.0), **zeros}
                part._set_main_param_and_optimizer_states = _setter_that_keeps_the_step(part)
                stack.callback(delattr, part, "_set_main_param_and_optimizer_states")
                stack.callback(_separate_step_counts, inner)
        yield


def _separate_step_counts(adam: torch.optim.Adam) -> None:
    for state in adam.state.values():
        state["step"] = state["step"].clone()


def _setter_that_keeps_the_step(part: Any):
    original = part._set_main_param_and_optimizer_states

    @torch.no_grad()  # one of Megatron's callers has no such guard
    def setter(model_param, tensors):
        group, place = part.model_param_group_index_map[model_param]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
        return original(model_param, {"step": state["step"], **tensors})

    return setter
