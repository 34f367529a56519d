"""DeepSpeed inference: an engine with a sequence group and a KV cache sharded over it.

    engine = init_inference(model, tp_size=1)           # under the deepspeed launcher, on every rank
    result = generate(engine, input_ids, max_new_tokens=64, eos_token_id=tokenizer.eos_token_id)

With weights="replicated" the ranks form a grid of sequence ranks x tensor-parallel ranks: rank = sequence rank *
tp_size + tensor rank, so that tensor-parallel ranks, which communicate most, are neighbours; weights are replicated
over the sequence ranks. With weights="sharded" all ranks share the weights and the cache (transformers/split_rules.py).
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

import deepspeed
from transformers import PreTrainedModel

from ...arguments import checked, shown
from ...cache.graph import check_cuda_graphs
from ...comm import Ranks, group_rank, group_size
from ...comm.rendezvous import LAUNCHER_VARIABLES, check_launched, start_default_group
from ...config import QUERIES, WEIGHTS, TreeConfig, check_choice, default_config
from ...files import read_deepspeed_config
from ..transformers.architectures import has_index, has_states
from ..transformers.attention import TreeCache, check_model
from ..transformers.generation import Generation
from ..transformers.generation import generate as generate_with_model
from ..transformers.image_prompts import set_text_attention
from ..transformers.layout_choice import choose_layout
from ..transformers.models import load_model
from ..transformers.rope import num_positions
from ..transformers.runner import CHUNK_SIZE, Runner
from ..transformers.split_model import connect, split_model
from ..transformers.split_rules import plan_layout
from ..transformers.weight_files import empty_model, read_pieces

REFUSED = {
    "dtype": "pass dtype=",
    "tensor_parallel": "pass tp_size=",
    "mp_size": "pass tp_size=",
    "replace_with_kernel_inject": "injected kernels have their own cache",
    "enable_cuda_graph": "the cache grows; pass cuda_graphs=True, whose graphs know that",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def skip_shared_memory_op() -> None:
    """Keep `deepspeed.init_distributed` from compiling its shared-memory all-reduce for the CPU; gloo takes its place.

    Only DeepSpeed's tensor parallelism would use it, with all ranks as one group, which is wrong with several sequence
    ranks.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def init_distributed(*, timeout_s: float = 1800.0) -> torch.device:
    """Join the process group of a job started by the deepspeed launcher (NCCL on GPUs, gloo on CPUs).

    timeout_s: time limit of the default group's collectives. Returns this rank's device, which is made current.
    Raises: ValueError when the launcher's environment variables are missing.
    """
    check_launched()
    accelerator = get_accelerator()
    local_rank = int(os.environ["LOCAL_RANK"])
    accelerator.set_device(local_rank)
    init_comm(timeout_s)
    return torch.device(accelerator.current_device_name())


def init_comm(timeout_s: float) -> None:
    """Start DeepSpeed's communication, with the default process group if there is none yet."""
    if not deepspeed.comm.is_initialized():
        skip_shared_memory_op()
        backend = get_accelerator().communication_backend_name()
        if not dist.is_initialized() and all(name in os.environ for name in LAUNCHER_VARIABLES):
            bound = backend == "nccl" and int(os.environ["WORLD_SIZE"]) > 1
            device = {"device_id": torch.device("cuda", int(os.environ["LOCAL_RANK"]))} if bound else {}
            start_default_group(backend, timeout_s=timeout_s, **device)
        deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=timeout_s), verbose=False)


