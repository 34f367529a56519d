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

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

import deepspeed

from ...cache.graph import check_cuda_graphs
from ...comm import neighbours
from ...comm.rendezvous import LAUNCHER_VARIABLES, check_launched, start_default_group
from ...config import QUERIES, WEIGHTS, TreeConfig, check_choice, default_config
from ...files import read_deepspeed_config
from ..transformers.architectures import has_states
from ..transformers.attention import TreeCache, check_model
from ..transformers.generation import Generation
from ..transformers.generation import generate as generate_with_model
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
    """Keep DeepSpeed from compiling its shared-memory all-reduce for the CPU.

    `deepspeed.init_distributed` builds it on first use (a minute or more, needs a compiler) where it considers it
    compatible. Only its tensor parallelism would use it, with all ranks as one group, which is wrong with more than one
    sequence rank. DeepSpeed reads the table edited here to decide; without the op it uses gloo.
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


class TensorParallelUnit:
    """DeepSpeed's mpu interface: it gives `init_inference` this rank's tensor-parallel group."""

    def __init__(self, group, size: int, rank: int):
        self.group, self.size, self.rank = group, size, rank

    def get_model_parallel_group(self):
        return self.group

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_rank(self) -> int:
        return self.rank


def init_inference(
    model,
    *,
    sp_size: int | None = None,
    tp_size: int = 1,
    weights: str = "replicated",
    split_latents: bool | None = None,
    queries: str = "split",
    dtype: torch.dtype | None = None,
    block_size: int = 16,
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
        model: a decoder-only causal language model, the same weights on every rank; or the folder of one. With
            weights="sharded" each rank then reads only its own pieces of the folder's safetensors files.
        sp_size: ranks over which a sequence is spread; default all ranks / tp_size.
        tp_size: tensor-parallel ranks (DeepSpeed's AutoTP); it must divide the model's heads and KV heads.
        weights: "replicated" (but for tp_size), or "sharded": all ranks share the weights and the cache, each about 1/N
            of both, also where there are fewer KV heads than ranks. The model is cut in place. sp_size and tp_size are
            then left out.
        split_latents: with weights="sharded" and latent attention: whether the ranks share its projections into
            latents, too, and gather what they give. Default: what the planner predicts to be faster.
        queries: with weights="sharded" and fewer KV heads than ranks: "split", a rank computes the queries of its own
            heads, and they are gathered among the ranks with the same KV heads; "repeated", each of these computes
            all of them, which sends less but takes memory for more weights (Helix, arXiv 2507.07120); "auto", what
            the planner predicts to be faster. With latent attention all ranks have the same KV head.
        dtype: of weights and cache; default the model's.
        block_size, cache_dtype, schedule, tree_config: of the caches, see `TreeCache`.
        prefill_chunk: tokens of a prompt per forward pass; it bounds the memory for activations.
        cuda_graphs: whether decode steps are captured in CUDA graphs and replayed, see `RowRunner`.
        config: further options of `deepspeed.init_inference`: a dictionary or the path of a JSON file.
        options: more of them; they win over those of config.
    Returns: the DeepSpeed engine, with `sp_group`, `sp_size`, `tp_size`, `weight_bytes` of this rank, `model_bytes` of
        the whole model, `plain_attention` (the model's attention implementation before it became "tree"),
        `new_cache()`, an empty `TreeCache`, and `new_runner(**options)`, a `Runner` over a new cache, for rows of any
        lengths.
    Raises: ValueError before any group is made: sizes that don't fit the ranks or the heads, an unsupported dtype or
        option, a model whose layers or attention are not supported.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    check_choice("weights", weights, WEIGHTS)
    check_choice("queries", queries, QUERIES)
    folder = None
    if isinstance(model, (str, Path)):
        if not (folder := Path(model)).is_dir():
            raise ValueError(f"model={str(model)!r} is no folder: pass a model, or the folder that holds its files")
        model = empty_model(folder, dtype) if weights == "sharded" else load_model(folder, dtype)
    model_config = model.config.get_text_config(decoder=True)
    dtype = dtype or model.dtype
    if (weights == "sharded" or tp_size != 1) and has_states(model_config):
        raise ValueError(
            f"weights={weights!r}, tp_size={tp_size}: {type(model_config).__name__} has recurrent layers, whose "
            "weights and states are whole on every rank: use weights='replicated' and tp_size=1"
        )
    layout = None
    if weights == "sharded":
        if sp_size is not None or tp_size != 1:
            raise ValueError(
                f"weights='sharded' splits weights and cache over all {world} ranks: leave sp_size={sp_size} and "
                f"tp_size={tp_size} out"
            )
        layout = plan_layout(model, world, rank, repeat_queries=queries == "repeated")
    else:
        sp_size = _check_sizes(world, sp_size, tp_size, model_config)
    if split_latents is not None and not (layout and layout.gathered):
        raise ValueError(
            f"split_latents={split_latents} is for weights='sharded' and models with latent attention, but weights="
            f"{weights!r} and the model is a {type(model).__name__}: leave it out"
        )
    if queries != "split" and layout is None:
        raise ValueError(f"queries={queries!r} is for weights='sharded', but weights={weights!r}: leave it out")
    if dtype not in DTYPES or dtype not in get_accelerator().supported_dtypes():
        raise ValueError(f"dtype={dtype} is not one of {DTYPES} that {get_accelerator().device_name()} supports")
    check_choice("cuda_graphs", cuda_graphs, (False, True))
    tree = tree_config or default_config()
    if cuda_graphs:
        check_cuda_graphs(device_type=get_accelerator().device_name(), schedule=schedule, config=tree)
    options = _merge_options(config, options)
    options.setdefault("max_out_tokens", num_positions(model_config) or 1024)
    cache_options = {
        "block_size": block_size,
        "dtype": cache_dtype,
        "schedule": schedule,
        "tree_config": tree_config,
    }
    if not isinstance(prefill_chunk, int) or prefill_chunk < 1:
        raise ValueError(f"prefill_chunk={prefill_chunk!r} must be a positive number of tokens")
    TreeCache(model_config, **cache_options)  # raises for a model or options that the cache can't serve
    model_bytes = dtype.itemsize * sum(parameter.numel() for parameter in model.parameters())
    tensor_parallel, timeout_s = {"tp_size": tp_size}, tree.timeout_s
    plain_attention = model_config._attn_implementation
    model.set_attn_implementation("tree")
    if layout is not None:
        left_open = {"queries": queries, "split_latents": split_latents}
        device = torch.device(get_accelerator().current_device_name())
        layout = choose_layout(layout, model, _token_group(), device=device, dtype=dtype, config=tree, **left_open)
        sp_size, tp_size = layout.heads.size, world
        sp_group = neighbours(_token_group(), sp_size, timeout_s=timeout_s)
        cache_options |= {"head_shares": layout.heads.shares, "weights_group": _token_group()}
        if folder is not None:
            read_pieces(model, folder, layout)
        split = split_model if folder is None else connect
        split(model, layout, _token_group(), transport=tree.transport, timeout_s=timeout_s)
    else:
        sp_group, tp_group = _make_groups(world, rank, sp_size, tp_size)
        if tp_size > 1:
            init_comm(timeout_s)
            # both: without an mpu DeepSpeed makes a group of ranks 0 to tp_size - 1, without tp_group it shards nothing
            tensor_parallel |= {"mpu": TensorParallelUnit(tp_group, tp_size, rank % tp_size), "tp_group": tp_group}
    engine = deepspeed.init_inference(model, dtype=dtype, tensor_parallel=tensor_parallel, **options)
    check_model(model)
    engine.eval()
    engine.sp_group, engine.sp_size, engine.tp_size = sp_group, sp_size, tp_size
    engine.model_bytes, engine.plain_attention = model_bytes, plain_attention
    engine.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    engine.prefill_chunk, engine.cuda_graphs = prefill_chunk, cuda_graphs
    engine.new_cache = lambda: TreeCache(model_config, cp_group=sp_group, **cache_options)
    engine.new_runner = lambda **options: Runner(
        engine.module,
        engine.new_cache(),
        **{"token_group": _token_group(), "chunk_size": prefill_chunk, "cuda_graphs": cuda_graphs, **options},
    )
    if cuda_graphs:
        engine.new_runner()  # raises for a model or a group whose steps can't be captured
    return engine


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


def _check_sizes(world: int, sp_size: int | None, tp_size: int, config) -> int:
    if not isinstance(tp_size, int) or tp_size < 1 or world % tp_size:
        raise ValueError(f"tp_size={tp_size!r} must be a positive integer that divides the {world} ranks")
    if sp_size is None:
        sp_size = world // tp_size
    if not isinstance(sp_size, int) or sp_size * tp_size != world:
        raise ValueError(f"sp_size={sp_size!r} * tp_size={tp_size} must be the number of ranks, {world}")
    heads = {"num_attention_heads": config.num_attention_heads}
    heads["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for name, number in heads.items():
        if number % tp_size:
            raise ValueError(f"tp_size={tp_size} must divide the model's {name}={number}")
    return sp_size


def _make_groups(world: int, rank: int, sp_size: int, tp_size: int):
    """(sequence group, tensor-parallel group) of this rank; None for a group of one. All ranks make all groups."""
    if tp_size == 1:
        return (dist.group.WORLD if world > 1 else None), None
    sp_group = tp_group = None
    for t in range(tp_size):
        group = dist.new_group(range(t, world, tp_size)) if sp_size > 1 else None
        sp_group = group if t == rank % tp_size else sp_group
    for s in range(sp_size):
        group = dist.new_group(range(s * tp_size, (s + 1) * tp_size))
        tp_group = group if s == rank // tp_size else tp_group
    return sp_group, tp_group


def generate(
    engine, input_ids: Tensor, *, max_new_tokens: int, cache: TreeCache | None = None, **options
) -> Generation:
    """Greedy decoding on all ranks of an engine from `init_inference`; see `generation.generate` for the options.

    cache: continue with this cache; default a new one. The tokens are rank 0's on every rank, tensor-parallel or not.
    """
    if not hasattr(engine, "new_cache"):
        raise ValueError(f"engine is a {type(engine).__name__}: pass what init_inference returns")
    cache = engine.new_cache() if cache is None else cache
    given = {"chunk_size": engine.prefill_chunk, "token_group": _token_group(), "cuda_graphs": engine.cuda_graphs}
    options = {**given, **options}
    return generate_with_model(engine.module, input_ids, cache=cache, max_new_tokens=max_new_tokens, **options)
