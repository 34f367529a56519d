"""Calls of training attention for tests/core/test_fuzz_attention.py: how they are drawn, run on a rank, and judged."""

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st

from megatron_tree import TreeConfig, tree_attn_func, tree_attn_varlen_func
from megatron_tree.core import energy
from megatron_tree.core.dropout import keep_weights
from megatron_tree.core.layout import Dispatched, Packed, positions_of, sequences_of, shard_segments
from megatron_tree.core.plan import HeadSplit, grids
from megatron_tree.core.spec import AttnSpec, Dropout
from support.attention import alibi_mask, distances, seen_in
from support.fuzz import DTYPES, EPSILON, TIMEOUT_S, check_close, magnitude, randn, told
from support.fuzz_layouts import dispatched, documents, on_one_rank, padding_of, rows_of, slices

GRADIENTS = ("dq", "dk", "dv", "dsinks")


@dataclass(frozen=True, kw_only=True, repr=False)
class Call:
    """One call of tree_attn_func, or with documents of tree_attn_varlen_func, and its gradient."""

    layout: object
    """"zigzag", "contiguous", a tuple of lengths, `Packed` or `Dispatched`."""
    seq_len: int
    """Rows of all ranks together."""
    keys: tuple | None = None
    """(layout, seq_len) of the keys in cross attention."""
    heads: tuple[int, int] = (2, 1)
    head_dims: tuple[int, int] = (4, 4)
    batch: int = 1
    dtype: torch.dtype = torch.float64
    mask: tuple = ()
    """Items of causal, window_size, ranges, softcap, dropout_p, dropout_seed, softmax_scale, alibi_slopes."""
    sinks: bool = False
    lse: str = "not asked for"
    """Or "returned", or "in the loss"."""
    memory: str = "bshd"
    config: tuple = ()
    """Items of TreeConfig."""
    refused: str = ""
    """What the ValueError says that every rank must raise."""
    seed: int = 0

    __repr__ = told

    def inputs(self):
        """q, k, v, dout, dlse of the whole sequence, sinks."""
        (h, h_kv), (d, d_v), b, s = self.heads, self.head_dims, self.batch, self.seq_len
        n = s if self.keys is None else self.keys[1]
        shapes = [(b, s, h, d), (b, n, h_kv, d), (b, n, h_kv, d_v), (b, s, h, d_v)]
        tensors = [randn(self.seed + i, *shape, dtype=self.dtype) for i, shape in enumerate(shapes)]
        dlse = randn(self.seed + 4, b, h, s, dtype=torch.promote_types(self.dtype, torch.float32))
        dlse = dlse.masked_fill(padding_of(self.layout, s), 0.0)  # gives no gradients, not even a sink's
        return *tensors, dlse, randn(self.seed + 5, h) if self.sinks else None

    @property
    def shardings(self):
        """(layout, rows) of queries and keys."""
        mine = self.layout, self.seq_len
        return mine, self.keys or mine


@st.composite
def masks(draw, cross):
    mask = {}
    if cross or draw(st.integers(0, 2)) == 0:
        mask["causal"] = False
    if not cross and draw(st.booleans()):
        mask["window_size"] = draw(st.tuples(st.integers(-1, 12), st.integers(-1, 6)))
    if draw(st.integers(0, 3)) == 0:
        mask["softcap"] = draw(st.sampled_from([0.5, 2.0, 30.0]))
    if draw(st.integers(0, 3)) == 0:
        mask["dropout_p"] = draw(st.sampled_from([0.1, 0.5, 0.9]))
        mask["dropout_seed"] = draw(st.integers(0, 2**63 - 1))
    if draw(st.integers(0, 3)) == 0:
        mask["softmax_scale"] = draw(st.sampled_from([-0.7, 0.0, 1.0, 6.0]))
    return mask


