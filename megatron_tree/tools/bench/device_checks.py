"""What only a real device can show beside speed: several ranks on it, a CUDA graph, offsets beyond 2^31 elements."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...core import kernels
from ...core.attention.decode import tree_decode
from ...core.attention.functional import tree_attn_func
from ...core.cache import ShardedCache
from ...core.cache.forward import ForwardPass
from ...core.cache.runner import RowRunner
from ...core.comm import group_rank, group_size
from ...core.config import TreeConfig
from ...core.kernels import KVCache
from ...core.layout import Segment, shard_positions
from ...core.spec import AttnSpec
from ..calibrate.kernel_cases import (
    Emit,
    KernelCase,
    KernelTiming,
    WrongResult,
    clock,
    inputs,
    ours,
    relative_error,
    rounding,
    truth_of,
)
from .tasks import NotHere

RANKS = 2
GRAPHED_STEPS = 200  # over a dozen pages of a row
VOCAB = 128  # of `SmallRunner`
SANITIZERS = "memcheck", "racecheck"
_SANITIZED = """
import torch
from {package} import low_precision as cases
where = {dtype}, torch.device("{device}"), "{backend}"
small = cases.ONE[0][0]._replace(length=70)
cases.check_training(cases.Training(((small,), (small,), 70, 70), (2, 1), (64, 64), {{}}), *where)
cases.check_decoding(cases.DECODING["int8"], *where)
"""


def check_ranks(case: KernelCase, backend: str, emit: Emit, *, device, dtype) -> None:
    """Training and decoding on two ranks that share the device, over gloo, against one rank's reference backend.

    Raises: `NotHere` without PyYAML, in which topologies are written.
    """
    if importlib.util.find_spec("yaml") is None:
        raise NotHere("several ranks need PyYAML: pip install pyyaml")
    errors = torch.zeros(RANKS, 5).share_memory_()  # of out, dq, dk, dv and the decoded token
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (f"file://{folder}/store", errors, case, backend, device, dtype), RANKS)
    worst, allowed = errors.max().item(), 4 * rounding(case, dtype)  # partial results are rounded as well
    if not worst <= allowed:
        raise WrongResult(f"ranks are off by {errors.tolist()}, allowed {allowed}")
    print(f"  {RANKS} ranks on {device}, {backend}: largest error {worst:.2g} of a row's norm", flush=True)
    emit(KernelTiming(case.label, "ranks", f"{RANKS} ranks, {backend}", None, worst, "relative error"))


def _rank(rank: int, store: str, errors: torch.Tensor, case: KernelCase, backend: str, device, dtype) -> None:
    """One rank: writes its relative errors."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    # a GPU's tensors take gloo's collectives; a rehearsal on a CPU, too
    group, config = dist.group.WORLD, TreeConfig(backend=backend, grid=(RANKS, 1), transport="builtin")
    given = inputs(case, device, dtype)
    rows = shard_positions(case.s, rank, RANKS, device=device)
    local = [x[:, rows].clone().requires_grad_() for x in given[:3]]
    out = tree_attn_func(*local, cp_group=group, config=config)
    grads = torch.autograd.grad(out, local, given[3][:, rows])
    _, *keys = (x.detach() for x in local)
    decoded = tree_decode(given[0][:, :1], *keys, cp_group=group, config=config)
    results = zip((out, *grads, decoded), _truth(case, given, rows), strict=True)
    errors[rank] = torch.tensor([relative_error(x, t) for x, t in results])
    dist.barrier()
    dist.destroy_process_group()


def _truth(case: KernelCase, given, rows) -> list[torch.Tensor]:
    """This rank's out, dq, dk, dv, and the decoded token, in float64."""
    whole = truth_of(case, given) | truth_of(case._replace(kind="bwd"), given)
    token = truth_of(case._replace(kind="decode"), [given[0][:, :1], *given[1:]])
    return [*(x[:, rows] for x in whole.values()), token["out"]]


