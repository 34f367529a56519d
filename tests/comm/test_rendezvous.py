"""The start of the default group: who does not come is named."""

import logging
import socket
import time

import pytest
import torch.distributed as dist

from megatron_tree import CommError
from megatron_tree.core.comm import rendezvous
from megatron_tree.core.log import logger
from support.ranks import environment, run_distributed

LIMIT_S = 3.0


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _start(rank, world, port, missing, address):
    """(seconds, error, what was logged) of a start without some ranks."""
    dist.barrier()
    dist.destroy_process_group()
    if rank in missing:
        return None
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    rendezvous.NOTICE_S, began = LIMIT_S / 2, time.monotonic()
    try:
        with environment({"MASTER_ADDR": address, "MASTER_PORT": port}), pytest.raises(CommError) as caught:
            rendezvous.start_default_group("gloo", timeout_s=LIMIT_S)
    finally:
        logger.removeHandler(handler)
    return time.monotonic() - began, str(caught.value), caught.value.ranks, said


@pytest.mark.parametrize(("address", "missing"), [("127.0.0.1", (1,)), ("localhost", (1, 2))])  # the latter: a name
def test_ranks_that_do_not_start_are_named(address, missing):
    results = run_distributed(_start, 3, _free_port(), missing, address, fresh=True)
    names = "rank 1" if missing == (1,) else "ranks [1, 2]"
    seconds, error, ranks, said = results[0]
    assert LIMIT_S <= seconds < LIMIT_S + 20
    assert error.startswith(f"{names} of 3 did not start at MASTER_ADDR={address}, MASTER_PORT=") and ranks == missing
    assert any(line.startswith(f"rank 0 waits for {names} of 3 to start, at MASTER_ADDR=") for line in said), said
    for other in results[1:]:
        assert other is None or "MASTER_PORT" in other[1]


def test_a_missing_rank_0_is_named():
    _, error, _, said = run_distributed(_start, 2, _free_port(), (0,), "127.0.0.1", fresh=True)[1]
    assert error.startswith("rank 1 does not reach the job's store at MASTER_ADDR=127.0.0.1, MASTER_PORT=")
    assert said == [line for line in said if line.startswith("rank 1 waits for rank 0, at MASTER_ADDR=127.0.0.1")] != []
