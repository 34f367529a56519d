"""Drawn calls of recurrent layers and their derivatives: how they are drawn, run on a rank, and judged.

The oracle is the same function of the whole sequence on one rank, token by token, differentiated by torch.
"""

import dataclasses
import itertools
import random

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from megatron_tree import Decay, TreeConfig, prefix_tree, tree_convolution, tree_halo, tree_recurrence, tree_scan
from megatron_tree.core.layout import Dispatched, Packed, shard_segments, spread_tree
from support.fuzz import TIMEOUT_S, check_close, magnitude, randn, told
from support.fuzz_layouts import dispatched, documents, on_one_rank, rows_of
from support.prefix_trees import grown
from support.recurrences import decaying, delta_rule

BACKWARDS = {"gradient": 1, "double backward": 2, "third backward": 3}
WAYS = (
    *BACKWARDS,
    "tangent",
    "jvp of grad",
    "grad of jvp",
    "backward of jvp",
    "forward over reverse",
    "jvp of jvp",
)
FUNCTIONS = ("recurrence", "layer", "scan", "convolution", "halo")
RECURRENCES = {"delta rule": delta_rule, "decay": decaying, "decay of rows": decaying}
TRANSITIONS = {"delta rule": lambda m, s: m @ s, "decay": lambda m, s: m[..., None, None] * s}
TRANSITIONS["decay of rows"] = lambda m, s: m[..., None] * s
OF_SEQUENCE = ("final", "last rows")  # results that every rank has
SHARED = ("state", "before", "weight", "")  # inputs that every rank has, and a whole loss
B, H, D, D_V = 1, 2, 2, 3


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DerivedLayer:
    """A call of `function`, and how it is differentiated."""

    layout: object
    """"zigzag", "contiguous", a tuple of lengths, `Packed` or `Dispatched`."""
    seq_len: int
    """Rows of all ranks together."""
    function: str = "recurrence"
    """Of `FUNCTIONS`; a "layer" is a convolution of the values before the recurrence."""
    way: str = "gradient"
    kernel: str = "delta rule"
    schedule: str = "auto"
    begins: bool = False
    """With an initial state, and rows before the sequence."""
    ends: bool = False
    count: int = 2
    wrt: tuple[str, ...] = ()
    """Names of inputs by which it is differentiated; none: all."""
    curved: bool = True
    """Whether the loss is not linear in the results."""
    recomputed: str = ""
    """The way of checkpointing: "reentrant" or "non-reentrant"."""
    in_place: bool = False
    """Whether results are changed in place."""
    seed: int = 0

    __repr__ = told

    @property
    def inputs(self):
        """The names of the inputs of a recurrence but its values."""
        return ("q", "k", "g", "beta") if self.kernel == "delta rule" else ("q", "k", "g")

    @property
    def names(self):
        """The names of all inputs."""
        state, before = (("state",), ("before",)) if self.begins else ((), ())
        return {
            "recurrence": (*self.inputs, "v", *state),
            "layer": (*self.inputs, "v", "weight", *state, *before),
            "scan": ("transition", "update", *state),
            "convolution": ("v", "weight", *before),
            "halo": ("v", *before),
        }[self.function]

    @property
    def leaves(self):
        return tuple(name for name in self.names if not self.wrt or name in self.wrt)

    def tensors(self, world):
        """{name: input} of the whole sequence."""
        s, n = self.seq_len, sum(map(len, self.segments(world)))
        of_state = {"delta rule": (D, D), "decay": (), "decay of rows": (D,)}[self.kernel]
        shapes = dict(q=(B, s, H, D), k=(B, s, H, D), g=(B, s, H), beta=(B, s, H), v=(B, s, H, D_V))
        shapes |= dict(state=(B, H, D, D_V), weight=(self.count + 1,), before=(B, self.count, H, D_V))
        shapes |= dict(transition=(n, B, H, *of_state), update=(n, B, H, D, D_V))
        if self.kernel == "decay of rows":
            shapes["g"] = B, s, H, D
        found = {name: randn(self.seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
        found["k"] = found["k"] / found["k"].norm(dim=-1, keepdim=True)
        found["g"], found["beta"] = -0.1 * found["g"] ** 2, found["beta"].sigmoid()
        return {name: found[name] for name in self.names}

    @property
    def is_single(self):
        """Whether there is one sequence, not packed documents or a tree."""
        return not isinstance(self.layout, (Packed, Dispatched)) or (len(self.layout.lengths) == 1 and not self.tree)

    @property
    def tree(self):
        """The runs of a prefix tree, if there is one."""
        return getattr(self.layout, "tree", ())

    def segments(self, world):
        """Those of every rank. A scan's sequence may have any length, whose ranks have tokens."""
        n = 2 * world if self.function == "scan" and isinstance(self.layout, str) else self.seq_len
        found = [shard_segments(n, r, world, self.layout.by_run if self.tree else self.layout) for r in range(world)]
        if not self.tree:
            return found
        return [[s._replace(pos=self.tree[s.seq].depth + s.pos) for s in of_rank] for of_rank in found]

    def documents(self):
        """{number: rows of the whole sequence}, of those with tokens; of a tree's runs."""
        if self.tree:
            cuts = itertools.pairwise(itertools.accumulate((run.length for run in self.tree), initial=0))
            return dict(enumerate(itertools.starmap(slice, cuts)))
        found = shard_segments(self.seq_len, 0, 1, on_one_rank(self.layout, self.seq_len))
        return {s.seq: slice(s.row, s.row + s.length) for s in found}

    def paths(self):
        """{number: rows of the whole sequence}, of documents; of a tree those from its root to the run's end."""
        paths = {}
        for number, rows in self.documents().items():
            before = paths.get(self.tree[number].parent, []) if self.tree else []
            paths[number] = [*before, *range(rows.start, rows.stop)]
        return paths

    def share(self, name, x, rank, world):
        """This rank's of an input or a result of the whole sequence."""
        if name in (*OF_SEQUENCE, *SHARED):
            return x
        if name in ("transition", "update", "states", "halos"):
            return x.split([len(of_rank) for of_rank in self.segments(world)])[rank]
        return x[:, rows_of(self.layout, self.seq_len, rank, world)]


@st.composite
def layouts(draw, world):
    """(layout, rows of all ranks)."""
    kinds = ["zigzag", "contiguous", "uneven", "uneven", "packed", "dispatched", "runs", "tree", "tree", "cut tree"]
    kind = draw(st.sampled_from(kinds))
    if kind in ("zigzag", "contiguous"):
        return kind, (2 * world if kind == "zigzag" else world) * draw(st.integers(0, 3))
    if kind == "uneven":
        lengths = tuple(draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 5, 8]), min_size=world, max_size=world)))
        return lengths, sum(lengths)
    if kind in ("tree", "cut tree"):
        rows = grown(random.Random(draw(st.integers(0, 999))), draw(st.integers(1, 5)), longest=5)
        tree = prefix_tree(rows, min_shared=draw(st.sampled_from([1, 1, 3]))).runs()
        layout = spread_tree(tree, world)
        if kind == "tree":
            return layout, layout.rows(world) * world
    if kind in ("runs", "cut tree"):  # one document in any runs, as a prompt lies in a cache
        total = draw(st.integers(0, 14)) if kind == "runs" else layout.starts[-1]
        cuts = sorted(draw(st.lists(st.integers(0, total), max_size=5)))
        runs = [(a, b - a) for a, b in itertools.pairwise((0, *cuts, total)) if b > a]
        holders = draw(st.lists(st.integers(0, world - 1), min_size=len(runs), max_size=len(runs)))
        shares = tuple(tuple(run for run, holder in zip(runs, holders) if holder == r) for r in range(world))
        rows = max(sum(n for _, n in share) for share in shares) + draw(st.integers(0, 1))
        return Dispatched((total,), (total,), shares, rows, () if kind == "runs" else tuple(tree)), rows * world
    layout = draw(documents(world) if kind == "packed" else dispatched(world))
    return layout, layout.rows(world) * world


