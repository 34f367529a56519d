"""Blocks of the cache: ranks hold equally many, rows share them, and changes can be foreseen."""

import random

import pytest

from megatron_tree.cache import RowBook
from megatron_tree.cache.blocks import Forecast


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("page_size", [1, 4])
def test_ranks_hold_equally_many_blocks(world, page_size):
    draw = random.Random(world)
    book = RowBook(0, world, page_size)
    rows = [book.add() for _ in range(20)]
    for _ in range(60):
        some = draw.sample(rows, draw.randint(1, 6))
        book.append(some, draw.choice([1, 1, 2, 9, 50]))
        assert max(book.loads) - min(book.loads) <= 1
        assert sum(book.loads) == sum(-(-book.rows[row].length // page_size) for row in rows)


@pytest.mark.parametrize("world", [2, 5])
def test_new_blocks_go_where_there_is_most_room(world):
    """Rows that go leave gaps; what comes fills them first: no rank that gets a block ends above another by two."""
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


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_forecast_is_what_happens(page_size):
    draw, book = random.Random(page_size), RowBook(0, 3, page_size)
    names = dict(enumerate(book.add() for _ in range(4)))
    for _ in range(40):
        for row in names.values():
            book.append([row], draw.randint(1, 9))
        forecast, plan = Forecast(book, dict(names), 4096), []
        lengths = {name: book.rows[row].length for name, row in names.items()}
        for _ in range(draw.randint(1, 8)):
            name, new = draw.choice(list(lengths)), max(lengths) + 1
            few, many = len(lengths) < 2, len(lengths) > 8
            change = draw.choice(["crop"] + ["remove"] * (not few) + ["add", "fork"] * (not many))
            arguments = {"add": [new], "fork": [name, new], "crop": [name, draw.randint(0, lengths[name])]}
            plan.append((change, *arguments.get(change, [name])))
            if change in ("add", "fork"):
                lengths[new] = 0 if change == "add" else lengths[name]
            elif change == "crop":
                lengths[name] = plan[-1][2]
            else:
                del lengths[name]
            getattr(forecast, change)(*plan[-1][1:])
        for change, name, *more in plan:
            if change == "add":
                names[name] = book.add()
            elif change == "fork":
                names[more[0]] = book.fork(names[name])
            elif change == "crop":
                book.crop(names[name], *more)
            else:
                book.remove(names.pop(name))
        assert forecast.free_tokens == 4096 // page_size * page_size - sum(book.loads) * page_size, plan
