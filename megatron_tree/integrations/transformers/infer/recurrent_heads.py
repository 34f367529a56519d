"""How ranks share the heads of recurrent layers: tables of which numbers in a weight belong to which head.

A layer has value heads, each with a state of its own, and key heads, each of which serves as many neighbouring value
heads: the keys of delta rules, the groups (B and C) of Mamba 2. Where a layer knows no heads, each channel is one. A
rank holds a run of value heads and the key heads that they read: whole key heads, or, with more ranks than key heads,
some value heads of one.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

from torch import nn

from ....core.cache.gathered import Piece, even_shares

KEY, VALUE = "key", "value"


class Block(NamedTuple):
    """Neighbouring rows of a weight: so many for each key head or each value head, in the order of the heads."""

    heads: str
    rows: int | str
    """For one head: a number, or the attribute of the layer that has it."""


class PerKeyHead(tuple[Block, ...]):
    """Blocks of one key head and its value heads, and then those of the next."""


class Rule(NamedTuple):
    """How the weights of a kind of recurrent layer are made of heads. Names that a layer lacks don't count.

    num_keys, num_values: attributes with the numbers of heads.
    rows: by parameter, module or buffer the blocks of its rows. columns: by projection, of its input; its partial
        results are summed over the ranks.
    sizes: attributes with the size of some blocks.
    whole: projections that every rank has whole.
    states: by kind ("conv", "recurrent") the blocks of dimension 1.
    norm: the norm of the values of all value heads that share a key head, if it is one.
    """

    num_keys: str
    num_values: str
    rows: dict[str, tuple[Block, ...]]
    columns: dict[str, tuple[Block, ...]]
    sizes: dict[str, tuple[Block, ...]]
    states: dict[str, tuple[Block, ...]]
    whole: tuple[str, ...] = ()
    norm: str = ""


_HEADS = (Block(VALUE, 1),)
_K, _V = Block(KEY, "head_k_dim"), Block(VALUE, "head_v_dim")
_GATED_DELTA = Rule(  # Qwen3-Next, Qwen3.5, OLMo Hybrid
    num_keys="num_k_heads",
    num_values="num_v_heads",
    rows={
        "in_proj_qkv": (_K, _K, _V),
        **dict.fromkeys(("q_proj", "k_proj"), (_K,)),
        **dict.fromkeys(("v_proj", "in_proj_z", "g_proj"), (_V,)),
        **dict.fromkeys(("in_proj_a", "in_proj_b", "a_proj", "b_proj", "A_log", "dt_bias"), _HEADS),
        "in_proj_qkvz": PerKeyHead((_K, _K, _V, _V)),
        "in_proj_ba": PerKeyHead(_HEADS * 2),
        "conv1d": (_K, _K, _V),
    },
    columns={"out_proj": (_V,), "o_proj": (_V,)},
    sizes={
        "num_k_heads": (Block(KEY, 1),),
        "num_v_heads": _HEADS,
        "key_dim": (_K,),
        "value_dim": (_V,),
        "conv_dim": (_K, _K, _V),
    },
    states={"conv": (_K, _K, _V), "recurrent": _HEADS},
)

_D = Block(VALUE, "head_dim")
_KIMI_DELTA = Rule(  # Kimi Linear, Bailing hybrid
    num_keys="num_heads",
    num_values="num_heads",
    rows={
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_b_proj", "g_proj"), (_D,)),
        **dict.fromkeys(("forget_gate.f_b_proj", "forget_gate.f_proj", "forget_gate.dt_bias"), (_D,)),
        **dict.fromkeys(("b_proj", "forget_gate.A_log"), _HEADS),
        "conv1d": (_D, _D, _D),
    },
    columns={"o_proj": (_D,)},
    sizes={
        **dict.fromkeys(("num_heads", "forget_gate.num_heads"), _HEADS),
        **dict.fromkeys(("qkv_dim", "forget_gate.qkv_dim"), (_D,)),
        "conv_dim": (_D, _D, _D),
    },
    states={"conv": (_D, _D, _D), "recurrent": _HEADS},
    whole=("g_a_proj", "forget_gate.f_a_proj"),
)

_B = Block(KEY, "ssm_state_size")
_MAMBA2 = Rule(  # Bamba, Granite hybrid, Falcon-H1, Nemotron-H, Zamba 2
    num_keys="n_groups",
    num_values="num_heads",
    rows={
        **dict.fromkeys(("in_proj", "mup_vector"), (_D, _D, _B, _B, Block(VALUE, 1))),
        **dict.fromkeys(("A_log", "D", "dt_bias"), _HEADS),
        "conv1d": (_D, _B, _B),
        "norm": (_D,),
    },
    columns={"out_proj": (_D,)},
    sizes={
        **dict.fromkeys(("n_groups", "norm.n_groups"), (Block(KEY, 1),)),
        "num_heads": _HEADS,
        "intermediate_size": (_D,),
        "conv_dim": (_D, _B, _B),
    },
    states={"conv": (_D, _B, _B), "recurrent": _HEADS},
    norm="norm",
)

_MAMBA1 = Rule(  # Jamba
    num_keys="intermediate_size",
    num_values="intermediate_size",
    rows={"in_proj": _HEADS * 2, **dict.fromkeys(("conv1d", "dt_proj", "A_log", "D"), _HEADS)},
    columns={"x_proj": _HEADS, "out_proj": _HEADS},
    sizes={"intermediate_size": _HEADS},
    states={"conv": _HEADS, "recurrent": _HEADS},
)

_M = Block(VALUE, "mamba_head_dim")
_MAMBA1_HEADS = Rule(  # Zamba
    num_keys="n_mamba_heads",
    num_values="n_mamba_heads",
    rows={
        "in_proj": PerKeyHead((_M, _M)),
        "conv1d": (_M,),
        **dict.fromkeys(("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D"), _HEADS),
    },
    columns={"out_proj": (_M,)},
    sizes={"n_mamba_heads": _HEADS, "intermediate_size": (_M,)},
    states={"conv": (_M,), "recurrent": _HEADS},
)

_SHORT_CONV = Rule(  # LFM2, LFM3
    num_keys="conv.out_channels",
    num_values="conv.out_channels",
    rows={"in_proj": _HEADS * 3, "conv": _HEADS},
    columns={"out_proj": _HEADS},
    sizes={"conv.out_channels": _HEADS},
    states={"conv": _HEADS},
)


def rule_of(module: nn.Module) -> Rule | None:
    """The rule of a recurrent layer; None for other modules."""
    if isinstance(getattr(module, "conv", None), nn.Conv1d):
        return _SHORT_CONV
    if not isinstance(getattr(module, "conv1d", None), nn.Conv1d):
        return None
    if hasattr(module, "forget_gate"):
        return _KIMI_DELTA
    if hasattr(module, "num_k_heads"):
        return _GATED_DELTA
    if hasattr(module, "n_groups"):
        return _MAMBA2
    if hasattr(module, "n_mamba_heads"):
        return _MAMBA1_HEADS
    return _MAMBA1 if hasattr(module, "x_proj") else None


class RecurrentHeads:
    """The heads of a recurrent layer that one rank holds.

    Raises: ValueError for more ranks than value heads, and for key heads that do not divide them.
    """

    def __init__(self, rule: Rule, module: nn.Module, world: int, rank: int):
        self.rule, self._module = rule, module
        self.num_keys, num_values = (attribute(module, name) for name in (rule.num_keys, rule.num_values))
        if num_values % self.num_keys or world > num_values:
            raise ValueError(
                f"{num_values} value heads ({self.num_keys} key heads) on {world} ranks: each takes at least one; "
                f"start {num_values} ranks or fewer"
            )
        self._values_of_key = num_values // self.num_keys
        self.splits_key_heads = world > self.num_keys
        """Whether several ranks hold value heads of the same key head."""
        if not self.splits_key_heads:
            self.keys = _run(even_shares(self.num_keys, world), rank)
            self.values = tuple(n * self._values_of_key for n in self.keys)
            return
        ranks = even_shares(world, self.num_keys)
        key = next(i for i in range(self.num_keys) if rank < sum(ranks[: i + 1]))
        first, stop = _run(even_shares(self._values_of_key, ranks[key]), rank - sum(ranks[:key]))
        self.keys = key, key + 1
        self.values = key * self._values_of_key + first, key * self._values_of_key + stop

    def width(self, blocks: tuple[Block, ...], *, whole: bool = False) -> int:
        """Rows of these blocks: this rank's, or all."""
        heads = {KEY: self.num_keys, VALUE: self.num_keys * self._values_of_key}
        own = {KEY: self.keys[1] - self.keys[0], VALUE: self.values[1] - self.values[0]}
        return sum((heads if whole else own)[block.heads] * self._rows(block) for block in blocks)

    def runs(self, blocks: tuple[Block, ...]) -> tuple[tuple[int, int], ...]:
        """This rank's rows of a weight that is made of these blocks."""
        if not isinstance(blocks, PerKeyHead):
            return self._runs(blocks, 0, range(self.num_keys), self.keys, self.values)
        runs, width = [], self.width(blocks, whole=True) // self.num_keys
        for key in range(*self.keys):
            first = key * self._values_of_key
            values = max(first, self.values[0]), min(first + self._values_of_key, self.values[1])
            runs += self._runs(blocks, key * width, range(key, key + 1), (key, key + 1), values)
        return tuple(runs)

    @property
    def states(self) -> dict[str, Piece]:
        """This rank's part of the layer's states [b, n, ...], by their names in a `RowState`."""
        number = self._module.layer_idx
        return {f"{number}.{kind}.0": Piece(1, self.runs(blocks)) for kind, blocks in self.rule.states.items()}

    def _runs(self, blocks, at: int, among: range, keys: tuple[int, int], values: tuple[int, int]):
        """Rows of the heads `keys` and `values` in blocks, from row `at` on, of the key heads `among`."""
        runs = []
        for block in blocks:
            (first, stop), unit = (keys, 1) if block.heads == KEY else (values, self._values_of_key)
            rows, begin = self._rows(block), among.start * unit
            runs.append((at + (first - begin) * rows, at + (stop - begin) * rows))
            at += len(among) * unit * rows
        return tuple(runs)

    def _rows(self, block: Block) -> int:
        return block.rows if isinstance(block.rows, int) else attribute(self._module, block.rows)


def _run(shares: tuple[int, ...], rank: int) -> tuple[int, int]:
    return sum(shares[:rank]), sum(shares[: rank + 1])


def attribute(module: nn.Module, name: str):
    """An attribute of a module or of one below it; None if there is none."""
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        return None
