"""Read and write both formats in one process, on the CPU.

The options of megatron-tree train that build a model are made from a Hugging Face configuration and back, and from the
options in a checkpoint of Megatron-LM and back. The weights are the same, under the names and in the layouts of
Transformers and of Megatron's GPTModel.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from ...core.files import check_free, whole_folder, writing
from ...integrations.megatron.cpu import megatron_on_cpu
from ...integrations.transformers.models import LOCAL, model_folder, naming
from ..training.arguments import NEW_MODEL, build_parser, complete
from ..training.checkpoint import (
    check_index,
    checkpoint_folder,
    finish,
    load_weights,
    model_state,
    newest,
    read_common,
    start_writing,
    write_state,
)
from ..training.data import EOD, TOKENIZER_FILES, open_tokenizer
from ..training.model import build_model, start_model_parallel

TOKENIZER = "tokenizer"


def to_megatron(model: str, out: Path) -> list[str]:
    """Convert a Transformers model into a checkpoint of weights alone, which any parallel layout loads.

    Args:
        model: folder of a Transformers model, or "smollm2". Weights in float16 become float32.
        out: folder to make: release/, latest_checkpointed_iteration.txt, model.yaml and tokenizer/.
    Returns: lines to print.
    Raises: ValueError for a model that can't be converted.
    """
    source = model_folder(model)
    with naming(source, "config.json"):
        config = AutoConfig.from_pretrained(source, **LOCAL)
    options = options_of(config)
    _make_room(out)
    with naming(source, "*.safetensors"):
        tensors = AutoModelForCausalLM.from_pretrained(source, dtype="auto", use_safetensors=True, **LOCAL).state_dict()
    options["bf16"] = all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    options["seq_length"] = config.max_position_embeddings
    lines = []
    if _has_tokenizer(source):
        options["tokenizer_model"] = str(out / TOKENIZER)
        with whole_folder(out / TOKENIZER) as part:
            open_tokenizer(str(source)).save_pretrained(part)
    else:
        lines += [f"{source} has no tokenizer: training takes bytes"]
    args = arguments_of(options)
    with one_rank(args):
        gpt = _empty_model(args)
        fill(gpt, tensors, options)
        del tensors
        final = checkpoint_folder(out, None)
        write_state(model_state(gpt), start_writing(final, args), args, iteration=0)
        finish(final, None)
    training = f"--seq-length {min(2048, options['seq_length'])} --lr 1e-5{' --bf16' if options['bf16'] else ''}"
    model_options = " ".join(megatron_lm_options(options))
    return [
        *lines,
        f"train it further: megatron-tree train --load {out} {training} --data-path DIR --save DIR",
        f"in Megatron-LM:   pretrain_gpt.py {model_options} --load {out} --ckpt-format torch_dist",
    ]


def to_huggingface(checkpoint: Path, out: Path, *, like: str | None = None, vocab_size: int | None = None) -> list[str]:
    """Convert a checkpoint of megatron-tree train, of Megatron-LM or of `to_megatron` into a Transformers model folder.

    Args:
        checkpoint: folder of --save, or of one checkpoint in it.
        out: folder to make.
        like: folder of a Transformers model whose configuration and tokenizer are used; default: the checkpoint's.
        vocab_size: tokens to keep; default: those of `like`, else of the checkpoint. Megatron-LM's name only the padded
            size.
    Returns: lines to print.
    Raises: ValueError for a checkpoint that can't be converted.
    """
    folder, common = _open(checkpoint)
    by_megatron_lm = "options" not in common
    if by_megatron_lm and "args" not in common:
        raise ValueError(f"{folder} names no options of its model: neither megatron_tree nor Megatron-LM wrote it")
    options = options_of_megatron_lm(common["args"], folder) if by_megatron_lm else common["options"]
    reference = None if like is None else AutoConfig.from_pretrained(model_folder(like), **LOCAL)
    rows = options["vocab_size"]
    kept = vocab_size or (rows if reference is None else reference.vocab_size)
    if not 0 < kept <= rows:
        raise ValueError(f"vocab_size={kept} must be from 1 to the checkpoint's {rows}")
    dtype = "bfloat16" if options["bf16"] else "float32"
    config = config_of({**options, "vocab_size": kept}, dtype=dtype)
    if reference is not None:
        _check_like(options_of(reference), options, like)
        config = reference
        config.dtype = getattr(torch, dtype)
    _make_room(out)
    args = arguments_of(options)
    with one_rank(args):
        gpt = _empty_model(args)
        load_weights(gpt, folder, dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {})
        tensors = tensors_of(gpt, {**options, "vocab_size": kept})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True, assign=True)
    model.tie_weights()
    tokenizer, lines = _tokenizer_of(options, like, takes_bytes=not by_megatron_lm), []
    if tokenizer is None:
        lines.append("no tokenizer is known: name a model folder with --like, or megatron-tree serve can't read text")
    elif reference is None:
        model.config.eos_token_id, model.config.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        model.generation_config = GenerationConfig.from_model_config(model.config)
    with whole_folder(out) as part:
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        model.save_pretrained(part)
    return [*lines, f"serve it: megatron-tree serve --model {out}"]


def arguments_of(options: dict[str, Any]) -> argparse.Namespace:
    """Options of megatron-tree train that build this model on one rank."""
    args = build_parser().parse_args([])
    for name, value in {**options, "use_distributed_optimizer": False}.items():
        setattr(args, name, value)
    return complete(args)


@contextlib.contextmanager
def one_rank(args: argparse.Namespace) -> Iterator[None]:
    """Megatron's process groups for this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with megatron_on_cpu():
            start_model_parallel(args)
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _empty_model(args: argparse.Namespace) -> torch.nn.Module:
    model = build_model(args, perform_initialization=False)
    return model.bfloat16() if args.bf16 else model  # Megatron makes its norms in fp32 and casts them later