@st.composite
def configs(draw, world, heads):
    """Valid items of TreeConfig for `world` ranks."""
    config = {"timeout_s": TIMEOUT_S, "check": draw(st.sampled_from(["first", "always", "never"]))}
    h, h_kv = heads
    u = draw(st.sampled_from([u for u in range(1, min(world, h) + 1) if world % u == 0]))
    kind = draw(st.sampled_from(["auto", "grid", "grid", "two grids", "cast", "ring"]))
    if u > 1 or draw(st.booleans()):
        config["ulysses_size"] = u
    if kind in ("cast", "ring"):
        config["schedule"] = kind
    if "grid" in kind:
        config["grid"] = draw(st.sampled_from(grids(world // u)))
    if kind == "two grids":
        config["grid_backward"] = draw(st.sampled_from(grids(world // u)))
    if kind != "ring" and draw(st.booleans()):
        local = HeadSplit.of(h, h_kv, u).n
        config["head_chunks"] = draw(st.sampled_from([n for n in range(1, local + 1) if local % n == 0]))
    config["transport"] = draw(st.sampled_from(["auto", "direct", "builtin"]))
    config["comm_dtype"] = draw(st.sampled_from(["auto", "fp32"]))
    return config


@st.composite
def calls(draw, world):
    """A valid call on `world` ranks."""
    forms = ["zigzag", "contiguous", "uneven", "packed", "dispatched", "cross", "packed cross"]
    form = draw(st.sampled_from(forms))
    cross, count = "cross" in form, draw(st.integers(0, 4))
    keys = None
    if "packed" in form:
        layout = draw(documents(world))
        seq_len, batch = sum(layout.padded), 1
        if cross:
            of_keys = draw(documents(world, len(layout.padded)))
            keys = of_keys, sum(of_keys.padded)
    elif form == "dispatched":
        layout, batch = draw(dispatched(world)), 1
        seq_len = layout.num_rows * world
    else:
        batch = draw(st.integers(1, 2))
        layout, seq_len = form, count * (2 * world if form == "zigzag" and world > 1 else world)
        if form == "uneven":
            layout = tuple(draw(st.lists(st.integers(0, 7), min_size=world, max_size=world)))
            seq_len = sum(layout)
        if cross:
            layout = draw(st.sampled_from(["zigzag", "contiguous"]))
            seq_len, n = 2 * world * count, 2 * world * draw(st.integers(0, 4))
            keys = layout, n
    h_kv = draw(st.sampled_from([1, 2, 3, 4]))
    heads = h_kv * draw(st.sampled_from([1, 1, 2, 3, 4])), h_kv
    dims = draw(st.sampled_from([(4, 4), (8, 8), (8, 4), (3, 5), (1, 1), (6, 16)]))
    mask, dtype = draw(masks(cross)), draw(DTYPES)
    if not cross and draw(st.integers(0, 3)) == 0:
        rows = draw(st.sampled_from([1, batch]))
        slopes = st.tuples(*[st.sampled_from([0.5, 0.125, 0.0, -0.0625])] * heads[0])  # fp32 has them
        mask["alibi_slopes"] = draw(st.tuples(*[slopes] * rows))
    if not isinstance(layout, (Packed, Dispatched)) and draw(st.integers(0, 3)) == 0:
        mask = {name: x for name, x in mask.items() if name in ("softcap", "softmax_scale")}
        mask["ranges"] = draw(slices(seq_len, seq_len if keys is None else keys[1]))
    config = draw(configs(world, heads))
    sinks, lse = draw(st.booleans()), draw(st.sampled_from(["not asked for", "returned", "in the loss"]))
    if dtype in (torch.bfloat16, torch.float16):  # what torch's own attention can be compared with
        mask = {name: x for name, x in mask.items() if name in ("causal", "window_size", "ranges", "alibi_slopes")}
        sinks, lse = False, "not asked for"
    backends = ["auto", "auto", "reference"]
    # exchanged heads bring every rank a gradient of a returned lse, zeros where the loss has none
    flowing = lse == "in the loss" or (lse == "returned" and config.get("ulysses_size", 1) > 1)
    biased = mask.get("softcap") or mask.get("alibi_slopes")
    if not (biased or mask.get("dropout_p") or mask.get("softmax_scale", 1.0) <= 0 or flowing):
        backends.append("aten")
    if dtype == torch.float32 and world < 3:  # Triton's interpreter takes its time
        backends.append("triton")
    config["backend"] = draw(st.sampled_from(backends))
    return Call(
        layout=layout,
        seq_len=seq_len,
        keys=keys,
        heads=heads,
        head_dims=dims,
        batch=batch,
        dtype=dtype,
        mask=tuple(mask.items()),
        sinks=sinks,
        lse=lse,
        memory=draw(st.sampled_from(["bshd", "sbhd", "strided"])),
        config=tuple(config.items()),
        seed=draw(st.integers(0, 1000)),
    )


REFUSED = {  # what must be refused: (items of the mask, items of the config)
    "softcap=-1.0": ({"softcap": -1.0}, {}),
    "window_size=(-2, 0)": ({"window_size": (-2, 0)}, {}),
    "dropout_p=1.0": ({"dropout_p": 1.0, "dropout_seed": 1}, {}),
    "dropout_seed=None": ({"dropout_p": 0.5, "dropout_seed": None}, {}),
    "cells": ({}, {"grid": (7, 1)}),
    "head_chunks=7": ({}, {"head_chunks": 7}),
    "ulysses_size=5": ({}, {"ulysses_size": 5}),
    "softmax_scale=inf": ({"softmax_scale": float("inf")}, {}),
}


@st.composite
def calls_or_refusals(draw, world):
    """A valid call, or now and then one that every rank must refuse, after which the group goes on."""
    call = draw(calls(world))
    if draw(st.integers(0, 9)):
        return call
    what = draw(st.sampled_from(list(REFUSED)))
    mask, config = REFUSED[what]
    config = {"timeout_s": TIMEOUT_S} | config
    items = dict(layout=call.layout, seq_len=call.seq_len, keys=call.keys, heads=call.heads, batch=call.batch)
    return Call(**items, mask=tuple((dict(call.mask) | mask).items()), config=tuple(config.items()), refused=what)


def _laid_out(x, memory):
    """x [b, s, ...] with other strides."""
    if memory == "sbhd":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return torch.stack((x, x), -1).flatten(-2)[..., ::2] if memory == "strided" else x.clone()


def run(rank, world, call):
    """{result: tensor} of this rank, or the text of its ValueError."""
    q, k, v, dout, dlse, sinks = call.inputs()
    rows, cols = (rows_of(*sharding, rank, world) for sharding in call.shardings)
    for x, sharding in ((q, call.shardings[0]), (k, call.shardings[1]), (v, call.shardings[1])):
        x[:, padding_of(*sharding)] = float("nan")  # nothing may come of what lies in padding
    leaves = [_laid_out(x[:, at], call.memory).requires_grad_() for x, at in ((q, rows), (k, cols), (v, cols))]
    options = dict(call.mask, cp_group=dist.group.WORLD, return_lse=call.lse != "not asked for")
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.tensor(options["alibi_slopes"]).squeeze(0)
    if sinks is not None:
        leaves.append(sinks.to(torch.promote_types(call.dtype, torch.float32)).requires_grad_())
        options["sinks"] = leaves[3]
    try:
        options["config"] = TreeConfig(**dict(call.config))
        results = called(call, *leaves[:3], options)
        gradients = [dout[:, rows], dlse[..., rows]][: 1 + (call.lse == "in the loss")]
        grads = torch.autograd.grad(results[: len(gradients)], leaves, gradients)
    except ValueError as error:
        return str(error)
    found = dict(zip(("out", "lse"), (x.detach() for x in results)))
    return found | dict(zip(GRADIENTS, grads))


def called(call, q, k, v, options):
    """(out,) or (out, lse)."""
    if isinstance(call.layout, Dispatched):
        found = tree_attn_varlen_func(q[0], k[0], v[0], layout=call.layout, **options)
        return tuple(x[None] for x in (found if options["return_lse"] else (found,)))
    if not isinstance(call.layout, Packed):
        found = tree_attn_func(q, k, v, layout=call.layout, **options)
        return found if options["return_lse"] else (found,)

    def bounds(lengths):
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)

    cu = dict(cu_seqlens=bounds(call.layout.lengths), cu_seqlens_padded=bounds(call.layout.padded))
    if call.keys is not None:
        cu["cu_seqlens_kv"], cu["cu_seqlens_kv_padded"] = bounds(call.keys[0].lengths), bounds(call.keys[0].padded)
    found = tree_attn_varlen_func(q[0], k[0], v[0], **cu, **options)
    return tuple(x[None] for x in (found if options["return_lse"] else (found,)))


def oracle_options(call):
    """What the energy's functions take beside tensors, for the whole sequence."""
    q, *_, sinks = call.inputs()
    mask = dict(call.mask)
    p, seed, drawn = mask.pop("dropout_p", 0.0), mask.pop("dropout_seed", None), mask.pop("ranges", None)
    mask.setdefault("softmax_scale", q.shape[-1] ** -0.5)
    spec = AttnSpec(**mask, dropout=Dropout(p, seed) if p else None)
    places = [(shard_segments(n, 0, 1, on_one_rank(layout, n)), n) for layout, n in call.shardings]
    (q_pos, k_pos), (q_seq, k_seq) = ([of(*x) for x in places] for of in (positions_of, sequences_of))
    keep = energy.visible(q_pos, k_pos, spec) if drawn is None else seen_in(drawn, len(q_pos), len(k_pos))
    keep &= (q_seq[:, None] == k_seq) & (k_seq >= 0)
    weights = None
    if p:
        positions = dict(q_positions=q_pos, k_positions=k_pos, q_sequences=q_seq)
        weights = keep_weights(spec.dropout, batch=q.shape[0], num_heads=q.shape[2], **positions)
    return dict(spec=spec, keep=keep, sinks=sinks, keep_weights=weights, distance=distances(q_pos, k_pos))


def truth(call):
    """({result: float64 tensor of the whole sequence}, what may be seen [s_q, s_k], distances [s_q, s_k])."""
    *tensors, dlse, _ = call.inputs()
    exact, options = [x.double() for x in tensors], oracle_options(call)
    out, lse = energy.attention(*exact[:3], **options)
    grads = energy.attention_grads(*exact, **options, dlse=dlse.double() if call.lse == "in the loss" else None)
    return dict(zip(("out", "lse", *GRADIENTS), (out, lse, *grads))), options["keep"], options["distance"]


def check(call, results):
    """Every rank's results against the truth, or every rank's refusal."""
    if call.refused:
        wrong = [r for r, x in enumerate(results) if not isinstance(x, str) or call.refused not in x]
        assert not wrong, f"ranks {wrong} did not refuse {call.refused}: {results[wrong[0]]}"
        return
    for rank, found in enumerate(results):
        assert not isinstance(found, str), f"rank {rank} refused a valid call: {found}"
    expected, keep, distance = truth(call)
    allowed = _allowed(call, expected, keep, distance)
    world = len(results)
    for rank, found in enumerate(results):
        rows, cols = (rows_of(*sharding, rank, world) for sharding in call.shardings)
        for name, x in found.items():
            if name != "dsinks":
                t = expected[name]
                t = t[..., rows] if name == "lse" else t[:, cols if name in ("dk", "dv") else rows]
                check_close(f"{name} of rank {rank}", x, t, allowed[name])
                padded = x.new_zeros(()) if name == "lse" else x[:, ~keep.any(1)[rows]] if name == "out" else x[:, :0]
                assert not padded.any(), f"{name} of rank {rank}: not 0 where nothing is seen"
    if call.sinks:
        check_close("dsinks", sum(x["dsinks"].double() for x in results), expected["dsinks"], allowed["dsinks"])


def _allowed(call, expected, keep, distance):
    """{result: error allowed}: 1e-10 in float64; in fp32 a few roundings; below, the rule: at most 2 (gradients: 3)
    times the error of torch's dense attention in that dtype, but never less than a few roundings of the result."""
    sizes = {name: max(1.0, magnitude(x)) for name, x in expected.items()}
    if call.dtype == torch.float64:
        return {name: 1e-10 * n for name, n in sizes.items()}
    slopes = torch.tensor(dict(call.mask).get("alibi_slopes", ((0.0,),)))
    logits = 1.0 + abs(dict(call.mask).get("softmax_scale", 1.0)) * max(1.0, call.head_dims[0] ** 0.5)
    logits += magnitude(slopes) * magnitude(distance * keep)
    few = {name: 64 * EPSILON[torch.float32] * logits * n for name, n in sizes.items()}
    if call.dtype == torch.float32:
        return few
    q, k, v, dout = (x.detach() for x in call.inputs()[:4])
    leaves = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
    mask = keep if not slopes.any() else alibi_mask(keep, slopes, distance).to(call.dtype)
    options = dict(attn_mask=mask, enable_gqa=True, scale=dict(call.mask).get("softmax_scale"))
    out = F.scaled_dot_product_attention(*leaves, **options)
    dense = [x.transpose(1, 2) for x in (out, *torch.autograd.grad(out, leaves, dout.transpose(1, 2)))]
    for name, x in zip(("out", "dq", "dk", "dv"), dense):
        error = magnitude((x.double() - expected[name]).nan_to_num())  # a row that sees nothing may be NaN there
        factor = 2 if name == "out" else 3
        few[name] = max(factor * error, 4 * EPSILON[call.dtype] * sizes[name])
    return few
