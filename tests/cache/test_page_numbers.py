"""Pages of the cache: ranks hold equally many, and rows share them."""

import random
import sys
from unittest import mock

import pytest
import torch

from megatron_tree.core.cache import RowBook, ShardedCache
from megatron_tree.core.cache.pages import PageRuns


@pytest.mark.parametrize(("world", "page_size"), [(1, 4), (3, 1), (7, 4)])
def test_ranks_hold_equally_many_pages(world, page_size):
    draw = random.Random(world)
    book = RowBook(0, world, page_size)
    rows = [book.add() for _ in range(20)]
    for _ in range(60):
        some = draw.sample(rows, draw.randint(1, 6))
        book.append(some, draw.choice([1, 1, 2, 9, 50]))
        assert max(book.loads) - min(book.loads) <= 1
        assert sum(book.loads) == sum(-(-book.rows[row].length // page_size) for row in rows)


def test_runs_are_the_pages():
    draw, runs, pages = random.Random(5), PageRuns(), []
    for _ in range(300):
        if draw.random() < 0.15:
            cut = draw.randrange(pages[-1] + 3) if pages else 0
            runs.cut(cut)
            pages = [page for page in pages if page < cut]
        else:
            pages.append(pages[-1] + draw.choice((1, 1, 1, 2, 5)) if pages else draw.randrange(3))
            runs.add(pages[-1])
        assert runs.count() == len(pages)
        for at in (0, draw.randrange(pages[-1] + 3) if pages else 1):
            assert runs.count(at) == sum(page < at for page in pages)
            assert [i for run in runs.since(at) for i in range(*run)] == [page for page in pages if page >= at]


def _lines(act):
    """How many lines of the package's Python act() runs."""
    lines = 0

    def count(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return count if "megatron_tree" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(count)
    try:
        act()
    finally:
        sys.settrace(before)
    return lines


def _work(length, by_position):
    """(lines of Python to find the keys of a chunk, numbers that become tables in the steps after it), where a row of
    `length` tokens is cached."""
    store, made, tensor = ShardedCache([None], rank=0, world=4), [], torch.tensor
    row = store.book.add()
    store.append([row], length)
    append = store.append([row], 256, sharded=True)
    lines = _lines(lambda: store.key_segments(append, 0, of_all_ranks=True, by_position=by_position))
    store.view(0, [row], "cpu")
    with mock.patch.object(torch, "tensor", lambda x, **options: made.append(len(x)) or tensor(x, **options)):
        for _ in range(5 * store.page_size):
            store.append([row], 1)
            view = store.view(0, [row], "cpu")
    held = store.book.rows[row]
    assert view.block_table.tolist() == held.pages and view.indices.tolist() == held.indices
    return lines, sum(made)


@pytest.mark.parametrize("by_position", [False, True])
def test_work_does_not_grow_with_what_is_cached(by_position):
    assert _work(1 << 12, by_position) == _work(1 << 18, by_position)


@pytest.mark.parametrize("world", [2, 5])
def test_new_pages_go_where_there_is_most_room(world):
    """Rows that go leave gaps; what comes fills them first: no rank that gets a page ends above another by two."""
    draw = random.Random(world)
    book = RowBook(0, world, 4)
    rows = []
    for _ in range(150):
        if rows and draw.random() < 0.3:
            book.remove(rows.pop(draw.randrange(len(rows))))
        elif rows and draw.random() < 0.2:
            rows.append(book.fork(draw.choice(rows)))
        else:
            rows.append(book.add())
            before = list(book.loads)
            book.append(rows[-1:], draw.randint(1, 80))
            grown = [after for was, after in zip(before, book.loads) if after > was]
            assert max(grown) <= min(book.loads) + 1
    for row in rows:
        book.remove(row)
    assert book.loads == [0] * world
    assert book.numbers[0].used == 0


def test_pages_that_rows_share_count_once_in_windows():
    """Not once for each row, by which the layers' memory grows."""
    book = RowBook(0, 1, 4, windows=(None, 8))
    rows = [book.add()]
    book.append(rows, 40)
    book.share(rows[0], range(10))
    for _ in range(20):
        rows.append(book.add())
        book.begin(rows[-1], range(10))
    book.append(rows[1:], 8)
    assert book.held == [[50], [50]] and book.most == [50, 50] == [numbers.used for numbers in book.numbers]
    fork = book.fork(rows[1])
    assert book.held == [[50], [50]]
    book.crop(fork, 46)
    assert book.held == [[51], [51]], "it will write to its last page"
    for row in (*rows, fork):
        book.remove(row)
    book.evict(10)
    assert book.held == [[0], [0]]