def sanitize(tool: str, backend: str, emit: Emit, *, device, dtype) -> None:
    """A forward, a backward and a decode step of small shapes under one of compute-sanitizer's tools. On a CPU, a
    rehearsal, without it.

    Raises: `WrongResult` with the end of what it says; `NotHere` without the tool.
    """
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if device.type == "cuda" and found is None:
        raise NotHere("compute-sanitizer is not here: it comes with CUDA's toolkit")
    prefix = [found, "--tool", tool, "--error-exitcode", "9"] if device.type == "cuda" else []
    program = _SANITIZED.format(package=__package__, dtype=dtype, device=str(device), backend=backend)
    done = subprocess.run([*prefix, sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode:
        raise WrongResult(f"{tool}, exit status {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    print(f"  {tool}: {'nothing found' if prefix else 'a rehearsal without the tool'}", flush=True)
    emit(KernelTiming(tool, "correct", backend, None, 0.0, "errors"))


def time_launch(case: KernelCase, backend: str, emit: Emit, *, device, dtype) -> None:
    """Microseconds of the host for a decode step over a short cache, launched and, with a GPU, in a CUDA graph."""
    call = ours(case, backend, inputs(case, device, dtype))
    ways = {"launched": call}
    call()
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        ways["replayed"] = graph.replay
    for name, way in ways.items():
        count = 3 if backend == "triton" and device.type == "cpu" else 500
        begun = time.perf_counter()
        for _ in range(count):
            way()
        seconds = (time.perf_counter() - begun) / count  # the device is faster, or the host waits for it
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        print(f"  a decode step, {name}: {seconds * 1e6:.1f} us of the host", flush=True)
        emit(KernelTiming(case.label, "launch", f"{backend}, {name}", seconds * 1e3, 1 / seconds, "steps/s"))


def check_step_graph(case: KernelCase, backend: str, emit: Emit, *, device, dtype) -> None:
    """Steps of a cache's runner in CUDA graphs, over pages and capacities: they must give what ordinary steps give.
    Without a GPU ordinary ones alone are timed."""
    options = dict(heads=(case.h, case.h_kv), head_dim=case.d, windows=(None, 256) * 2, device=device, dtype=dtype)
    options["config"] = TreeConfig(backend=backend)
    gpu = device.type == "cuda"
    runners = [SmallRunner(**options, cuda_graphs=graphs) for graphs in ((False, True) if gpu else (False,))]
    words = torch.arange(case.s, device=device) % VOCAB
    rows = list(range(case.b + 1))  # one less than a power of two: an empty row is run as well
    for runner in runners:
        for row in rows:
            runner.prefill(runner.add(), words[: case.s >> row])
    tokens, worst = words[: len(rows), None], 0.0
    for _ in range(GRAPHED_STEPS if gpu else 0):
        ordinary, replayed = (runner.step(rows, tokens) for runner in runners)
        worst = max(worst, relative_error(replayed, ordinary))
        if not worst <= 4 * rounding(case, dtype):
            raise WrongResult(f"a replayed step is off by {worst:.2g} of a row's norm, {runner.length(0)} tokens")
        tokens = ordinary.argmax(-1)
    if gpu:
        print(
            f"  {GRAPHED_STEPS} steps of a runner, replayed: largest difference {worst:.2g} of a row's norm", flush=True
        )
    for name, runner in zip(("runner's step, launched", "runner's step, replayed"), runners):
        seconds = clock(functools.partial(runner.step, rows, tokens), device)
        print(f"  {name}: {seconds * 1e6:.1f} us", flush=True)
        emit(KernelTiming(case.label, "step", name, seconds * 1e3, 1 / seconds, "steps/s"))


def check_offsets(elements: int, backend: str, emit: Emit, *, device, dtype) -> None:
    """Tensors of more than `elements` numbers, whose end alone matters: keys, pages, and merged states."""
    _long_cache(elements, backend, device, dtype)
    _many_pages(elements, backend, device, dtype)
    _many_states(elements, device)
    print(f"  the ends of tensors of {elements:.3g} elements were read where they are", flush=True)
    emit(KernelTiming(f"{elements} elements", "offsets", backend, None, float(elements), "elements"))


def _need(name: str, value, expected: float) -> None:
    if not abs(float(value) - expected) < 1e-2:
        raise WrongResult(f"{name}: {float(value):.4g} where the last element gives {expected:g}")


def _long_cache(elements: int, backend: str, device, dtype) -> None:
    """A key that alone matters is the last one of the cache, in decoding and in the forward."""
    s = elements // 128 + 1000
    k = torch.zeros(1, s, 1, 128, device=device, dtype=dtype)
    v = torch.zeros_like(k)
    q = torch.zeros(1, 1, 1, 128, device=device, dtype=dtype)
    q[..., 0], k[0, -1, 0, 0], v[0, -1, 0, 5] = 30.0, 30.0, 7.0
    spec = AttnSpec(softmax_scale=1.0)
    state = kernels.attn_decode(q, KVCache(k, v), spec, backend=backend)
    _need("decoding", state[0, 0, 0, 5], 7.0)
    segments = dict(q_segments=(Segment(0, s - 1, 1),), k_segments=(Segment(0, 0, s),))
    _need("forward", kernels.attn_fwd(q, k, v, **segments, spec=spec, backend=backend)[0][0, 0, 0, 5], 7.0)


def _many_pages(elements: int, backend: str, device, dtype) -> None:
    """The row's last token, in the last page, is the one that matters."""
    size = 256
    n = elements // (size * 2 * 128) + 8
    k = torch.zeros(n, size, 2, 128, device=device, dtype=dtype)
    v = torch.zeros_like(k)
    q = torch.zeros(1, 1, 2, 128, device=device, dtype=dtype)
    q[..., 0], k[-1, 99, :, 0], v[-1, 99, :, 5] = 30.0, 30.0, 7.0
    table = torch.tensor([[0, n // 2, n - 1]], dtype=torch.int32, device=device)
    cache = KVCache(k, v, lengths=torch.tensor([2 * size + 100], device=device), block_table=table)
    state = kernels.attn_decode(q, cache, AttnSpec(softmax_scale=1.0), backend=backend)
    for head in range(2):
        _need("pages", state[0, 0, head, 5], 7.0)


def _many_states(elements: int, device) -> None:
    """Five states of elements / 4, of which the last alone weighs anything."""
    states = torch.zeros(5, elements // 128, 32, device=device)
    states[..., -1] = -100.0
    states[4, :, :5], states[4, :, -1] = 3.0, 100.0
    merged = kernels.merge_packed(states)
    for row in (0, -1):
        _need("merged states", merged[row, 4], 3.0)
        _need("merged lse", merged[row, -1], 100.0)


class SmallRunner(RowRunner):
    """A small decoder over the sharded cache that needs torch alone: random weights, the same on every rank.

    Args:
        heads: query heads and KV heads. windows: of every layer, how many of the last tokens a query sees; None: all.
        page_size, cache_dtype: of the cache. options: of `RowRunner`.
    """

    def __init__(
        self,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 16,
        windows: Sequence[int | None] = (None, None),
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
        cache_dtype: str = "auto",
        cp_group=None,
        config: TreeConfig | None = None,
        **options,
    ):
        place = dict(rank=group_rank(cp_group), world=group_size(cp_group))
        store = ShardedCache(list(windows), page_size=page_size, dtype=cache_dtype, **place)
        (h, h_kv), width, generator = heads, heads[0] * head_dim, torch.Generator().manual_seed(1)

        def weight(rows: int, columns: int) -> Tensor:
            return (2 * torch.randn(rows, columns, generator=generator) / rows**0.5).to(device, dtype)

        self._heads, self._windows, self._words = (h, h_kv, h_kv), windows, weight(VOCAB, width)
        self._layers = [(weight(width, (h + 2 * h_kv) * head_dim), weight(width, width)) for _ in windows]
        self._periods = (1e4 ** torch.linspace(0, 1, width)).to(device)
        super().__init__(
            store,
            cp_group=cp_group,
            token_group=cp_group,
            device=torch.device(device),
            vocab_size=VOCAB,
            max_positions=None,
            config=config,
            **options,
        )

    def _run(self, forward: ForwardPass, tokens: Tensor, positions: Tensor, keep: list[int] | None) -> Tensor:
        x = self._words[tokens] + torch.sin(positions[..., None] / self._periods).to(self._words.dtype)
        for layer, (projection, weight) in enumerate(self._layers):
            window = self._windows[layer]
            heads = (torch.nn.functional.layer_norm(x, x.shape[-1:]) @ projection).unflatten(-1, (sum(self._heads), -1))
            q, k, v = heads.split(self._heads, 2)
            forward.write(layer, k, v)
            sides = (-1, -1) if window is None else (window - 1, 0)
            out = forward.attend(layer, q, config=self.config, window_size=sides)
            x = x + torch.tanh(out.flatten(2) @ weight)
        return (x if keep is None else x[:, keep]) @ self._words.t()
