"""Read and write both formats in one process, on the CPU."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from ...core.files import whole_folder, writing
from ...integrations.megatron.cpu import megatron_on_cpu
from ...integrations.transformers.models import model_folder, naming
from ..training.arguments import build_parser, complete
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
from .options import VOCABULARY, config_of, megatron_lm_options, options_of, options_of_megatron_lm
from .weights import fill, tensors_of

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
        config = AutoConfig.from_pretrained(source)
    options = options_of(config)
    _check_free(out)
    with naming(source, "*.safetensors"):
        tensors = AutoModelForCausalLM.from_pretrained(source, dtype="auto", use_safetensors=True).state_dict()
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
    reference = None if like is None else AutoConfig.from_pretrained(model_folder(like))
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
    _check_free(out)
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


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists: name another folder to write, or delete it")
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