def _open(checkpoint: Path) -> tuple[str, dict[str, Any]]:
    """The folder of the newest checkpoint, and what is not sharded in it."""
    folder = str(checkpoint) if (checkpoint / ".metadata").is_file() else newest(checkpoint)[0]
    if folder is None:
        raise ValueError(f"{checkpoint} has no checkpoint: name a folder that --save wrote, or one checkpoint in it")
    check_index(Path(folder))
    return folder, read_common(folder)


def _make_room(out: Path) -> None:
    check_free(out)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)


def _check_like(needed: dict[str, Any], options: dict[str, Any], like: str) -> None:
    for name, value in needed.items():
        if name not in VOCABULARY and value != options[name]:
            raise ValueError(f"{name}={options[name]!r} in the checkpoint, but {like} has {value!r}: name another")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _tokenizer_of(options: dict[str, Any], like: str | None, *, takes_bytes: bool) -> Any:
    if like is not None and _has_tokenizer(model_folder(like)):
        return open_tokenizer(str(model_folder(like)))
    if options["tokenizer_model"] is not None:
        return open_tokenizer(options["tokenizer_model"])
    return byte_tokenizer() if takes_bytes and options["vocab_size"] == EOD + 1 else None


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The tokens of megatron-tree train for a new model: bytes, and 256 for the end of a document."""
    vocab = {char: byte for byte, char in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # Megatron's


class Family(NamedTuple):
    """Models of one `model_type`."""

    config: type
    plain: dict[str, Any]
    """Fields of the configuration that must have this value."""
    options: dict[str, bool]
    """What distinguishes the family, as options."""


FAMILIES = {
    "llama": Family(
        transformers.LlamaConfig,
        {"attention_bias": False, "mlp_bias": False},
        {"qk_layernorm": False, "add_qkv_bias": False},
    ),
    "qwen2": Family(
        transformers.Qwen2Config, {"use_sliding_window": False}, {"qk_layernorm": False, "add_qkv_bias": True}
    ),
    "qwen3": Family(
        transformers.Qwen3Config,
        {"attention_bias": False, "use_sliding_window": False},
        {"qk_layernorm": True, "add_qkv_bias": False},
    ),
}
KNOWN = "llama (Llama, SmolLM, SmolLM2, TinyLlama), qwen2 (Qwen 2, Qwen 2.5) and qwen3 (dense)"


def options_of(config: Any) -> dict[str, Any]:
    """The options of megatron-tree train that build the model of a Transformers configuration.

    Raises: ValueError that names what can't be converted, and what can.
    """
    kind = config.model_type
    if kind not in FAMILIES:
        raise ValueError(f"model_type={kind!r} can't be converted: the families that can are {KNOWN}")
    family = FAMILIES[kind]
    needed = {**family.plain, "hidden_act": "silu", "quantization_config": None}
    for name, value in needed.items():
        if (found := getattr(config, name, value)) != value:
            raise ValueError(f"{name}={found!r} can't be converted: of {kind} models only those with {name}={value!r}")
    heads = config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "norm_epsilon": float(config.rms_norm_eps),
        "vocab_size": config.vocab_size,
        "make_vocab_size_divisible_by": 1,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        **family.options,
        **_rope_options(config.rope_parameters),
    }


def _rope_options(rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    base = {"rotary_base": float(rope["rope_theta"])}
    if kind == "default":
        return base
    if kind != "llama3":
        raise ValueError(
            f"rope_type={kind!r} can't be converted: Megatron's rotary embedding has 'default' and 'llama3'"
        )
    for name, value in LLAMA3.items():
        if rope[name] != value:
            raise ValueError(f"{name}={rope[name]!r} can't be converted: Megatron has {value!r} built in")
    return {**base, "use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}


def config_of(options: dict[str, Any], *, dtype: str) -> Any:
    """The Transformers configuration of a model that these options build; the inverse of `options_of`.

    dtype: name of the weights' dtype.
    Raises: ValueError for a model that none of the families has.
    """
    special = {name: options[name] for name in ("qk_layernorm", "add_qkv_bias")}
    kinds = [kind for kind, family in FAMILIES.items() if family.options == special]
    if not kinds:
        both = "qk_layernorm=True with add_qkv_bias=True"
        raise ValueError(f"{both} can't be converted: no family has both ({KNOWN})")
    rope = {"rope_type": "default", "rope_theta": options["rotary_base"]}
    if options["use_rope_scaling"]:
        rope |= {"rope_type": "llama3", "factor": options["rope_scaling_factor"], **LLAMA3}
    return FAMILIES[kinds[0]].config(
        num_hidden_layers=options["num_layers"],
        hidden_size=options["hidden_size"],
        intermediate_size=options["ffn_hidden_size"],
        num_attention_heads=options["num_attention_heads"],
        num_key_value_heads=options["num_query_groups"],
        head_dim=options["kv_channels"],
        rms_norm_eps=options["norm_epsilon"],
        vocab_size=options["vocab_size"],
        tie_word_embeddings=not options["untie_embeddings_and_output_weights"],
        rope_parameters=rope,
        max_position_embeddings=options["seq_length"],
        bos_token_id=None,
        eos_token_id=None,
        dtype=dtype,
    )


PLAIN: dict[str, Any] = {  # those that must have this value; a release that lacks one means that
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "no_rope_freq": None,
    "apply_layernorm_1p": False,
    "layernorm_zero_centered_gamma": False,  # its name from 0.16 on
    "multi_latent_attention": False,
    "num_experts": None,
    "mtp_num_layers": None,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "heterogeneous_layers_config_path": None,
    "hybrid_override_pattern": None,
    "window_size": None,
    "window_attn_skip_freq": None,
    "softmax_type": "vanilla",
}
VOCABULARY = ("vocab_size", "make_vocab_size_divisible_by", "tokenizer_model")


def options_of_megatron_lm(args: argparse.Namespace, checkpoint: str) -> dict[str, Any]:
    """The options of a checkpoint's model. args: Megatron-LM's, which it holds.

    Raises: ValueError for a model that can't be converted.
    """
    for name, needed in PLAIN.items():
        if (value := getattr(args, name, needed)) != needed:
            raise ValueError(
                f"{checkpoint} holds a Megatron-LM model with {name}={value!r}, which can't be converted: only "
                f"{name}={needed!r} can"
            )
    wanted = (*(name for name in NEW_MODEL if name not in VOCABULARY), "seq_length", "bf16")
    given = {name: getattr(args, name) for name in wanted if hasattr(args, name)}
    if hasattr(args, "layernorm_epsilon"):  # its name from 0.16 on
        given["norm_epsilon"] = args.layernorm_epsilon
    if missing := set(wanted) - set(given):
        raise ValueError(f"{checkpoint} doesn't say its {min(missing)}: an unknown release of Megatron-LM wrote it")
    if not getattr(args, "group_query_attention", False):
        given["num_query_groups"] = args.num_attention_heads
    of_huggingface = getattr(args, "tokenizer_type", None) == "HuggingFaceTokenizer"
    tokenizer = args.tokenizer_model if of_huggingface else None
    return {**given, **dict(zip(VOCABULARY, (args.padded_vocab_size, 1, tokenizer), strict=True))}


def megatron_lm_options(options: dict[str, Any]) -> list[str]:
    """Megatron-LM's command line for a model of these options."""
    words = ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"]
    words += ["--group-query-attention", "--max-position-embeddings", str(options["seq_length"])]
    for name in (*(name for name in NEW_MODEL if name != "tokenizer_model"), "bf16"):
        value, option = options.get(name, False), "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is not False:
            words += [option, repr(value) if name == "norm_epsilon" else str(int(value))]
    return words


