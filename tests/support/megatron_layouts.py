"""Some optimizer steps of a GPTModel in a parallel layout, against a plain loop over the whole model.

    check_training(4, [Run(tp=2, cp=2, config=(("sequence_parallel", True),))])

The layout trains with Megatron's own means: schedules, DistributedDataParallel, finalize_model_grads, its optimizer.
The reference uses none of them: every rank goes by itself through the whole model with Megatron's own attention and the
whole global batch, with torch's clipping and AdamW. Losses, gradient norms, the first step's gradients and what all
steps change in the weights must agree.
"""

import dataclasses
import functools
import itertools
import re
import zlib

import torch
import torch.distributed as dist

from megatron_tree.integrations import megatron as tree
from support.megatron_models import SEQ_LENGTH, VOCAB, Case, megatron, transformer_config
from support.ranks import run_distributed

GLOBAL_BATCH, STEPS = 4, 3
LEARNING_RATE, CLIP = 1e-2, 1.0
EPS = 1e-2  # large: AdamW then shows a wrong scale, and no noise of tiny gradients
TOLERANCE = 1e-5
TOLERANCE_OF_CHANGES = 1e-4  # a weight near 1 is rounded to 6e-8, and changes by little more than 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A layout and what is trained in it."""

    tp: int = 1
    pp: int = 1
    vp: int | None = None  # virtual pipeline stages on a rank
    cp: int = 1
    ep: int = 1
    num_layers: int = 2
    micro_batch: int = 1
    distributed_optimizer: bool = False
    dtype: torch.dtype = torch.float32
    loss_scale: float | None = None  # the first one; fp16 only
    skipped: tuple = ()  # (step, global rank): that rank gets an infinite gradient, so nobody takes this step
    documents: tuple = ()
    """Of each microbatch the lengths of its documents, which are dispatched over all ranks; none: rows of a batch."""
    mla: bool = False
    config: tuple = ()
    """Further options of the TransformerConfig: (name, value) pairs."""


def plain(run):
    """The same model in fp32 on one rank."""
    of_layouts = ("recompute", "sequence_parallel", "overlap_p2p", "batch_p2p", "calculate_per_token_loss")
    config = tuple(pair for pair in run.config if not pair[0].startswith(of_layouts))
    same = {name: getattr(run, name) for name in ("num_layers", "micro_batch", "skipped", "documents", "mla")}
    return Run(config=config, **same)


def config_of(run):
    case = Case(tp=run.tp, pp=run.pp, cp=run.cp, num_heads=4, dtype=run.dtype, mla=run.mla)
    layout = {
        "virtual_pipeline_model_parallel_size": run.vp,
        "expert_model_parallel_size": run.ep,
        "expert_tensor_parallel_size": 1,
    }
    sizes = {"num_layers": run.num_layers, "hidden_size": 32, "ffn_hidden_size": 48, "fp16": run.dtype == torch.float16}
    return transformer_config(case, **sizes, **layout, **dict(run.config))


