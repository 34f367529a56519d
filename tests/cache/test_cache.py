"""The sharded cache without processes: every rank's book and pages, against a dict that knows each row's tokens."""

import random
from unittest import mock

import pytest
import torch

from megatron_tree.core.cache import LayerPages, RowBook, ShardedCache, quantize
from megatron_tree.core.cache.forward import PackedRows
from megatron_tree.core.cache.pages import GROWTH, on_device
from megatron_tree.core.cache.prefixes import page_keys

WINDOWS = [None, 5, None, 12]  # three kinds of layers


class Fleet:
    """All ranks of a cache, and `naive`: by row, the value of every token."""

    def __init__(self, world, page_size, windows=(None,), dtype="auto"):
        self.caches = [
            ShardedCache(list(windows), rank=rank, world=world, page_size=page_size, dtype=dtype)
            for rank in range(world)
        ]
        self.windows, self.page_size, self.naive, self.chunk = list(windows), page_size, {}, {}
        self.next_value = 1

    def each(self, method, *args):
        results = [getattr(cache, method)(*args) for cache in self.caches]
        assert len(set(map(str, results))) == 1
        return results[0]

    def add(self):
        ids = {cache.book.add() for cache in self.caches}
        (row,) = ids
        self.naive[row], self.chunk[row] = [], 0
        return row

    def fork(self, row):
        ids = {cache.book.fork(row) for cache in self.caches}
        (copy,) = ids
        self.naive[copy], self.chunk[copy] = list(self.naive[row]), self.chunk[row]
        return copy

    def share(self, row):
        """The first rank has the keys."""
        book, keys = self.caches[0].book, page_keys(self.naive[row], self.page_size)
        indices = book.pages_to_share(row, keys)
        for cache in self.caches:
            cache.book.share(row, indices, keys if cache.book is book else ())

    def begin(self, text):
        """A row with as much of a text as is found."""
        numbers = self.caches[0].book.prefixes.find(page_keys(text, self.page_size))
        if numbers:
            row = self.add()
            for cache in self.caches:
                cache.book.begin(row, numbers)
            self.naive[row] = text[: len(numbers) * self.page_size]
        return len(numbers)

    def remove(self, row):
        self.each("remove", row)
        del self.naive[row]

    def crop(self, row, length):
        self.each("crop", row, length)
        del self.naive[row][length:]

    def append(self, rows, n, *, sharded=False, layers=None):
        values = torch.arange(self.next_value, self.next_value + len(rows) * n).view(len(rows), n)
        self.next_value += len(rows) * n
        shares = []
        for rank, cache in enumerate(self.caches):
            append = cache.append(rows, n, sharded=sharded)
            mine = values
            if sharded:
                first, runs = append.first[0], append.shares[rank]
                shares.append(append.shares)
                at = torch.tensor([p - first for start, count in runs for p in range(start, start + count)] or [0])
                mine = values[:, at]
            for layer in range(len(self.windows)) if layers is None else layers:
                x = (mine * 10.0 + layer)[..., None, None]
                cache.write(layer, append, x.expand(-1, -1, 2, 4), -x.expand(-1, -1, 2, 3))
        assert all(share == shares[0] for share in shares)
        for row, new in zip(rows, values.tolist(), strict=True):
            self.naive[row] += new
            self.chunk[row] = n

    def stored(self, rank, row, layer):
        """position -> value, as the kernels would find it."""
        cache = self.caches[rank]
        kind = cache.kind_of[layer]
        view, pages = cache.view(kind, [row], "cpu"), cache.layers[layer]
        n = int(view.lengths[0])
        if not n:
            return {}
        slots = view.block_table[0].repeat_interleave(self.page_size)[:n].long() * self.page_size
        slots += torch.arange(n) % self.page_size
        k, v = pages.k.flatten(0, 1)[slots], pages.v.flatten(0, 1)[slots]
        assert torch.equal(k[:, :1, :1].expand_as(k), k), "heads or dims are mixed up"
        assert torch.equal(v[:, 0, 0], -k[:, 0, 0])
        found = dict(zip(view.positions[0, :n].tolist(), k[:, 0, 0].tolist(), strict=True))
        assert len(found) == n, "a position twice"
        return found

    def check(self):
        books = [cache.book for cache in self.caches]
        for rank, book in enumerate(books):
            assert book.loads == books[0].loads
            assert (book.held, book.most) == (books[0].held, books[0].most)
            for numbers, held, most in zip(book.numbers, book.held, book.most, strict=True):
                assert numbers.used <= held[rank] <= book.loads[rank] and numbers.capacity <= most
            held = [(row.pages[0][i], row.length - at * self.page_size) for row in book.rows.values()
                    for i, at in enumerate(row.indices[0])]  # fmt: skip
            full = {page for page, tokens in held if tokens >= self.page_size}
            full |= {entry.numbers[0] for entry in book.prefixes if entry.numbers[0] is not None}
            begun = [page for page, tokens in held if tokens < self.page_size]
            assert book.loads[rank] == len(full) + len(begun), "shared pages that are full count once"
        for row, values in self.naive.items():
            assert len({(book.rows[row].length, str(book.rows[row].runs)) for book in books}) == 1
            for layer, window in enumerate(self.windows):
                parts = [self.stored(rank, row, layer) for rank in range(len(books))]
                whole = {position: value for part in parts for position, value in part.items()}
                assert sum(map(len, parts)) == len(whole), "a token on two ranks"
                for position, value in whole.items():
                    assert value == values[position] * 10 + layer
                first = 0 if window is None else max(0, len(values) - window + 1)  # what the next query sees
                assert set(range(first, len(values))) <= whole.keys()
                if window is not None:
                    assert len(whole) <= window + self.chunk[row] + self.page_size
                for rank, cache in enumerate(self.caches):
                    self.check_segments(cache, cache.kind_of[layer], row, parts[rank])

    def check_segments(self, cache, kind, row, part):
        """Segments for queries from the middle of the row on: true positions, or ones as good as true."""
        length = cache.book.rows[row].length
        begin = length // 2 if cache.book.windows[kind] is None else length
        segments = cache.book.key_segments(row, kind, begin)
        assert sum(s.length for s in segments) == len(part)
        claimed = [s.pos + i for s in segments for i in range(s.length)]
        assert [s.row for s in segments] == [sum(s.length for s in segments[:i]) for i in range(len(segments))]
        for true, said in zip(sorted(part), claimed, strict=True):
            assert said == true or (cache.book.windows[kind] is None and true < begin and said < begin)


