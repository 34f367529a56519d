"""Transformers' recurrent layers over tokens that are spread over ranks.

A layer computes in a `RecurrentRun` (mixers.py) over a shard of a batch, or in a `RecurrentPass` over a `TreeCache`:

- In a sharded prefill a rank's recurrent layers run its own tokens, from the row's states before the chunk to those
  after it, which are on every rank again.
- Layers whose scan takes no state (Jamba, Zamba) go on from one in the same way when a rank runs all tokens.

Each adapter takes the place of a function of a modeling file and has its arguments. It calls that function, whatever
kernel it is, for each segment of this rank's tokens, through `tree_halo` and `tree_recurrence` (docs/recurrent.md).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer
from transformers.utils.import_utils import is_flash_linear_attention_available, is_mamba_2_ssm_available

from ....core.comm import group_rank, group_size
from ....core.config import TreeConfig
from ....core.layout import Layout, Segment
from ....core.recurrence.halo import tree_convolution
from ....core.recurrence.layer import Decay, tree_recurrence
from ....core.recurrence.scan import chains_of


@dataclass(kw_only=True)
class RecurrentRun:
    """One mixer's run over this rank's tokens [b, s_local] of sequences that cp_group shares."""

    cp_group: object
    layout: Layout
    config: TreeConfig | None
    conv_state: Tensor | None = None
    """[b, c, n]: the convolution's inputs before the sequence's, n >= kernel size - 1; None: zeros."""
    recurrent_state: Tensor | None = None
    """The state before the sequence, for scans that take none: [b, c, n] or, if they run head by head, [b, h, c, n]."""
    num_final_rows: int = 0
    """How many of the convolution's last inputs are kept, those before the sequence included."""
    final_conv_state: Tensor | None = None
    """[b, c, num_final_rows] on every rank, once the convolution has run."""
    used: list[str] = field(default_factory=list)
    """The wrapped functions that have run."""

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all tokens of one sequence, and functions that are called as they are begin with it."""
        return group_size(self.cp_group) == 1 and isinstance(self.layout, str) and self.recurrent_state is None

    @property
    def options(self) -> dict:
        """Of `tree_recurrence` and `tree_halo`."""
        return {"cp_group": self.cp_group, "layout": self.layout, "config": self.config}

    def segments(self, num_rows: int) -> tuple[Segment, ...]:
        """Those of this rank's num_rows rows."""
        world = group_size(self.cp_group)
        return chains_of(num_rows * world, world, self.layout).segments[group_rank(self.cp_group)]


current_run: contextvars.ContextVar[RecurrentRun | None] = contextvars.ContextVar("tree_recurrent_run", default=None)
"""Of the layer that runs; None: it has all tokens itself."""


def in_runs(adapters: Mapping[str, Callable]) -> dict[str, Callable]:
    """Adapters for the table of families, by what they replace: outside of a `RecurrentRun`, and where a rank has the
    whole sequence, the originals are called as they are; otherwise adapter(run, original, ...)."""
    return {name: functools.partial(_call_in_run, name, adapter) for name, adapter in adapters.items()}


def _call_in_run(name: str, adapter: Callable, original: Callable, *args, **kwargs):
    if (run := current_run.get()) is None:
        return original(*args, **kwargs)
    run.used.append(name)
    return original(*args, **kwargs) if run.is_whole else adapter(run, original, *args, **kwargs)


def leave_unfused(original: Callable, *args, **kwargs):
    """Of a kernel that is a whole layer: in a run it returns nothing, and the layer calls its parts instead."""
    return original(*args, **kwargs) if current_run.get() is None else None


