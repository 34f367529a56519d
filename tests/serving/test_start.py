"""generate, chat and serve on ranks that nobody ends for them (srun, mpirun): what one can not do, all say and end."""

import contextlib
import io
import json
import socket
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("deepspeed")

from megatron_tree import launching
from megatron_tree.core import log
from megatron_tree.core.cache.graph import GraphedSteps
from megatron_tree.inference.serving import command, start
from megatron_tree.integrations.transformers.infer.engine import share_model, use_cuda_graphs
from megatron_tree.tools.bench.device_checks import SmallRunner
from support.hf_models import tiny_model
from support.http_server import byte_model, byte_tokenizer
from support.ranks import run_distributed
from support.tape import Tape, TapedSteps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    byte_tokenizer().save_pretrained(folder)
    byte_model().save_pretrained(folder)
    return folder


class _Ended(Exception):
    """Instead of the process."""


def _end(rank, error):
    raise _Ended(f"{type(error).__name__}: {error}")


def _commands(rank, world, cases):
    """(status or error, what was printed) of commands, one after another.

    cases: [(command, options, more of them on the last rank alone, a function of `models` that raises there)].
    """
    from megatron_tree.integrations.transformers import models

    def fail(*_, **__):
        raise RuntimeError("the disk is gone")

    launching.RANK_0_FIRST_S, launching.exit_after_failure = 0.0, _end
    results = []
    for name, options, more, broken in cases:
        said, last = io.StringIO(), rank == world - 1
        with contextlib.ExitStack() as stack:
            if last and broken:
                stack.enter_context(mock.patch.object(models, broken, fail))
            stack.enter_context(contextlib.redirect_stderr(said))
            stack.enter_context(contextlib.redirect_stdout(said))
            try:
                ended = getattr(command, name)([str(x) for x in (*options, *(more if last else ()))])
            except _Ended as error:
                ended = str(error)
        results.append((ended, said.getvalue()))
    return results


def test_what_one_rank_can_not_do_ends_all(folder, tmp_path):
    (tmp_path / "text").write_text("a short text")
    tiny_model("falcon_h1").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model = ("--model", folder)
    ask = (*model, "--prompt-file", tmp_path / "text", "--max-new-tokens", 4)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            ("serve", (*model, "--port", port), (), None),
            ("serve", (*model, "--port", 0), ("--max-rows", 4), None),
            ("chat", model, ("--system", "be kind"), None),
            ("generate", ask, ("--temperature", 0.5), None),
            ("generate", (*ask, "--model", tmp_path, "--num-speculative-tokens", 2), (), None),
            ("generate", ask, (), "load_tokenizer"),
            ("generate", ask, (), "load_model"),  # the last: nobody can use the group afterwards
        ]
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        results = run_distributed(_commands, 2, cases, env=env, fresh=True)
    differs = "the ranks were started with different options: "
    sentences = [
        f"--host 127.0.0.1 --port {port}: ",
        f"{differs}--max-rows is 8 on rank 0 and 4 on rank 1\n",
        f"{differs}--system is None on rank 0 and 'be kind' on rank 1\n",
        f"{differs}--temperature is 0.0 on rank 0 and 0.5 on rank 1\n",
        "speculation (--num-speculative-tokens): the model has recurrent layers, whose state can't go back",
    ]
    for rank, of_rank in enumerate(results):
        for (name, *_), sentence, (status, said) in zip(cases, sentences, of_rank, strict=False):
            assert status == 1 and f"megatron-tree {name}: {'rank 1: ' if rank else ''}{sentence}" in said, said
    (tokenizer, _), (weights, _) = results[0][-2:]
    assert tokenizer == "TreeError: rank 1 failed: RuntimeError: the disk is gone"
    assert weights.startswith("CommError: rank 1 failed: RuntimeError: the disk is gone, on rank 1, in the start")
    assert [ended for ended, _ in results[1][-2:]] == ["RuntimeError: the disk is gone"] * 2


