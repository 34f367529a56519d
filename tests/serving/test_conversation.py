"""Answers of a row that is kept from turn to turn, and the chat on top: only what is new is run, on all ranks alike."""

import json
import os

import pytest
import torch
import torch.distributed as dist

from megatron_tree.core.comm import Ranks
from megatron_tree.core.comm.wire import share
from megatron_tree.inference.generation.conversation import Conversation
from megatron_tree.inference.generation.sampling import SamplingParams
from megatron_tree.inference.serving.chat import Chat, Lines, Transcript, follow, open_input
from support.hf_models import prompt, tiny_model
from support.http_server import byte_model, byte_tokenizer
from support.limits import files_of_at_most
from support.plain_runner import PlainRunner
from support.ranks import largest, on_ranks, run_distributed

GREEDY = SamplingParams(max_tokens=6)


@torch.no_grad()
def plain_answer(model, tokens, new):
    """Greedy tokens and logits with everything run anew."""
    cache = PlainRunner(model)
    row = cache.add()
    logits, found = cache.prefill(row, torch.tensor(tokens)), []
    for _ in range(new):
        found.append((int(logits.argmax()), logits))
        logits = cache.step([row], torch.tensor([[found[-1][0]]]))[0, -1]
    return [token for token, _ in found], [row for _, row in found]


def _length(runner):
    (row,) = runner.store.book.rows.values()
    return row.length


@pytest.mark.parametrize("family", ["llama", "mistral"])
@on_ranks(2)
def test_only_new_tokens_are_prefilled(rank, family):
    from megatron_tree.integrations.transformers.attention import TreeCache
    from megatron_tree.integrations.transformers.infer.runner import Runner

    model = tiny_model(family)
    first, more = prompt(1, 45)[0].tolist(), prompt(1, 30, seed=3)[0].tolist()
    want, logits = plain_answer(model, first, 6)
    second = first + want + more
    want2, _ = plain_answer(model, second, 6)
    third = first[:20] + more  # goes back behind what is held
    want3, _ = plain_answer(model, third, 6)
    model.set_attn_implementation("tree")
    runner = Runner(model, TreeCache(model.config, cp_group=dist.group.WORLD, page_size=4), chunk_size=16)
    conversation = Conversation(runner, None, end_tokens=(), group=dist.group.WORLD)
    found = []
    for tokens in (first, second, third):
        found.append(conversation.answer(tokens, GREEDY, keep_logits=True))
    # three tokens: the third is not in the cache
    cut = conversation.answer(first, GREEDY, cancelled=lambda: _length(runner) == len(first) + 2)
    assert [a.tokens for a in found] == [want, want2, want3]
    if rank == 0:
        assert largest(float((a - b).abs().max()) for a, b in zip(found[0].logits, logits, strict=True)) < 1e-3
    assert _length(runner) == len(conversation.held) == len(first) + 2
    assert conversation.held == first + want[:2]
    assert (cut.tokens, cut.finish_reason) == (want[:3], "cancelled")
    # the last token of an answer is not in the cache yet; a window that has moved on begins anew
    figures = [(a.new_tokens, a.finish_reason, len(a.step_s)) for a in found]
    assert figures == [(45, "length", 5), (31, "length", 5), (50 if family == "mistral" else 30, "length", 5)], figures


def test_an_answer_keeps_its_tokens_until_reset():
    tokenizer = byte_tokenizer()
    transcript = Transcript(tokenizer, [0], system="be brief")
    first = transcript.ask("hi")
    assert tokenizer.decode(first) == "<system>be brief\n<user>hi\n<assistant>"
    transcript.answered("yes", [77, 78, 79])  # other tokens than the text's own
    second = transcript.ask("why")
    assert second[: len(first) + 3] == first + [77, 78, 79]
    assert tokenizer.decode(second[len(first) + 3 :]) == "\n<user>why\n<assistant>"
    assert [m["role"] for m in transcript.messages] == ["system", "user", "assistant"]
    transcript.reset()
    assert tokenizer.decode(transcript.ask("c")) == "<system>be brief\n<user>c\n<assistant>"