def test_a_book_refuses_what_makes_no_sense():
    for args, message in (((2, 2), "rank=2"), ((0, 1, 0), "page_size=0"), ((0, 1, 4, (0,)), r"windows=\(0,\)")):
        with pytest.raises(ValueError, match=message):
            RowBook(*args)
    book = RowBook(0, 1)
    for method in (book.fork, book.remove, lambda row: book.append([row], 1), lambda row: book.crop(row, 0)):
        with pytest.raises(ValueError, match="row=7 is not in the cache"):
            method(7)
    with pytest.raises(ValueError, match="dtype='int4'"):
        ShardedCache([None], dtype="int4")


@pytest.mark.parametrize("world", [2, 4])
def test_shares_are_at_most_two_runs_and_one_more(world):
    """A chunk of a prompt: each rank's part in two runs (zigzag), and maybe the rest of a block that was begun."""
    book = RowBook(0, world, 4)
    row = book.add()
    for n in (3, 40, 1, 129, 6):
        shares = book.append([row], n, sharded=True).shares
        assert max(map(len, shares)) <= 3
        tokens = sorted(p for runs in shares for start, count in runs for p in range(start, start + count))
        assert tokens == list(range(book.rows[row].length - n, book.rows[row].length))


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_against_a_dict(seed):
    draw = random.Random(seed)
    fleet = Fleet(world=(1, 2, 3, 4, 2, 5)[seed], page_size=(4, 3, 1, 2, 5, 4)[seed], windows=WINDOWS)
    for step in range(70):
        rows = list(fleet.naive)
        action = draw.choices(["add", "append", "sharded", "fork", "crop", "remove"], [2, 8, 3, 2, 4, 1])[0]
        if action == "add" or not rows:
            fleet.append([fleet.add()], draw.randint(1, 20))
        elif action == "append":
            fleet.append(draw.sample(rows, draw.randint(1, min(4, len(rows)))), draw.choice([1, 1, 1, 3, 17]))
        elif action == "sharded":
            fleet.append([draw.choice(rows)], draw.randint(1, 40), sharded=True)
        elif action == "fork":
            fleet.fork(draw.choice(rows))
        elif action == "crop":
            row = draw.choice(rows)
            length = draw.randint(max(0, len(fleet.naive[row]) - 6), len(fleet.naive[row]))
            forgotten = fleet.caches[0].book.rows[row].forgotten
            if length and any(w is not None and max(0, length - w + 1) < f for w, f in zip((None, 5, 12), forgotten)):
                for cache in fleet.caches:
                    with pytest.raises(ValueError, match="window of .*crop to"):
                        cache.crop(row, length)
            else:
                fleet.crop(row, length)
        else:
            fleet.remove(draw.choice(rows))
        if step % 5 == 0:
            fleet.check()
    fleet.check()
    for row in list(fleet.naive):
        fleet.remove(row)
    for cache in fleet.caches:
        assert [numbers.used for numbers in cache.book.numbers] == [0] * 3
        assert cache.book.loads == [0] * len(fleet.caches)
        assert cache.nbytes == 0


