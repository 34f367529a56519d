"""launch/generate.py as users run it: by the deepspeed launcher, in real processes, to the end or to a failure."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

import transformers
from megatron_tree.serving.arguments import build_parser, check_arguments
from support.hf_models import CONFIGS

REPO = Path(__file__).parents[2]
SCRIPT = REPO / "launch" / "generate.py"
LAUNCHER = Path(sys.executable).parent / "deepspeed"
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
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    model.save_pretrained(folder)
    (folder / "text").write_text(TEXT)
    return folder


def _about(folder):
    return "--model", folder, "--prompt-file", folder / "text", "--question", "who runs?"


def _launch(ranks, *arguments, script=SCRIPT, seconds=200):
    """Run the launcher; returns (exit code, output). No process of it may be left afterwards."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mark = f"{os.getpid()}-{port}"
    env = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{REPO}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "LAUNCH_TEST_MARK": mark,
    }
    command = [LAUNCHER, "--num_gpus", ranks, "--master_port", port, "--no_local_rank", script, *arguments]
    done = subprocess.run(
        [str(part) for part in command], env=env, cwd=REPO, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert not _processes_with(f"LAUNCH_TEST_MARK={mark}"), "processes are left"
    return done.returncode, done.stdout + done.stderr


def _processes_with(variable):
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(path)
        except OSError:
            continue
    return found


def test_generates_checks_and_reports(folder, tmp_path):
    options = ("--max-new-tokens", 7, "--ignore-eos", "--check", "--json", tmp_path / "f.json")
    code, output = _launch(2, *_about(folder), *options)
    assert code == 0, output
    assert "check: all 7 tokens are equal" in output
    figures = json.loads((tmp_path / "f.json").read_text())
    prompt_tokens = len(TEXT.rstrip()) + 2 + len("who runs?")
    assert (figures["prompt_tokens"], figures["new_tokens"], figures["prefill"]) == (prompt_tokens, 7, "sharded")
    assert sum(rank["cached_tokens"] for rank in figures["ranks"]) == prompt_tokens + 6
    assert figures["check"]["tokens_equal"] is True
    assert figures["check"]["max_logit_difference"] < 1e-4
    said = [line for line in output.splitlines() if "decode schedule" in line]
    assert said and all(line.startswith("decode schedule") for line in said), "a log line inside the answer"
    prefill = f"prefill: {prompt_tokens} of {prompt_tokens}"
    for text in (prefill, "of the whole", "per token", f"{prompt_tokens:,} tokens"):
        assert text in output


def test_a_file_of_prompts_with_sampling(folder, tmp_path):
    lines = [{"prompt": "the quick"}, {"prompt": "the dog", "temperature": 0.0}, {"id": "x", "prompt": "a wood"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--model", folder, "--prompts", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    options += ("--temperature", 1.0, "--top-k", 20, "--seed", 5, "--max-new-tokens", 5, "--max-rows", 2)
    options += ("--prefill-chunk", 4, "--cache-block-size", 2, "--resume")
    options += ("--schedule", "allreduce")
    code, output = _launch(2, *options)
    assert code == 0, output
    assert "3 answered in" in output and "0 were there, 0 failed" in output
    job, *answers = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert job["job"]["about"]["sp_size"] == 2 and job["job"]["sampling"]["seed"] == 5
    assert sorted(str(answer["id"]) for answer in answers) == ["0", "1", "x"]
    assert all(answer["answers"][0]["finish_reason"] in ("length", "stop") for answer in answers)
    code, output = _launch(2, *options)
    assert code == 0 and "0 answered in" in output and "3 were there" in output


def test_a_wrong_answer_fails_the_check(folder, tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import generate\n"
        "from megatron_tree.cache import LayerPages\n"
        "write = LayerPages.write\n"
        "LayerPages.write = lambda self, slots, k, v: write(self, slots, 3 * k, -3 * v)\n"
        "sys.exit(generate.main(sys.argv[1:]))\n"
    )
    code, output = _launch(2, *_about(folder), "--max-new-tokens", 12, "--ignore-eos", "--check", script=script)
    assert code == 1, output
    assert "of the answer differs from the plain model's" in output
    assert "sharded: [" in output
    assert "plain: [" in output


def test_a_failure_on_one_rank_ends_the_run(folder, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import generate\n"
        "from megatron_tree.integrations.transformers import models\n"
        "load_model = models.load_model\n"
        "def failing(*args):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise OSError('the disk of rank 1 is gone')\n"
        "    return load_model(*args)\n"
        "models.load_model = failing\n"
        "sys.exit(generate.main(sys.argv[1:]))\n"
    )
    code, output = _launch(2, *_about(folder), script=script)
    assert code != 0
    assert "rank 1 failed: OSError: the disk of rank 1 is gone" in output


def test_a_prompt_that_is_too_long_fails_before_the_model_is_loaded(folder, tmp_path):
    (tmp_path / "long").write_text(TEXT * 9)
    code, output = _launch(2, "--model", folder, "--prompt-file", tmp_path / "long")
    assert code != 0
    assert "prompt tokens and max_new_tokens=32 exceed the model's 256 positions" in output


def test_a_bad_option_is_told_once(folder):
    code, output = _launch(2, "--model", folder, "--context-parallel-size", 3)
    assert code != 0
    assert (
        output.count("--context-parallel-size 3 times --tensor-model-parallel-size 1 must be the number of ranks, 2")
        == 1
    )
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens 0 must be 1 or more"),
        (["--tensor-model-parallel-size", "3"], "must be the number of ranks, 4"),
        (["--model", "no/such/model"], "neither 'smollm2' nor a folder"),
        (["--prompt-file", "no/such/file"], "--prompt-file 'no/such/file' can't be read"),
        (["--json", "no/such/folder/f.json"], "does not exist"),
        (["--question", " "], "--question is empty"),
        (["--distributed-timeout-minutes", "0"], "must be more than 0"),
        (["--temperature", "-1"], "--temperature -1.0 must be a finite number"),
        (["--top-p", "0"], "--top-p 0.0 must be"),
        (["--stop", ""], "--stop .* must be texts that are not empty"),
        (["--prefill-chunk", "0"], "--prefill-chunk 0 must be 1 or more"),
        (["--max-rows", "0"], "--max-rows 0 must be 1 or more"),
        (
            ["--check", "--temperature", "1"],
            "--check compares with plain greedy decoding, which has no --temperature",
        ),
        (["--check", "--cache-dtype", "int8"], "has no --cache-dtype"),
        (["--output", "out.jsonl"], "--output needs --prompts"),
        (["--resume"], "--resume needs --prompts"),
        (["--prompts", __file__], "--prompts needs --output"),
        (["--prompts", "no/such/file", "--output", "x"], "--prompts 'no/such/file' can't be read"),
        (["--prompts", __file__, "--output", "no/such/folder/x"], "--output .* does not exist"),
        (["--prompts", __file__, "--output", "x", "--check"], "--check can't be combined with --prompts"),
    ],
)
def test_options_are_checked_before_anything_is_sent(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_arguments(build_parser().parse_args(arguments), 4)


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
    script = ["bash", "launch/deepspeed_local.sh", "-n", "2", "launch/chat.py", "--model", str(tmp_path)]
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(REPO)
        os.environ |= {"VIRTUAL_ENV": str(LAUNCHER.parents[1]), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(REPO)}
        os.execvp(script[0], [*script, "--max-new-tokens", "200", "--ignore-eos"])
    seen, end = b"", time.monotonic() + 150
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


def test_the_configs_name_existing_options():
    from megatron_tree.launching import parse_with_config

    paths = list((REPO / "configs" / "generate").glob("*.yaml"))
    assert paths
    for path in paths:
        args = parse_with_config(build_parser(), ["--config", str(path), "--max-new-tokens", "5"])
        assert args.max_new_tokens == 5  # the command line wins


def test_help_needs_no_launcher():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--help"],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "examples" in done.stdout
