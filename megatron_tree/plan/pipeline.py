"""The order in which the stages of head chunks run: while one group is computed, others are on their way.

A group is a generator. Up to its end it yields six times, or fewer:

    start the exchange of heads  |  start the gathers  |  wait for them  |  compute and start the reductions  |
    start their second level  |  wait for them and start the exchange back  |  wait for that

The schedule of an attention call and the cost model run through the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

_ORDER = (0, 1, 2, 0, -1, -2)  # in one round: which groups, counted from the round's own, go on by one stage


def run_chunks(groups: Sequence[Generator]) -> list:
    """Run all groups through their stages; returns their results."""
    ended: dict[int, object] = {}

    def advance(i: int) -> None:
        try:
            next(groups[i])
        except StopIteration as stop:
            ended[i] = stop.value

    for now in range(-2, len(groups) + 2):
        for i in (now + n for n in _ORDER):
            if 0 <= i < len(groups) and i not in ended:
                advance(i)
    for i in range(len(groups)):
        while i not in ended:
            advance(i)
    return [ended[i] for i in range(len(groups))]
