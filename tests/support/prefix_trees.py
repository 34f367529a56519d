"""Rows that share prefixes."""


def grown(draw, count, *, vocab=2, longest=14):
    """Random rows, each of which begins as one before it does, or alone."""
    rows = [[]]
    for _ in range(count):
        begin = draw.choice(rows)
        begin = begin[: draw.randint(0, len(begin))]
        rows.append(begin + [draw.randrange(vocab) for _ in range(draw.randint(1, longest))])
    return rows[1:]


def in_a_tree(*, prompt, answers, length):
    """Answers of one length to one prompt, which differ from their first token on."""
    return [list(range(1, prompt + 1)) + [i + 1] * length for i in range(answers)]