def build_chunks(run, config):
    """This rank's parts of the GPTModel, one a virtual stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    chunks = []
    for stage in range(run.vp or 1):
        vp = {"vp_stage": stage if run.vp else None}
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", **vp)
        if run.cp > 1 or run.documents:
            spec = tree.use_tree_attention(spec)
        if config.sequence_parallel:
            spec = tree.use_sequence_parallel_norm(spec)
        place = {"ignore_virtual": False, **vp} if run.vp else {}
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCAB,
            max_sequence_length=SEQ_LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            **vp,
        )
        cores = {type(module).__name__ for name, module in model.named_modules() if name.endswith(".core_attention")}
        assert cores == {"TreeDotProductAttention" if run.cp > 1 or run.documents else "DotProductAttention"}
        for name, parameter, cut in whole_names(run, [model]):
            parameter.data.copy_(cut(whole_weight(name, parameter, cut)))
        if run.documents:
            tree.use_dispatched_documents(model)
        chunks.append(model if run.dtype == torch.float32 else Float16Module(config, model))
    return chunks


def whole_names(run, chunks):
    """(name in the whole model, parameter, function that cuts this rank's part out of the whole one)."""
    from megatron.core import parallel_state

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        first_layer = chunk.decoder.layers[0].layer_number - 1
        for name, parameter in chunk.named_parameters():
            name = _count_from(first_layer, "layers", name)
            split = run.tp > 1 and getattr(parameter, "tensor_model_parallel", False)
            if "local_experts" in name:
                name = _count_from(dict(run.config)["num_moe_experts"] // run.ep * ep_rank, "local_experts", name)
                split = False  # expert_tensor_parallel_size is 1
            parts = 2 if "linear_fc1" in name else 1  # gate and value of a gated MLP are cut one by one
            place = {"dim": getattr(parameter, "partition_dim", 0), "size": run.tp, "rank": tp_rank}
            yield name, parameter, functools.partial(_cut, parts=parts, **place) if split else _all_of_it


def _count_from(first, what, name):
    return re.sub(rf"\b{what}\.(\d+)", lambda match: f"{what}.{first + int(match[1])}", name)


def _cut(whole, *, dim, parts, size, rank):
    return torch.cat([part.chunk(size, dim)[rank] for part in whole.chunk(parts, dim)], dim)


def _all_of_it(whole):
    return whole


def whole_weight(name, parameter, cut=None):
    """The whole weight, from its name alone; exact in every dtype."""
    shape = list(parameter.shape)
    if cut not in (None, _all_of_it):
        shape[parameter.partition_dim] *= cut.keywords["size"]
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (0.15 * torch.randn(shape, generator=generator) + ("norm" in name)).bfloat16()


def global_batch(step):
    """tokens, labels, positions [GLOBAL_BATCH, SEQ_LENGTH] of one step."""
    text = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(step))
    positions = torch.arange(SEQ_LENGTH).expand(GLOBAL_BATCH, -1).contiguous()
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous(), "positions": positions}


def train_plainly(run):
    """{"losses", "norms": by step; "gradients": of the first step; "weights": the last ones, by whole name}."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))  # as Megatron's schedules do it
    (model,) = build_chunks(run, config_of(run))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS, weight_decay=0.0)
    result = {"losses": [], "norms": [], "gradients": {}, "weights": {}}
    for step in range(STEPS):
        optimizer.zero_grad()
        for router in filter(lambda module: hasattr(module, "reset_global_aux_loss_tracker"), model.modules()):
            router.reset_global_aux_loss_tracker()  # as Megatron's finalize_model_grads does it
        total = num_tokens = 0.0
        for batch in microbatches(run, step, of_all=True):
            losses, loss = _forward_step(iter([batch]), model)
            loss, count, _ = loss(losses)
            loss.backward()
            total, num_tokens = total + float(loss.detach()), num_tokens + float(count)
        for parameter in model.parameters():
            parameter.grad /= num_tokens
        if step == 0:
            result["gradients"] = {name: p.grad.clone() for name, p, _ in whole_names(run, [model])}
        result["losses"].append(total / num_tokens)
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        if step not in run.skipped[:1]:
            optimizer.step()
    result["weights"] = {name: p.detach().clone() for name, p, _ in whole_names(run, [model])}
    return result


def train(run):
    """(the same with Megatron's means, of this rank's part; {name: function that cuts this part out of the whole}).

    "gradients" is None with the distributed optimizer. Also "applied": whether each step was taken, and "scales": the
    loss scale after each step.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = config_of(run)
    steps = iter(range(STEPS))

    def finalize(model, *args, **kwargs):
        if run.skipped == (next(steps), dist.get_rank()):
            next(model[0].parameters()).main_grad.fill_(float("inf"))
        finalize_model_grads(model, *args, **kwargs)

    config.finalize_model_grads_func = finalize
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=run.distributed_optimizer, overlap_grad_reduce=False
    )
    chunks = [DistributedDataParallel(config, ddp, chunk) for chunk in build_chunks(run, config)]
    scaling = {} if run.loss_scale is None else {"initial_loss_scale": run.loss_scale, "hysteresis": 1}
    precision = {"bf16": config.bf16, "fp16": config.fp16, "params_dtype": run.dtype}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            adam_eps=EPS,
            weight_decay=0.0,
            clip_grad=CLIP,
            use_distributed_optimizer=run.distributed_optimizer,
            **precision,
            **scaling,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    config.grad_scale_func = optimizer.scale_loss
    result = {"losses": [], "norms": [], "gradients": None, "applied": [], "scales": []}
    for step in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batches = microbatches(run, step)
        outputs = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(batches) for _ in chunks] if run.vp else iter(batches),
            model=chunks if run.vp else chunks[0],
            num_microbatches=len(batches),
            seq_length=SEQ_LENGTH,
            micro_batch_size=run.micro_batch,
            forward_only=False,
        )
        result["losses"].append(mean_loss(outputs))
        if step == 0 and not run.distributed_optimizer:
            scale = optimizer.get_loss_scale()
            result["gradients"] = {name: p.main_grad / scale for name, p, _ in whole_names(run, chunks)}
        applied, norm, _ = optimizer.step()
        result["applied"].append(applied)
        result["norms"].append(norm)
        result["scales"].append(float(optimizer.get_loss_scale()))
    result["weights"] = {name: p.detach().clone() for name, p, _ in whole_names(run, chunks)}
    return result, {name: cut for name, _, cut in whole_names(run, chunks)}