@st.composite
def derived_layers(draw, world):
    layout, seq_len = draw(layouts(world))
    drawn = DerivedLayer(
        layout=layout,
        seq_len=seq_len,
        function=draw(st.sampled_from(FUNCTIONS)),
        way=draw(st.sampled_from(WAYS)),
        kernel=draw(st.sampled_from(list(RECURRENCES))),
        schedule=draw(st.sampled_from(["auto", "gather", "exchange"])),
        begins=draw(st.booleans()),
        ends=draw(st.booleans()),
        count=draw(st.integers(1, 5)),
        curved=draw(st.booleans()),
        recomputed=draw(st.sampled_from(["", "reentrant", "non-reentrant"])),
        in_place=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )
    changes = {"wrt": tuple(draw(st.lists(st.sampled_from(drawn.names), max_size=2, unique=True)))}
    if drawn.way not in BACKWARDS or (drawn.way != "gradient" and drawn.recomputed == "reentrant"):
        changes["recomputed"] = ""
    if not drawn.is_single:
        changes |= {"begins": False, "ends": False, "wrt": tuple(set(changes["wrt"]) - {"state", "before"})}
    return dataclasses.replace(drawn, **changes)


def convolved(weight, x):
    """A causal function of every row and those before it, zeros before the first."""
    shifted = [torch.cat((torch.zeros_like(x[:, :i]), x[:, : x.shape[1] - i]), 1) for i in range(len(weight))]
    return sum(w * y for w, y in zip(weight, shifted)).tanh()


