"""Images in the server and in generate: data URLs and files through the model's own processor."""

import base64
import concurrent.futures
import contextlib
import io
import json
import subprocess
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL", reason="Pillow reads images")

import openai
from PIL import Image

import transformers
from megatron_tree.inference.generation.requests import Request
from megatron_tree.inference.generation.sampling import SamplingParams
from megatron_tree.inference.serving import images
from megatron_tree.inference.serving.http import link, prompts
from megatron_tree.inference.serving.images import ImageFile, ImagePrompts, from_data_url
from megatron_tree.integrations.transformers.models import load_config, load_model, takes_images
from support.http_server import serving, until
from support.llava import llava_runner, save_llava
from support.processes import free_port
from support.ranks import run_distributed

PART = {"type": "text", "text": "what?"}


def _file(color, size=(20, 16)):
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def _part(data):
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    save_llava(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with serving(None, tokenizer, runner=llava_runner(folder), images=ImagePrompts(folder)) as server:
        yield server


def _wanted(folder, text, files):
    tokens, inputs = ImagePrompts(folder)(text, list(map(ImageFile, files)))
    model = load_model(folder, torch.float32)
    ids = torch.tensor([tokens])
    found = model.generate(input_ids=ids, **inputs, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    return transformers.AutoTokenizer.from_pretrained(folder).decode(found, skip_special_tokens=True)


def test_answers_about_images_are_those_of_plain_transformers(folder, server):
    client, files = server.client(), [_file("red"), _file("blue", (16, 30))]
    assert takes_images(load_config(folder), folder)
    content = [_part(files[0]), PART, _part(files[1])]
    asked = {"model": "tiny", "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(messages=[{"role": "user", "content": content}], **asked)
    assert answer.choices[0].message.content == _wanted(folder, "[user]<image>what?<image>[assistant]", files)
    assert answer.usage.prompt_tokens == len("[user]what?[assistant]") + 2 * 16
    parts = [{"type": "input_image", "image_url": _part(files[0])["image_url"]["url"]}]
    parts += [{"type": "input_text", "text": "what?"}]
    asked_too = {"model": "tiny", "max_output_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = client.responses.create(input=[{"role": "user", "content": parts}], **asked_too)
    assert answer.output_text == _wanted(folder, "[user]<image>what?[assistant]", files[:1])
    texts = client.chat.completions.create(messages=[{"role": "user", "content": [PART]}], **asked)
    assert texts.usage.prompt_tokens == len("[user]what?[assistant]")


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("http://127.0.0.1/a.png", "opens no other addresses"),
        ("file:///etc/passwd", "opens no other addresses"),
        ("data:image/png;base64,%%%", "not base64"),
        ("data:image/png;base64,aGVsbG8=", "can't be read"),
    ],
)
def test_addresses_and_data_that_are_no_images_are_refused(server, url, what):
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    with pytest.raises(openai.BadRequestError, match=what):
        server.client().chat.completions.create(model="tiny", messages=[message])


def test_placeholders_in_a_text_and_images_too_large_are_refused(folder, monkeypatch):
    read = ImagePrompts(folder)
    with pytest.raises(ValueError, match="refuses them.*2 <image> tokens"):
        read("<image><image>", [ImageFile(_file("red"))])
    with pytest.raises(ValueError, match="65 images are more than 64"):
        read("<image>" * 65, [ImageFile(b"")] * 65)
    monkeypatch.setattr(images, "MOST_PIXELS", 700)
    assert len(read("<image>" * 2, [ImageFile(_file("red"))] * 2)[0]) == 32
    with pytest.raises(ValueError, match=r"960 pixels in all \(20 x 16, 20 x 16, 20 x 16\) are more than 700"):
        read("<image>" * 3, [ImageFile(_file("red"))] * 3)
    assert from_data_url("data:image/gif;base64,aGk=") == (b"hi", "GIF")


def _header_of(data, kind):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def test_only_the_format_that_the_header_names_is_read(folder, monkeypatch):
    """Pillow's reader of EPS starts a program."""
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *command, **_: started.append(command))
    monkeypatch.setattr(subprocess, "check_call", lambda *command, **_: started.append(command))
    read, eps = ImagePrompts(folder), io.BytesIO()
    Image.new("RGB", (20, 16), "red").save(eps, "EPS")
    for data, kind, what in (
        (eps.getvalue(), "png", "no PNG"),
        (eps.getvalue(), "x-eps", "'image/x-eps' is not supported: send one of image/png"),
        (_file("red"), "jpeg", "no JPEG"),
    ):
        with pytest.raises(ValueError, match=what):
            read("<image>", [from_data_url(_header_of(data, kind))])
    with pytest.raises(ValueError, match="no GIF or JPEG or PNG or WEBP"):
        read("<image>", [ImageFile(eps.getvalue())])
    assert not started
    for kind in ("png", "jpeg", "webp", "gif"):
        file = io.BytesIO()
        Image.new("RGB", (20, 16), "red").save(file, kind)
        assert len(read("<image>", [from_data_url(_header_of(file.getvalue(), kind))])[0]) == 16


def test_texts_do_not_wait_for_images(server, monkeypatch):
    begun, go_on, opened = threading.Event(), threading.Event(), images._opened

    def slowly(file):
        begun.set()
        assert go_on.wait(60)
        return opened(file)

    monkeypatch.setattr(images, "_opened", slowly)
    monkeypatch.setattr(prompts, "MOST_IMAGE_PROMPTS", 1)
    client, asked = server.client(), {"model": "tiny", "max_tokens": 2, "temperature": 0}
    picture = [{"role": "user", "content": [_part(_file("red"))]}]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waits = pool.submit(client.chat.completions.create, messages=picture, **asked)
        try:
            assert begun.wait(60)
            assert client.chat.completions.create(messages=[{"role": "user", "content": "why?"}], **asked).choices
            assert client.completions.create(prompt="a", **asked).choices
            with pytest.raises(openai.InternalServerError, match="wait until their images are prepared") as refused:
                client.chat.completions.create(messages=picture, **asked)
            assert refused.value.status_code == 503 and refused.value.response.headers["Retry-After"] == "2"
        finally:
            go_on.set()
        assert waits.result().choices


def test_images_of_all_requests_are_bounded(server, monkeypatch):
    frontend = server.service.frontend
    monkeypatch.setattr("megatron_tree.inference.serving.http.frontend.MOST_IMAGE_BYTES", 100)
    client, asked = server.client(), {"model": "tiny", "max_tokens": 2, "temperature": 0}
    picture = [{"role": "user", "content": [_part(_file("red"))]}]
    assert client.chat.completions.create(messages=picture, **asked).choices, "a single one has what it needs"
    until(lambda: not frontend._image_bytes)
    release = frontend._hold(50)
    with pytest.raises(openai.InternalServerError, match="images of other requests take all memory"):
        client.chat.completions.create(messages=picture, **asked)
    assert client.completions.create(prompt="a", **asked).choices
    release()
    assert client.chat.completions.create(messages=picture, **asked).choices


def test_a_request_goes_to_ranks_in_other_processes_with_its_images():
    inputs = {"pixel_values": torch.randn(2, 3), "image_grid_thw": torch.tensor([[1, 2, 3]])}
    inputs["half"] = inputs["pixel_values"].bfloat16()
    request = Request(prompt=[1, 2], sampling=SamplingParams(max_tokens=3, seed=4), images=inputs)
    found = link.request_from_json(json.loads(json.dumps(link.request_to_json(request, [[5]]))))
    assert found.images.keys() == inputs.keys() and found.begun == [[5]] and found.sampling == request.sampling
    assert all(torch.equal(found.images[name], x) and found.images[name].dtype == x.dtype for name, x in inputs.items())


def _generated(rank, world, folder, files, weights):
    from megatron_tree.inference.serving.arguments import build_parser, check_arguments
    from megatron_tree.inference.serving.generate import run

    argv = ["--model", folder, "--question", "what?", "--max-new-tokens", "6", "--check", "--weights", weights]
    args = build_parser().parse_args([*map(str, argv), "--image", files[0], "--image", files[1]])
    check_arguments(args, world)
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
        run(args)
    return output.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_generate_answers_about_files_of_images(folder, tmp_path, weights):
    pytest.importorskip("deepspeed")
    files = [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    for name, color in zip(files, ("red", "blue")):
        Path(name).write_bytes(_file(color))
    env = {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    said, _ = run_distributed(_generated, 2, folder, files, weights, env=env, fresh=True)
    assert "check: all" in said and "tokens are equal" in said, said


def test_a_processor_without_its_packages_says_which(tmp_path, monkeypatch):
    def without(*args, **kwargs):
        raise ImportError("Qwen2VLVideoProcessor requires the Torchvision library")

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", without)
    with pytest.raises(ValueError, match="packages that are not installed: .*Torchvision"):
        ImagePrompts(tmp_path)("", [])
