"""tree_decode beside the paper's Algorithm 3 in the paper's own framework, JAX, on four devices of the host."""

import importlib.util
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_tree import shard_sequence, tree_decode
from support import jax_decode
from support.decoding import decode_inputs, decode_oracle
from support.ranks import largest, run_distributed

SHARDS = 4


def _same_as(rank, world, out, lse):
    """The largest difference to JAX's out and lse, over our schedules."""
    q, k, v = decode_inputs(2, 1, 40 * SHARDS, dtype=torch.float64)
    k, v = (shard_sequence(x, dist.group.WORLD, 1, layout="contiguous") for x in (k, v))
    worst = 0.0
    for schedule in ("allreduce", "auto", "ring"):
        o, l = tree_decode(q, k, v, cp_group=dist.group.WORLD, schedule=schedule, return_lse=True)
        worst = largest((worst, (o[:, 0] - out).abs().max().item(), (l.squeeze(-1) - lse).abs().max().item()))
    return worst


@pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="needs JAX: pip install -e '.[jax]'")
def test_same_as_algorithm_3_in_jax(tmp_path):
    q, k, v = decode_inputs(2, 1, 40 * SHARDS, dtype=torch.float64)
    np.savez(tmp_path / "in.npz", q=q[:, 0], k=k, v=v)
    program = pathlib.Path(jax_decode.__file__)
    files = [str(tmp_path / name) for name in ("in.npz", "out.npz")]
    subprocess.run([sys.executable, str(program), str(SHARDS), *files], check=True, timeout=120)
    with np.load(tmp_path / "out.npz") as found:
        out, lse = (torch.from_numpy(found[name]) for name in ("out", "lse"))
    true_out, true_lse = decode_oracle(q, k, v, None)
    assert (out - true_out[:, 0]).abs().max() < 1e-12 and (lse - true_lse.squeeze(-1)).abs().max() < 1e-12
    assert largest(run_distributed(_same_as, SHARDS, out, lse)) < 1e-12