class RecurrentLayer(LinearAttentionLayer):
    """Of a `TreeCache`, for a recurrent layer: it has the states of one run of the model at a time, see `ModelRuns`.

    Attributes:
        run: of the layer over this rank's tokens of a prompt; None: it runs all tokens.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, layer_idx: int, num_states: int):
        super().__init__(num_states)
        self.layer_idx = layer_idx
        self.run: RecurrentRun | None = None

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs) -> Tensor:
        """Take new inputs [b, c, n]; returns them, with those before them unless the run puts them there."""
        if self.run is None:
            return super().update_conv_state(conv_states, state_idx, **kwargs)
        self.run.conv_state, self.run.num_final_rows = self.conv_states[state_idx], kwargs["conv_kernel_size"]
        return conv_states

    def finish(self) -> None:
        """The run over this rank's tokens is over: the convolution's state is what all ranks' tokens leave behind."""
        run, self.run = self.run, None
        super().update_conv_state(run.final_conv_state, conv_kernel_size=run.num_final_rows)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The states [b, ...] by a name that tells layer, kind and number."""
        states = {f"{self.layer_idx}.conv.{i}": x for i, x in self.conv_states.items()}
        states |= {f"{self.layer_idx}.recurrent.{i}": x for i, x in self.recurrent_states.items()}
        return {name: x for name, x in states.items() if x is not None}

    def replace(self, tensors: dict[str, Tensor]) -> None:
        """Take these states, which models change in place; none: the states of rows without tokens."""
        for i in range(self.number_of_states):
            conv = tensors.get(f"{self.layer_idx}.conv.{i}")
            recurrent = tensors.get(f"{self.layer_idx}.recurrent.{i}")
            self.conv_states[i], self.recurrent_states[i] = conv, recurrent
            self.is_conv_states_initialized[i] = self.has_previous_state[i] = conv is not None
            self.is_recurrent_states_initialized[i] = recurrent is not None
            self.conv_kernel_size[i] = None if conv is None else conv.shape[-1]


class RecurrentPass:
    """One pass in which all recurrent layers run in a `RecurrentRun`.

    Args:
        layers: by their number. cp_group, layout: the ranks that share the tokens, and how; None, "contiguous": this
            rank has all of them.
    """

    def __init__(
        self, layers: Mapping[int, RecurrentLayer], *, cp_group, layout: Layout, config: TreeConfig | None = None
    ):
        self._layers, self.options = layers, {"cp_group": cp_group, "layout": layout, "config": config}
        self.is_sharded = not isinstance(layout, str)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context of the model's run."""
        before = current_pass.set(self)
        try:
            yield
        finally:
            current_pass.reset(before)

    def begin(self, mixer: nn.Module) -> RecurrentRun:
        """A layer begins."""
        layer = self._layers[mixer.layer_idx]
        run = RecurrentRun(**self.options, recurrent_state=layer.recurrent_states[0])
        layer.run = run if self.is_sharded else None
        return run

    def end(self, mixer: nn.Module, *, failed: bool) -> None:
        """A layer is over."""
        layer = self._layers[mixer.layer_idx]
        if failed:
            layer.run = None
        elif layer.run is not None:
            layer.finish()


current_pass: contextvars.ContextVar[RecurrentPass | None] = contextvars.ContextVar("tree_recurrent_pass", default=None)


def _check_packing(options: dict) -> None:
    """Raise ``ValueError`` for bounds of documents in a kernel's own form."""
    if given := [name for name in ("cu_seqlens", "seq_idx") if options.get(name) is not None]:
        raise ValueError(
            f"{', '.join(given)}: on shards packed documents are told by position_ids, which start again in each; "
            "leave out cu_seq_lens_q and seq_idx"
        )


def convolution(run: RecurrentRun, original: Callable, hidden_states: Tensor, weight: Tensor, *args, **options):
    """`causal_conv1d_fn` over hidden_states [b, c, s_local], weight [c, kernel size]."""
    _check_packing(options)
    x, count = hidden_states.transpose(1, 2), max(weight.shape[-1] - 1, run.num_final_rows)
    before = run.conv_state
    if before is not None:
        before = F.pad(before, (count - before.shape[-1], 0)).transpose(1, 2)

    def kernel(x: Tensor) -> Tensor:
        return original(x.transpose(1, 2), weight, *args, **options).transpose(1, 2)

    out, final = tree_convolution(kernel, x, count, before=before, return_final=run.num_final_rows > 0, **run.options)
    if final is not None:
        run.final_conv_state = final[:, -run.num_final_rows :].transpose(1, 2)
    return out.transpose(1, 2)


