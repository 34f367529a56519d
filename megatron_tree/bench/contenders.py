"""The contenders of `bench step`: one Transformers model, whose attention each of them computes over all ranks."""

from __future__ import annotations

import copy
import importlib.util
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from transformers import AttentionInterface, AttentionMaskInterface

from ..config import TreeConfig
from ..integrations.transformers.parallel import register_sequence_parallel
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
RIVALS = ("deepspeed", *TRAIN)
LR, IGNORED = 1e-4, -100


def missing() -> dict[str, str]:
    """The rivals that can't run here, and why."""
    why = {} if importlib.util.find_spec("deepspeed") else {"deepspeed": "DeepSpeed is not installed"}
    return why | (dict.fromkeys(TRAIN, reason) if (reason := no_torch_ring()) else {})


class Contender:
    """A model with one way to attend over the ranks, its optimizer and its batch.

    tokens: int64 [b, s], the same on all ranks. group: None for one rank alone, "plain".
    Attributes: losses, norms: of each step. gradient: of the last step, before it was clipped, flat in fp32.
    """

    def __init__(self, name: str, model, tokens: Tensor, group, case: Case, start=None):
        self.model, self.group, self.case, self.losses, self.norms = copy.deepcopy(model).train(), group, case, [], []
        self.world, self.rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        self.gradient: Tensor | None = None
        self._batch, self._parallel = {"input_ids": tokens, "labels": tokens}, None
        self._labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
        if name in OURS:
            config = TreeConfig(**OURS[name](self.world))
            self._parallel = register_sequence_parallel(self.model, tree_config=config)
        elif name != "plain":
            attend = _deepspeed(self.model, group, case) if name == "deepspeed" else _torchs(name, group)
            AttentionInterface.register(f"bench_{name}", attend)
            AttentionMaskInterface.register(f"bench_{name}", lambda *args, **kwargs: None)
            self.model.set_attn_implementation(f"bench_{name}")
        zigzag = name in TRAIN
        share = tokens.shape[1] // self.world
        one = torch.arange(self.rank * share, (self.rank + 1) * share)
        self._rows = shard_positions(tokens.shape[1], self.rank, self.world) if zigzag else one
        self._average = start(self.model) if start else None
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)

    def step(self, laps: Laps) -> tuple:
        """One training step."""
        batch = self._parallel.shard_batch(self._batch) if self._parallel else self._shard()
        laps("batch")
        loss = self.model(**batch).loss
        shown = loss.detach().clone()
        if not self._parallel and self.world > 1:
            dist.all_reduce(shown, group=self.group)
        laps("forward")
        (loss if self._parallel else loss * self.world).backward()
        laps("backward")
        parameters = list(self.model.parameters())
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
        """This rank's tokens; the loss is a sum, divided by the number of all labels."""
        labels, rows = self._labels[:, self._rows], self._rows.expand(self.case.batch, -1)
        total = self.case.batch * (self.case.seq_len - 1)
        own = {"input_ids": self._batch["input_ids"][:, self._rows], "position_ids": rows}
        return {**own, "labels": labels, "shift_labels": labels, "num_items_in_batch": total, "use_cache": False}


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _torchs(name: str, group):
    """torch's context parallelism as an attention function of Transformers."""

    def attend(module, q, k, v, attention_mask, **kwargs):
        return TRAIN[name](group, *(x.transpose(1, 2) for x in (q, k, v))), None

    return attend


def _deepspeed(model, group, case: Case):
    """DeepSpeed's Ulysses as an attention function of Transformers, with heads padded to a number that it can take."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it is compiled, and sums over all ranks
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    world, h_kv = dist.get_world_size(group), case.num_heads_kv
    ratio = case.num_heads // h_kv
    if h_kv % world and world % h_kv:
        h_kv += -h_kv % world
    while h_kv * ratio % world:
        ratio += 1
    exchange = UlyssesSPAttentionHF(
        attn=sdpa_attention_forward,
        batch_size=case.batch,
        attn_head_count=h_kv * ratio,
        attn_head_size=case.head_dim,
        kv_head_count=h_kv,
        num_hidden_layers=model.config.num_hidden_layers,
        process_group=group,
        seq_length_is_variable=True,
    )
    if (h_kv, ratio) == (case.num_heads_kv, case.num_heads // case.num_heads_kv):
        return lambda module, q, k, v, mask, **options: exchange(module, q, k, v, None, **options)

    def attend(module, q, k, v, mask, **options):
        heads = q.shape[1]
        groups = q.unflatten(1, (k.shape[1], -1))  # [b, h_kv, h / h_kv, s, d]
        more = h_kv - k.shape[1]
        q = F.pad(groups, (0, 0, 0, 0, 0, ratio - groups.shape[2], 0, more)).flatten(1, 2)
        k, v = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (k, v))
        module.num_key_value_groups = ratio
        out, _ = exchange(module, q, k, v, None, **options)  # [b, s, padded heads * d]
        out = out.unflatten(-1, (h_kv, ratio, -1))[:, :, : groups.shape[1], : groups.shape[2]]
        return out.reshape(*out.shape[:2], heads, -1), None

    return attend


def _averaging(model, *, group, case: Case):
    """Average all gradients over the ranks in one message."""
    world = dist.get_world_size(group)

    def average(parameters) -> None:
        gradients = [p.grad for p in parameters]
        flat = torch.cat([x.flatten() for x in gradients])
        dist.all_reduce(flat, group=group)
        flat /= world
        for mine, x in zip(flat.split([x.numel() for x in gradients]), gradients):
            x.copy_(mine.view_as(x))

    return average


def _fsdp2(model, *, group, case: Case) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


STARTS = {"average": _averaging, "fsdp2": _fsdp2}
"""How gradients are averaged: what wraps a model, and returns what is to be done after its backward."""