# Parameters of GPTModel and the tensors of Transformers that they are made of; {} is the number of a layer.
NAMES = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.layers.{}.input_layernorm.weight": ("model.layers.{}.input_layernorm.weight",),
    "decoder.layers.{}.self_attention.linear_proj.weight": ("model.layers.{}.self_attn.o_proj.weight",),
    "decoder.layers.{}.self_attention.q_layernorm.weight": ("model.layers.{}.self_attn.q_norm.weight",),
    "decoder.layers.{}.self_attention.k_layernorm.weight": ("model.layers.{}.self_attn.k_norm.weight",),
    "decoder.layers.{}.pre_mlp_layernorm.weight": ("model.layers.{}.post_attention_layernorm.weight",),
    "decoder.layers.{}.mlp.linear_fc1.weight": tuple(f"model.layers.{{}}.mlp.{x}_proj.weight" for x in ("gate", "up")),
    "decoder.layers.{}.mlp.linear_fc2.weight": ("model.layers.{}.mlp.down_proj.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "output_layer.weight": ("lm_head.weight",),
}
for _kind in ("weight", "bias"):
    _qkv = tuple(f"model.layers.{{}}.self_attn.{x}_proj.{_kind}" for x in "qkv")
    NAMES[f"decoder.layers.{{}}.self_attention.linear_qkv.{_kind}"] = _qkv


