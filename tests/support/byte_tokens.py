"""A tokenizer that needs no files."""

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from transformers import PreTrainedTokenizerFast


def byte_tokenizer(*, end: str = "<end>", size: int = 257) -> PreTrainedTokenizerFast:
    """One token for each byte and an end token; size: only so many, the letters and digits of ASCII among them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 1]
    tokenizer = Tokenizer(BPE(vocab={c: i for i, c in enumerate([end, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
