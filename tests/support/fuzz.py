"""Property-based tests over real ranks: examples drawn by hypothesis here, run there, judged here against the oracle.

An example is a session: the hosts of the ranks, and a few calls that run one after another in one process group. So
hypothesis shrinks a failure to the shortest session and the simplest call. A failure says as Python how to
run its session again.

    pytest tests/core/test_fuzz_attention.py tests/cache/test_fuzz_cache.py              # about 300 calls, as in CI
    pytest tests/core/test_fuzz_attention.py tests/cache/test_fuzz_cache.py -m slow      # at least 2,000
    TREE_FUZZ_CALLS=20000 TREE_FUZZ_SEED=7 pytest ... -m slow                 # as many as you like, other ones
"""

import dataclasses
import os
import sys

import hypothesis
import torch
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from megatron_tree.core.layout import Dispatched, Packed
from support.hosts import Hosts
from support.ranks import DistributedTestError, run_distributed

SEED = int(os.environ.get("TREE_FUZZ_SEED", "0"))
# at least; a test draws whole sessions, about twice as many of the fast ones
CALLS = {"fast": 120, "slow": int(os.environ.get("TREE_FUZZ_CALLS", "2000"))}
SESSION = 8  # calls of a session, at most
MEAN_SESSION = 3  # about what hypothesis draws of them, after
FIRST = 4  # small sessions to begin with
ROUNDS = 3  # at most: hypothesis varies what it has drawn, and may have stayed with short sessions
TIMEOUT_S = 60.0  # of a collective: a hang becomes a CommError; a busy machine does not
EPSILON = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
DTYPES = st.sampled_from([torch.float64] * 7 + [torch.float32, torch.bfloat16, torch.float16])


def attack(run, check, world, drawn_from, calls, shrink=True, mean_session=MEAN_SESSION):
    """Draw sessions on `world` ranks of calls from a strategy, at least `calls` of them, the same for the same seed.

    run(rank, world, call) runs on every rank; check(call, results by rank) judges here.
    """
    count = 0
    limits = dict(deadline=None, database=None, print_blob=True)
    phases = [Phase.generate, *([Phase.shrink] if shrink else [])]
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

    def session(drawn):
        nonlocal count
        count += len(drawn[1])
        run_session(run, check, *drawn)

    drawing = hypothesis.given(sessions(world, drawn_from))
    for seed in range(SEED, SEED + ROUNDS):
        if count < calls:
            limits["max_examples"] = FIRST + int((calls - count) / mean_session)
            settings = hypothesis.settings(**limits, phases=phases, suppress_health_check=checks)
            hypothesis.seed(seed)(settings(drawing(session)))()
    print(f"{count} calls on {world} ranks, TREE_FUZZ_SEED={SEED}")
    assert count >= calls, f"only {count} calls"


def sessions(world, calls):
    """(host of every rank, calls): calls is a strategy."""
    hosts = {
        1: [(0,)],
        2: [(0, 0), (0, 1)],
        3: [(0, 0, 0), (0, 1, 2), (0, 1, 0)],
        6: [(0, 0, 0, 0, 0, 0), (0, 0, 0, 1, 1, 1)],
        4: [(0, 0, 0, 0), (0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 1, 0), (0, 0, 0, 1)],
    }
    return st.tuples(st.sampled_from(hosts[world]), st.lists(calls, min_size=1, max_size=SESSION))


def _session(rank, world, run, hosts, calls):
    with Hosts(hosts):
        return [run(rank, world, call) for call in calls]


def run_session(run, check, hosts, calls):
    """Run a session and judge it; see `attack`.

    Raises: AssertionError that says how to run the session again.
    """
    try:
        found = run_distributed(_session, len(hosts), run, hosts, calls, timeout=4 * TIMEOUT_S)
        for i, call in enumerate(calls):
            check(call, [results[i] for results in found])
    except (AssertionError, DistributedTestError) as error:
        again = f"run_session({run.__name__}, {check.__name__}, {hosts}, {calls})  # in {run.__module__}"
        if isinstance(error, DistributedTestError):  # shrinking a hang takes long: say it now
            print(f"failed with TREE_FUZZ_SEED={SEED}: {again}", file=sys.stderr)
        raise AssertionError(f"{error}\nrun it again: {again}") from error


def told(case):
    """repr of a dataclass as Python that makes it: only what is not the default."""
    fields = [(f.name, getattr(case, f.name)) for f in dataclasses.fields(case) if getattr(case, f.name) != f.default]
    return f"{type(case).__name__}({', '.join(f'{name}={_python(value)}' for name, value in fields)})"


def _python(value):
    """repr of what a case holds; that of documents is too short to make them from."""
    if isinstance(value, (Packed, Dispatched)):
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(map(repr, fields))})"
    if isinstance(value, tuple):
        return f"({''.join(f'{_python(x)}, ' for x in value)})"
    return repr(value)


def randn(seed, *shape, dtype=torch.float64):
    """The same numbers on every rank and here."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def magnitude(x):
    """The largest finite magnitude; 0 of nothing."""
    x = x.detach().double().abs()
    x = x[x.isfinite()]
    return float(x.max()) if x.numel() else 0.0


def check_close(name, found, truth, allowed):
    """found within `allowed` of truth, with -inf where truth has it, and never NaN."""
    assert found.shape == truth.shape, (name, found.shape, truth.shape)
    found, truth = found.double(), truth.double()
    assert not found.isnan().any(), f"{name}: NaN"
    assert torch.equal(found.isinf(), truth.isinf()), f"{name}: another pattern of empty rows"
    error = magnitude(torch.where(truth.isinf(), 0.0, found - truth))
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