def from_transformers(parameter: str) -> tuple[str, ...]:
    """The tensors of Transformers that a parameter of GPTModel is made of: one, (gate, up) or (q, k, v)."""
    layer = re.search(r"(?<=\.layers\.)\d+", parameter)
    names = NAMES[re.sub(r"(?<=\.layers\.)\d+", "{}", parameter)]
    return tuple(name.format(layer[0] if layer else "") for name in names)


def joined(parts: list[Tensor], options: Mapping[str, Any]) -> Tensor:
    """One parameter of GPTModel from its tensors in Transformers.

    q, k and v [heads * d, ...] become groups of a KV head with its query heads: [groups, heads/groups + 2, d, ...].
    """
    if len(parts) < 3:
        return torch.cat(parts)
    groups = options["num_query_groups"]
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


def parted(weight: Tensor, options: Mapping[str, Any], count: int) -> list[Tensor]:
    """The inverse of `joined`, for `count` tensors."""
    if count < 3:
        return list(weight.chunk(count))
    groups, d = options["num_query_groups"], options["kv_channels"]
    rows = weight.unflatten(0, (groups, -1)).split([options["num_attention_heads"] // groups * d, d, d], 1)
    return [part.flatten(0, 1) for part in rows]


@torch.no_grad()
def fill(model: torch.nn.Module, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
    """Fill the parameters of a GPTModel from a Transformers model.

    Raises: ValueError for tensors that have no place in the model, or another shape.
    """
    left = set(tensors)
    if not options["untie_embeddings_and_output_weights"]:
        left.discard("lm_head.weight")
    for name, parameter in model.named_parameters():
        sources = from_transformers(name)
        if missing := [source for source in sources if source not in tensors]:
            raise ValueError(f"the weights lack {missing[0]}, which their configuration asks for")
        weight = joined([tensors[source] for source in sources], options)
        if weight.shape != parameter.shape:
            raise ValueError(f"{sources[0]} makes {tuple(weight.shape)}, but {name} has {tuple(parameter.shape)}")
        parameter.copy_(weight)
        left -= set(sources)
    if left:
        raise ValueError(f"{len(left)} tensors have no place in a GPTModel, for instance {min(left)}")


def tensors_of(model: torch.nn.Module, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The parameters of a GPTModel under Transformers' names, without the padding of the vocabulary."""
    tensors = {}
    for name, parameter in model.named_parameters():
        weight, sources = parameter.detach(), from_transformers(name)
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            weight = weight[: options["vocab_size"]]
        for source, part in zip(sources, parted(weight, options, len(sources)), strict=True):
            tensors[source] = part.contiguous()
    return tensors