def sharded(case, given):
    """{name: result} of this rank, from its inputs."""
    options = dict(cp_group=dist.group.WORLD, layout=case.layout, config=TreeConfig(timeout_s=TIMEOUT_S))
    rows = dict(before=given.get("before"), return_final=case.ends, **options)
    state = dict(initial_state=given.get("state"), return_final_state=case.ends, schedule=case.schedule, **options)
    results, v = {}, given.get("v")
    if case.function == "scan":
        results["states"], results["final"] = tree_scan(given["transition"], given["update"], **state)
    if case.function == "halo":
        halos, results["last rows"] = tree_halo(v, case.count, **rows)
        results["halos"] = halos.transpose(0, 1)
    if case.function in ("convolution", "layer"):
        v, results["last rows"] = tree_convolution(lambda x: convolved(given["weight"], x), v, case.count, **rows)
        results["out"] = v
    if case.function in ("recurrence", "layer"):
        decay = None if case.kernel == "delta rule" else Decay(given["g"], given["q"])
        inputs = [given[name] for name in case.inputs]
        results["out"], results["final"] = tree_recurrence(
            RECURRENCES[case.kernel], inputs, v, head_dim=D, decay=decay, **state
        )
    return {name: x for name, x in results.items() if x is not None}


def whole(case, world, given):
    """`sharded` for the whole sequence: for torch every result depends on all inputs, if by 0."""
    results, v = {}, given.get("v")
    if case.function == "scan":
        results["states"], results["final"] = _whole_scan(case, world, given)
    else:
        first = given.get("before", v.new_zeros(B, case.count, H, D_V))
        padded = {number: torch.cat((first, v[:, rows]), 1) for number, rows in case.paths().items()}
    if case.function in ("halo", "convolution", "layer"):
        results["last rows"] = next(iter(padded.values()), first)[:, -case.count :]
    if case.function == "halo":
        segments = itertools.chain(*case.segments(world))
        halos = [padded[s.seq][:, s.pos : s.pos + case.count] for s in segments]
        results["halos"] = torch.stack(halos) if halos else first.new_zeros(0, *first.shape)
    if case.function in ("convolution", "layer"):
        parts = {i: convolved(given["weight"], x)[:, case.count :] for i, x in padded.items()}
        results["out"] = v = _joined(case, parts, v)
    if case.function in ("recurrence", "layer"):
        state, parts = given.get("state"), {}
        results["final"] = v.new_zeros(B, H, D, D_V) if state is None else state
        for i, rows in case.paths().items():
            inputs = [given[name][:, rows] for name in case.inputs]
            parts[i], results["final"] = RECURRENCES[case.kernel](inputs, v[:, rows], state)
        results["out"] = _joined(case, parts, v)
    zero = sum(0 * x.exp().sum() for x in given.values())
    return {name: x + zero for name, x in results.items() if case.ends or name not in OF_SEQUENCE}


def _joined(case, parts, like):
    """The last rows of paths, and zeros in padding, as rows of the whole sequence."""
    out = torch.zeros_like(like)
    for i, rows in case.documents().items():
        own = parts[i][:, len(parts[i][0]) - (rows.stop - rows.start) :]
        out = torch.cat((out[:, : rows.start], own, out[:, rows.stop :]), 1)
    return out


