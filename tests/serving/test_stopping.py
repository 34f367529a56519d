"""Text in pieces: whole characters only, nothing taken back, stop texts wherever tokens are cut."""

import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import transformers
from megatron_tree.inference.generation.sampling import SamplingParams
from megatron_tree.inference.generation.stopping import Detokenizer, Stopper, StopTexts, decode
from support.word_tokens import word_tokenizer

TEXT = "Grüße, 世界! 👩‍🔬 na\u00efve \ufffd x  y\n"


def _bytes_of_gpt2():
    """Every byte a token, by the byte-level alphabet."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE({**vocab, "<end>": 256}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def _pieces(tokenizer, tokens, before=()):
    detokenizer = Detokenizer(tokenizer, before)
    return [detokenizer.add(token) for token in tokens], detokenizer.flush()


def test_bytes_become_characters_one_by_one():
    tokenizer = _bytes_of_gpt2()
    tokens = tokenizer(TEXT).input_ids
    assert len(tokens) == len(TEXT.encode())
    pieces, rest = _pieces(tokenizer, tokens)
    assert "".join(pieces) + rest == TEXT
    assert all(len(piece) <= 1 for piece in pieces if "\ufffd" not in piece), "a character waited for the next one"


def test_any_tokens_add_up_to_their_text():
    tokenizer, draw = _bytes_of_gpt2(), random.Random(3)
    for _ in range(60):
        _check_sum(tokenizer, [draw.randrange(len(tokenizer)) for _ in range(draw.randrange(1, 25))])


def test_words_and_bytes_add_up_to_their_text():
    """Where the bytes make characters; in a run of such tokens, one bad byte turns all of them into bad ones."""
    tokenizer, draw = word_tokenizer(), random.Random(3)
    for _ in range(60):
        words = [draw.choice(("▁Paris", "▁a", "▁", "!", "x", "</s>", "<s>", *"ü€👍")) for _ in range(12)]
        known = tokenizer.get_vocab()
        cut = [[word] if word in known else [f"<0x{byte:02X}>" for byte in word.encode()] for word in words]
        _check_sum(tokenizer, [known[token] for tokens in cut for token in tokens])


def _check_sum(tokenizer, tokens):
    """Alone, and behind each beginning whose text the rest does not change."""
    for cut in range(len(tokens)):
        before, whole = decode(tokenizer, tokens[:cut]), decode(tokenizer, tokens)
        if not whole.startswith(before):
            continue
        pieces, rest = _pieces(tokenizer, tokens[cut:], torch.tensor(tokens[:cut], dtype=torch.int64))
        assert "".join(pieces) + rest == whole.removeprefix(before), tokens
        assert not any(piece.endswith("\ufffd") for piece in pieces)


def test_spaces_between_words_stay():
    tokenizer = word_tokenizer()
    number = tokenizer.convert_tokens_to_ids
    tokens = [number(t) for t in ("▁The", "</s>", "▁Paris", "x", "<0xE2>", "<0x82>", "<0xAC>", "▁", "!")]
    assert _pieces(tokenizer, tokens) == (["The", "", " Paris", "x", "", "", "€", " ", "!"], "")
    for special in (0, 30):  # in front of the text: they make it neither begin nor continue
        before = [number("▁Paris"), *[number("</s>")] * special]
        assert _pieces(tokenizer, tokens[:1], before) == ([" The"], "")
        assert _pieces(tokenizer, tokens[:1], before[1:]) == (["The"], "")


def test_bytes_that_are_no_characters_do_not_change_what_was_told():
    """A decoder that makes a whole run of bytes bad because of one."""
    tokenizer, draw = word_tokenizer(), random.Random(4)
    number = tokenizer.convert_tokens_to_ids
    tokens = [number(t) for t in ("▁a", "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "▁Paris", "▁is")]
    assert _pieces(tokenizer, tokens) == (["a", "", "", "€", "", "\ufffd Paris", " is"], "")
    for _ in range(40):
        some = [number(f"<0x{draw.choice((0xE2, 0x82, 0xAC, 0xFF)):02X}>") for _ in range(9)]
        pieces, rest = _pieces(tokenizer, [*some, number("▁Paris"), number("▁is")])
        assert pieces[-2].endswith(" Paris") and pieces[-1] == " is" and not rest
    for kind, some in ((tokenizer, number("<0x80>")), (_bytes_of_gpt2(), 100)):
        assert decode(kind, [some]) == "\ufffd"
        pieces, rest = _pieces(kind, [some] * 100)
        assert "".join(pieces) + rest == "\ufffd" * 100 and len(rest) < 40, "bytes wait for ever"


def _first_end(text, stops):
    """By brute force: where the text ends when it comes letter by letter, and by what."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_stop_texts_are_found_however_the_text_is_cut():
    draw = random.Random(5)
    for _ in range(400):
        text = "".join(draw.choice("ab") for _ in range(12))
        stops = ["".join(draw.choice("ab") for _ in range(draw.randrange(2, 5))) for _ in range(draw.randrange(3))]
        expected, by = _first_end(text, stops)
        finder, told, found, rest = StopTexts(stops), "", None, text
        while rest and found is None:
            cut = draw.randrange(1, 5)
            piece, found = finder.add(rest[:cut])
            told, rest = told + piece, rest[cut:]
            assert expected.startswith(told), "told what it had to take back"
        told += finder.flush() if found is None else ""
        assert (told, found) == (expected, by), (text, stops)


def _run(tokenizer, tokens, end_tokens=(256,), **options):
    stopper, pieces = Stopper(tokenizer, SamplingParams(**options), end_tokens), []
    for token in tokens:
        pieces.append(stopper.add(token))
        if pieces[-1].finish_reason is not None:
            break
    return "".join(p.text for p in pieces), pieces[-1].finish_reason, pieces[-1].stop_reason, len(pieces)


def test_an_answer_ends_by_tokens_by_texts_and_by_its_length():
    tokenizer = _bytes_of_gpt2()
    tokens = tokenizer("äbc→d<e").input_ids
    assert _run(tokenizer, tokens, stop="c→") == ("äb", "stop", "c→", 7)
    assert _run(tokenizer, tokens, stop=("zz", "→d<f"), max_tokens=8) == ("äbc→d", "length", None, 8)
    assert _run(tokenizer, tokens, max_tokens=5) == ("äbc\ufffd", "length", None, 5)
    end = tokens[:3] + [256] + tokens[3:]
    assert _run(tokenizer, end) == ("äb", "stop", 256, 4)
    assert _run(tokenizer, end, ignore_eos=True, max_tokens=6)[1:] == ("length", None, 6)
    assert _run(tokenizer, end, ignore_eos=True, stop_token_ids=(tokens[3],))[1:] == ("stop", tokens[3], 5)
    assert _run(tokenizer, end, stop="bX") == ("äb", "stop", 256, 4), "what was held back is told at the end"
    assert _run(None, end) == ("", "stop", 256, 4)
