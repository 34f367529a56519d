"""The contenders of `bench step`: one Transformers model, whose attention each of them computes over all ranks."""

from __future__ import annotations

import copy
import importlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from transformers import AttentionInterface, AttentionMaskInterface

from ..config import TreeConfig
from ..integrations.transformers.train.sequence_parallel import register_sequence_parallel
from ..layout import shard_positions
from .measure import Laps
from .rivals import TRAIN, no_torch_ring
from .runs import Case

OURS = {
    "auto": lambda world: {},
    "ulysses": lambda world: dict(ulysses_size=world),
    "grid": lambda world: dict(ulysses_size=1),
    "ring": lambda world: dict(schedule="ring"),
}
ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"
RIVALS = ("deepspeed", *TRAIN)
VOCAB, LR, IGNORED = 256, 1e-4, -100


def missing() -> dict[str, str]:
    """The rivals that can't run here, and why."""
    why = {}
    try:  # before ranks are forked: it takes seconds
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        importlib.import_module(ULYSSES)
    except ImportError as error:
        why["deepspeed"] = f"{ULYSSES}: {error}"
    return why | (dict.fromkeys(TRAIN, reason) if (reason := no_torch_ring()) else {})


class Contender:
    """A model that attends over the ranks in one way, its optimizer and its batch.

    Args: name of OURS or RIVALS, or "plain": one rank alone, without a group. model: of which it takes a copy.
        tokens: int64 [b, s], the same on all ranks. wrapper: of `WRAPPERS`.
    Attributes: losses, norms: of each step, of the gradient before it is clipped. gradient: of the first step, flat in
        fp32, all of it.
    """

    def __init__(self, name: str, model, tokens: Tensor, case: Case, group=None, wrapper: str | None = None):
        self.losses, self.norms, self.gradient = [], [], None
        self._model, self._group = copy.deepcopy(model).train(), group
        self._world, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        self._parallel = None
        if name in OURS:
            config = TreeConfig(**OURS[name](self._world))
            self._parallel = register_sequence_parallel(self._model, tree_config=config)
        elif name in RIVALS:
            attend = _deepspeed(self._model, group, case) if name == "deepspeed" else _torchs(name, group)
            AttentionInterface.register(f"bench_{name}", attend)
            AttentionMaskInterface.register(f"bench_{name}", lambda *args, **kwargs: None)
            self._model.set_attn_implementation(f"bench_{name}")
        self._tokens, share = tokens, case.seq_len // self._world
        contiguous = torch.arange(rank * share, (rank + 1) * share)
        self._rows = shard_positions(case.seq_len, rank, self._world) if name in TRAIN else contiguous
        self._average = WRAPPERS[wrapper](self._model, group) if wrapper else None
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, fused=True)

    def step(self, laps: Laps) -> tuple:
        """One training step; no results that repeat."""
        ours, parameters = self._parallel is not None, list(self._model.parameters())
        whole = {"input_ids": self._tokens, "labels": self._tokens}
        batch = self._parallel.shard_batch(whole) if ours else self._shard()
        laps("batch")
        loss = self._model(**batch).loss  # ours: of all ranks' tokens; others: this rank's share of it
        shown = loss.detach().clone()
        if not ours and self._world > 1:
            dist.all_reduce(shown, group=self._group)
        laps("forward")
        (loss if ours else loss * self._world).backward()
        laps("backward")
        if self._average:
            self._average(parameters)
        if not self.losses:
            self.gradient = torch.cat([_whole(p.grad).flatten().float() for p in parameters])
        self.norms.append(float(_whole(torch.nn.utils.clip_grad_norm_(parameters, 1.0))))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(float(shown))
        laps("optimizer")
        return ()

    def _shard(self) -> dict:
        """This rank's tokens; their loss is a sum, divided by the number of all labels."""
        b, s = self._tokens.shape
        labels = F.pad(self._tokens[:, 1:], (0, 1), value=IGNORED)[:, self._rows]
        own = {"input_ids": self._tokens[:, self._rows], "position_ids": self._rows.expand(b, -1)}
        return {**own, "labels": labels, "shift_labels": labels, "num_items_in_batch": b * (s - 1), "use_cache": False}


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _torchs(name: str, group):
    """torch's context parallelism as an attention function of Transformers."""

    def attend(module, q, k, v, attention_mask, **kwargs):
        return TRAIN[name](group, *(x.transpose(1, 2) for x in (q, k, v))), None

    return attend


def _deepspeed(model, group, case: Case):
    """DeepSpeed's Ulysses as an attention function of Transformers, with heads padded to a number that it can take."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it is compiled, and sums over all ranks
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    world, h_kv = dist.get_world_size(group), case.num_heads_kv
    ratio = case.num_heads // h_kv
    if h_kv % world and world % h_kv:
        h_kv += -h_kv % world
    while h_kv * ratio % world:
        ratio += 1
    exchange = importlib.import_module(ULYSSES).UlyssesSPAttentionHF(
        attn=sdpa_attention_forward,
        batch_size=case.batch,
        attn_head_count=h_kv * ratio,
        attn_head_size=case.head_dim,
        kv_head_count=h_kv,
        num_hidden_layers=model.config.num_hidden_layers,
        process_group=group,
        seq_length_is_variable=True,
    )
    if h_kv * ratio == case.num_heads:
        return lambda module, q, k, v, mask, **options: exchange(module, q, k, v, None, **options)
    more = h_kv - case.num_heads_kv, ratio - case.num_heads // case.num_heads_kv

    def attend(module, q, k, v, mask, **options):
        groups = q.unflatten(1, (k.shape[1], -1))  # [b, h_kv, h / h_kv, s, d]
        q = F.pad(groups, (0, 0, 0, 0, 0, more[1], 0, more[0])).flatten(1, 2)
        k, v = (F.pad(x, (0, 0, 0, 0, 0, more[0])) for x in (k, v))
        module.num_key_value_groups = ratio
        out, _ = exchange(module, q, k, v, None, **options)  # [b, s, padded heads * d]
        out = out.unflatten(-1, (h_kv, ratio, -1))[:, :, : groups.shape[1], : groups.shape[2]]
        return out.flatten(2), None

    return attend


def _averaging(model, group):
    """Average all gradients over the ranks in one message."""
    world = dist.get_world_size(group)

    def average(parameters: list[Tensor]) -> None:
        gradients = [p.grad for p in parameters]
        flat = torch.cat([x.flatten() for x in gradients])
        dist.all_reduce(flat, group=group)
        flat /= world
        for mine, x in zip(flat.split([x.numel() for x in gradients]), gradients):
            x.copy_(mine.view_as(x))

    return average


def _fsdp2(model, group) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)


WRAPPERS = {"average": _averaging, "fsdp2": _fsdp2}
"""What averages gradients, by name: (model, group) -> what is to be done after a backward, or None."""