@pytest.mark.parametrize("seed", range(4))
def test_rows_begin_with_shared_pages(seed):
    """Of rows that go on, of others that have gone, with the same tokens on all ranks and in layers with windows."""
    draw = random.Random(seed)
    fleet = Fleet(world=(1, 2, 3, 4)[seed], page_size=(4, 3, 1, 2)[seed], windows=WINDOWS if seed % 2 else (None,))
    texts, found = [], 0
    for step in range(160):
        rows = list(fleet.naive)
        action = draw.choices(["append", "share", "begin", "fork", "crop", "remove", "evict"], [6, 4, 5, 1, 2, 2, 1])[0]
        if action == "append" or not rows:
            fleet.append([draw.choice([*rows, fleet.add()])], draw.randint(1, 12))
        elif action == "share":
            row = draw.choice(rows)
            fleet.share(row)
            texts.append(list(fleet.naive[row]))
        elif action == "begin" and texts:
            found += fleet.begin(draw.choice(texts)) > 0
        elif action == "fork":
            fleet.fork(draw.choice(rows))
        elif action == "crop":
            row = draw.choice(rows)
            fleet.crop(row, draw.choice([0, len(fleet.naive[row])]))
        elif action == "remove":
            fleet.remove(draw.choice(rows))
        else:
            for cache in fleet.caches:
                cache.book.evict(1)
        if step % 4 == 0:
            fleet.check()
            assert len({str([*cache.book.prefixes.unused]) for cache in fleet.caches}) == 1
    assert found > 3
    for row in list(fleet.naive):
        fleet.remove(row)
    for cache in fleet.caches:
        cache.book.evict(len(cache.book.prefixes.unused))
        assert not any(numbers.used for numbers in cache.book.numbers) and not any(cache.book.loads)


def test_a_fork_copies_a_page_when_one_of_the_two_writes():
    fleet = Fleet(world=2, page_size=4)
    row = fleet.add()
    fleet.append([row], 10)
    used = [cache.book.numbers[0].used for cache in fleet.caches]
    copy = fleet.fork(row)
    assert [cache.book.numbers[0].used for cache in fleet.caches] == used
    fleet.append([copy], 1)  # into the third page, which both share
    assert sum(cache.book.numbers[0].used for cache in fleet.caches) == sum(used) + 1
    fleet.check()


def test_a_failed_append_leaves_a_fork_whole():
    """The model fails after layer 0 has written: the page that was copied for it holds the row in all layers."""
    fleet = Fleet(world=1, page_size=4, windows=(None, None, 5))
    row = fleet.add()
    fleet.append([row], 6)
    copy = fleet.fork(row)
    fleet.append([copy], 3, layers=[0])
    fleet.crop(copy, 6)
    fleet.check()
    fleet.append([copy, row], 2)
    fleet.check()


def test_crop_beyond_a_window_or_the_row():
    book = RowBook(0, 1, 2, (None, 4))
    row = book.add()
    book.append([row], 9)
    book.append([row], 3)
    book.crop(row, 9)  # what the last append added can always go
    for length, message in ((10, "between 0 and the 9"), (-1, "between 0 and the 9"), (8, "crop to 9 or more")):
        with pytest.raises(ValueError, match=message):
            book.crop(row, length)
    book.crop(row, 0)
    book.append([row], 1)
    assert book.rows[row].local[1] == 1


def test_pages_are_used_again_and_reset_frees_them():
    fleet = Fleet(world=2, page_size=2, windows=(None, 4))
    for _ in range(5):
        rows = [fleet.add() for _ in range(3)]
        fleet.append(rows, 12)
        fleet.check()
        for row in rows:
            fleet.remove(row)
    assert all(cache.book.numbers[0].capacity == 9 for cache in fleet.caches)
    fleet.append([fleet.add()], 5)
    for cache in fleet.caches:
        cache.reset()
        assert (cache.allocated_bytes, cache.nbytes, cache.book.rows) == (0, 0, {})
    fleet.naive.clear()
    fleet.append([fleet.add()], 5)
    fleet.check()


