"""A rank's pieces of a model are read from its files: the right ones, nothing else, and damaged files are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import transformers
from megatron_tree.integrations.transformers.infer.split_model import empty_model, read_pieces
from megatron_tree.integrations.transformers.infer.weight_layout import plan_layout
from support.hf_models import tiny_model
from support.processes import own_bytes


def _check_pieces(model, layout, whole):
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, layout.piece_of(name, whole.get_parameter(name))), name


@pytest.mark.parametrize("family", ["gpt2", "olmo2"])
def test_pieces_of_other_forms_are_read(family, tmp_path):
    whole = tiny_model(family)
    whole.save_pretrained(tmp_path)
    for rank in (0, 3):
        model = empty_model(tmp_path)
        layout = plan_layout(model, 4, rank)
        read_pieces(model, tmp_path, layout)
        _check_pieces(model, layout, whole)


def test_buffers_are_read(tmp_path):
    """Biases by which routers choose experts, and a number of no dimension."""
    whole = tiny_model("deepseek_v3_experts")
    whole.register_buffer("number", torch.tensor(3.0))
    for buffer in whole.buffers():
        buffer.normal_()
    whole.save_pretrained(tmp_path)
    model = empty_model(tmp_path)
    model.register_buffer("number", torch.tensor(0.0))
    read_pieces(model, tmp_path, plan_layout(model, 2, 1))
    for name, buffer in whole.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer) == (name in whole.state_dict()), name


def test_a_rank_has_memory_for_its_own_pieces_alone(tmp_path):
    heads = dict(num_attention_heads=8, num_key_value_heads=4)
    sizes = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, vocab_size=8192)
    whole = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**heads, **sizes))
    whole.save_pretrained(tmp_path)
    size = sum(p.nbytes for p in whole.parameters())
    empty_model(tmp_path)  # imports what it needs
    before = own_bytes()
    model = empty_model(tmp_path)
    assert {p.device.type for p in model.parameters()} == {"meta"} and own_bytes() - before < 0.2 * size
    layout = plan_layout(model, 4, 1)
    read_pieces(model, tmp_path, layout)
    assert own_bytes() - before < 0.45 * size
    _check_pieces(model, layout, whole)


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [("lacks", f"its weights lack {NAME}"), ("shape", r"is \[47, 32\], but"), ("quantized", "is quantized")],
)
def test_files_that_are_refused(damage, message, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if damage == "lacks":
        del tensors[NAME]
    elif damage == "shape":
        tensors[NAME] = tensors[NAME][:-1].contiguous()
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    def read():
        model = empty_model(tmp_path)
        read_pieces(model, tmp_path, plan_layout(model, 1, 0))

    with pytest.raises(ValueError, match=message):
        read()


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(ValueError, match="on 8 ranks: each takes at least one of the model's 4 query heads; start 4"):
        plan_layout(tiny_model("llama"), 8, 0)