@checked
def init_inference(
    model,
    *,
    sp_size: int | None = None,
    tp_size: int = 1,
    weights: str = "replicated",
    split_latents: bool | None = None,
    queries: str = "split",
    dtype: torch.dtype | None = None,
    page_size: int = 16,
    cache_dtype: str = "auto",
    prefill_chunk: int = CHUNK_SIZE,
    schedule: str = "auto",
    tree_config: TreeConfig | None = None,
    cuda_graphs: bool = False,
    config: str | dict | None = None,
    **options,
):
    """`deepspeed.init_inference` for a Transformers model, with the KV cache sharded over sp_size ranks.

    Args:
        model: a decoder-only causal language model, the same weights on every rank; or the folder of one, of which
            each rank reads only its own pieces with weights="sharded".
        sp_size: ranks over which a sequence is spread; default all ranks / tp_size.
        tp_size: tensor-parallel ranks (DeepSpeed's AutoTP); it must divide the model's heads and KV heads.
        weights: "replicated" (but for tp_size), or "sharded": all ranks share weights and cache, each about 1/N of
            both, for any number of KV heads. The model is cut in place; leave out sp_size and tp_size.
        split_latents: sharded latent attention: whether its projections to latents are split and their outputs
            gathered. Default: what the planner predicts to be faster.
        queries: sharded, with fewer KV heads than ranks: "split", each rank computes its heads' queries, which are
            gathered; "repeated", the ranks of a KV head each compute all of its queries, with more weights and fewer
            messages (Helix, arXiv 2507.07120); "auto", what the planner predicts to be faster.
        dtype: of weights and cache; default the model's.
        page_size, cache_dtype, schedule, tree_config: of the caches, see `TreeCache`.
        prefill_chunk: tokens of a prompt per forward pass; it bounds the memory for activations.
        cuda_graphs: whether decode steps are captured in CUDA graphs and replayed, see `RowRunner`.
        config, options: more options of `deepspeed.init_inference`: a dictionary or the path of a JSON file, and
            keywords, which win.
    Returns: the DeepSpeed engine, with `sp_group`, `sp_size`, `tp_size`, `weight_bytes` of this rank, `model_bytes` of
        the whole model, `plain_attention` (the model's attention implementation before it became "tree"),
        `new_cache()`, an empty `TreeCache`, and `new_runner(**options)`, a `Runner` over a new cache.
    Raises: ValueError before any group is made: sizes that don't fit the ranks or the heads, an unsupported dtype or
        option, a model whose layers or attention are not supported.
    """
    tree = tree_config or default_config()
    check_choice("weights", weights, WEIGHTS)
    check_choice("queries", queries, QUERIES)
    check_choice("cuda_graphs", cuda_graphs, (False, True))
    if not isinstance(prefill_chunk, int) or prefill_chunk < 1:
        raise ValueError(f"prefill_chunk={prefill_chunk!r} must be a positive number of tokens")
    if cuda_graphs:
        check_cuda_graphs(device_type=get_accelerator().device_name(), schedule=schedule, config=tree)
    model, folder = _model_or_folder(model, weights, dtype)
    text, dtype = model.config.get_text_config(decoder=True), dtype or model.dtype
    _check_model(text, dtype, tp_size)
    options = _merge_options(config, options)
    options.setdefault("max_out_tokens", num_positions(text) or 1024)
    cache_options = {"page_size": page_size, "dtype": cache_dtype, "schedule": schedule, "tree_config": tree_config}
    TreeCache(text, **cache_options)  # raises for a model or options that the cache can't serve

    model_bytes = dtype.itemsize * sum(parameter.numel() for parameter in model.parameters())
    plain_attention = text._attn_implementation
    share = _split if weights == "sharded" else _replicate
    ranks = share(model, folder, sp_size, tp_size, queries, split_latents, dtype=dtype, tree=tree)
    cache_options |= ranks.cache_options
    engine = deepspeed.init_inference(model, dtype=dtype, tensor_parallel=ranks.tensor_parallel, **options)
    check_model(model)
    engine.eval()
    engine.sp_group, engine.sp_size, engine.tp_size = ranks.sp_group, group_size(ranks.sp_group), ranks.tp_size
    engine.model_bytes, engine.plain_attention = model_bytes, plain_attention
    engine.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    engine.runner_options = {"token_group": _token_group(), "chunk_size": prefill_chunk, "cuda_graphs": cuda_graphs}
    engine.new_cache = lambda: TreeCache(text, cp_group=ranks.sp_group, **cache_options)
    engine.new_runner = lambda **more: Runner(engine.module, engine.new_cache(), **engine.runner_options | more)
    if cuda_graphs:
        engine.new_runner()  # raises for a model or a group whose steps can't be captured
    return engine


class _Ranks(NamedTuple):
    """How the ranks share the cache and the weights."""

    sp_group: object
    tp_size: int
    tensor_parallel: dict
    """DeepSpeed's option."""
    cache_options: dict
    """Options of `TreeCache` that follow from it."""


def _model_or_folder(model, weights: str, dtype: torch.dtype | None):
    """(model, its folder): sharded weights of a folder are read later, in pieces."""
    if isinstance(model, PreTrainedModel):
        return model, None
    if not isinstance(model, (str, Path)):
        raise ValueError(f"model={shown(model)} must be a Transformers model, or the folder of one")
    if not (folder := Path(model)).is_dir():
        raise ValueError(f"model={str(model)!r} is no folder: pass a model, or the folder that holds its files")
    return (empty_model(folder, dtype) if weights == "sharded" else load_model(folder, dtype)), folder


def _check_model(text, dtype: torch.dtype, tp_size: int) -> None:
    device = get_accelerator()
    if dtype not in DTYPES or dtype not in device.supported_dtypes():
        raise ValueError(f"dtype={dtype} is not one of {DTYPES} that {device.device_name()} supports")
    if tp_size != 1 and has_states(text):
        raise ValueError(
            f"tp_size={tp_size}: {type(text).__name__} has recurrent layers, which DeepSpeed's tensor parallelism does "
            "not split: use weights='sharded', or tp_size=1"
        )
    if tp_size != 1 and has_index(text):
        raise ValueError(
            f"tp_size={tp_size}: {type(text).__name__} has layers with an index, whose weights DeepSpeed's tensor "
            "parallelism would split: use weights='sharded', or tp_size=1"
        )


