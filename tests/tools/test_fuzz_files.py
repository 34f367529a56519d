"""Files with bytes flipped or cut: they read as what was written, or a ValueError names them. Never anything else.

What has no checksum and is written by people (configurations, prompts, hostfiles) may also say something else that is
valid; then every value has the type that its option asks for.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("yaml")
pytest.importorskip("transformers")

from megatron_tree.core.cache.files import load_rows, model_fingerprint
from megatron_tree.core.plan import known_topologies, load_topology
from megatron_tree.core.plan.topology import TOPOLOGIES, place
from megatron_tree.inference.generation.sampling import SamplingParams
from megatron_tree.inference.generation.scheduler import Scheduler
from megatron_tree.inference.serving import arguments as generate_arguments
from megatron_tree.inference.serving.batch import BatchOptions, read_requests, run_batch
from megatron_tree.inference.serving.http import arguments as serve_arguments
from megatron_tree.integrations.transformers import models
from megatron_tree.integrations.transformers.attention import TreeCache
from megatron_tree.integrations.transformers.infer.generation import generate
from megatron_tree.launching import parse_with_config
from support.damage import chances, damaged, examples, reads
from support.hf_models import prompt, tiny_model
from support.plain_runner import PlainRunner, character_tokenizer

REPO = Path(__file__).resolve().parents[2]
ODD = [
    *("", "null", "true", "-1", "0", ".nan", "-.inf", "1e400", "9" * 40, "9" * 5000, "[]", "[1, [2]]", "{a: 1}"),
    *('"a\\0b"', "2020-01-01", "0x10", "*a", "&a [*a]", "!!python/object:os.system x", "'\u2028'", "[" * 3000),
]


# --- configurations ---


def _train(path):
    from megatron_tree.tools.training.arguments import build_parser, check_arguments, parse_arguments

    return build_parser(), parse_arguments(["--config", path]), lambda args: check_arguments(args, 4)


def _generate(path, module=generate_arguments):
    parser = module.build_parser()
    return parser, parse_with_config(parser, ["--config", path]), lambda args: module.check_arguments(args, 4)


def _serve(path):
    return _generate(path, serve_arguments)


TEXTS = {
    _train: (REPO / "configs" / "train" / "quickstart.yaml").read_text() + "data_path: .\nbf16: true\n"
    "lr_decay_iters: 90\nclip_grad: 1.0\nseed: 3\n",
    _generate: (REPO / "configs" / "generate" / "cpu.yaml").read_text() + "temperature: 0.5\ntop_k: 3\n"
    "seed: 17\ntensor_model_parallel_size: 2\ncuda_graphs: false\n",
    _serve: "served_model_name: [a, b]\nport: 0\nhost: localhost\nmax_rows: 3\nrequest_timeout: 7.5\n"
    "weights: sharded\ncache_bytes: 0\nwait_timeout: 9\n",
}


@pytest.mark.parametrize("script", list(TEXTS), ids=lambda script: script.__name__.strip("_"))
@examples(16, 160)
def test_configurations(tmp_path, script, seed, count):
    path, text = tmp_path / "options.yaml", TEXTS[script]
    lines = [line for line in text.splitlines() if ":" in line and not line.startswith("#")]
    for chance in chances(seed, count):
        if chance.random() < 0.5:
            path.write_bytes(damaged(text.encode(), chance))
        else:
            odd = chance.choice(lines).partition(":")[0] + ": " + chance.choice(ODD)
            kept = [line for line in lines if line.partition(":")[0] != odd.partition(":")[0]]
            path.write_text("\n".join([*kept, odd, ""]), encoding="utf-8")
        read = reads(lambda: script(str(path)), path)
        if read is None:
            continue
        parser, args, check = read
        _check_types(parser, args)
        names = [action.dest for action in parser._actions]
        reads(lambda: check(args), *names, *(name.replace("_", "-") for name in names), "topology", "schedule", "ranks")  # noqa: B023


def _check_types(parser, args):
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if value is None or action.dest == "config" or value is action.default:
            continue
        kind = bool if isinstance(action, argparse.BooleanOptionalAction) else action.type or str
        for item in value if isinstance(value, (list, tuple)) else [value]:
            assert not isinstance(kind, type) or isinstance(item, kind), f"{action.dest}={value!r}"
            assert action.choices is None or item in action.choices


@examples(24, 300)
def test_topologies(tmp_path, seed, count):
    path = tmp_path / "net.yaml"
    texts = [(TOPOLOGIES / f"{name}.yaml").read_text() for name in known_topologies()]
    for chance in chances(seed, count):
        text = chance.choice(texts)
        if chance.random() < 0.6:
            path.write_bytes(damaged(text.encode(), chance))
        else:
            lines = text.splitlines()
            at = chance.choice([i for i, line in enumerate(lines) if ": " in line and "#" not in line])
            lines[at] = lines[at].partition(":")[0] + ": " + chance.choice(ODD)
            path.write_text("\n".join(lines), encoding="utf-8")
        topology = reads(lambda: load_topology(path), path)
        if topology is not None:
            reads(lambda: place(topology, ["a", "a", "b", "b"]), "topology")  # noqa: B023


@examples(6, 60)
def test_hostfiles(tmp_path, seed, count):
    """launch/deepspeed_hostfile.sh reads them; what it accepts goes to the launcher, which notes the file here."""
    binaries = tmp_path / "venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(sys.executable)
    (binaries / "deepspeed").write_text("#!/bin/sh\necho started\n")
    (binaries / "deepspeed").chmod(0o755)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "VIRTUAL_ENV": str(binaries.parent)}
    hosts, text = tmp_path / "hosts", (REPO / "configs" / "hostfile.example").read_text()
    command = ["bash", REPO / "launch" / "deepspeed_hostfile.sh", "--hostfile", hosts, "--master-addr", "127.0.0.1",
               "--node-rank", "0", "generate"]  # fmt: skip
    for chance in chances(seed, count):
        hosts.write_bytes(
            damaged(text.encode() if chance.random() < 0.3 else b"node-0 slots=8\nnode-1 slots=8\n", chance)
        )
        done = subprocess.run(list(map(str, command)), env=env, capture_output=True, timeout=60)
        if done.returncode:
            assert f"error: {hosts}".encode() in done.stderr, done.stderr
        else:
            assert done.stdout == b"started\n"
            lines = hosts.read_bytes().decode("latin-1").split("\n")
            pairs = [line.partition("#")[0].split() for line in lines if line.partition("#")[0].strip()]
            assert pairs and all(len(pair) == 2 and int(pair[1].removeprefix("slots=")) > 0 for pair in pairs)
            assert len({pair[0] for pair in pairs}) == len(pairs)


# --- prompts and their answers ---

LINES = [
    {"prompt": "the quick brown fox"},
    {"id": "b", "prompt": "jumps", "temperature": 1.0, "max_tokens": 3, "logprobs": 1, "stop": ["q"]},
    {"messages": [{"role": "user", "content": "over?"}], "seed": 5, "top_p": 0.8, "n": 2, "stop_token_ids": [7]},
]
VALUES = [None, True, -1, 0, 1e400, float("nan"), 10**30, "", "\ud800", [], {}, [[]], "x" * 5000, {"role": 1}, [None]]


def _scheduler(tokenizer):
    return Scheduler(PlainRunner(tiny_model("llama")), tokenizer, max_rows=3, max_waiting=2)


@examples(24, 250)
def test_prompts(seed, count):
    tokenizer = character_tokenizer()
    scheduler, sampling = _scheduler(tokenizer), SamplingParams(seed=3)
    whole = "\n".join(map(json.dumps, LINES)).encode()
    for chance in chances(seed, count):
        if chance.random() < 0.5:
            data = damaged(whole, chance)
        else:
            line = dict(chance.choice(LINES))
            line[chance.choice([*line, "n", "seed", "echo"])] = chance.choice(VALUES)
            data = json.dumps(line).encode() if chance.random() < 0.95 else b"[" * 100_000
        tasks = reads(lambda: read_requests(data, "in.jsonl", scheduler, tokenizer, sampling), "in.jsonl")  # noqa: B023
        for task in tasks or ():
            assert scheduler.check(task.request).numel() and task.request.sampling.seed is not None


def _answer(source, output):
    tokenizer = character_tokenizer()
    options = {"sampling": SamplingParams(max_tokens=3, seed=3), "about": {"model": "tiny"}}
    run_batch(
        _scheduler(tokenizer), tokenizer, BatchOptions(input=str(source), output=str(output), **options), progress=False
    )
    return sorted(output.read_bytes().splitlines())


@examples(8, 120)
def test_half_written_answers(tmp_path, seed, count):
    """A job over a damaged output of its own refuses it, or ends with every answer as it was."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, LINES)))
    expected = _answer(source, output)
    whole = output.read_bytes()
    for chance in chances(seed, count):
        output.write_bytes(broken := damaged(whole, chance))
        found = reads(lambda: _answer(source, output), output)
        assert found == expected if found is not None else output.read_bytes() == broken


