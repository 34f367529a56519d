"""Batch generation: results are those of the requests alone, an interrupted run goes on, bad files are told first."""

import fcntl
import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_tree.core.files import NotWritten
from megatron_tree.inference.generation.sampling import SamplingParams
from megatron_tree.inference.generation.scheduler import Scheduler
from megatron_tree.inference.serving.batch import BatchOptions, BatchResult, run_batch
from support.hf_models import tiny_model
from support.plain_runner import PlainRunner, character_tokenizer
from support.ranks import run_distributed

LINES = [
    {"prompt": "the quick brown fox"},
    {"id": "b", "prompt": "jumps", "temperature": 1.0, "max_tokens": 3, "logprobs": 1, "prompt_logprobs": 0},
    {"messages": [{"role": "user", "content": "over?"}], "seed": 5, "temperature": 0.8},
    {"id": 17, "prompt": "the lazy dog", "n": 2, "temperature": 1.5},
    {"prompt": "and runs on", "stop": ["q", "z"], "top_p": 0.9, "temperature": 1.0},
]
IDS = [0, "b", 2, 17, 4]


@pytest.fixture
def files(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("\n\n".join(map(json.dumps, LINES)) + "\n")
    return str(path), str(tmp_path / "out.jsonl")


def _run(files, group=None, *, max_rows=3, tokenizer=True, **options):
    tokenizer = character_tokenizer() if tokenizer is True else tokenizer
    runner = PlainRunner(tiny_model("llama"), token_group=group)
    scheduler = Scheduler(runner, tokenizer, max_rows=max_rows, max_waiting=2)
    options = {"sampling": SamplingParams(max_tokens=6, seed=3), "about": {"model": "tiny"}, **options}
    result = run_batch(scheduler, tokenizer, BatchOptions(input=files[0], output=files[1], **options), progress=False)
    assert not runner.rows
    return result


def _results(files):
    with open(files[1]) as file:
        header, *results = map(json.loads, file)
    assert set(header) == {"job", "crc32"}
    return sorted(results, key=lambda result: result["index"])


def _alike(found, want):
    """Whether results are equal but for the rounding of log-probabilities, and with it the checksums of lines."""
    if isinstance(want, dict):
        return found.keys() == want.keys() and all(_alike(found[x], want[x]) for x in want if x != "crc32")
    if isinstance(want, list):
        return len(found) == len(want) and all(map(_alike, found, want))
    return abs(found - want) < 1e-4 if isinstance(want, float) else found == want


def _rank_run(rank, world, files):
    return _run(files, dist.group.WORLD)


def test_results_are_the_same_in_any_company_and_on_two_ranks(files, tmp_path):
    assert _run(files) == BatchResult(5, 0, 0)
    results = _results(files)
    assert [result["id"] for result in results] == IDS and [result["index"] for result in results] == list(range(5))
    assert [len(result["answers"]) for result in results] == [1, 1, 1, 2, 1]
    assert results[0]["prompt_tokens"] == 19 and results[0]["completion_tokens"] <= 6
    logprobs = results[1]["answers"][0]["logprobs"]
    assert len(logprobs) == results[1]["completion_tokens"] <= 3 and logprobs[0]["top"][0][1] >= logprobs[0]["logprob"]
    assert len(results[1]["answers"][0]["prompt_logprobs"]) == results[1]["prompt_tokens"] - 1
    alone = files[0], str(tmp_path / "alone.jsonl")
    _run(alone, max_rows=2)
    assert _alike(_results(alone), results)
    ranks = files[0], str(tmp_path / "ranks.jsonl")
    assert run_distributed(_rank_run, 2, ranks) == [BatchResult(5, 0, 0)] * 2
    assert _alike(_results(ranks), results)


@pytest.mark.parametrize("cut", ["header", "line", "border"])
def test_an_interrupted_run_goes_on(files, cut, capfd):
    sampling = SamplingParams(max_tokens=6)  # no seed: the second run takes the first one's
    _run(files, sampling=sampling)
    header, *lines = Path(files[1]).read_bytes().splitlines(keepends=True)
    whole, results = b"".join((header, *reversed(lines))), _results(files)  # in no order of the input
    Path(files[1]).write_bytes(whole)
    starts = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    end = {"header": 20, "line": starts[2] + 9, "border": starts[3]}
    os.truncate(files[1], end[cut])
    done = {"header": 0, "line": 2, "border": 3}[cut]
    again = _run(files, sampling=sampling)
    assert again == BatchResult(5 - done, done, 0)
    left = end[cut] - max([start for start in starts if start <= end[cut]], default=0)
    assert (f"removed an incomplete last line of {left} bytes" in capfd.readouterr().err) == (left > 0)
    if cut == "header":
        return
    assert _results(files) == results
    assert Path(files[1]).read_bytes()[: starts[0]] == whole[: starts[0]]


def test_an_output_of_other_options_is_refused_and_left_alone(files):
    _run(files)
    before = Path(files[1]).read_bytes()
    for options, message in (
        ({"about": {"model": "large"}}, "written with other options: about.model='tiny' then, 'large' now"),
        ({"sampling": SamplingParams(max_tokens=6, seed=4)}, "sampling.seed=3 then, 4 now"),
    ):
        with pytest.raises(ValueError, match=message):
            _run(files, **options)
    text = Path(files[0]).read_text()
    Path(files[0]).write_text(text + '{"prompt": "more"}\n')
    with pytest.raises(ValueError, match="input_sha256"):
        _run(files)
    assert Path(files[1]).read_bytes() == before
    Path(files[0]).write_text(text)
    for content, message in (
        (b"hello\n", "line 1, is not the output of a batch"),
        (before + b"{}\n", "line 7, is not a re"),
    ):
        Path(files[1]).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            _run(files)
        assert Path(files[1]).read_bytes() == content


BAD = {
    "{'prompt'}": "line 2: not valid JSON",
    "[1]": "line 2: must be a JSON object",
    '{"id": 3}': "line 2: must have one of 'prompt' and 'messages'",
    '{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}': "line 2: must have one of",
    '{"prompt": ""}': "line 2: prompt must be a list of one token number or more",
    '{"messages": [{"role": "user"}]}': "line 2: messages [0] has no content",
    '{"prompt": "a", "beams": 3}': "line 2: 'beams' is not a sampling option",
    '{"prompt": "a", "n": 9}': "line 2: n=9 must be from 1 to max_rows=3",
    '{"prompt": "a", "id": "x"}': "line 2: id 'x' is used in line 1 already",
}


def _bad(rank, world, files, lines):
    told = []
    for line in lines:
        if rank == 0:
            Path(files[0]).write_text('{"prompt": "b", "id": "x"}\n' + line + "\n{]\n")
        with pytest.raises(ValueError) as error:
            _run(files, dist.group.WORLD)
        told.append(str(error.value))
    return told


def test_bad_lines_are_told_with_their_numbers_on_all_ranks_before_anything_runs(files):
    here, there = run_distributed(_bad, 2, files, list(BAD))
    assert here == there
    for told, expected in zip(here, BAD.values(), strict=True):
        assert expected in told and "line 3: not valid JSON" in told and "line 1:" not in told
    assert not os.path.getsize(files[1])


def test_files_that_can_not_be_used(files, tmp_path):
    with pytest.raises(FileNotFoundError):
        _run((str(tmp_path / "none"), files[1]))
    with pytest.raises(NotWritten, match="none can't be written to: out is not written"):
        _run((files[0], str(tmp_path / "none" / "out")))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="holds no requests"):
        _run((str(tmp_path / "empty"), files[1]))
    with open(files[1], "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is being written to by another run"):
            _run(files)
    plain = character_tokenizer()
    plain.chat_template = None
    with pytest.raises(ValueError, match="line 5: messages: the model's tokenizer has no chat template"):
        _run(files, tokenizer=plain)
