"""megatron-tree convert: weights of Hugging Face models in and out of Megatron's checkpoints."""

import argparse
import shutil

import pytest
import torch

pytest.importorskip("transformers")

from megatron.core.transformer.enums import AttnBackend
from safetensors.torch import load_file

import transformers
from megatron_tree.core.files import NotWritten
from megatron_tree.tools.convert.checkpoints import PLAIN, byte_tokenizer, to_huggingface, to_megatron
from megatron_tree.tools.convert.command import main
from megatron_tree.tools.training.checkpoint import MANIFEST
from support.limits import files_of_at_most
from support.ranks import run_distributed
from support.training_runs import losses, records, train_all, write_text

WEIGHTS = "weights of Hugging Face models (megatron_tree.tools.convert)"
VOCAB = 131
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA3 |= {"original_max_position_embeddings": 8192}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "smollm2": lambda: transformers.LlamaConfig(
        **SHAPE | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}, tie_word_embeddings=True
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, rms_norm_eps=1e-6),
    "qwen3": lambda: transformers.Qwen3Config(
        **SHAPE, head_dim=12, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ),
}


def model_of(family, dtype=torch.float32):
    """A random model in which every parameter matters: norms and biases too."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(1.0 if "embed" in name else 4.0)
            else:
                weight.add_(torch.randn_like(weight) * 0.3)
    return model.to(dtype)


def tokens(batch=2, length=32):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """{family: (the model, its folder, the folder of its checkpoint)}."""
    found = {}
    for family in CONFIGS:
        folder = tmp_path_factory.mktemp(family)
        model = model_of(family)
        model.save_pretrained(folder / "hf")
        to_megatron(str(folder / "hf"), folder / "megatron")
        found[family] = (model, folder / "hf", folder / "megatron")
    return found


@pytest.mark.supports(WEIGHTS, with_="Llama, SmolLM2, Qwen 2, Qwen 3; cp = 2; tp = 2, cp = 2")
def test_the_tree_computes_the_same_logits(converted):
    """The checkpoint of one process, loaded at cp = 2, with tp = 2 where heads allow it: Transformers' logits."""
    folders = {family: folder for family, (_, _, folder) in converted.items()}
    logits = run_distributed(_logits, 4, folders, fresh=True, timeout=120)[0]
    for family in folders:
        with torch.no_grad():
            expected = converted[family][0](tokens()).logits
        assert expected.abs().max() > 0.5
        assert (logits[family][..., :VOCAB] - expected).abs().max() <= 1e-5 * expected.abs().max(), family


def _logits(rank, world, folders):
    from megatron.core import parallel_state

    from megatron_tree import unshard_sequence
    from megatron_tree.integrations.megatron.compat import batch_on_this_cp_rank
    from megatron_tree.integrations.megatron.cpu import megatron_on_cpu
    from megatron_tree.tools.training.arguments import parse_arguments
    from megatron_tree.tools.training.checkpoint import load_weights, newest
    from megatron_tree.tools.training.model import build_model, start_model_parallel

    logits = {}
    with megatron_on_cpu(), torch.no_grad():
        for family, folder in folders.items():
            options = f"--context-parallel-size 2 --tensor-model-parallel-size {1 if family == 'smollm2' else 2}"
            args = parse_arguments(["--load", str(folder), *options.split()])
            start_model_parallel(args)
            model = build_model(args).eval()
            load_weights(model, newest(folder)[0])
            ids = tokens()
            places = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
            shard = batch_on_this_cp_rank({"tokens": ids, "position_ids": places})
            local = model(shard["tokens"], shard["position_ids"], None)
            parts = [torch.empty_like(local) for _ in range(args.tensor_model_parallel_size)]
            torch.distributed.all_gather(parts, local, group=parallel_state.get_tensor_model_parallel_group())
            logits[family] = unshard_sequence(torch.cat(parts, -1), parallel_state.get_context_parallel_group(), 1)
            parallel_state.destroy_model_parallel()
    return logits


@pytest.mark.supports(WEIGHTS, with_="and back, bit for bit")
def test_there_and_back_bit_by_bit(converted, tmp_path):
    for family, (model, hf, megatron) in converted.items():
        to_huggingface(megatron, tmp_path / family)
        before, after = (load_file(folder / "model.safetensors") for folder in (hf, tmp_path / family))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before), family
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / family)
        with torch.no_grad():
            assert torch.equal(again(tokens()).logits, model(tokens()).logits), family
        assert type(again) is type(model)


def test_no_space_left(converted, tmp_path):
    """Nothing that looks like a model or a checkpoint is left, and the sentence names the folder."""
    _, hf, megatron = converted["llama"]
    for convert, source in ((to_huggingface, megatron), (to_megatron, str(hf))):
        out = tmp_path / convert.__name__
        with files_of_at_most(20_000), pytest.raises(NotWritten, match=f"no space left on {tmp_path}") as caught:
            convert(source, out)
        assert str(caught.value).endswith("is not written (File too large)")
        assert not out.exists() or not (out / "latest_checkpointed_iteration.txt").exists()
    to_huggingface(megatron, tmp_path / "to_huggingface")


