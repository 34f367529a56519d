"""DeepSpeed inference: an engine with a sequence group and a KV cache sharded over it.

    engine = init_inference(model, tp_size=1)           # under the deepspeed launcher, on every rank
    result = generate(engine, input_ids, max_new_tokens=64, eos_token_id=tokenizer.eos_token_id)

With weights="replicated" the ranks form a grid of sequence ranks x tensor-parallel ranks: rank = sequence rank *
tp_size + tensor rank, so that tensor-parallel ranks, which communicate most, are neighbours; weights are replicated
over the sequence ranks. With tp_size=1 DeepSpeed only wraps what integrations/transformers/engine.py makes.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import deepspeed

from ...core.arguments import checked
from ...core.comm import group_rank, group_size
from ...core.comm.rendezvous import start_default_group
from ...core.config import TreeConfig, default_config
from ...core.files import read_deepspeed_config
from ...launching import LAUNCHER_VARIABLES, check_launched
from ..transformers.attention import TreeCache, check_model
from ..transformers.families.images import set_text_attention
from ..transformers.families.rope import num_positions
from ..transformers.families.table import families_of
from ..transformers.infer.engine import (
    Engine,
    check_options,
    check_replicated,
    model_or_folder,
    share_model,
    token_group,
    use_cuda_graphs,
)
from ..transformers.infer.runner import CHUNK_SIZE

REFUSED = {
    "dtype": "pass dtype=",
    "tensor_parallel": "pass tp_size=",
    "mp_size": "pass tp_size=",
    "replace_with_kernel_inject": "injected kernels have their own cache",
    "enable_cuda_graph": "the cache grows; pass cuda_graphs=True, whose graphs know that",
}
ENGINE = (  # of `Engine`, which a DeepSpeed engine gets
    "sp_group",
    "sp_size",
    "tp_size",
    "model_bytes",
    "weight_bytes",
    "plain_attention",
    "runner_options",
    "new_cache",
    "new_runner",
)


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
    cuda_graphs: bool | None = None,
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
        cuda_graphs: whether decode steps are captured in CUDA graphs and replayed, see `RowRunner`. Default: on a GPU,
            where the model and the ranks can have them; the log says why not.
        config, options: more options of `deepspeed.init_inference`: a dictionary or the path of a JSON file, and
            keywords, which win.
    Returns: the DeepSpeed engine, with `sp_group`, `sp_size`, `tp_size`, `weight_bytes` of this rank, `model_bytes` of
        the whole model, `plain_attention` (the model's attention implementation before it became "tree"),
        `new_cache()`, an empty `TreeCache`, and `new_runner(**options)`, a `Runner` over a new cache.
    Raises: ValueError before any group is made: sizes that don't fit the ranks or the heads, an unsupported dtype or
        option, a model whose layers or attention are not supported.
    """
    tree, accelerator = tree_config or default_config(), get_accelerator()
    device = torch.device(accelerator.current_device_name())
    check_options(weights, queries, prefill_chunk, cuda_graphs, schedule, device.type, tree_config)
    options = _merge_options(config, options)
    if isinstance(dtype, torch.dtype) and dtype not in accelerator.supported_dtypes():
        raise ValueError(f"dtype={dtype} is not one of {accelerator.supported_dtypes()}, which {device.type} supports")
    if weights == "sharded" and (sp_size is not None or tp_size != 1):
        raise ValueError(
            f"weights='sharded' splits weights and cache over all {group_size(token_group())} ranks: leave "
            f"sp_size={sp_size} and tp_size={tp_size} out"
        )
    model, folder = model_or_folder(model, weights, dtype)
    text = model.config.get_text_config(decoder=True)
    options.setdefault("max_out_tokens", num_positions(text) or 1024)
    cache_options = {"page_size": page_size, "dtype": cache_dtype, "schedule": schedule, "tree_config": tree_config}
    if weights == "replicated":
        _check_split_by_deepspeed(text, tp_size)
        sp_size = _check_sizes(sp_size, tp_size, text)
    if tp_size == 1:
        of_caches = {"page_size": page_size, "cache_dtype": cache_dtype, "schedule": schedule}
        own = share_model(
            folder if weights == "sharded" and folder is not None else model, weights=weights, queries=queries,
            split_latents=split_latents, dtype=dtype, prefill_chunk=prefill_chunk, tree_config=tree_config,
            cuda_graphs=False, device=device, **of_caches,
        )  # fmt: skip
        tensor_parallel = {"tp_size": 1}
    else:
        check_replicated(model, queries, split_latents)
        TreeCache(text, **cache_options)  # raises for a model or options that the cache can't serve
        dtype, plain_attention = dtype or model.dtype, text._attn_implementation
        model_bytes = dtype.itemsize * sum(parameter.numel() for parameter in model.parameters())
        set_text_attention(model, "tree")
        sp_group, tensor_parallel = _grid(sp_size, tp_size, tree)
        own = Engine(
            module=model, sp_group=sp_group, tp_size=tp_size, model_bytes=model_bytes, plain_attention=plain_attention,
            cache_options=cache_options,
            runner_options={"token_group": token_group(), "chunk_size": prefill_chunk},
        )  # fmt: skip
    engine = deepspeed.init_inference(own.module, dtype=own.module.dtype, tensor_parallel=tensor_parallel, **options)
    check_model(engine.module)
    engine.eval()
    own = replace(own, module=engine.module)
    for name in ENGINE:
        setattr(engine, name, getattr(own, name))
    use_cuda_graphs(engine, cuda_graphs, device)
    return engine


def _check_split_by_deepspeed(text, tp_size: int) -> None:
    families = {} if tp_size == 1 else families_of(text)
    if "recurrent" in families:
        raise ValueError(
            f"tp_size={tp_size}: {type(text).__name__} has recurrent layers, which DeepSpeed's tensor parallelism does "
            "not split: use weights='sharded', or tp_size=1"
        )
    if any(family.has_index for family in families.values()):
        raise ValueError(
            f"tp_size={tp_size}: {type(text).__name__} has layers with an index, whose weights DeepSpeed's tensor "
            "parallelism would split: use weights='sharded', or tp_size=1"
        )


def _grid(sp_size: int, tp_size: int, tree: TreeConfig) -> tuple[object, dict]:
    """Make a grid of sequence ranks x tensor-parallel ranks, among which DeepSpeed splits the weights. Returns the
    ranks that share a row's tokens, and DeepSpeed's option."""
    world, rank = group_size(token_group()), group_rank(token_group())
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
    return sp_group, {"tp_size": tp_size, "mpu": mpu, "tp_group": tp_group}


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
    world = group_size(token_group())
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
