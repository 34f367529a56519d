"""Trainers with other losses on sharded sequences, TRL's among them: what is logged, and the weights, on one rank."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from support.ranks import largest, run_distributed
from support.trainers import ARGUMENTS, OFFLINE

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
pytest.importorskip("trl", reason="TRL is an optional package")

STEPS = 4
ROWS = 27  # which no batch divides
OPTIONS = ARGUMENTS | {"max_steps": STEPS, "learning_rate": 1e-2, "bf16": False, "gradient_checkpointing": False}
SENTENCES = [
    "a sequence is cut into shards", "ranks share what they see", "one tree sums them all", "every query meets its key",
    "the gradient is a mean", "tokens of a row stay in order", "padding has no label", "loss is a number",
]  # fmt: skip


def _tokenizer():
    from support.byte_tokens import byte_tokenizer

    return byte_tokenizer(size=129)


def _model(kind="causal", seed=1):
    from support.hf_models import SHAPE

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SHAPE | {"pad_token_id": 0, "eos_token_id": 0, "bos_token_id": None})
    classes = {"causal": transformers.AutoModelForCausalLM, "scores": transformers.AutoModelForSequenceClassification}
    config.num_labels = 1
    return classes[kind].from_config(config)


def _with_lora(model, task=None):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, "task_type": task}
    return get_peft_model(model, LoraConfig(**options))


def _pairs():
    from datasets import Dataset

    rows = [(SENTENCES[i % 8][:9], SENTENCES[i % 8][9:], SENTENCES[(3 * i + 1) % 8]) for i in range(ROWS)]
    return Dataset.from_list([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in rows])


def _on_disk(rows, folder):
    """The rows in a folder of this run, in which TRL keeps what it computes for them on rank 0."""
    from datasets import Dataset, load_from_disk

    if not dist.is_initialized() or dist.get_rank() == 0:
        Dataset.from_list(rows).save_to_disk(str(folder))
    if dist.is_initialized():
        dist.barrier()
    return load_from_disk(str(folder))


def _make(name, trainer, folder, ranks, **more):
    """A trainer with the arguments of a case; ranks: data-parallel ones, which share 4 rows."""
    import trl
    from datasets import Dataset

    size = {"per_device_train_batch_size": 4 // ranks, "per_device_eval_batch_size": 4 // ranks}
    config = lambda kind, **options: getattr(trl, kind)(str(folder), **OPTIONS | size | options)  # noqa: E731
    options = {"processing_class": _tokenizer()} | more
    if name in ("smoothed", "weighted"):
        rows = [_tokenizer()(text)["input_ids"] for text in (SENTENCES * 4)[:ROWS]]
        data = [{"input_ids": ids, "labels": [-100] * (i % 5) + ids[i % 5 :]} for i, ids in enumerate(rows)]
        collator = transformers.DataCollatorForSeq2Seq(_tokenizer())
        if name == "weighted":
            options["compute_loss_func"] = _weighted if "sp_size" in more else _weighted_logits
        smoothing = 0.1 if name == "smoothed" else 0.0
        own = {"gradient_accumulation_steps": 2, "label_smoothing_factor": smoothing, "eval_strategy": "steps"}
        args = transformers.TrainingArguments(str(folder), **OPTIONS | size | own | {"eval_steps": 2})
        evaluated = data[: 5 if ranks == 1 else 4]  # several plain ranks count a sample twice to have equally many
        return trainer(_model(), args, collator, data, evaluated, **options)
    if KINDS[name] == "SFTTrainer":
        data = Dataset.from_list([{"prompt": s[:7], "completion": s[7:]} for s in (SENTENCES * 4)[:ROWS]])
        if name == "packed":
            data = Dataset.from_list([{"text": s} for s in SENTENCES * 16])
        own = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        args = config("SFTConfig", **own, **SUPERVISED[name])
        return trainer(model=_model(), args=args, train_dataset=data, eval_dataset=data.select(range(5)), **options)
    if name == "lora":  # the reference is the model without its adapters
        return trainer(model=_with_lora(_model()), args=config("DPOConfig"), train_dataset=_pairs(), **options)
    if name in PREFERENCES:
        args = config("DPOConfig", **PREFERENCES[name])
        return trainer(model=_model(), ref_model=_model(seed=2), args=args, train_dataset=_pairs(), **options)
    if name == "precomputed":
        args = config("DPOConfig", precompute_ref_log_probs=True)
        return trainer(
            model=_model(), args=args, train_dataset=_on_disk(_pairs().to_list(), folder / "pairs"), **options
        )
    if name in ("dpo", "fsdp"):
        sharded = name == "fsdp" and "sp_size" in more
        wrapper = {"fsdp": True, "fsdp_config": {"version": 2}} if sharded else {}
        args = config("DPOConfig", gradient_accumulation_steps=2, use_weighting=True, **wrapper)
        if sharded:  # Accelerate has FSDP for ranks with devices only
            from accelerate.state import PartialState
            from accelerate.utils import DistributedType

            assert args.device.type == "cpu"
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        made = trainer(model=_model(), ref_model=_model(seed=2), args=args, train_dataset=_pairs(), **options)
        if name == "dpo":
            made.logged = _logs_completions(made)
        return made
    if name in ("reward", "adapted"):
        args = config("RewardConfig", center_rewards_coefficient=0.1, eval_strategy="steps", eval_steps=2)
        data, model = _pairs(), _model("scores")
        if name == "adapted":
            model = _with_lora(model, "SEQ_CLS")
        return trainer(model=model, args=args, train_dataset=data, eval_dataset=data.select(range(8)), **options)
    if KINDS[name] == "KTOTrainer":
        rows = [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 3 > 0} for i, r in enumerate(_pairs())]
        loss = {"loss_type": "apo_zero_unpaired", "undesirable_weight": 0.7} if name == "apo" else {}
        args = config("KTOConfig", precompute_ref_log_probs=name == "precomputed_kto", **loss)
        data, reference = _on_disk(rows, folder / "rows"), None if name == "apo" else _model(seed=2)
        model = _model()
        model.config._name_or_path = str(folder.parents[1] / "reference")  # where TRL finds one by itself
        if name == "lora_kto":
            model, reference = _with_lora(model), None
        return trainer(model=model, ref_model=reference, args=args, train_dataset=data, **options)
    data = Dataset.from_list([{"prompt": s[: 5 + i % 7]} for i, s in enumerate(SENTENCES * 4)])
    own = ONLINE[name]
    online = {"num_generations": 8, "max_completion_length": 10, "per_device_train_batch_size": 8 // ranks}
    if name in ("rollout", "truncated"):
        online["per_device_train_batch_size"], options["rollout_func"] = 16 // ranks, _rollout
    model = _model()
    if KINDS[name] == "RLOOTrainer" or own.get("beta"):  # TRL loads the reference from where the model came from
        model.config._name_or_path = str(folder.parents[1] / "reference")
    args = config(KINDS[name].replace("Trainer", "Config"), **online | own)
    if args.eval_strategy != "no":
        options["eval_dataset"] = data.select(range(5, 8))
    if name == "adapted_kl":
        model = _with_lora(model)
    rewards = _reward
    if name == "scored":
        rewards, options["reward_processing_classes"] = [_model("scores", seed=4), _reward], [_tokenizer(), None]
    return trainer(model=model, reward_funcs=rewards, args=args, train_dataset=data, **options)


def _logs_completions(trainer):
    """TRL's callback that generates for some prompts after every second step: each process for some of them."""
    from trl.trainer.callbacks import LogCompletionsCallback

    trainer.eval_dataset = {
        "prompt": [s[:6] for s in SENTENCES[:3]]
    }  # Accelerate splits lists, but no dataset's column
    # shards are trained without a cache of Transformers'
    generation = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0, use_cache=False)
    callback = LogCompletionsCallback(trainer, generation, freq=2)
    trainer.add_callback(callback)
    return callback


