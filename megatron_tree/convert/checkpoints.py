"""Read and write both formats in one process, on the CPU."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from ..integrations.megatron.compat import no_manager_process
from ..integrations.megatron.cpu import megatron_on_cpu
from ..integrations.transformers.models import model_folder
from ..training.arguments import build_parser, complete
from ..training.checkpoint import load_weights
from ..training.checkpoint_files import begin, checkpoint_folder, finish, newest
from ..training.checkpoint_options import MODEL, Saved, options_to_save, read_saved
from ..training.checkpoint_safety import check_index
from ..training.data import EOD, TOKENIZER_FILES, open_tokenizer
from ..training.model import build_model, start_model_parallel
from .families import config_of, options_of
from .weights import fill, of_transformers, tensors_of

MODEL_FILE, TOKENIZER = "model.yaml", "tokenizer"
TRAINING = {"lr": 1e-5, "seq_length": 2048}  # of a model that is trained further; the defaults are a small new model's


def to_megatron(model: str, out: Path, *, dtype: str = "auto") -> list[str]:
    """Convert a Transformers model into a checkpoint of weights alone, which any parallel layout loads.

    Args:
        model: folder of a Transformers model, or "smollm2".
        out: folder to make: release/, latest_checkpointed_iteration.txt, model.yaml and tokenizer/.
        dtype: "float32", "bfloat16", or "auto": as they are (float16 becomes float32).
    Returns: lines to print.
    Raises: ValueError for a model that can't be converted.
    """
    source = model_folder(model)
    config = AutoConfig.from_pretrained(source)
    options = options_of(config)
    _check_free(out)
    whole = AutoModelForCausalLM.from_pretrained(source, dtype="auto", use_safetensors=True)
    tensors = whole.state_dict()
    all_bf16 = all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    options["bf16"] = all_bf16 if dtype == "auto" else dtype == "bfloat16"
    options["seq_length"] = config.max_position_embeddings
    lines, tokenizer = _copy_tokenizer(source, out / TOKENIZER)
    options["tokenizer_model"] = tokenizer
    args = arguments_of(options)
    with one_rank(args):
        gpt = _empty_model(args)
        for _ in _progress(fill(gpt, tensors, options), gpt, "converting"):
            pass
        del whole, tensors
        final = checkpoint_folder(out, None)
        unfinished = begin(final)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state = {
            "iteration": 0,
            "consumed_train_samples": 0,
            "options": options_to_save(args),
            "world_size": 1,
            "checkpoint_version": 3.0,  # Megatron-LM asks for it
            "model": gpt.sharded_state_dict(metadata={"dp_cp_group": group}),
        }
        with no_manager_process():
            dist_checkpointing.save(state, str(unfinished))
        finish(final, None)
    for_training = {**options, **TRAINING, "seq_length": min(TRAINING["seq_length"], options["seq_length"])}
    _write_options(out / MODEL_FILE, for_training)
    model_options = " ".join(megatron_lm_options(options))
    return [
        *lines,
        f"train it further: megatron-tree train --config {out / MODEL_FILE} --load {out} --data-path DIR --save DIR",
        f"in Megatron-LM:   pretrain_gpt.py {model_options} --load {out} --ckpt-format torch_dist",
    ]


def to_huggingface(
    checkpoint: Path,
    out: Path,
    *,
    like: str | None = None,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
) -> list[str]:
    """Convert a checkpoint of megatron-tree train, of Megatron-LM or of `to_megatron` into a Transformers model folder.

    Args:
        checkpoint: folder of --save, or of one checkpoint in it.
        out: folder to make.
        like: folder of a Transformers model whose configuration and tokenizer are used.
        tokenizer: folder of the tokenizer; default: that of `like`, else the one the checkpoint names.
        vocab_size: tokens to keep; default: those of `like`, else as the checkpoint says. Megatron-LM's say only the
            padded size.
    Returns: lines to print.
    Raises: ValueError for a checkpoint that can't be converted.
    """
    saved, lines = _open(checkpoint)
    options = dict(saved.options)
    rows = options["vocab_size"]
    reference = AutoConfig.from_pretrained(model_folder(like)) if like is not None else None
    wanted = vocab_size if vocab_size is not None else (reference.vocab_size if reference is not None else rows)
    if not 0 < wanted <= rows:
        raise ValueError(f"vocab_size={wanted} must be from 1 to the checkpoint's {rows}")
    dtype = "bfloat16" if options["bf16"] else "float32"
    config = config_of({**options, "vocab_size": wanted}, dtype=dtype)
    if reference is not None:
        _check_like(options_of(reference), options, like)
        config = reference
        config.dtype = getattr(torch, dtype)
    _check_free(out)
    args = arguments_of(options)
    with one_rank(args):
        gpt = _empty_model(args)
        load_weights(gpt, saved)
        total = sum(len(of_transformers(name)) for name, _ in gpt.named_parameters())
        kept = {**options, "vocab_size": wanted}
        tensors = dict(_bar(tensors_of(gpt, kept), total, "converting"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True, assign=True)
    model.tie_weights()
    unfinished = out.with_name(out.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    words = _tokenizer_of(saved, tokenizer, like, rows)
    if words is None:
        lines.append("no tokenizer is known: name its folder with --tokenizer, or megatron-tree serve can't read text")
    else:
        words.save_pretrained(unfinished)
        if reference is None:
            model.config.eos_token_id, model.config.bos_token_id = words.eos_token_id, words.bos_token_id
            model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(unfinished)
    unfinished.rename(out)
    return [*lines, f"serve it: megatron-tree serve --model {out}"]


def megatron_lm_options(options: dict[str, Any]) -> list[str]:
    """Megatron-LM's command line for a model of these options."""
    words = ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"]
    words += ["--group-query-attention", "--max-position-embeddings", str(options["seq_length"])]
    for name in (*MODEL, "bf16", "vocab_size", "make_vocab_size_divisible_by"):
        value, option = options.get(name, MODEL.get(name)), "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is not False and value != MODEL.get(name):
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
    if (checkpoint / ".metadata").is_file():
        found, lines = str(checkpoint), []
    else:
        found, lines = newest(checkpoint)
    if found is None:
        raise ValueError(f"{checkpoint} has no checkpoint: name a folder that --save wrote, or one checkpoint in it")
    check_index(Path(found))
    return read_saved(found), lines


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


