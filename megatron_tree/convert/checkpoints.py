"""Read and write both formats in one process, on the CPU."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from megatron.core import parallel_state
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from ..integrations.megatron.cpu import megatron_on_cpu
from ..integrations.transformers.models import model_folder
from ..training.arguments import build_parser, complete
from ..training.checkpoint import load_weights, model_state, write_state
from ..training.checkpoint_files import begin, checkpoint_folder, finish, newest
from ..training.checkpoint_options import MODEL, Saved, read_saved
from ..training.checkpoint_safety import check_index
from ..training.data import EOD, TOKENIZER_FILES, open_tokenizer
from ..training.model import build_model, start_model_parallel
from .families import config_of, options_of
from .weights import fill, tensors_of

MODEL_FILE, TOKENIZER = "model.yaml", "tokenizer"
TRAINING = {"lr": 1e-5, "seq_length": 2048}  # of a model that is trained further; the defaults are a small new model's
NOTE = "# Options of megatron-tree train for this model; lr, seq_length and bf16 are suggestions.\n"


def to_megatron(model: str, out: Path) -> list[str]:
    """Convert a Transformers model into a checkpoint of weights alone, which any parallel layout loads.

    Args:
        model: folder of a Transformers model, or "smollm2". Weights in float16 become float32.
        out: folder to make: release/, latest_checkpointed_iteration.txt, model.yaml and tokenizer/.
    Returns: lines to print.
    Raises: ValueError for a model that can't be converted.
    """
    source = model_folder(model)
    config = AutoConfig.from_pretrained(source)
    options = options_of(config)
    _check_free(out)
    tensors = AutoModelForCausalLM.from_pretrained(source, dtype="auto", use_safetensors=True).state_dict()
    options["bf16"] = all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    options["seq_length"] = config.max_position_embeddings
    lines = []
    if _has_tokenizer(source):
        options["tokenizer_model"] = str(out / TOKENIZER)
        open_tokenizer(str(source)).save_pretrained(out / TOKENIZER)
    else:
        lines += [f"{source} has no tokenizer: training takes bytes, unless {MODEL_FILE} names one (tokenizer_model)"]
    args = arguments_of(options)
    with one_rank(args):
        gpt = _empty_model(args)
        fill(gpt, tensors, options)
        del tensors
        final = checkpoint_folder(out, None)
        write_state({"samples": 0, **model_state(gpt)}, str(begin(final)), args, iteration=0)
        finish(final, None)
    for_training = {**options, **TRAINING, "seq_length": min(TRAINING["seq_length"], options["seq_length"])}
    (out / MODEL_FILE).write_text(NOTE + yaml.safe_dump(for_training, sort_keys=False))
    model_options = " ".join(megatron_lm_options(options))
    return [
        *lines,
        f"train it further: megatron-tree train --config {out / MODEL_FILE} --load {out} --data-path DIR --save DIR",
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
    saved, lines = _open(checkpoint)
    options = saved.options
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
        load_weights(gpt, saved)
        tensors = tensors_of(gpt, {**options, "vocab_size": kept})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True, assign=True)
    model.tie_weights()
    unfinished = out.with_name(out.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    tokenizer = _tokenizer_of(saved, like)
    if tokenizer is None:
        lines.append("no tokenizer is known: name a model folder with --like, or megatron-tree serve can't read text")
    else:
        tokenizer.save_pretrained(unfinished)
        if reference is None:
            model.config.eos_token_id, model.config.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
            model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(unfinished)
    unfinished.rename(out)
    return [*lines, f"serve it: megatron-tree serve --model {out}"]


def megatron_lm_options(options: dict[str, Any]) -> list[str]:
    """Megatron-LM's command line for a model of these options."""
    words = ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"]
    words += ["--group-query-attention", "--max-position-embeddings", str(options["seq_length"])]
    for name in (*MODEL, "bf16", "vocab_size", "make_vocab_size_divisible_by"):
        value, option = options.get(name, False), "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is not False:
            words += [option, repr(value) if name == "norm_epsilon" else str(int(value))]
    return words


def arguments_of(options: dict[str, Any]) -> argparse.Namespace:
    """Options of megatron-tree train that build this model on one rank."""
    args = build_parser().parse_args([])
    alone = dict(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1)
    for name, value in {**options, **alone, "use_distributed_optimizer": False}.items():
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


def _open(checkpoint: Path) -> tuple[Saved, list[str]]:
    folder, lines = (str(checkpoint), []) if (checkpoint / ".metadata").is_file() else newest(checkpoint)
    if folder is None:
        raise ValueError(f"{checkpoint} has no checkpoint: name a folder that --save wrote, or one checkpoint in it")
    check_index(Path(folder))
    return read_saved(folder), lines


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists: name another folder to write, or delete it")
    out.parent.mkdir(parents=True, exist_ok=True)


def _check_like(needed: dict[str, Any], options: dict[str, Any], like: str) -> None:
    for name in MODEL:
        if name in needed and needed[name] != options[name]:
            raise ValueError(
                f"{name}={options[name]!r} in the checkpoint, but {like} has {needed[name]!r}: name another"
            )


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _tokenizer_of(saved: Saved, like: str | None) -> Any:
    if like is not None and _has_tokenizer(model_folder(like)):
        return open_tokenizer(str(model_folder(like)))
    if saved.options["tokenizer_model"] is not None:
        return open_tokenizer(saved.options["tokenizer_model"])
    is_byte_model = not saved.by_megatron_lm and saved.options["vocab_size"] == EOD + 1
    return byte_tokenizer() if is_byte_model else None


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The tokens of megatron-tree train without --tokenizer-model: bytes, and 256 for the end of a document."""
    vocab = {char: byte for byte, char in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)
