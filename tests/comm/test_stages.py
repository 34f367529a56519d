"""The order of head chunks' stages: each one's own, and how those of neighbours overlap."""

import pytest

from megatron_tree.core.plan import Stages, run_stages

ORDER = ("exchange", "gather", "receive", "attend", "advance", "give_back", "collect")


def _log_of(num_chunks, streams):
    log = []

    class Logged(Stages):
        def __init__(self, i):
            for stage in ORDER:
                setattr(self, stage, lambda stage=stage: log.append((i, stage)))

    run_stages([Logged(i) for i in range(num_chunks)], streams=streams)
    return log


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7])
def test_stages_of_neighbours_overlap(num_chunks, streams):
    log, gathered = _log_of(num_chunks, streams), set()
    for i in range(num_chunks):
        assert tuple(stage for chunk, stage in log if chunk == i) == ORDER
    for i in range(num_chunks - 1):
        following = (i + 1, "gather"), (i + 1, "exchange")
        assert all(log.index(stage) < log.index((i, "attend")) for stage in following), "under way during attention"
        assert log.index((i + 1, "attend")) < log.index((i, "give_back")), "reduced during the next one's attention"
    for chunk, stage in log:
        gathered |= {chunk} if stage == "gather" else set()
        gathered -= {chunk} if stage == "attend" else set()
        assert len(gathered) <= 2
