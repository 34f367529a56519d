"""Run a function on several real ranks (processes with a gloo group) from inside a test.

    from support.ranks import run_distributed

    def _ranks_add_up(rank, world, scale):          # top level: the workers import it by name
        x = torch.full((4,), scale * rank)
        dist.all_reduce(x)
        return x

    def test_sum():
        assert run_distributed(_ranks_add_up, 4, 2.0)[3].tolist() == [12.0] * 4

    @on_ranks(4)                                     # or the ranks assert by themselves
    def test_sum_on_every_rank(rank):
        ...

Workers are forked from a server that has torch imported, and are kept for the rest of the session, so a call costs
milliseconds. Every call gets a process group of its own. A pool in which a rank failed is thrown away.
"""

import atexit
import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import inspect
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback

import numpy as np
import torch
import torch.distributed as dist

from support.turns import enough_cores

SEED = 1234
START_TIMEOUT = 120.0  # seconds for a pool of workers to come up
patience = 1  # times as long a limit of run_distributed: more for slow tests, see conftest.py
CROWDED = 100  # threads of a rank whose groups were never freed: each wakes up 100 times a second
GRACE = 2.0  # seconds in which the other ranks may still report after the first failure
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
    "DS_ACCELERATOR": "cpu",
    "TORCH_COMPILE_DISABLE": "1",  # Megatron compiles a few small functions with C++, on every rank
}
# What the fork server imports beforehand; the optional ones only if the session has imported the package already. Ranks
# that import by themselves take seconds each: a Transformers model imports torch._dynamo, ZeRO torch.distributed.fsdp.
PRELOAD = ("numpy", "torch", "torch.distributed", "pytest")
PRELOAD_IF_IMPORTED = {
    "support.triton_interpreter": (),
    "torch._dynamo": (),
    "hypothesis": (),
    "megatron.core": (),
    "transformers": ("transformers.models.llama.modeling_llama",),
    "deepspeed": ("torch.distributed.fsdp",),
    "accelerate": ("torch.distributed.fsdp", "transformers.trainer", "accelerate.utils"),
    "megatron_tree": (),
}
POISONED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)


class DistributedTestError(RuntimeError):
    """A rank raised, died or did not finish. `failures` maps each rank that reported one to its traceback."""

    def __init__(self, message, failures=None, unfinished=()):
        super().__init__(message)
        self.failures = failures or {}
        self.unfinished = tuple(unfinished)


def num_threads(default):
    """Threads of torch in the session, and in each rank, where launch/portable.sh asks for a number of them."""
    return int(os.environ.get("TREE_TEST_THREADS") or default)


def seed_everything(seed=SEED):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def largest(numbers):
    """The largest of some errors; NaN if one of them is NaN, which `max` may lose: max(0.0, nan) is 0.0."""
    return float(np.max([float(number) for number in numbers]))


@contextlib.contextmanager
def poisoned_empty():
    """Fill every uninitialised floating-point tensor with NaN, so that reading one shows."""

    def poison(tensor):
        if tensor.dtype in POISONED_DTYPES and tensor.device.type != "meta":
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    def wrap(factory):
        def poisoned(*args, **kwargs):
            return poison(factory(*args, **kwargs))

        return poisoned

    places = [(torch, name) for name in ("empty", "empty_like", "empty_strided", "empty_permuted")]
    places += [(torch.Tensor, name) for name in ("new_empty", "new_empty_strided")]
    originals = [getattr(owner, name) for owner, name in places]
    with torch.device("meta"):
        torch.empty(0)  # at its first use, torch notes which functions a default device applies to
    for (owner, name), factory in zip(places, originals, strict=True):
        setattr(owner, name, wrap(factory))
    try:
        yield
    finally:
        for (owner, name), factory in zip(places, originals, strict=True):
            setattr(owner, name, factory)


