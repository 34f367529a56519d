"""The stages of a head chunk in a pass, and their order: while one chunk is computed, others are on their way.

Attention and the planner's cost model run through the same order.
"""

from __future__ import annotations

from collections.abc import Sequence


class Stages:
    """One head chunk on its way through a pass: its stages in order. A pass implements those that it needs."""

    def exchange(self) -> None:
        """Start to exchange heads for tokens."""

    def gather(self) -> None:
        """Wait for that; start to gather rows."""

    def receive(self) -> None:
        """Compute what needs no message; wait for the rows."""

    def attend(self) -> None:
        """Compute the rest; start the reductions."""

    def advance(self) -> None:
        """Start the second level of the reductions."""

    def give_back(self) -> None:
        """Wait for the reductions; start to exchange tokens for heads."""

    def collect(self) -> None:
        """Wait for that."""


# One round: each stage, and how far ahead of the round's chunk the chunk is that runs it.
_ROUND = ((0, "receive"), (1, "gather"), (2, "exchange"), (0, "attend"), (-1, "advance"), (-2, "give_back"))
_ROUND_OF_STREAMS = ((0, "receive"), (2, "exchange"), (0, "attend"), (2, "gather"), (-1, "advance"), (-2, "give_back"))


def run_stages(chunks: Sequence[Stages], *, streams: bool = False) -> None:
    """Run all chunks through their stages. Gathered rows of at most two chunks exist at any time.

    streams: whether a GPU runs them. A collective then begins when all has run that was queued before it. So a gather
    is queued right after attention over the rows whose memory it takes, and the first two before any attention. A CPU
    rank does not wait where it gathers; it starts the next gather once the last one has the network no more.
    """
    for now in range(-2, len(chunks) + 2):
        for ahead, stage in _ROUND_OF_STREAMS if streams else _ROUND:
            if 0 <= now + ahead < len(chunks):
                getattr(chunks[now + ahead], stage)()
    for chunk in chunks:
        chunk.collect()