def microbatches(run, step, *, of_all=False):
    """This rank's share of the global batch: over data-parallel ranks by rows, over cp as Megatron does it, and of
    documents over all of them; of_all: the whole of it."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    if run.documents:
        group = None if of_all else parallel_state.get_data_parallel_group(with_context_parallel=True)
        return [_dispatched(lengths, 10 * step + i, group) for i, lengths in enumerate(run.documents)]
    place = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    dp_rank, dp = (0, 1) if of_all else place
    rows = torch.arange(GLOBAL_BATCH).view(-1, dp, run.micro_batch)[:, dp_rank]  # [microbatch, row]
    batch = global_batch(step)
    return [get_batch_on_this_cp_rank({name: x[some] for name, x in batch.items()}) for some in rows]


def _dispatched(lengths, seed, group):
    text = torch.randint(0, VOCAB, (1, sum(lengths) + 1), generator=torch.Generator().manual_seed(seed))
    batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": torch.ones(1, sum(lengths))}
    batch, packed = tree.dispatch_batch(batch, [0, *itertools.accumulate(lengths)], cp_group=group)
    return {**batch, "positions": batch["position_ids"], "packed_seq_params": packed}


def _forward_step(iterator, model):
    batch = next(iterator)
    packed = {"packed_seq_params": batch["packed_seq_params"]} if "packed_seq_params" in batch else {}
    losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"], **packed)
    return losses, functools.partial(_loss, mask=batch.get("loss_mask"))


def _loss(losses, mask):
    count = losses.numel() if mask is None else int(mask.sum())
    total = (losses.float() if mask is None else losses.float() * mask).sum()
    return total, torch.tensor(count, dtype=torch.int), (total.detach().clone(), count)


def mean_loss(outputs):
    """Mean over all tokens of the global batch, on every rank."""
    from megatron.core import parallel_state

    total = torch.zeros(2, dtype=torch.float64)
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        for loss, tokens in outputs:
            total += torch.stack([loss.double(), torch.tensor(tokens, dtype=torch.float64)])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def in_layout(run, function):
    """`function(run)` with Megatron's process groups for its layout."""
    others = {"virtual_pipeline_model_parallel_size": run.vp} if run.vp else {}
    if run.ep > 1:
        others |= {"expert_model_parallel_size": run.ep, "expert_tensor_parallel_size": 1}
    with megatron(tp=run.tp, pp=run.pp, cp=run.cp, **others):
        return function(run)


def errors(result, cuts, reference):
    """{what: largest error on this rank, relative to the largest true value}."""
    found = {}
    for what in ("losses", "norms"):
        mine, true = torch.tensor(result[what]), torch.tensor(reference[what])
        found[what] = float(((mine - true) / true).abs().max())
    for name, cut in cuts.items():
        if result["gradients"] is not None:
            found[f"gradient of {name}"] = _relative(result["gradients"][name], cut(reference["gradients"][name]))
        start = whole_weight(name, reference["weights"][name])
        change, true = result["weights"][name] - cut(start), cut(reference["weights"][name] - start)
        found[f"change of {name}"] = _relative(change, true)
    return found


def _relative(mine, true):
    assert mine.shape == true.shape
    return float((mine - true).abs().max() / true.abs().max())


def _errors_of(rank, world, runs):
    references = {reference: in_layout(reference, train_plainly) for reference in {plain(run): 0 for run in runs}}
    return [errors(*in_layout(run, train), references[plain(run)]) for run in runs]


def check_training(world, runs, *, timeout=200.0):
    """Every run equals the plain loop, on every rank."""
    for found in run_distributed(_errors_of, world, runs, timeout=timeout):
        for run, values in zip(runs, found, strict=True):
            for what, error in values.items():
                limit = TOLERANCE_OF_CHANGES if what.startswith("change") else TOLERANCE
                assert error <= limit, f"{what} is off by {error:.1e} in {run}"