def delta_rule(
    run: RecurrentRun,
    original: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **options,
) -> tuple[Tensor, Tensor | None]:
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`: query, key [b, s_local, h, d], value
    [b, s_local, h, d_v], states [b, h, d, d_v]."""
    _check_packing(options)
    dtype = query.dtype
    if not is_flash_linear_attention_available():  # torch's compute in fp32 and round what they return to query's dtype
        query, key, value = (_widened(x) for x in (query, key, value))

    def kernel(inputs, v, state):
        q, k, decay, rate = inputs
        return original(q, k, v, g=decay, beta=rate, initial_state=state, output_final_state=True, **options)

    out, final = tree_recurrence(
        kernel,
        (query, key, g, beta),
        value,
        head_dim=key.shape[-1],
        initial_state=initial_state,
        return_final_state=output_final_state,
        **run.options,
    )
    return out.to(dtype), final


def mamba2(
    run: RecurrentRun,
    original: Callable,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    z: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **options,
):
    """`mamba2_chunk_scan`: hidden_states [b, s_local, h, d_v], dt [b, s_local, h], A [h], B and C [b, s_local, g, d],
    states [b, h, d_v, d]."""
    _check_packing(options)
    x = hidden_states if is_mamba_2_ssm_available() else _widened(hidden_states)  # torch's returns fp32
    dt = _time_steps(dt, dt_bias, dt_softplus).clamp(*dt_limit)

    def kernel(inputs, v, state):
        steps, b, c = inputs
        state = None if state is None else state.mT
        out, final = original(v, steps, A, b, c, initial_states=state, return_final_states=True, **options)
        return out, final.mT

    groups = hidden_states.shape[2] // C.shape[2]
    out, final = tree_recurrence(
        kernel,
        (dt, B, C),
        x,
        head_dim=B.shape[-1],
        decay=Decay(dt * A, C.repeat_interleave(groups, 2)),
        initial_state=None if initial_states is None else initial_states.mT,
        return_final_state=return_final_states,
        **run.options,
    )
    out = out if z is None else out * F.silu(z)
    return (out, final.mT) if return_final_states else out


def mamba1(
    run: RecurrentRun,
    original: Callable,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **options,
):
    """`mamba_selective_scan`: hidden_states, dt and z [b, c, s_local], A [c, n], B and C [b, n, s_local], states
    [b, c, n]. Channels are heads with values of one number; kernels take one dtype for all."""
    initial = run.recurrent_state
    if initial is not None and initial.dim() == 4:  # head by head
        initial = initial[:, run.used.count("mamba_selective_scan") - 1]
    x, b, c = (_widened(x).transpose(1, 2) for x in (hidden_states, B, C))
    bias = None if delta_bias is None else delta_bias[:, None]
    dt = _time_steps(dt, bias, delta_softplus).transpose(1, 2)

    def kernel(inputs, v, state):
        tensors = (y.transpose(1, 2) for y in (v[..., 0], inputs[0]))
        out, final = original(*tensors, A, *(y.transpose(1, 2) for y in inputs[1:]), return_last_state=True, **options)
        return out.transpose(1, 2)[..., None], final[..., None]

    out, final = tree_recurrence(
        kernel,
        (dt, b, c),
        x[..., None],
        head_dim=A.shape[-1],
        decay=Decay(dt[..., None] * A, c[:, :, None].expand(*x.shape, -1)),
        initial_state=None if initial is None else initial[..., None],
        return_final_state=return_last_state,
        **run.options,
    )
    out = out[..., 0].transpose(1, 2)
    out = out if z is None else out * F.silu(z)
    return (out, final[..., 0]) if return_last_state else out


def _time_steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Those that a state-space kernel would make of dt, in fp32: the decay is made of the same ones."""
    dt = _widened(dt) if bias is None else _widened(dt) + bias
    return F.softplus(dt) if softplus else dt


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