def run_distributed(fn, world_size, *args, timeout=120.0, env=None, fresh=False):
    """Run `fn(rank, world, *args)` on `world_size` ranks and return the list of their results.

    Args:
        fn: a function at the top level of an importable module (a test module is one).
        world_size: number of processes; a gloo group over all of them is the default group while `fn` runs.
        args: picklable, the same on every rank.
        timeout: seconds for the whole call; also the time limit of the group's collectives. Times `patience`.
        env: environment variables set in the workers during the call.
        fresh: use new processes and throw them away afterwards, for a `fn` that changes global state
            (Megatron's parallel state, a monkey patch, a signal handler).
    Returns: results by rank. Tensors come back on the CPU, as copies.
    Raises: DistributedTestError with the first failing rank's traceback, or the ranks that had not finished and where
        they were. No process of the pool is alive any more when it is raised.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: at least one rank is needed")
    task, timeout = pickle.dumps((fn, args)), patience * timeout
    with enough_cores(world_size):
        pool = _Pool(world_size) if fresh else _pools.pop(world_size, None) or _Pool(world_size)
        try:
            results = pool.run(task, timeout, env or {})
        except BaseException:
            pool.kill()
            raise
    if fresh or pool.is_crowded():
        pool.kill()
    else:
        _pools[world_size] = pool
    return results


def on_ranks(world_size=None, **options):
    """A test that runs on ranks, whose assertions are made there. It is given its parameters and fixtures, and `rank`
    and `world` if it asks for them.

    world_size: number of ranks; None: the test's parameter `world`. options: of `run_distributed`.
    """

    def decorate(fn):
        places = ("rank",) if world_size is None else ("rank", "world")
        parameters = inspect.signature(fn).parameters
        names = [name for name in parameters if name not in places]

        @functools.wraps(fn)
        def test(**arguments):
            world = world_size or arguments.pop("world")
            run_distributed(_run_test, world, fn.__module__, fn.__name__, arguments, **options)

        del test.__wrapped__  # else pytest would ask for a fixture `rank`
        test.__signature__ = inspect.Signature([parameters[name] for name in names])
        test.of_rank = fn
        return test

    return decorate


def _run_test(rank, world, module, name, arguments):
    fn, places = getattr(importlib.import_module(module), name).of_rank, {"rank": rank, "world": world}
    fn(**arguments, **{name: x for name, x in places.items() if name in inspect.signature(fn).parameters})


@contextlib.contextmanager
def as_launched():
    """In this context a rank is as torchrun starts it: without a group, which `init_process_group()` makes as it does
    there. It is left open, as every group of a job. All ranks enter it."""
    from megatron_tree.core.comm.rendezvous import host_store

    if dist.get_rank() == 0:
        _agents.append(host_store())
    port = [_agents[-1].port if _agents else None]
    dist.broadcast_object_list(port)
    dist.barrier()
    dist.destroy_process_group()
    with environment({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port[0], "TORCHELASTIC_USE_AGENT_STORE": "True"}):
        yield


def close_pools():
    """End all workers. Called at the end of the session."""
    while _pools:
        _pools.popitem()[1].kill()


_pools = {}
_groups = itertools.count()
_store = None
_agents = []  # of rank 0: stores of the groups that a job's ranks have started by themselves
atexit.register(close_pools)


def _session_store():
    global _store
    if _store is None:
        # bound to IPv4: of a peer at ::ffff:127.0.0.1 the store asks the name server for the name, which may take 5 s
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            port = listener.getsockname()[1]
            options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
            _store = dist.TCPStore("127.0.0.1", port, **options)
    return _store


def fork_server():
    context = multiprocessing.get_context("forkserver")
    optional = [(name, *parts) for name, parts in PRELOAD_IF_IMPORTED.items() if name in sys.modules]
    context.set_forkserver_preload([*PRELOAD, *itertools.chain(*optional)])
    return context


class _Pool:
    """`world_size` worker processes, each the leader of a process group of its own, joined by pipes to this one."""

    def __init__(self, world_size):
        self.connections, self.processes = [], []
        self.traces = tempfile.TemporaryDirectory(prefix="ranks-")
        context = fork_server()
        server_env = {**WORKER_ENV, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            with environment(server_env):  # inherited by the fork server, which starts with the first worker
                for rank in range(world_size):
                    ours, theirs = context.Pipe()
                    worker = context.Process(target=_worker, args=(theirs, self._trace(rank)), daemon=True)
                    worker.start()
                    theirs.close()
                    self.connections.append(ours)
                    self.processes.append(worker)
            self._collect(time.monotonic() + START_TIMEOUT, START_TIMEOUT)
        except BaseException:
            self.kill()
            raise

    def _trace(self, rank):
        return os.path.join(self.traces.name, str(rank))

    def run(self, task, timeout, env):
        deadline = time.monotonic() + timeout
        prefix = f"group{next(_groups)}"
        world = len(self.connections)
        for rank, connection in enumerate(self.connections):
            job = (rank, world, task, timeout, env, list(sys.path), os.getcwd(), _session_store().port, prefix)
            with contextlib.suppress(OSError):  # a worker that is gone is named by _collect
                connection.send(job)
        results = self._collect(deadline, timeout)
        for connection in self.connections:
            connection.send(None)  # every rank is done: the group may be closed
        return results

    def _collect(self, deadline, timeout):
        results, failures = {}, {}
        while len(results) + len(failures) < len(self.connections):
            pending = {c: r for r, c in enumerate(self.connections) if r not in results and r not in failures}
            ready = multiprocessing.connection.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending[connection]
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    self.processes[rank].join(30.0)
                    code = self.processes[rank].exitcode
                    failures = {rank: f"the process died, exit code {code}\n", **failures}  # a cause: goes first
                else:
                    (results if succeeded else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            raise self._failure(failures)
        unfinished = [rank for rank in range(len(self.connections)) if rank not in results]
        if unfinished:
            message = f"timed out after {timeout:g} s; ranks that had not finished: {unfinished}\n"
            raise DistributedTestError(message + self._stacks(unfinished), unfinished=unfinished)
        return [results[rank] for rank in range(len(self.connections))]

    def _failure(self, failures):
        (first, text), *others = failures.items()
        message = f"rank {first} of {len(self.connections)} failed:\n{text}"
        for rank, other in others:
            message += f"rank {rank} failed, too: {other.strip().splitlines()[-1]}\n"
        return DistributedTestError(message, failures)

    def _stacks(self, ranks):
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        end, text, paths = time.monotonic() + 5.0, "", [self._trace(rank) for rank in ranks]
        while time.monotonic() < end and not all(os.path.exists(x) and os.path.getsize(x) for x in paths):
            time.sleep(0.05)
        time.sleep(0.2)
        for rank in ranks:
            with contextlib.suppress(OSError), open(self._trace(rank)) as file:
                text += f"rank {rank} was at:\n{file.read()}"
        return text

    def is_crowded(self):
        tasks = [f"/proc/{process.pid}/task" for process in self.processes]
        return any(os.path.isdir(path) and len(os.listdir(path)) > CROWDED for path in tasks)

    def kill(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in self.processes:
            process.join(10.0)
        for connection in self.connections:
            connection.close()
        self.traces.cleanup()


@contextlib.contextmanager
def environment(values):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _worker(connection, trace_path):
    """Serve jobs. A job's group stays open until all ranks are done: else the others fail with "connection reset"."""
    os.setpgid(0, 0)
    _die_with_parent()
    torch.set_num_threads(num_threads(default=1))
    gc.freeze()  # what the fork server has imported: collections leave it alone
    with open(trace_path, "w") as trace, poisoned_empty():
        faulthandler.register(signal.SIGUSR1, file=trace, all_threads=False)
        connection.send_bytes(pickle.dumps((True, None)))
        while True:
            try:
                job = connection.recv()
            except EOFError:
                os._exit(0)
            if job is None:
                if dist.is_initialized():
                    dist.destroy_process_group()
                _agents.clear()
                gc.collect()  # a gloo group that is left in a cycle has a thread that wakes up 100 times a second
                gc.freeze()  # what is left, modules for the most part, is not looked at again
                continue
            try:
                reply = pickle.dumps((True, _run_job(*job)))
            except BaseException:
                reply = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(reply)


def _run_job(rank, world, task, timeout, env, path, directory, port, prefix):
    sys.path[:] = path
    os.chdir(directory)
    with environment({**WORKER_ENV, "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, **env}):
        fn, args = pickle.loads(task)
        seed_everything()
        dist.set_debug_level_from_env()
        limit = datetime.timedelta(seconds=timeout)
        store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        return fn(rank, world, *args)


def _die_with_parent():
    """Ask the kernel to kill this process when the fork server ends, which it does with the test session."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
