"""Plain loops under DDP, FSDP2 and HSDP, data x sequence ranks: the steps of one rank without them."""

import contextlib
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from support.deepspeed_cases import Case
from support.ranks import largest, on_ranks, run_distributed

NAMES = {1: ("sp",), 2: ("dp", "sp"), 3: ("dp_replicate", "dp_shard", "cp")}
SAME = 4e-6  # weights that AdamW has moved by up to 4e-3; 3e-7 where it was measured
TINY_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Wrapped(Case):
    """A model and its batches under a wrapper; dims: of the mesh, the sequence's last."""

    wrapper: str = "none"
    dims: tuple[int, ...] = (1,)
    sp: int = 1
    zero: int = 0
    clip: float = 0.3
    accumulate: int = 2

    def steps(self):
        """Per step, per microbatch: the two data-parallel ranks' batches, the second with shorter rows if padded."""
        generator = torch.Generator().manual_seed(7)
        steps = [[self._batch(generator) for _ in range(self.accumulate)] for _ in range(TINY_STEPS)]
        return [[self._halves(batch) for batch in step] for step in steps]

    def _halves(self, batch):
        if self.batches == "padded":  # of the second half the last seven columns are padding
            for name, padding in (("attention_mask", 0), ("labels", -100)):
                batch[name][2:, 23:] = padding
        halves = [{name: x[2 * i : 2 * i + 2] for name, x in batch.items()} for i in (0, 1)]
        if self.batches == "padded":
            halves[1] = {name: x[:, :23] for name, x in halves[1].items()}
        return batch, halves

    @property
    def alone(self):
        return replace(self, wrapper="none", dims=(1,), loss_tile=None, mlp_tile=None, checkpointing=False)


FAST = {
    "DDP, dp 2 x sp 2, packed, accumulation": Wrapped(wrapper="DDP", dims=(2, 2), batches="packed"),
    "FSDP2, dp 2 x sp 2, padded, experts in other numbers of tiles": Wrapped(
        wrapper="FSDP2", dims=(2, 2), batches="padded", family="qwen2_moe", mlp_tile=5, loss_tile=7, checkpointing=True
    ),
}
SLOW = {
    f"{wrapper}, {dims}, {batches}": Wrapped(wrapper=wrapper, dims=dims, batches=batches, family=family)
    for wrapper, dims, batches, family in (
        ("DDP", (1, 4), "padded", "gpt_oss"),
        ("DDP", (4,), "ignored", "smollm2"),
        ("FSDP2", (2, 2), "packed", "llama"),
        ("FSDP2", (1, 4), "packed", "smollm2"),
        ("FSDP2", (4, 1), "ignored", "llama"),
        ("HSDP", (2, 1, 2), "packed", "llama"),
        ("HSDP", (1, 2, 2), "padded", "falcon_h1"),
    )
}


def _wrap(model, wrapper):
    """The model in a wrapper that averages over all ranks."""
    world = torch.distributed.get_world_size()
    if wrapper == "none":
        return model
    if wrapper == "DDP":
        return DistributedDataParallel(model)
    dims = {"mesh_shape": (2, world // 2), "mesh_dim_names": ("replicas", "shards")}
    mesh = torch.distributed.init_device_mesh("cpu", **(dims if wrapper == "HSDP" else {"mesh_shape": (world,)}))
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.float32)}  # it copies arguments
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def _start(case):
    """(model, wrapped model, SequenceParallel or None, optimizer)."""
    model, parallel = case.model(), None
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    if case.wrapper != "none":
        from megatron_tree.integrations.transformers import register_sequence_parallel

        mesh = torch.distributed.init_device_mesh("cpu", case.dims, mesh_dim_names=NAMES[len(case.dims)])
        tiles = {"loss_tile": case.loss_tile, "mlp_tile": case.mlp_tile}
        parallel = register_sequence_parallel(model, mesh=mesh, **tiles)
        assert parallel.sp_size == case.dims[-1]
    wrapped = _wrap(model, case.wrapper)
    return model, wrapped, parallel, case.make_optimizer(wrapped)


def _own(parallel, batch, halves):
    """This rank's shard of the batch of all data-parallel ranks."""
    if parallel is None:
        return batch | {"use_cache": False}
    if parallel.dp_size == 2:
        return parallel.shard_batch(halves[parallel.dp_rank])
    return parallel.shard_batch({name: x.chunk(parallel.dp_size)[parallel.dp_rank] for name, x in batch.items()})


