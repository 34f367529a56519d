"""A tokenizer of Llama 2's kind, which needs no files."""

from tokenizers import Tokenizer, decoders, models, normalizers

from transformers import PreTrainedTokenizerFast

START, END, TURN = "<s>", "</s>", "<|turn|>"
WORDS = ("The", "capital", "of", "France", "is", "Paris", "a", "b")


def word_tokenizer(chat_template=None) -> PreTrainedTokenizerFast:
    """Words with a mark for the space before them, letters of ASCII, and bytes for what is neither; the decoder strips
    the first space. START is put before every text; END and TURN end one."""
    special = [START, END, TURN]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *(f"▁{word}" for word in WORDS), "▁"]
    letters = [chr(c) for c in range(33, 127)]
    scored = [(piece, -1.0) for piece in pieces] + [(letter, -9.0) for letter in letters]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    options = {"bos_token": START, "eos_token": END, "additional_special_tokens": [TURN]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=END, chat_template=chat_template, **options)
    fast.add_bos_token = True
    return fast