@pytest.mark.parametrize(("dtype", "after"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
def test_less_precision(tmp_path, dtype, after):
    """bfloat16 stays, float16 becomes fp32, both exactly."""
    model = model_of("qwen2", dtype)
    model.save_pretrained(tmp_path / "hf")
    to_megatron(str(tmp_path / "hf"), tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    for key, tensor in load_file(tmp_path / "back" / "model.safetensors").items():
        assert tensor.dtype == after
        assert torch.equal(tensor, model.state_dict()[key].to(after))


@pytest.mark.refuses("models of other families (megatron_tree.tools.convert)", when="the conversion")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: transformers.GPT2Config(), "model_type='gpt2' can't be converted: the families that can are llama"),
        (lambda: transformers.LlamaConfig(**SHAPE, mlp_bias=True), "mlp_bias=True can't be converted: of llama models"),
        (
            lambda: transformers.LlamaConfig(**SHAPE, rope_parameters={**LLAMA3, "high_freq_factor": 8.0}),
            "high_freq_factor=8.0 can't be converted: Megatron has 4.0 built in",
        ),
    ],
)
def test_what_cant_be_converted_is_named(config, message, tmp_path):
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        to_megatron(str(tmp_path), tmp_path / "out")


def test_a_byte_for_every_token():
    """The tokenizer that goes with byte models: ids are the bytes that the data had."""
    words, text = byte_tokenizer(), "naïve\n\x00\t日本 é"
    assert words(text)["input_ids"] == list(text.encode())
    assert words.decode(list(text.encode())) == text
    assert words.eos_token_id == 256
    assert len(words) == 257


@pytest.mark.supports(WEIGHTS, with_="of Megatron-LM's checkpoints (torch_dist)")
def test_megatron_lm_checkpoints(converted, tmp_path):
    """Those values of Megatron-LM's that are not sharded, no list of files; what a family lacks is refused by name."""
    _, hf, ours = converted["llama"]

    def as_megatron_lm(name, **changed):
        folder = tmp_path / name
        shutil.copytree(ours, folder)
        (folder / "release" / MANIFEST).unlink()
        common = torch.load(folder / "release" / "common.pt", weights_only=True)
        options = PLAIN | common.pop("options")
        options |= {"group_query_attention": True, "padded_vocab_size": VOCAB, "rotary_base": 500000, "save": "there"}
        common["args"] = argparse.Namespace(**options | {"attention_backend": AttnBackend.auto} | changed)
        torch.save(common, folder / "release" / "common.pt")
        return folder

    to_huggingface(as_megatron_lm("same"), tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (hf, tmp_path / "back"))
    assert all(torch.equal(before[name], after[name]) for name in before | after)
    for changed, message in (
        ({"num_experts": 4}, "num_experts=4, which can't be converted: only num_experts=None can"),
        ({"normalization": "LayerNorm"}, "normalization='LayerNorm', which"),
        ({"window_size": (8, 0)}, r"window_size=\(8, 0\), which"),
    ):
        with pytest.raises(ValueError, match=message):
            to_huggingface(as_megatron_lm(min(changed), **changed), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.supports(WEIGHTS, with_="trained further at cp = 2, and back")
def test_trained_further_and_served(tmp_path):
    """A model of Hugging Face's with its tokenizer: trained at cp = 2, saved, resumed, converted back."""
    text, hf, start = write_text(tmp_path / "text", 4), tmp_path / "hf", tmp_path / "start"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE | {"vocab_size": 257}))
    model.save_pretrained(hf)
    byte_tokenizer().save_pretrained(hf)
    to_megatron(str(hf), start)
    kept, options = tmp_path / "kept", f"--load {start} --data-path {text} --context-parallel-size 2 --lr 1e-2"
    options += " --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --seq-length 32"
    runs = {
        "first": f"{options} --train-iters 2 --lr-decay-iters 4 --save {kept}",
        "second": f"{options} --train-iters 4 --resume --save {kept}",
    }
    run_distributed(train_all, 2, [(tmp_path / n, run) for n, run in runs.items()], fresh=True, timeout=200)
    with torch.no_grad():
        ids = torch.tensor([list((text / "0.py").read_bytes()[:33])])
        untrained = float(model(ids, labels=ids).loss)
    assert losses(tmp_path / "first")[1] == pytest.approx(untrained, abs=0.1)
    assert sorted(losses(tmp_path / "second")) == [3, 4]
    assert losses(tmp_path / "second")[4] < losses(tmp_path / "first")[1]
    assert records(tmp_path / "first", "start")[0]["options"]["tokenizer_model"] == str(start / "tokenizer")
    to_huggingface(kept, tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    with torch.no_grad():
        assert float(back(ids, labels=ids).loss) < untrained
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "back").decode([104, 105]) == "hi"
    assert back.generation_config.eos_token_id == 256


def test_the_command_line(converted, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, hf, checkpoint = converted["smollm2"]
    assert main(["to-megatron", str(hf), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"megatron-tree train --load {tmp_path / 'out'} --seq-length 64 --lr 1e-5 " in said
    assert "--num-layers 2 --hidden-size 72 " in said
    assert "hf has no tokenizer: training takes bytes" in said
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release\n"
    assert main(["to-huggingface", str(checkpoint), str(tmp_path / "like"), "--like", str(hf)]) == 0
    assert f"megatron-tree serve --model {tmp_path / 'like'}" in capsys.readouterr().out
    for words, message in (
        ("to-huggingface hf new", "hf has no checkpoint: name a folder that --save wrote, or one checkpoint"),
        ("to-huggingface out like", "like exists: name another folder to write, or delete it"),
        ("to-huggingface out new --vocab-size 132", "vocab_size=132 must be from 1 to the checkpoint's 131"),
        ("to-megatron out new", "out' is neither 'smollm2' nor a folder with a config.json"),
    ):
        command, source, out, *options = words.split()
        assert main([command, str(tmp_path / source), str(tmp_path / out), *options]) == 2
        assert message in capsys.readouterr().err