def _split(
    model, folder: Path | None, sp_size, tp_size, queries: str, split_latents: bool | None, *, dtype, tree: TreeConfig
) -> _Ranks:
    """Cut the model: all ranks share weights and cache."""
    everyone = _token_group()
    world, rank = group_size(everyone), group_rank(everyone)
    if sp_size is not None or tp_size != 1:
        raise ValueError(
            f"weights='sharded' splits weights and cache over all {world} ranks: leave sp_size={sp_size} and "
            f"tp_size={tp_size} out"
        )
    layout = plan_layout(model, world, rank, repeat_queries=queries == "repeated")
    if split_latents is not None and not layout.latents:
        raise _for_latents(model, split_latents, "sharded")
    set_text_attention(model, "tree")
    device = torch.device(get_accelerator().current_device_name())
    left_open = {"queries": queries, "split_latents": split_latents}
    layout = choose_layout(layout, model, everyone, device=device, dtype=dtype, config=tree, **left_open)
    ranks = Ranks.of(everyone, device, tree)
    sp_group = ranks.neighbours(layout.heads.size)
    if folder is None:
        split_model(model, layout, ranks)
    else:
        read_pieces(model, folder, layout)
        connect(model, layout, ranks)
    cache_options = {"head_shares": layout.heads.shares, "weights_group": everyone}
    cache_options["state_pieces"] = layout.state_pieces or None
    return _Ranks(sp_group, world, {"tp_size": 1}, cache_options)


def _replicate(
    model, folder, sp_size: int | None, tp_size: int, queries: str, split_latents, *, dtype, tree: TreeConfig
) -> _Ranks:
    """Make a grid of sequence ranks x tensor-parallel ranks, among which DeepSpeed splits the weights."""
    sp_size = _check_sizes(sp_size, tp_size, model.config.get_text_config(decoder=True))
    if split_latents is not None:
        raise _for_latents(model, split_latents, "replicated")
    if queries != "split":
        raise ValueError(f"queries={queries!r} is for weights='sharded', but weights='replicated': leave it out")
    set_text_attention(model, "tree")
    world, rank = group_size(_token_group()), group_rank(_token_group())
    if tp_size == 1:
        return _Ranks(dist.group.WORLD if world > 1 else None, 1, {"tp_size": 1}, {})
    sp_group = None
    if sp_size > 1:
        sp_group, _ = dist.new_subgroups_by_enumeration([list(range(t, world, tp_size)) for t in range(tp_size)])
    tp_group, _ = dist.new_subgroups(tp_size)
    init_comm(tree.timeout_s)
    # both: without an mpu DeepSpeed makes a group of ranks 0 to tp_size - 1, without tp_group it shards nothing
    mpu = SimpleNamespace(
        get_model_parallel_group=lambda: tp_group,
        get_model_parallel_world_size=lambda: tp_size,
        get_model_parallel_rank=lambda: rank % tp_size,
    )
    return _Ranks(sp_group, tp_size, {"tp_size": tp_size, "mpu": mpu, "tp_group": tp_group}, {})


def _for_latents(model, split_latents: bool, weights: str) -> ValueError:
    return ValueError(
        f"split_latents={split_latents} is for weights='sharded' and models with latent attention, but weights="
        f"{weights!r} and the model is a {type(model).__name__}: leave it out"
    )


def _token_group():
    """All ranks, including tensor-parallel ones, run the same tokens."""
    return dist.group.WORLD if dist.is_initialized() else None


def _merge_options(config: str | dict | None, options: dict) -> dict:
    """DeepSpeed's options from a dictionary or a JSON file and from keywords. ValueError for those that don't fit."""
    if isinstance(config, str):
        config = read_deepspeed_config("config", config)
    options = {**(config or {}), **options}
    for name, instead in REFUSED.items():
        if value := options.pop(name, None):
            raise ValueError(f"DeepSpeed's option {name}={value!r} can't be used here: {instead}")
    return options


def _check_sizes(sp_size: int | None, tp_size: int, config) -> int:
    """The number of sequence ranks."""
    world = group_size(_token_group())
    if not isinstance(tp_size, int) or tp_size < 1 or world % tp_size:
        raise ValueError(f"tp_size={tp_size!r} must be a positive integer that divides the {world} ranks")
    sp_size = world // tp_size if sp_size is None else sp_size
    if not isinstance(sp_size, int) or sp_size * tp_size != world:
        raise ValueError(f"sp_size={sp_size!r} * tp_size={tp_size} must be the number of ranks, {world}")
    config = config.per_layer_config[0]  # all layers are of one kind where tp_size may be more than 1
    heads = {"num_attention_heads": config.num_attention_heads}
    heads["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for name, number in heads.items():
        if number % tp_size:
            raise ValueError(f"tp_size={tp_size} must divide the model's {name}={number}")
    return sp_size


@checked
def generate(
    engine, input_ids: Tensor, *, max_new_tokens: int, cache: TreeCache | None = None, **options
) -> Generation:
    """Greedy decoding on all ranks of an engine from `init_inference`; see `generation.generate` for the options.

    cache: continue with this cache; default a new one. The tokens are rank 0's on every rank, tensor-parallel or not.
    """
    if not hasattr(engine, "new_cache"):
        raise ValueError(f"engine is a {type(engine).__name__}: pass what init_inference returns")
    cache = engine.new_cache() if cache is None else cache
    options = engine.runner_options | options
    return generate_with_model(engine.module, input_ids, cache=cache, max_new_tokens=max_new_tokens, **options)