@pytest.mark.parametrize(("world", "dtype"), [(1, "auto"), (4, "auto"), (2, "int8")])
def test_memory_of_a_rank(world, dtype):
    """At most (1 + 1/8) of (tokens / p + a page for each p-th row and one more), whatever the lengths."""
    draw = random.Random(3)
    page_size, rows, heads, d = 4, 9, 2, 8
    caches = [ShardedCache([None, None], rank=r, world=world, page_size=page_size, dtype=dtype) for r in range(world)]
    per_token = 2 * heads * (2 * d * 4 if dtype == "auto" else 2 * (d + 4))  # layers, heads, k and v (and scales)
    total = 0
    for cache in caches:
        for _ in range(rows):
            cache.book.add()
    for _ in range(40):
        row, n = draw.randrange(rows), draw.choice([1, 2, 30])
        total += n
        x = torch.randn(1, n, heads, d)
        for cache in caches:
            append = cache.append([row], n)
            for layer in range(2):
                cache.write(layer, append, x, x)
            pages = (total / page_size + rows) / world + 1
            assert cache.allocated_bytes <= (1 + 1 / GROWTH) * pages * page_size * per_token
            assert cache.nbytes == cache.num_local() * per_token
    assert sum(cache.num_local() for cache in caches) == total


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_eight_bits_round_trip(source):
    """int8: at most half a step of largest / 127; fp8 (e4m3, 3 bits of mantissa): 1/16 of each value, or half of its
    smallest step, 2^-9 of largest / 448."""
    x = torch.randn(50, 3, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 50)[:, None, None]
    x[0] = 0.0
    x = x.to(source)
    largest = x.float().abs().amax(-1, keepdim=True)
    for dtype, allowed in (
        (torch.int8, 0.5 * largest / 127),
        (torch.float8_e4m3fn, torch.maximum(x.float().abs() / 16, 2**-10 * largest / 448)),
    ):
        stored, scale = quantize(x, dtype)
        assert (stored.dtype, scale.dtype, scale.shape) == (dtype, torch.float32, x.shape[:-1])
        back = stored.float() * scale[..., None]
        assert bool(((back - x.float()).abs() <= allowed * (1 + 1e-5)).all())
        pages = LayerPages(4, dtype)
        pages.reserve(13, x[None], x[None])
        pages.write(torch.arange(50), x, x)
        again = pages.k.float() * pages.k_scale[..., None]
        assert torch.equal(again.flatten(0, 1)[:50], back)
        pages.reserve(40, x[None], x[None])
        assert torch.equal(pages.read("k_scale", torch.arange(50)), scale)
        assert pages.k_scale.stride(1) == 1  # a head's scales lie side by side


def test_tokens_of_another_kind_are_refused():
    cache = ShardedCache([None])
    row = cache.book.add()
    x = torch.zeros(1, 3, 2, 8)
    cache.write(0, cache.append([row], 3), x, x)
    for other in (x.bfloat16(), torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 1, 8)):
        with pytest.raises(ValueError, match=r"don't fit the cache.*\(2, 8\).*float32"):
            cache.write(0, cache.append([row], 3), other, other)


def test_numbers_go_to_a_device_without_a_wait(monkeypatch):
    """What a step's rows need: made on the host, and copied from pinned memory."""
    of_list = torch.tensor

    def tensor(data, **options):
        assert "device" not in options
        return of_list(data, **options)

    monkeypatch.setattr(torch, "tensor", tensor)
    cache = ShardedCache([None], rank=0, world=1, page_size=2)
    row = cache.book.add()
    cache.write(0, cache.append([row], 2100), *torch.ones(2, 1, 2100, 1, 4))
    rows = [row, cache.book.fork(row)]
    for _ in range(3):
        cache.write(0, cache.append(rows, 1), *torch.ones(2, 2, 1, 1, 4))
        assert cache.view(0, rows, "cpu").lengths.shape == (2,)
    assert len(cache.view(0, rows, "cpu").shared) == 1
    packed = PackedRows([2, 3], torch.device("cpu"))
    assert packed.ends == [1, 4] and packed.pack(torch.arange(6.0).view(2, 3)).tolist() == [[0, 1, 3, 4, 5]]

    copies = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: mock.Mock(to=lambda *a, **k: copies.append((a, k))))
    on_device(torch.ones(1), "cuda")
    assert copies == [(("cuda",), {"non_blocking": True})]
