"""A runner that shards nothing: one DynamicCache of Transformers per row. Stand-in for the real one, and its oracle."""

import copy

import torch

from megatron_tree.core.cache import ShardedCache
from transformers import DynamicCache


class PlainRunner:
    """Every rank holds everything. `calls` lists what was called, with tokens, to compare ranks."""

    has_states = False

    def __init__(self, model, *, token_group=None, chunk_size=8, capacity=None, page_size=1):
        self.model, self.token_group, self.chunk_size = model, token_group, chunk_size
        self.device, self.vocab_size = torch.device("cpu"), model.config.vocab_size
        self.max_positions = model.config.max_position_embeddings
        self.capacity, self.page_size = capacity, page_size
        self.rows, self.calls, self.least_free = {}, [], capacity
        self.store = ShardedCache([None], page_size=page_size)  # counts as the real one's does
        self._book = self.store.book
        self._book.remove(self._book.add())  # rows are numbered from 1

    def add(self):
        row = self._book.add()
        self.rows[row] = DynamicCache(config=self.model.config)
        self.calls.append(("add", row))
        return row

    def prefill(self, row, tokens, row_length=0):
        assert not row_length or row_length >= self.length(row) + len(tokens)
        assert tokens.dtype == torch.int64 and tokens.dim() == 1
        self.calls.append(("prefill", row, tokens.tolist()))
        return self._run(row, tokens)[-1]

    def prefill_rows(self, rows, prompts):
        return torch.stack([self.prefill(row, prompt) for row, prompt in zip(rows, prompts, strict=True)])

    def step(self, rows, tokens, row_length=None):
        assert tokens.dtype == torch.int64 and tokens.shape[0] == len(rows) == len(set(rows))
        self.calls.append(("step", list(rows), tokens.tolist()))
        return torch.stack([self._run(row, own) for row, own in zip(rows, tokens)])

    def _run(self, row, tokens):
        assert not torch.is_grad_enabled()
        self._book.append([row], len(tokens))
        logits = self.model(tokens[None], past_key_values=self.rows[row], use_cache=True).logits[0].float()
        self._reckon()
        return logits

    def length(self, row):
        return self.rows[row].get_seq_length()

    def most_at_once(self, length):
        return self.max_positions - length

    def can_crop(self, row, length):
        return True

    def crop(self, row, length):
        self.rows[row].crop(length - self.length(row))  # by how many
        self._book.crop(row, length)

    def fork(self, row):
        fork = self._book.fork(row)
        self.rows[fork] = copy.deepcopy(self.rows[row])
        self.calls.append(("fork", row, fork))
        self._reckon()
        return fork

    def remove(self, row):
        self.calls.append(("remove", row))
        self._book.remove(row)
        del self.rows[row]

    def _reckon(self):
        if self.capacity is not None:
            assert self.free_tokens >= 0, "the cache overflows"
            self.least_free = min(self.least_free, self.free_tokens)

    @property
    def free_tokens(self):
        if self.capacity is None:
            return None
        return (self.capacity // self.page_size - sum(self._book.loads)) * self.page_size


def character_tokenizer():
    """One token per printable ASCII character; 0 is padding, 1 the end; with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    import transformers

    vocab = {character: i for i, character in enumerate(["<pad>", "<end>", *map(chr, range(32, 127)), "\n"])}
    vocab |= {chr(0x3B1 + i): len(vocab) + i for i in range(131 - len(vocab))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return fast
