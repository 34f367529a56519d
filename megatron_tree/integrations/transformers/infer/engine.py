"""Inference of a Transformers model on all ranks: they share its KV cache, and with weights="sharded" its weights.

    engine = share_model(model)                         # on every rank
    result = generate(engine, input_ids, max_new_tokens=64, eos_token_id=tokenizer.eos_token_id)

With weights="sharded" all ranks share weights and cache (weight_layout.py). DeepSpeed's tensor parallelism beside
sequence ranks is in integrations/deepspeed/inference.py, whose engine has the same methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from transformers import PreTrainedModel

from ....core.arguments import checked, shown
from ....core.cache.graph import check_cuda_graphs
from ....core.comm import Ranks, group_rank, group_size
from ....core.config import QUERIES, WEIGHTS, TreeConfig, check_choice, default_config
from ....core.kernels import ACCELERATORS
from ....core.log import say_once
from ..attention import TreeCache, check_model
from ..families.images import set_text_attention
from ..models import load_model
from .generation import Generation
from .generation import generate as generate_with_model
from .runner import CHUNK_SIZE, Runner
from .split_model import connect, empty_model, read_pieces, split_model
from .weight_layout import choose_layout, plan_layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEPS_TRIED = 3  # the last one is replayed


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model whose ranks share its KV cache."""

    module: PreTrainedModel
    sp_group: object
    """The ranks that share a row's tokens; None for one."""
    tp_size: int
    """Ranks that share the weights."""
    model_bytes: int
    """Of the whole model."""
    plain_attention: str
    """The model's attention implementation before it became "tree"."""
    cache_options: dict
    runner_options: dict

    @property
    def sp_size(self) -> int:
        return group_size(self.sp_group)

    @property
    def weight_bytes(self) -> int:
        """Of this rank."""
        return sum(parameter.nbytes for parameter in self.module.parameters())

    def new_cache(self) -> TreeCache:
        """An empty cache."""
        text = self.module.config.get_text_config(decoder=True)
        return TreeCache(text, cp_group=self.sp_group, **self.cache_options)

    def new_runner(self, **more) -> Runner:
        """A `Runner` over a new cache; more: options of it."""
        return Runner(self.module, self.new_cache(), **self.runner_options | more)


@checked
def share_model(
    model,
    *,
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
    device: torch.device | None = None,
) -> Engine:
    """An engine of all ranks of the job; arguments as of `init_inference` of integrations.deepspeed.

    device: of the weights and the cache; default: the current GPU, or the CPU. The model is changed in place.
    Raises: ValueError before any group is made: an unsupported dtype or option, a model whose layers or attention are
        not supported.
    """
    device = device or _own_device()
    check_options(weights, queries, prefill_chunk, cuda_graphs, schedule, device.type, tree_config)
    model, folder = model_or_folder(model, weights, dtype)
    text, dtype = model.config.get_text_config(decoder=True), dtype or model.dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype} is not one of {DTYPES}")
    cache_options = {"page_size": page_size, "dtype": cache_dtype, "schedule": schedule, "tree_config": tree_config}
    TreeCache(text, **cache_options)  # raises for a model or options that the cache can't serve
    model_bytes = dtype.itemsize * sum(parameter.numel() for parameter in model.parameters())
    plain_attention, everyone = text._attn_implementation, token_group()
    sp_group, tp_size = everyone, 1
    if weights == "sharded":
        sp_group, of_split = _split(model, folder, queries, split_latents, device=device, dtype=dtype, tree=tree_config)
        tp_size, cache_options = group_size(everyone), cache_options | of_split
    else:
        check_replicated(model, queries, split_latents)
        set_text_attention(model, "tree")
    model.to(device=device, dtype=dtype).eval()
    check_model(model)
    engine = Engine(
        module=model,
        sp_group=sp_group if group_size(sp_group) > 1 else None,
        tp_size=tp_size,
        model_bytes=model_bytes,
        plain_attention=plain_attention,
        cache_options=cache_options,
        runner_options={"token_group": everyone, "chunk_size": prefill_chunk},
    )
    use_cuda_graphs(engine, cuda_graphs, device)
    return engine


def use_cuda_graphs(engine, wanted: bool | None, device: torch.device) -> None:
    """Let an engine's runners capture their decode steps in CUDA graphs, or not. Collective.

    wanted: None: on a GPU, unless its model or ranks can't have them: some steps are tried, and the log says why not.
    Raises: ValueError, the same on all ranks, where they are wanted and can't be had.
    """
    engine.runner_options["cuda_graphs"] = bool(wanted)
    if wanted:
        engine.new_runner()
    elif wanted is None and device.type in ACCELERATORS:
        try:
            replay_steps(engine, "cuda_graphs")
        except ValueError as error:
            say_once(f"decode steps are launched one by one: {error}")