def _whole_scan(case, world, given):
    segments = list(itertools.chain(*case.segments(world)))
    zeros = torch.zeros(B, H, D, D_V, dtype=torch.float64)
    first = given.get("state", zeros)
    states, lasts = [zeros] * len(segments), {}
    for i in sorted(range(len(segments)), key=lambda i: segments[i].pos):
        seq = segments[i].seq
        states[i] = lasts.get(seq, lasts.get(case.tree[seq].parent, first) if case.tree else first)
        after = TRANSITIONS[case.kernel](given["transition"][i], states[i]) + given["update"][i]
        lasts[seq] = after
    return torch.stack(states) if states else zeros.new_zeros(0, *zeros.shape), next(iter(lasts.values()), first)


def derivatives(case, call, given, tangents, upstream, ranks):
    """{name: derivative}, of results or by inputs. call: {name: input} -> {name: result}."""
    inputs, along = (tuple(tensors[name] for name in case.leaves) for tensors in (given, tangents))
    leaves = tuple(x.clone().requires_grad_() for x in inputs)

    def called(*leaves):
        results = call(given | dict(zip(case.leaves, leaves)))
        for x in results.values() if case.in_place else ():
            x.mul_(2)
        return results

    def loss(*leaves):
        if case.recomputed:
            results = _recomputed(case, called, leaves)
        else:
            results = called(*leaves)
        parts = {name: ((x + x**2 if case.curved else x) * upstream[name]).sum() for name, x in results.items()}
        return sum(x / ranks if name in OF_SEQUENCE else x for name, x in parts.items())

    def gradient(*leaves):
        return torch.func.grad(loss, tuple(range(len(leaves))))(*leaves)

    def change(*leaves):
        return torch.func.jvp(loss, leaves, along)[1]

    if case.way == "tangent":
        return torch.func.jvp(called, inputs, along)[1]
    if case.way == "jvp of jvp":
        return {"": torch.func.jvp(change, inputs, along)[1]}
    if case.way in BACKWARDS:
        total = loss(*leaves)
        for _ in range(BACKWARDS[case.way] - 1):
            found = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)
            total = sum((g * t).sum() for g, t in zip(found, along))
        total.backward()  # reentrant checkpoints know no other
        found = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    elif case.way == "jvp of grad":
        found = torch.func.jvp(gradient, inputs, along)[1]
    elif case.way == "grad of jvp":
        found = torch.func.grad(change, tuple(range(len(inputs))))(*inputs)
    elif case.way == "backward of jvp":
        found = torch.autograd.grad(change(*leaves), leaves, materialize_grads=True)
    else:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, along)]
            found = torch.autograd.grad(loss(*duals), duals, materialize_grads=True)
            found = [forward_ad.unpack_dual(g).tangent for g in found]
        found = [torch.zeros_like(x) if t is None else t for x, t in zip(leaves, found)]
    return dict(zip(case.leaves, found))


def _recomputed(case, called, leaves):
    names = []

    def run(*leaves):
        results = called(*leaves)
        names[:] = results
        return tuple(results.values())

    results = checkpoint(run, *leaves, use_reentrant=case.recomputed == "reentrant")
    return dict(zip(names, results))


def drawn(case, world):
    """Inputs, their tangents and the results' upstream gradients, of the whole sequence."""
    given = case.tensors(world)
    tangents = {name: randn(case.seed + 100 + i, *x.shape) for i, (name, x) in enumerate(given.items())}
    results = whole(case, world, given)
    return given, tangents, {name: randn(case.seed + 200 + i, *x.shape) for i, (name, x) in enumerate(results.items())}


def run(rank, world, case):
    """{name: derivative} of this rank."""
    mine = [{name: case.share(name, x, rank, world) for name, x in xs.items()} for xs in drawn(case, world)]
    found = derivatives(case, lambda given: sharded(case, given), *mine, world)
    return {name: x.detach() for name, x in found.items()}


def check(case, results):
    """Every rank's derivatives against the whole sequence's."""
    world, plain = len(results), dataclasses.replace(case, recomputed="")
    expected = derivatives(plain, lambda given: whole(case, world, given), *drawn(case, world), 1)
    for name, truth in expected.items():
        truth = truth.detach()
        allowed = 1e-11 * max(1.0, magnitude(truth))
        if name in SHARED:
            check_close(f"{name}, {case.way}", sum(x[name] for x in results), truth, allowed)
            continue
        for rank, found in enumerate(results):
            mine = case.share(name, truth, rank, world)
            check_close(f"{name} of rank {rank}, {case.way}", found[name], mine, allowed)