def test_any_end_token_of_the_model_or_the_tokenizer_ends_an_answer(tmp_path):
    """As of a Llama 3 that ends turns with one token and texts with another, or of a fine-tuned model."""
    tokenizer, model, prompt = byte_tokenizer(), byte_model(seed=2), "the quick brown fox"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    tokens = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)[0, ids.shape[1] :].tolist()
    places = [tokens.index(token) for token in dict.fromkeys(tokens)][1:3]  # where new ones come
    first, second = (tokens[place] for place in places)
    (tmp_path / "prompts").write_text(json.dumps({"prompt": prompt}) + "\n")
    cases, wants = [], []
    for i, (ends, of_tokenizer, place) in enumerate(
        [
            ([second, first], None, places[0]),
            ([255], first, places[0]),
            (second, 255, places[1]),
            (None, second, places[1]),
        ]
    ):
        folder = tmp_path / f"model{i}"
        model.config.eos_token_id = model.generation_config.eos_token_id = ends
        model.save_pretrained(folder)
        tokenizer.eos_token = None if of_tokenizer is None else tokenizer.convert_ids_to_tokens(of_tokenizer)
        tokenizer.save_pretrained(folder)
        files = ("--prompts", tmp_path / "prompts", "--output", tmp_path / f"answers{i}")
        cases.append(("generate", ("--model", folder, *files, "--max-new-tokens", 20), (), None))
        wants.append((place + 1, tokens[place]))
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    results = run_distributed(_commands, 2, cases, env=env, fresh=True)
    for i, ((status, said), (count, end)) in enumerate(zip(results[0], wants, strict=True)):
        assert status == 0, said
        line = json.loads((tmp_path / f"answers{i}").read_text().splitlines()[1])
        (answer,) = line["answers"]
        found = (line["completion_tokens"], answer["finish_reason"], answer["stop_reason"])
        assert found == (count, "stop", end), i


def _looks_at_values(self, forward, tokens, positions, keep):
    return run_small(self, forward, tokens, positions, keep) * float(positions.max())


run_small = SmallRunner._run
NO_GRAPHS = {
    None: None,
    "only a GPU has CUDA graphs": lambda runner: GraphedSteps(runner),
    "beside images": lambda runner: setattr(runner, "image_tokens", (7,)),
    "makes the host wait": lambda runner: setattr(runner, "_run", _looks_at_values.__get__(runner)),
}


def test_programs_record_steps_where_they_are_asked_to():
    engine = share_model(tiny_model("llama"))
    start.replay_steps(engine, "record_steps")
    assert engine.new_runner()._graphs.option == "record_steps"
    engine = share_model(tiny_model("phi3_longrope"))
    with pytest.raises(ValueError, match="record_steps=True can't be had: .* rows' lengths; leave record_steps out$"):
        start.replay_steps(engine, "record_steps")
    assert "record_steps" not in engine.runner_options


@pytest.mark.parametrize("reason", NO_GRAPHS)
def test_programs_capture_decode_steps_where_they_can(reason, monkeypatch, caplog):
    """Three steps are tried, with a tape in the place of a graph; what can't be captured is launched, and the log says
    why."""

    def new_runner(cuda_graphs):
        runner = SmallRunner(page_size=4)
        runner._graphs = TapedSteps(runner)
        if reason is not None:
            NO_GRAPHS[reason](runner)
        return runner

    engine = SimpleNamespace(runner_options={"cuda_graphs": False}, new_runner=new_runner)
    monkeypatch.setattr(log, "_said", set())
    Tape.begin()
    with caplog.at_level("INFO", "megatron_tree"):
        use_cuda_graphs(engine, None, torch.device("cuda"))
    assert engine.runner_options == {"cuda_graphs": reason is None}
    assert Tape.replays == (2 if reason is None else 0)
    said = [x.message for x in caplog.records if "launched one by one" in x.message]
    assert len(said) == (reason is not None) and all(reason in text for text in said)