# --- saved caches and models ---


def _store(model):
    return TreeCache(model.config, cp_group=None, page_size=4).store


def _contents(model, folder):
    store = _store(model)
    rows, tokens = load_rows(store, folder, cp_group=None, fingerprint=model_fingerprint(model))
    kept = [pages.tensors for pages in store.layers]
    return [store.book.rows[row].length for row in rows], [*tokens, *(x[name] for x in kept for name in sorted(x))]


@examples(12, 200)
def test_saved_caches(tmp_path, seed, count):
    model = tiny_model("mistral")
    model.set_attn_implementation("tree")
    cache, ids = TreeCache(model.config, cp_group=None, page_size=4), prompt(2, 21)
    generate(model, ids, cache=cache, max_new_tokens=1, chunk_size=16)
    folder = tmp_path / "saved"
    cache.save(str(folder), list(ids), fingerprint=model_fingerprint(model))
    lengths, tensors = _contents(model, folder)
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    for chance in chances(seed, count):
        path = chance.choice(sorted(whole))
        path.write_bytes(damaged(whole[path], chance))
        found = reads(lambda: _contents(model, folder), folder)
        if found is not None:
            assert found[0] == lengths and all(torch.equal(x, y) for x, y in zip(found[1], tensors, strict=True))
        path.write_bytes(whole[path])


@examples(6, 60)
def test_model_folders(tmp_path, seed, count):
    """Weights have no checksum in Transformers' format: only their header is damaged here, or the file cut."""
    folder = tmp_path / "model"
    model = tiny_model("llama")
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    whole = {path: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".safetensors")}
    for chance in chances(seed, count):
        path = chance.choice(sorted(whole))
        data = whole[path]
        if path.suffix == ".safetensors":
            header = 8 + int.from_bytes(data[:8], "little")
            cut = data[: chance.randrange(header, len(data))]
            data = cut if chance.random() < 0.5 else damaged(data[:header], chance) + data[header:]
        else:
            data = damaged(data, chance)
        path.write_bytes(data)

        def load():
            models.load_config(folder)
            models.load_tokenizer(folder)
            models.load_model(folder, torch.float32)

        reads(load, folder)
        path.write_bytes(whole[path])
    shutil.rmtree(folder)
