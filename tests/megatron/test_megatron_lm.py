"""launch/megatron_lm.sh: an unmodified Megatron-LM checkout with tree attention, on CPU ranks."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest
import torch

from megatron_tree.integrations.megatron import megatron_lm

REPO = Path(__file__).resolve().parents[2]
CHECKOUT = os.environ.get("MEGATRON_LM")
# A model that takes every path of interest in seconds: GQA, RMSNorm, SwiGLU, rotary positions.
OPTIONS = (
    *("--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 4, "--group-query-attention"),
    *("--num-query-groups", 2, "--seq-length", 64, "--max-position-embeddings", 64, "--vocab-size", 4999),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--attention-dropout", 0, "--hidden-dropout", 0, "--micro-batch-size", 2, "--global-batch-size", 4, "--lr", 1e-3),
    *("--train-iters", 4, "--log-interval", 1, "--eval-iters", 1, "--eval-interval", 4),
)
MOCK = ("--mock-data", "--tokenizer-type", "NullTokenizer")


def launch(*arguments, timeout=200, cwd=None):
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    command = ["bash", REPO / "launch" / "megatron_lm.sh", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=environment)


@pytest.fixture
def checkout(tmp_path):
    """What has the shape of a checkout: the installed megatron.core, a training loop, and a script that uses both."""
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "megatron" / "core").symlink_to(Path(megatron.core.__file__).parent)
    (tmp_path / "megatron" / "training" / "initialize.py").write_text(
        "import torch\n"
        "def initialize_megatron(allow_no_cuda=False):\n"
        "    assert allow_no_cuda or torch.cuda.is_available(), 'Megatron requires CUDA.'\n"
        "def set_jit_fusion_options():\n"
        "    torch.rand(3, device='cuda')\n"
    )
    (tmp_path / "megatron" / "training" / "training.py").write_text(
        "from megatron.training.initialize import initialize_megatron, set_jit_fusion_options\n"
        "def pretrain():\n"
        "    initialize_megatron()\n"
        "    set_jit_fusion_options()\n"
    )
    (tmp_path / "pretrain_gpt.py").write_text(
        "import json, sys\n"
        "import megatron.core, torch\n"
        "from megatron.training.training import pretrain\n"
        "if __name__ == '__main__':\n"
        "    state = torch.get_rng_state()\n"
        "    pretrain()\n"
        "    from megatron_tree.integrations import megatron as tree\n"
        "    same = torch.equal(state, torch.get_rng_state())\n"
        "    compiled = torch.compile(lambda x: torch.compiler.is_compiling())(1)\n"
        "    seen = [sys.argv, megatron.core.__file__, tree.is_installed(), torch.cuda.device_count(), same]\n"
        "    print('SEEN' + json.dumps([*seen, compiled]))\n"
    )
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is added where there is a GPU")
def test_a_script_runs_unmodified_with_its_own_arguments(checkout):
    """One rank: what the script sees, and that its training loop's CUDA assertion and warm-up are out of the way."""
    given = ("--cp-comm-type", "tree", "--lr", "1e-3", "--title", "two words", "--transformer-impl=local", "--yes")
    done = launch("-n", 1, checkout, "pretrain_gpt.py", *given, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--cp-comm-type" not in done.stderr
    argv, core, installed, devices, same_state, compiled = json.loads(re.search("^SEEN(.*)", done.stdout, re.M)[1])
    added = [
        *("--distributed-backend", "gloo", "--use-cpu-initialization", "--no-gradient-accumulation-fusion"),
        *("--no-masked-softmax-fusion", "--no-persist-layer-norm", "--no-rope-fusion"),
    ]
    assert argv == [str(checkout / "pretrain_gpt.py"), *given, *added]
    assert f"with these options added: {' '.join(added)}\n" in done.stdout
    assert core == str(checkout / "megatron" / "core" / "__init__.py"), "the checkout's own"
    assert installed
    assert devices == 1
    assert same_state, "the warm-up draws no random numbers"
    assert not compiled
    assert "not installed" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_package_that_the_script_lacks_is_named(checkout):
    (checkout / "pretrain_gpt.py").write_text("import no_such_package\n")
    done = launch("-n", 1, checkout, "pretrain_gpt.py", timeout=250)
    assert done.returncode != 0
    assert "pip install no_such_package" in done.stdout + done.stderr
    assert "warning: no --cp-comm-type among the options" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is redirected where there is a GPU")
def test_norms_under_sequence_parallelism(checkout, monkeypatch):
    """Megatron's own norm refuses it; of a model without it, it stays."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from support.core_attention import config

    plain, parallel = config(), config(sequence_parallel=True, tensor_model_parallel_size=2)
    monkeypatch.setattr(megatron_lm.compat, "training_replacements", list)
    with megatron_lm.megatron_lm_on_cpu():
        ours = WrappedTorchNorm(config=parallel, hidden_size=8, eps=1e-3)
        assert isinstance(ours, megatron_lm.SequenceParallelNorm)
        assert (ours.hidden_size, ours.eps) == (8, 1e-3)
        assert type(WrappedTorchNorm(plain, 8)) is torch.nn.LayerNorm
    with pytest.raises(AssertionError, match="sequence parallel"):
        WrappedTorchNorm(parallel, 8)
    assert type(WrappedTorchNorm(plain, 8)) is torch.nn.LayerNorm


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="TransformerEngine is installed")
def test_layers_of_transformer_engine_are_named():
    """pretrain_mamba.py has no other; by a spec, and called as newer releases call them."""
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
    from megatron.core.transformer.spec_utils import build_module

    megatron_lm.compat.name_missing_transformer_engine()
    attention = mamba_stack_spec.submodules.attention_layer.submodules.self_attention.submodules
    message = "is a layer of TransformerEngine, which is not installed: install it"
    with pytest.raises(megatron_lm.compat.UnsupportedMegatronError, match=f"^TERowParallelLinear {message}"):
        build_module(attention.linear_proj, 8, 8, config=None)
    with pytest.raises(megatron_lm.compat.UnsupportedMegatronError, match=f"^TEDotProductAttention {message}"):
        attention.core_attention(config=None, name="core_attention")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["empty", "pretrain_gpt.py"], "empty holds no megatron/core: name the folder of a Megatron-LM checkout"),
        (["core", "pretrain_gpt.py"], "core holds no megatron/training: name the folder of a Megatron-LM checkout"),
        (["whole"], "no script given: name one of whole"),
        (["whole", "pretrain_gpt.py"], "no such script: whole/pretrain_gpt.py"),
    ],
)
def test_wrong_calls(arguments, message, tmp_path):
    for folder in ("empty", "core/megatron/core", "whole/megatron/core", "whole/megatron/training"):
        (tmp_path / folder).mkdir(parents=True)
    done = launch(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def trained(ranks, *options, data=MOCK, folder=CHECKOUT, script="pretrain_gpt.py"):
    """{what: its values} that training prints: losses and gradient norms of every step, losses of the evaluations."""
    done = launch("-n", ranks, folder, script, *OPTIONS, *data, *options, timeout=500)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    names = ("lm loss:", "grad norm:", "lm loss value:")
    return {name: [float(x) for x in re.findall(rf"{name} ([-+.\dE]+)", done.stdout)] for name in names}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM names no Megatron-LM checkout")
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares runs on CPU ranks")
def test_a_real_checkout_trains_as_on_one_rank():
    """Losses and gradient norms of two ranks equal those of Megatron's own attention on one."""
    one = trained(1)
    assert len(one["lm loss:"]) == len(one["grad norm:"]) == 4
    assert one["lm loss value:"], "evaluations"
    tree = ("--context-parallel-size", 2, "--cp-comm-type", "tree")
    assert trained(2, *tree) == {name: pytest.approx(values, rel=2e-6) for name, values in one.items()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM names no Megatron-LM checkout")
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares runs on CPU ranks")
def test_latent_attention_and_sequence_parallelism_of_a_real_checkout():
    """MLA on two ranks against one; --sequence-parallel against tensor parallelism alone."""
    mla = ("--multi-latent-attention", "--q-lora-rank", 16, "--kv-lora-rank", 16, "--qk-head-dim", 8)
    mla += ("--qk-pos-emb-head-dim", 4, "--v-head-dim", 8, "--rope-type", "rope")
    tree, tensor = ("--context-parallel-size", 2, "--cp-comm-type", "tree"), ("--tensor-model-parallel-size", 2)
    spec = ("--spec", "megatron_tree.integrations.megatron", "get_gpt_layer_tree_spec")
    for ranks, common, compared in ((1, mla, tree), (2, tensor, ("--sequence-parallel", *spec))):
        expected = trained(ranks, *common)
        assert len(expected["lm loss:"]) == 4
        result = trained(2, *common, *compared)
        assert result == {name: pytest.approx(values, rel=2e-6) for name, values in expected.items()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM names no Megatron-LM checkout")
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on CPU ranks")
def test_checkpoints_of_a_real_checkout_go_both_ways(tmp_path):
    """Saved by Megatron-LM, converted, trained by megatron-tree train at cp = 2 and by Megatron-LM, and converted."""
    pytest.importorskip("yaml")
    transformers = pytest.importorskip("transformers")
    from megatron_tree.tools.convert.checkpoints import to_huggingface, to_megatron
    from support.ranks import run_distributed
    from support.training_runs import losses, train_all, write_text

    saving = ("--ckpt-format", "torch_dist", "--save-interval", 2, "--ffn-hidden-size", 160, "--save")
    trained(1, *saving, tmp_path / "theirs")
    to_huggingface(tmp_path / "theirs", tmp_path / "theirs_hf")
    to_megatron(str(tmp_path / "theirs_hf"), tmp_path / "start")
    options = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --seq-length 64"
    options += f" --data-path {write_text(tmp_path / 'text')} --context-parallel-size 2 --load {tmp_path / 'start'}"
    runs = [(tmp_path / "run", f"{options} --save {tmp_path / 'ours'}")]
    outcome = run_distributed(train_all, 2, runs, fresh=True, timeout=200)[0][0]
    assert outcome.iteration == 4, outcome
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4]
    opening = ("--load", tmp_path / "ours", "--no-load-rng", "--override-opt_param-scheduler", "--train-iters", 6)
    again = trained(1, *saving, tmp_path / "again", *opening)
    assert len(again["lm loss:"]) == 2, "steps 5 and 6"
    to_huggingface(tmp_path / "again", tmp_path / "hf", vocab_size=5000)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.config.model_type == "llama"
    assert model(torch.arange(16)[None]).logits.shape == (1, 16, 5000)


PACKED = """
import random, runpy
import torch
from megatron.training.datasets import sft_dataset
from megatron.training.tokenizer import tokenizer

class Documents:  # every fourth sample is one long document, the others are short ones
    def __init__(self, path): pass
    def __len__(self): return 64
    def __getitem__(self, i):
        draw = random.Random(int(i))
        lengths = [draw.randint(2, 12) for _ in range(4)] if i % 4 else [50 + int(i) % 9]
        return [{"role": "system", "content": n} for n in lengths]

class Tokens:
    eod = pad = bos = eos = 126
    vocab_size, unique_identifiers = 128, {}
    def __init__(self, *args, **options): pass
    def tokenize_conversation(self, conversation, **options):
        n = conversation[0]["content"]
        text = torch.randint(2, 120, (n,), generator=torch.Generator().manual_seed(n))
        return text, torch.where(torch.arange(n) < n // 4, -100, text)

sft_dataset.SFTLowLevelDataset, tokenizer.SFTTokenizer = Documents, Tokens
runpy.run_path("pretrain_gpt.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM names no Megatron-LM checkout")
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares runs on CPU ranks")
def test_a_real_checkout_dispatches_packed_batches(tmp_path, monkeypatch):
    """Four data-parallel ranks share the documents of all; Megatron averages losses of evaluations over its ranks."""
    for path in Path(CHECKOUT).resolve().iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "pretrain_sft.py").write_text(PACKED)
    monkeypatch.chdir(tmp_path)
    options = ["--dispatch-documents", "--calculate-per-token-loss", "--cp-comm-type", "tree"]
    data = ["--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", "none", "--legacy-tokenizer"]
    data += ["--no-create-attention-mask-in-dataloader"]
    options += ["--spec", "megatron_tree.integrations.megatron", "get_gpt_layer_tree_spec", "--micro-batch-size", 1]
    data += [x for part in ("train", "valid", "test") for x in (f"--{part}-data-path", tmp_path / "none")]
    where = dict(data=data, folder=tmp_path, script="pretrain_sft.py")
    one, four = (trained(n, *options, **where) for n in (1, 4))
    for name in ("lm loss:", "grad norm:"):
        assert len(one[name]) == 4 and four[name] == pytest.approx(one[name], rel=2e-6)