def _copy_tokenizer(source: Path, target: Path) -> tuple[list[str], str | None]:
    """Returns: (lines to print, the new folder)."""
    if not _has_tokenizer(source):
        line = f"{source} has no tokenizer: training takes bytes, unless {MODEL_FILE} names one (tokenizer_model)"
        return [line], None
    open_tokenizer(str(source)).save_pretrained(target)
    return [], str(target)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _tokenizer_of(saved: Saved, named: str | None, like: str | None, rows: int) -> Any:
    if named is None and like is not None and _has_tokenizer(model_folder(like)):
        named = str(model_folder(like))
    named = named or saved.options["tokenizer_model"]
    if named is not None:
        return open_tokenizer(named)
    return None if saved.by_megatron_lm or rows != EOD + 1 else byte_tokenizer()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The tokens of megatron-tree train without --tokenizer-model: bytes, and 256 for the end of a document."""
    printed = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    words = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(printed)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>", clean_up_tokenization_spaces=False)


def _byte_of(char: str) -> int:
    """The byte for which a character stands in byte-level BPE: itself if it can be printed, else from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return ord(char) if ord(char) < 256 else others[ord(char) - 256]


def _write_options(path: Path, options: dict[str, Any]) -> None:
    import yaml

    note = "# Options of megatron-tree train for this model; lr, seq_length and bf16 are suggestions.\n"
    path.write_text(note + yaml.safe_dump(options, sort_keys=False))


def _progress(steps: Iterable[Any], model: torch.nn.Module, what: str) -> Iterable[Any]:
    return _bar(steps, sum(1 for _ in model.parameters()), what)


def _bar(steps: Iterable[Any], total: int, what: str) -> Iterable[Any]:
    return tqdm(steps, total=total, desc=what, unit="tensor", dynamic_ncols=True, disable=not sys.stderr.isatty())