def _weighted(outputs, labels, num_items_in_batch=None):
    """Weights of tokens by their number, and more of it where the model is right."""
    weights = (1 + labels % 3) * (1 + outputs.log_probs.detach().exp())
    count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return -(weights * outputs.log_probs).sum() / count


def _weighted_logits(outputs, labels, num_items_in_batch=None):
    """The same from whole logits and labels that are not shifted."""
    labels = labels[:, 1:]
    log_probs = outputs.logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    outputs.log_probs = log_probs.masked_fill(labels == -100, 0)
    return _weighted(outputs, labels, num_items_in_batch)


def _reward(completions, **options):
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def _rollout(prompts, trainer):
    """Completions of eight lengths to each prompt, every second of which ends."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    rows = [[(7 * (i % 8) + 3 * j + len(row)) % 120 + 1 for j in range(3 + i % 8)] for i, row in enumerate(ids)]
    rows = [row + [0] * (i % 2) for i, row in enumerate(rows)]
    return {"prompt_ids": ids, "completion_ids": rows, "logprobs": None}


TWICE = {"steps_per_generation": 2, "num_iterations": 2}
ONLINE = {  # options of GRPO and RLOO
    "grpo": TWICE | {"gradient_accumulation_steps": 1, "entropy_coef": 0.01},
    "statistics": {"scale_rewards": "batch", "top_entropy_quantile": 0.6, "loss_type": "cispo", "beta": 0.1}
    | {"steps_per_generation": 2, "multi_objective_aggregation": "normalize_then_sum"},
    "rollout": {},
    "sapo": TWICE | {"loss_type": "sapo"},
    "vespo": TWICE | {"loss_type": "vespo"},
    "luspo": TWICE | {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "kl": TWICE | {"beta": 0.1, "scale_rewards": "none", "loss_type": "dr_grpo", "use_bias_correction_kl": False},
    "synced": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "loss_type": "grpo"},
    "two-sided": TWICE | {"delta": 1.5, "epsilon_high": 0.3, "off_policy_mask_threshold": 0.1},
    "truncated": {"mask_truncated_completions": True, "loss_type": "bnpo"},
    "scored": {"reward_weights": [1.0, 0.5]},
    "gspo": TWICE
    | {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.05}
    | {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 4},
    "adaptive": {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "num_iterations": 2, "entropy_coef": 0.01}
    | {"use_adaptive_entropy": True, "entropy_target": 9.0, "top_entropy_quantile": 0.5, "loss_type": "cispo"},
    "sampled": {"repetition_penalty": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.001, "temperature": 0.7}
    | {"max_completion_length": 30, "scale_rewards": "none"},
    "adapted_kl": TWICE | {"beta": 0.1, "loss_type": "grpo"},
    "rloo": {"normalize_advantages": True},
    "rloo-ended": {"mask_truncated_completions": True, "max_completion_length": 60, "beta": 0.0},
    "rloo-clipped": TWICE | {"beta": 0.2, "reward_clip_range": (0.2, 0.8)},
}
SUPERVISED = {
    "sft": {"loss_type": "dft"},
    "packed": {"packing": True, "max_length": 64},
    "chunked": {"loss_type": "chunked_nll", "completion_only_loss": False, "max_length": 24},
    "unpadded": {"padding_free": True, "max_length": None},
}
PAIRWISE = ["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"]
PAIRWISE += ["apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"]
PREFERENCES = {
    "pairwise": {"loss_type": PAIRWISE, "label_smoothing": 0.1, "gradient_accumulation_steps": 2},
    "divergent": {"f_divergence_type": "js_divergence", "ld_alpha": 0.5, "sync_ref_model": True}
    | {"ref_model_sync_steps": 2, "optim": "sgd", "learning_rate": 0.1},
}
KINDS = {
    "smoothed": "Trainer", "weighted": "Trainer", **dict.fromkeys(SUPERVISED, "SFTTrainer"),
    **dict.fromkeys((*PREFERENCES, "dpo", "lora", "fsdp", "precomputed"), "DPOTrainer"),
    **dict.fromkeys(("kto", "precomputed_kto", "apo", "lora_kto"), "KTOTrainer"),
    **{name: "RLOOTrainer" if name.startswith("rloo") else "GRPOTrainer" for name in ONLINE},
    "reward": "RewardTrainer", "adapted": "RewardTrainer",
}  # fmt: skip
CLOCKS = ("runtime", "per_second", "time")


def _class(name):
    import trl

    return transformers.Trainer if KINDS[name] == "Trainer" else getattr(trl, KINDS[name])


def _figures(trainer):
    """What is logged in every step but times, and the weights."""
    logs = [{k: v for k, v in log.items() if not any(c in k for c in CLOCKS)} for log in trainer.state.log_history]
    for kept in ("prompt", "completion", "advantages"):  # of the latest completions
        logs.append(dict(enumerate(getattr(trainer, "_logs", {}).get(kept, ()))))
    if hasattr(trainer, "logged") and trainer.accelerator.is_main_process:
        assert sorted(x[:2] for x in trainer.logged.table) == [
            (str(i), s[:6]) for i in (2, 4) for s in sorted(SENTENCES[:3])
        ]
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return logs, {name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in weights.items()}


def _plain(rank, world, folder, names):
    found = {}
    for name in names:
        trainer = _make(name, _class(name), folder / name, world)
        trainer.train()
        found[name] = _figures(trainer)
    return found


def _sharded(rank, world, folder, names, sp_size, want):
    from accelerate.state import AcceleratorState

    from megatron_tree.integrations.transformers.train.trainer import SequenceParallelMixin

    for name in names:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.pop("ACCELERATE_USE_FSDP", None)  # Accelerate sets it for a run with FSDP
        cls = type("Mine", (SequenceParallelMixin, _class(name)), {})
        trainer = _make(
            name,
            cls,
            folder / name,
            world // sp_size,
            sp_size=sp_size,
            loss_tile=None if "reward" in _class(name).__name__.lower() else 16,
        )
        trainer.train()
        logs, weights = _figures(trainer)
        for log, truth in zip(logs, want[name][0], strict=True):
            assert log.keys() == truth.keys()
            # with LoRA the reference is the same model at first
            for key in (key for key in truth if (name, key) != ("lora", "rewards/accuracies")):
                assert log[key] == pytest.approx(truth[key], rel=1e-3, abs=2e-5), (name, key, log, truth)
        for key, p in weights.items():
            assert largest((p - want[name][1][key]).abs().flatten().tolist()) < 2e-5, (name, key)


def _check(tmp_path, names, world, sp_size):
    _model(seed=2).save_pretrained(tmp_path / "reference")
    want, *_ = run_distributed(
        _plain, world // sp_size, tmp_path / "plain", names, timeout=250, env=OFFLINE, fresh=True
    )
    for name in names:
        norms = [log["grad_norm"] for log in want[name][0] if "grad_norm" in log]
        assert len(norms) == STEPS and min(norms) > 1e-3, name
    run_distributed(_sharded, world, tmp_path / "sharded", names, sp_size, want, timeout=500, env=OFFLINE, fresh=True)


@pytest.mark.timeout(600)
@pytest.mark.supports("TRL's trainers", with_="SFT, DPO, GRPO; 2 ranks")
@pytest.mark.supports("`transformers.Trainer`", with_="label smoothing, compute_loss_func")
def test_trainers_with_other_losses_on_two_ranks(tmp_path):
    _check(tmp_path, ["smoothed", "weighted", "dpo", "grpo", "sft", "precomputed", "precomputed_kto"], 2, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.supports("TRL's trainers", with_="GRPO; dp = 2, sp = 2; statistics of all rewards")
def test_two_groups_that_share_the_answers_to_a_prompt(tmp_path):
    _check(tmp_path, ["statistics"], 4, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.supports(
    "TRL's trainers", with_="packed SFT, KTO, RLOO, reward models; DPO with LoRA, FSDP2; all losses of GRPO"
)
@pytest.mark.parametrize(
    "names",
    [
        ["packed", "kto", "lora", "adapted"],
        ["reward", "rloo", "fsdp", "apo"],
        ["sapo", "vespo", "luspo", "kl", "two-sided"],
        ["synced", "truncated", "scored", "rloo-clipped"],
        ["pairwise", "divergent", "lora_kto", "chunked", "unpadded"],
        ["gspo", "adaptive", "sampled", "adapted_kl", "rloo-ended"],
    ],
)
def test_more_trainers_on_two_ranks(tmp_path, names):
    _check(tmp_path, names, 2, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.supports("TRL's trainers", with_="dp = 2, sp = 2; sp = 4")
@pytest.mark.parametrize(
    ("names", "sp_size"), [(["weighted", "dpo", "rollout", "rloo"], 2), (["reward", "sft", "grpo"], 4)]
)
def test_four_ranks(tmp_path, names, sp_size):
    _check(tmp_path, names, 4, sp_size)


def test_what_is_refused():
    from types import SimpleNamespace

    from megatron_tree.integrations.transformers.train import trl

    processor = {"processing_class": SimpleNamespace(image_processor=None)}
    for name, options, given, message in (
        ("GRPOTrainer", {"cast_lm_head_to_fp32": True}, {}, "cast_lm_head_to_fp32=True doesn't work on shards"),
        (
            "GRPOTrainer",
            {"use_transformers_continuous_batching": True},
            {},
            "use_transformers_continuous_batching=True",
        ),
        ("RLOOTrainer", {"cache_implementation": "static"}, {}, "cache_implementation='static' doesn't work on shards"),
        ("RLOOTrainer", {}, processor, "trains on text"),
        ("GRPOTrainer", {"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha=5.0: GRPOTrainer would add noise"),
        ("SFTTrainer", {"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1: SFTTrainer computes it"),
        ("SFTTrainer", {}, {"compute_loss_func": print}, "compute_loss_func=<built-in function print>"),
    ):
        with pytest.raises(ValueError, match=message):
            trl.check_arguments(name, SimpleNamespace(**options), given)
    sizes = {"per_device_train_batch_size": 4, "steps_per_generation": 1, "num_generations": 8, "eval_strategy": "no"}
    args = SimpleNamespace(**sizes, use_vllm=False)
    with pytest.raises(ValueError, match="steps_per_generation=4 times 3 sequence groups must be a multiple of the 8"):
        trl.count_batches(args, SimpleNamespace(sp_size=2, dp_size=3))
    args.steps_per_generation = 4
    trl.count_batches(args, SimpleNamespace(sp_size=2, dp_size=3))
    assert args.generation_batch_size == 48
    args.use_vllm, args.vllm_mode = True, "colocate"
    with pytest.raises(ValueError, match="vllm_mode='colocate': vLLM would run on 3 sequence groups"):
        trl.count_batches(args, SimpleNamespace(sp_size=2, dp_size=3))
