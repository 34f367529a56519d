"""megatron-tree serve as users run it: two ranks under the deepspeed launcher, asked over HTTP, stopped by a signal."""

import concurrent.futures
import contextlib
import json
import re
import signal
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("deepspeed")

import openai

from support.http_server import byte_model, byte_tokenizer
from support.launched import KEY, launched, process_of

PROMPT = "the quick brown fox jumps over the lazy dog and runs on through the wood until the night falls"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    byte_tokenizer().save_pretrained(folder)
    byte_model().save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "said"), [("replicated", "over 2, the weights over 1"), ("sharded", "and the weights over all;")]
)
def test_two_ranks_serve_and_stop_in_order(folder, weights, said):
    options = ("--model", folder, "--port", 0, "--max-rows", 4, "--prefill-chunk", 64)
    with launched(*options, "--weights", weights) as (process, lines, over):
        assert any(f"the cache {said}" in line for line in lines), "".join(lines)
        address = re.search(r"serving tiny at (\S+), up to 256 tokens, with an API key", "".join(lines))
        assert address, "".join(lines)
        client = openai.OpenAI(base_url=address[1], api_key=KEY, max_retries=0, timeout=200)
        tokenizer, model = byte_tokenizer(), byte_model()
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        want = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=0)[0, ids.shape[1] :]
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0)
        assert answer.choices[0].text == tokenizer.decode(want, skip_special_tokens=True)
        assert answer.usage.prompt_tokens == ids.shape[1]
        stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        # the signal comes while an answer is under way: it is finished, then all processes end by themselves
        stream = client.completions.create(model="tiny", prompt="x", max_tokens=250, temperature=0, stream=True,
                                           extra_body={"ignore_eos": True})  # fmt: skip
        pieces = [next(stream)]
        process_of(process.pid, 0).send_signal(signal.SIGTERM)
        pieces += list(stream)
        assert pieces[-1].choices[0].finish_reason == "length"
        assert over.wait(200)
        assert process.wait(100) == 0, "".join(lines)
        assert lines[-1] == "stopped\n"
        assert not [line for line in lines if "Traceback" in line]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_a_frozen_worker_is_named_and_seen_by_the_health_check(folder, weights):
    options = ("--model", folder, "--port", 0, "--wait-timeout", 9, "--weights", weights)
    with launched(*options) as (process, lines, _):
        address = re.search(r"serving tiny at (\S+)/v1", "".join(lines))[1]
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=120)
        worker = process_of(process.pid, 1)
        health = [_health(address)]
        worker.suspend()
        try:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                asked = pool.submit(client.completions.create, model="tiny", prompt=PROMPT, max_tokens=20)
                while not asked.done():
                    with contextlib.suppress(urllib.error.URLError, ConnectionError):  # the server ends
                        health.append(_health(address))
                    time.sleep(0.2)
                with pytest.raises(openai.InternalServerError, match="rank 1 did not respond within 9 s"):
                    asked.result()
        finally:
            worker.kill()
        assert health[0] == (200, {"status": "ok"})
        reasons = [x[1].get("reason", "") for x in health if x[0] == 503]
        assert any("rank 0 has been waiting for another rank" in x for x in reasons), health


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_an_answer_outlives_its_ranks(folder, rank, number):
    options = ("--ranks", 2, "--restarts", 1, "--model", folder, "--port", 0, "--wait-timeout", 4)
    with launched(*options, launcher=False) as (process, lines, over):
        address = re.search(r"serving tiny at (\S+)/v1", "".join(lines))[1]
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=200)
        asked = {"model": "tiny", "prompt": "hello there", "max_tokens": 200, "temperature": 0}
        asked["extra_body"] = {"ignore_eos": True}
        whole = client.completions.create(**asked)
        stream, pieces = client.completions.create(**asked, stream=True), []
        for chunk in stream:
            pieces.append(chunk)
            if len(pieces) == 10:
                process_of(process.pid, rank).send_signal(number)
        assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text
        assert client.completions.create(**asked).choices[0].text == whole.choices[0].text
        assert _health(address) == (200, {"status": "ok"})
        process.send_signal(signal.SIGTERM)
        assert over.wait(100)
        assert process.wait(100) == 0 and lines[-1] == "stopped\n"
        assert "".join(lines).count("the ranks are started again (restart 1)") == 1


def _health(address):
    try:
        answer = urllib.request.urlopen(f"{address}/health", timeout=30)
    except urllib.error.HTTPError as error:
        answer = error
    return answer.status, json.load(answer)
