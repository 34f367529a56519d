"""TRL's trainers on sharded sequences: losses, gradient norms and weights of TRL's own on one rank."""

import pytest
import torch

from support.ranks import largest, run_distributed

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
pytest.importorskip("trl", reason="TRL is an optional package")

STEPS = 4
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
ARGUMENTS = {
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "seed": 3,
    "optim": "adamw_torch",
    "adam_epsilon": 1e-5,
    "gradient_checkpointing": False,
}
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


def _pairs():
    from datasets import Dataset

    rows = [(SENTENCES[i % 8][:9], SENTENCES[i % 8][9:], SENTENCES[(3 * i + 1) % 8]) for i in range(32)]
    return Dataset.from_list([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in rows])


def _make(name, trainer, folder, ranks, **more):
    """A trainer with the arguments of a case; ranks: data-parallel ones, which share 4 rows."""
    import trl
    from datasets import Dataset

    size = {"per_device_train_batch_size": 4 // ranks, "per_device_eval_batch_size": 4 // ranks}
    config = lambda kind, **options: getattr(trl, kind)(str(folder), **ARGUMENTS | size | options)  # noqa: E731
    options = {"processing_class": _tokenizer()} | more
    if name in ("sft", "packed"):
        data = Dataset.from_list([{"prompt": s[:7], "completion": s[7:]} for s in SENTENCES * 4])
        if name == "packed":
            data = Dataset.from_list([{"text": s} for s in SENTENCES * 16])
        packing = {"packing": True, "max_length": 64} if name == "packed" else {"loss_type": "dft"}
        args = config("SFTConfig", gradient_accumulation_steps=2, **packing)
        return trainer(model=_model(), args=args, train_dataset=data, **options)
    if name == "dpo":
        args = config("DPOConfig", gradient_accumulation_steps=2, use_weighting=True)
        return trainer(model=_model(), ref_model=_model(seed=2), args=args, train_dataset=_pairs(), **options)
    if name == "reward":
        args = config("RewardConfig", center_rewards_coefficient=0.1, eval_strategy="steps", eval_steps=2)
        data = _pairs()
        return trainer(
            model=_model("scores"), args=args, train_dataset=data, eval_dataset=data.select(range(8)), **options
        )
    if name == "kto":
        rows = [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 3 > 0} for i, r in enumerate(_pairs())]
        args = config("KTOConfig")
        return trainer(
            model=_model(), ref_model=_model(seed=2), args=args, train_dataset=Dataset.from_list(rows), **options
        )
    data = Dataset.from_list([{"prompt": s[: 5 + i % 7]} for i, s in enumerate(SENTENCES * 4)])
    kind = {"grpo": "GRPOConfig", "rloo": "RLOOConfig"}[name]
    online = {"num_generations": 8, "max_completion_length": 10, "per_device_train_batch_size": 8}
    if name == "grpo":
        online |= {"steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 1}
        online |= {"mask_truncated_completions": False, "entropy_coef": 0.01}
    model = _model()
    if name == "rloo":  # TRL loads the reference from where the model came from
        _model(seed=2).save_pretrained(folder / "reference")
        model.config._name_or_path = str(folder / "reference")
    args = config(kind, **online)
    return trainer(model=model, reward_funcs=_reward, args=args, train_dataset=data, **options)


def _reward(completions, **options):
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


KINDS = dict.fromkeys(("sft", "packed"), "SFTTrainer") | {
    "dpo": "DPOTrainer", "kto": "KTOTrainer", "reward": "RewardTrainer", "grpo": "GRPOTrainer", "rloo": "RLOOTrainer",
}  # fmt: skip
CLOCKS = ("runtime", "per_second", "time", "flos")


def _figures(trainer):
    """What is logged in every step but times, and the weights."""
    logs = [{k: v for k, v in log.items() if not any(c in k for c in CLOCKS)} for log in trainer.state.log_history]
    return logs, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def _plain(rank, world, folder, names):
    import trl

    found = {}
    for name in names:
        trainer = _make(name, getattr(trl, KINDS[name]), folder, 1)
        trainer.train()
        found[name] = _figures(trainer)
    return found


def _sharded(rank, world, folder, names, sp_size, want):
    import trl
    from accelerate.state import AcceleratorState

    from megatron_tree.integrations.transformers.trainer import SequenceParallelMixin

    for name in names:
        cls = type("Mine", (SequenceParallelMixin, getattr(trl, KINDS[name])), {})
        trainer = _make(
            name, cls, folder / name, world // sp_size, sp_size=sp_size, loss_tile=16 if name != "reward" else None
        )
        trainer.train()
        logs, weights = _figures(trainer)
        for log, truth in zip(logs, want[name][0], strict=True):
            assert log.keys() == truth.keys()
            for key in (key for key in truth if "std" not in key):  # of each reward once for every rank of a group
                assert log[key] == pytest.approx(truth[key], rel=1e-3, abs=2e-5), (name, key, log, truth)
        for key, p in weights.items():
            assert largest((p - want[name][1][key]).abs().flatten().tolist()) < 2e-5, (name, key)
        AcceleratorState._reset_state(reset_partial_state=True)


def _check(tmp_path, names, world, sp_size):
    (want,) = run_distributed(_plain, 1, tmp_path / "plain", names, timeout=250, env=ADDRESS, fresh=True)
    for name in names:
        first, last = want[name][0][0], want[name][0][-2]
        print(name, first, last)
    run_distributed(_sharded, world, tmp_path, names, sp_size, want, timeout=500, env=ADDRESS, fresh=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(KINDS))
def test_two_ranks(tmp_path, name):
    _check(tmp_path, [name], 2, 2)