def test_templates_that_end_answers_or_change_earlier_turns():
    transcript = Transcript(byte_tokenizer("{% for m in messages %}{{ m['content'] }}<end>{% endfor %}"), [0])
    first = transcript.ask("a")
    transcript.answered("b", [66, 0])
    assert transcript.ask("c")[len(first) :] == [66, 0, *byte_tokenizer()("c<end>").input_ids]
    tokenizer = byte_tokenizer("{% for m in messages %}{{ loop.revindex }}{{ m['content'] }}{% endfor %}")
    transcript = Transcript(tokenizer, [])
    transcript.ask("a")
    transcript.answered("b", [77])
    assert tokenizer.decode(transcript.ask("c")) == "3a2b1c"
    with pytest.raises(ValueError, match="no chat template"):
        Transcript(byte_tokenizer(None), [])


def _chat(rank, world, path):
    from megatron_tree.integrations.transformers.attention import TreeCache
    from megatron_tree.integrations.transformers.infer.runner import Runner

    group = dist.group.WORLD if world > 1 else None
    ranks = Ranks.of(group)
    tokenizer, model = byte_tokenizer(), byte_model()
    model.set_attn_implementation("tree")
    runner = Runner(model, TreeCache(model.config, cp_group=group, page_size=4))
    conversation = Conversation(runner, tokenizer, end_tokens=(0,), group=group)
    if rank == 0:
        lines, transcript = open_input(path), Transcript(tokenizer, (0,))
        Chat(conversation, transcript, GREEDY, lines, lambda plan: share(plan, ranks)).run()
        lines.close()
    else:
        follow(conversation, GREEDY, ranks)
    return conversation.held


def test_the_chat_is_the_same_on_any_number_of_ranks(tmp_path, capsys):
    (tmp_path / "text").write_text("long " * 8)
    commands = ["hello there", f"/file {tmp_path / 'text'}", "and?", f"/save {tmp_path / 'saved'}", "/nonsense",
                "/file no/such/file", "/save", "x" * 300, "/reset", "", "still there?", "/quit", "never"]  # fmt: skip
    (tmp_path / "lines").write_text("\n".join(commands))
    alone = _chat(0, 1, str(tmp_path / "lines"))
    saved = json.loads((tmp_path / "saved").read_text())
    said = capsys.readouterr()
    assert [m["role"] for m in saved] == ["user", "assistant"] * 2
    assert saved[2]["content"].endswith("long\n\nand?")
    for text in (
        "/nonsense is not a command",
        "no/such/file: No such file",
        "/save needs",
        "the model has 256 positions",
    ):
        assert text in said.err
    assert "tokens prefilled in" in said.out and "> still there?" in said.out
    assert len(alone) == len("<user>still there?\n<assistant>") + GREEDY.max_tokens - 1
    assert run_distributed(_chat, 2, str(tmp_path / "lines")) == [alone] * 2


def test_a_chat_that_can_not_be_saved_goes_on(tmp_path, capsys):
    (tmp_path / "lines").write_text(f"{'hello ' * 30}\n/save {tmp_path / 'saved'}\n/save {tmp_path}/no/where\n/quit")
    with files_of_at_most(100):
        _chat(0, 1, str(tmp_path / "lines"))
    said = capsys.readouterr().err
    assert f"no space left on {tmp_path}: saved is not written (File too large)\n" in said
    assert f"{tmp_path}/no can't be written to: where is not written (No such file or directory)\n" in said
    assert [path.name for path in tmp_path.iterdir()] == ["lines"]


def test_lines_that_come_slowly():
    read, write = os.pipe()
    lines = Lines(read)
    assert lines.read(0.0) is None
    os.write(write, b"one\r\ntw")
    assert lines.read(1.0) == "one"
    assert lines.read(0.0) is None
    os.write(write, b"o\n\nlast")
    os.close(write)
    assert [lines.read(1.0) for _ in range(3)] == ["two", "", "last"]
    with pytest.raises(EOFError):
        lines.read(1.0)
    lines.close()
