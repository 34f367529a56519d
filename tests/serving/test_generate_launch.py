"""megatron-tree generate on ranks of this process, and its chat in a terminal, started by the launch script."""

import contextlib
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

import transformers
from megatron_tree import launching
from megatron_tree.inference.serving import command
from megatron_tree.inference.serving.arguments import build_parser, check_arguments
from support.hf_models import family_config
from support.processes import free_port
from support.ranks import run_distributed

REPO = Path(__file__).parents[2]
TEXT = "the quick brown fox jumps over the lazy dog and runs on through the wood until the night falls\n" * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model with a tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    vocab = {character: i for i, character in enumerate(["<pad>", "<end>", *map(chr, range(32, 127)), "\n"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(family_config("llama"))
    model.save_pretrained(folder)
    (folder / "text").write_text(TEXT)
    return folder


def _about(folder):
    return "--model", folder, "--prompt-file", folder / "text", "--question", "who runs?"


def _runs(rank, world, batch, long, split, draft, check, wrong):
    """What a batch, the same again, a long prompt, sharded weights, speculation, a check of a wrong cache, the command
    with a model that generates no text, and the batch with other options print and raise."""
    from megatron_tree.core.cache import LayerPages
    from megatron_tree.inference.serving.generate import run

    def outcome(argv):
        args = build_parser().parse_args([str(part) for part in argv])
        check_arguments(args, world)
        error = None
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
            try:
                run(args)
            except (ValueError, RuntimeError) as raised:
                error = f"{type(raised).__name__}: {raised}"
        return output.getvalue(), error

    found = [outcome(argv) for argv in (batch, batch, long, split, draft)]
    write = LayerPages.write
    LayerPages.write = lambda self, slots, k, v: write(self, slots, 3 * k, -3 * v)
    found.append(outcome(check))
    launching.RANK_0_FIRST_S = 0.0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as output:
        code = command.generate([str(part) for part in wrong])
    return [*found, (code, output.getvalue()), outcome([*batch, "--seed", 6])]


@pytest.fixture(scope="module")
def outcomes(folder, tmp_path_factory):
    """`_runs` on two ranks, and where the batch's answers are."""
    place = tmp_path_factory.mktemp("batch")
    lines = [{"prompt": "the quick"}, {"prompt": "the dog", "temperature": 0.0}, {"id": "x", "prompt": "a wood"}]
    (place / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = ["--model", folder, "--prompts", place / "in.jsonl", "--output", place / "out.jsonl"]
    batch += ["--temperature", 1.0, "--top-k", 20, "--seed", 5, "--max-new-tokens", 5, "--max-rows", 2]
    batch += ["--prefill-chunk", 40]
    (place / "long").write_text(TEXT * 9)
    long = ["--model", folder, "--prompt-file", place / "long"]
    check = [*_about(folder), "--max-new-tokens", 12, "--check"]
    split = [*check, "--weights", "sharded", "--json", place / "split.json"]
    draft = [*check, "--json", place / "draft.json", "--num-speculative-tokens", 4]
    shutil.copytree(folder, place / "other")
    transformers.CLIPConfig().save_pretrained(place / "other")
    wrong = ["--model", place / "other", *_about(folder)[2:]]
    env = {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return run_distributed(
        _runs, 2, batch, long, split, draft, check, wrong, env=env, fresh=True, timeout=200
    ), place / "out.jsonl"


def test_a_file_of_prompts_with_sampling_and_the_same_again(outcomes):
    (first, again, *_), (other, *_) = outcomes[0]
    assert first[1] is other[1] is again[1] is None
    assert "3 answered in" in first[0] and "0 were there, 0 failed" in first[0] and other[0] == ""
    assert "0 answered in" in again[0] and "3 were there" in again[0]
    for of_rank in outcomes[0]:
        assert re.match(
            "StartError: output .* was written with other options: sampling.seed=5 then, 6 now", of_rank[7][1]
        )
    job, *answers = map(json.loads, outcomes[1].read_text().splitlines())
    assert job["job"]["about"]["sp_size"] == 2 and job["job"]["sampling"]["seed"] == 5
    assert sorted(str(answer["id"]) for answer in answers) == ["0", "1", "x"]
    assert all(answer["answers"][0]["finish_reason"] in ("length", "stop") for answer in answers)


def test_a_prompt_that_is_too_long_fails_before_the_model_is_loaded(outcomes):
    for _, _, (said, error), *_ in outcomes[0]:
        assert "prompt tokens and max_new_tokens=32 exceed the model's 256 positions" in error
        assert "ready after" not in said


def test_weights_and_cache_over_all_ranks(outcomes):
    ((said, error), (_, other)) = (of_rank[3] for of_rank in outcomes[0])
    assert error is None and other is None
    assert "the cache and the weights over all" in said and "check: all 12 tokens are equal" in said
    assert "[cut at --max-new-tokens 12]" in said
    figures = json.loads(outcomes[1].with_name("split.json").read_text())
    assert figures["prompt_tokens"] == len(TEXT.rstrip()) + 2 + len("who runs?") and figures["new_tokens"] == 12
    assert figures["check"]["tokens_equal"] is True and figures["check"]["max_logit_difference"] < 1e-4
    whole = figures["model_bytes"]
    for rank in figures["ranks"]:
        assert 0.5 * whole <= rank["weight_bytes"] < 0.51 * whole
        assert f"{rank['weight_bytes']:,}" in said
    for text in (f"prefill: {figures['prompt_tokens']} of", "of the whole", "per token"):
        assert text in said


def test_replicated_weights_and_speculation(outcomes):
    ((said, error), (_, other)) = (of_rank[4] for of_rank in outcomes[0])
    assert error is None and other is None
    assert "check: all 12 tokens are equal" in said and "drafted tokens were right" in said
    figures = json.loads(outcomes[1].with_name("draft.json").read_text())
    assert sum(rank["cached_tokens"] for rank in figures["ranks"]) == figures["prompt_tokens"] + 11
    numbers = figures["speculation"]
    assert numbers["accepted"] == 11 - numbers["steps"] <= numbers["drafted"]


def test_a_wrong_answer_fails_the_check_on_all_ranks(outcomes):
    ((said, error), (_, other)) = (of_rank[5] for of_rank in outcomes[0])
    assert error == other and error.startswith("CheckError: token ")
    assert "of the answer differs from the plain model's" in error
    assert "sharded: [" in said and "plain: [" in said


def test_a_mistake_is_one_sentence(outcomes):
    """Another rank prints it only if the launcher does not end it first."""
    for rank, name in enumerate(("megatron-tree generate", "megatron-tree generate: rank 1")):
        code, said = outcomes[0][rank][6]
        assert code == 1 and said.startswith(f"{name}: ") and said.count("\n") == 1
        assert "(clip) is not one that AutoModelForCausalLM or" in said


def test_a_failure_on_one_rank_names_the_rank(folder, monkeypatch, capsys):
    from megatron_tree.inference.serving import generate

    def failing(args):
        raise OSError("the disk is gone")

    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(generate, "run", failing)
    monkeypatch.setattr(launching, "leave", leave)
    for name in launching.LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else "1")
    monkeypatch.setattr(launching, "RANK_0_FIRST_S", 0.0)
    with pytest.raises(SystemExit, match="1"):
        command.generate([str(part) for part in _about(folder)])
    assert "rank 1 failed: OSError: the disk is gone" in capsys.readouterr().err


@pytest.mark.slow
def test_a_chat_in_a_terminal(tmp_path):
    """Through the script that puts ranks into the background; Ctrl-C stops an answer, not the chat."""
    import pty
    import select
    import signal
    import time

    from support.http_server import byte_model, byte_tokenizer

    byte_model().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    script = ["bash", "launch/deepspeed_local.sh", "-n", "2", "chat", "--model", str(tmp_path)]
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(REPO)
        os.environ |= {"VIRTUAL_ENV": sys.prefix, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPO)}
        os.execvp(script[0], [*script, "--max-new-tokens", "1500", "--weights", "sharded"])
    seen, end = b"", time.monotonic() + 500
    try:

        def until(text):
            nonlocal seen
            while text not in seen:
                assert time.monotonic() < end, seen
                if select.select([fd], [], [], 0.5)[0]:
                    seen += os.read(fd, 1 << 16)
            seen = seen[seen.index(text) + len(text) :]

        until(b"> ")
        os.write(fd, b"hello\n")
        time.sleep(0.5)
        os.write(fd, b"\x03")
        until(b", stopped]")
        until(b"> ")
        os.write(fd, b"half a line\x03")
        until(b"> ")
        os.write(fd, b"/quit\n")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    except BaseException:
        os.kill(pid, signal.SIGTERM)
        raise
    finally:
        os.close(fd)