def _train(case, model, wrapped, parallel, optimizer, steps):
    """([loss of each step], [gradient norm of each step])."""
    losses, norms = [], []
    for microbatches in steps:
        total = 0.0
        for number, (batch, halves) in enumerate(microbatches):
            last = number == len(microbatches) - 1
            if hasattr(wrapped, "set_requires_gradient_sync"):
                wrapped.set_requires_gradient_sync(last)
            with contextlib.nullcontext() if last or case.wrapper != "DDP" else wrapped.no_sync():
                loss = wrapped(**_own(parallel, batch, halves)).loss / len(microbatches)
                loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(wrapped.parameters(), case.clip)
        norms.append(_whole(norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def _whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _apart(found, case, model, want):
    """Largest differences of the losses and gradient norms (relative) and weights from those of one rank."""
    (losses, norms), (want_losses, want_norms, weights) = found, want
    return (
        largest(abs(a / b - 1) for a, b in zip(losses, want_losses, strict=True)),
        largest(abs(a / b - 1) for a, b in zip(norms, want_norms, strict=True)),
        largest(float((_whole(p).detach() - weights[n]).abs().max()) for n, p in model.named_parameters()),
    )


def _alone(case):
    model, wrapped, _, optimizer = _start(case.alone)
    losses, norms = _train(case.alone, model, wrapped, None, optimizer, case.steps())
    assert min(norms) > case.clip, "nothing is clipped"
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def _run_all(rank, world, cases):
    apart = {}
    for name, case in cases.items():
        want = _alone(case)
        model, wrapped, parallel, optimizer = _start(case)
        found = _train(case, model, wrapped, parallel, optimizer, case.steps())
        apart[name] = _apart(found, case, model, want)
        with torch.no_grad():
            wrapped.eval()
            batch, halves = case.steps()[0][0]
            plain = case.model().eval()
            plain.load_state_dict(want[2], strict=False)  # tied weights are there once
            loss = wrapped(**_own(parallel, batch, halves)).loss
            assert loss.item() == pytest.approx(plain(**batch, use_cache=False).loss.item(), abs=1e-5)
    return apart


def _check(cases):
    for apart in run_distributed(_run_all, 4, cases):
        for name, (losses, norms, weights) in apart.items():
            assert losses < SAME and norms < SAME and weights < SAME, (name, losses, norms, weights)


@pytest.mark.supports("`DistributedDataParallel`", with_="dp = 2, sp = 2; packed, accumulation, clipping")
@pytest.mark.supports("FSDP2 (`fully_shard`)", with_="dp = 2, sp = 2; padded, experts in tiles, checkpointing")
def test_wrapped_on_data_and_sequence_ranks():
    _check(FAST)


def _save(rank, world, case, folder):
    """Two steps, and a checkpoint. Returns what one rank does in all of them."""
    model, wrapped, parallel, optimizer = _start(case)
    _train(case, model, wrapped, parallel, optimizer, case.steps()[:2])
    weights, states = get_state_dict(wrapped, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return _alone(case)


def _resume(rank, world, case, folder, want):
    """The other two steps, on other ranks or another wrapper. Returns how far the weights are apart."""
    model, wrapped, parallel, optimizer = _start(case)
    with torch.no_grad():
        for p in wrapped.parameters():
            p.add_(1.0)
    weights, states = get_state_dict(wrapped, optimizer)
    saved = {"model": weights, "optimizer": states}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(wrapped, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    losses, norms = _train(case, model, wrapped, parallel, optimizer, case.steps()[2:])
    return _apart((losses, norms), case, model, (want[0][2:], want[1][2:], want[2]))


def test_a_checkpoint_is_resumed_on_another_mesh(tmp_path):
    """Of FSDP2 on 2 x 2 ranks, on 1 x 4, under DDP, and by one rank with the whole model."""
    case = Wrapped(wrapper="FSDP2", dims=(2, 2), batches="packed", accumulate=1)
    want = run_distributed(_save, 4, case, str(tmp_path))[0]
    others = ((4, replace(case, dims=(4,))), (2, replace(case, wrapper="DDP", dims=(1, 2))), (1, case.alone))
    for world, other in others:
        for apart in run_distributed(_resume, world, other, str(tmp_path), want):
            assert max(apart) < SAME, (other, apart)


@on_ranks(4)
def test_wrappers_and_meshes_of_other_ranks_are_refused():
    from megatron_tree.integrations.transformers import register_sequence_parallel

    ids, policy = torch.arange(1, 17).view(1, -1), MixedPrecisionPolicy(torch.float32)
    batch = {"input_ids": ids, "labels": ids}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    for options, message in (
        ({"mesh": mesh["sp"]}, "not all 4 of them: pass the mesh of the whole job"),
        ({"mesh": mesh, "sp_size": 2}, "sp_size=2 and a mesh: pass one of them"),
        ({"mesh": (2, 2)}, r"mesh=\(2, 2\) must be a DeviceMesh or None"),
    ):
        with pytest.raises(ValueError, match=message):
            register_sequence_parallel(Case(sp=1, zero=0).model(), **options)
    for message, wrap in (
        (
            "averages gradients over 2 of 4 ranks: leave out its process_group",
            lambda model: DistributedDataParallel(model, process_group=mesh.get_group("dp")),
        ),
        ("give fully_shard a mesh of all 4", lambda model: fully_shard(model, mesh=mesh["dp"], mp_policy=policy)),
        (
            "up_proj of a LlamaMLP is sharded by itself",
            lambda model: fully_shard([fully_shard(model.model.layers[1].mlp.up_proj), model][1], mp_policy=policy),
        ),
    ):
        model = Case(sp=1, zero=0).model()
        parallel = register_sequence_parallel(model, mesh=mesh, mlp_tile=3)
        with pytest.raises(ValueError, match=message):
            wrap(model)(**parallel.shard_batch(batch))


@pytest.mark.slow
@pytest.mark.supports("FSDP2 (`fully_shard`)", with_="sp = 4; tied weights; replicas of shards (HSDP)")
def test_wrapped_on_other_meshes():
    _check(SLOW)