def replay_steps(engine, option: str) -> None:
    """Set an option of the engine's runners, "cuda_graphs" or "record_steps". Collective: some steps are tried.

    Raises: ValueError, the same on all ranks, where its model or ranks can't have it.
    """
    runner = engine.new_runner(**{option: True})
    if runner.image_tokens:
        raise ValueError(f"{option}=True can't be had beside images")
    row, token = runner.add(), torch.zeros(1, dtype=torch.int64)
    runner.prefill(row, token)
    for _ in range(STEPS_TRIED):
        runner.step([row], token[None])
    engine.runner_options[option] = True


@checked
def generate(
    engine, input_ids: Tensor, *, max_new_tokens: int, cache: TreeCache | None = None, **options
) -> Generation:
    """Greedy decoding on all ranks of an engine; see `generation.generate` for the options.

    engine: from `share_model` or `init_inference`. cache: continue with this cache; default a new one. The tokens are
        rank 0's on every rank, tensor-parallel or not.
    """
    if not hasattr(engine, "new_cache"):
        raise ValueError(f"engine is a {type(engine).__name__}: pass what init_inference returns, or share_model")
    cache = engine.new_cache() if cache is None else cache
    options = engine.runner_options | options
    return generate_with_model(engine.module, input_ids, cache=cache, max_new_tokens=max_new_tokens, **options)


def check_options(
    weights: str,
    queries: str,
    prefill_chunk: int,
    cuda_graphs: bool | None,
    schedule: str,
    device_type: str,
    tree_config: TreeConfig | None,
) -> None:
    check_choice("weights", weights, WEIGHTS)
    check_choice("queries", queries, QUERIES)
    check_choice("cuda_graphs", cuda_graphs, (None, False, True))
    if not isinstance(prefill_chunk, int) or prefill_chunk < 1:
        raise ValueError(f"prefill_chunk={prefill_chunk!r} must be a positive number of tokens")
    if cuda_graphs:
        check_cuda_graphs(device_type=device_type, schedule=schedule, config=tree_config or default_config())


def model_or_folder(model, weights: str, dtype: torch.dtype | None) -> tuple[PreTrainedModel, Path | None]:
    """(model, its folder): sharded weights of a folder are read later, in pieces."""
    if isinstance(model, PreTrainedModel):
        return model, None
    if not isinstance(model, (str, Path)):
        raise ValueError(f"model={shown(model)} must be a Transformers model, or the folder of one")
    if not (folder := Path(model)).is_dir():
        raise ValueError(f"model={str(model)!r} is no folder: pass a model, or the folder that holds its files")
    return (empty_model(folder, dtype) if weights == "sharded" else load_model(folder, dtype)), folder


def check_replicated(model, queries: str, split_latents: bool | None) -> None:
    """Raise ``ValueError`` for options of split weights."""
    if split_latents is not None:
        raise _for_latents(model, split_latents, "replicated")
    if queries != "split":
        raise ValueError(f"queries={queries!r} is for weights='sharded', but weights='replicated': leave it out")


def token_group():
    """All ranks, including tensor-parallel ones, run the same tokens."""
    return dist.group.WORLD if dist.is_initialized() else None


def _own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _split(
    model, folder: Path | None, queries: str, split_latents: bool | None, *, device, dtype, tree: TreeConfig | None
) -> tuple[object, dict]:
    """Cut the model: all ranks share weights and cache. Returns the ranks that share tokens, options of the caches."""
    everyone = token_group()
    world, rank = group_size(everyone), group_rank(everyone)
    layout = plan_layout(model, world, rank, repeat_queries=queries == "repeated")
    if split_latents is not None and not layout.latents:
        raise _for_latents(model, split_latents, "sharded")
    set_text_attention(model, "tree")
    ranks = Ranks.of(everyone, device, tree)
    layout = choose_layout(layout, ranks, queries=queries, split_latents=split_latents, dtype=dtype)
    sp_group = ranks.neighbours(layout.heads.size)
    if folder is None:
        split_model(model, layout, ranks)
    else:
        read_pieces(model, folder, layout)
        connect(model, layout, ranks)
    cache_options = {"head_shares": layout.heads.shares, "weights_group": everyone}
    return sp_group, cache_options | {"state_pieces": layout.state_pieces or None}


def _for_latents(model, split_latents: bool, weights: str) -> ValueError:
    return ValueError(
        f"split_latents={split_latents} is for weights='sharded' and models with latent attention, but weights="
        f"{weights!r} and the model is a {type(model).__name__}: leave it out"
    )
