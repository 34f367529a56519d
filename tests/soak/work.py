"""What the ranks of a soak run: two scripts of launch/, in rounds of a fixed size, and the files that these write."""

import json
import random
from itertools import chain
from pathlib import Path

import torch

from megatron_tree.integrations.transformers import models
from megatron_tree.tools.training.checkpoint import MANIFEST

from ..support.byte_tokens import byte_tokenizer

SAVE_INTERVAL = 20
PROMPT, ANSWER = (16, 400), (4, 48)  # tokens, at least and at most


def lines(path: Path) -> list[dict]:
    """The complete lines of a JSONL file, which may grow; none if there is no such file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _command(name: str, **options) -> list[str]:
    given = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return ["-m", "megatron_tree", name, *given]


class Training:
    """megatron-tree train on a small GPT, all ranks in one context-parallel group. A result: (step, loss)."""

    name, allowed, once = "train", 1e-6, False  # allowed: relative; once: no result twice in a round

    def __init__(self, home: Path, *, ranks: int, total: int, limit_s: float, seed: int):
        self.total, self._ranks, self._limit_s, self._seed = total, ranks, limit_s, seed
        self._text, self._damaged = home / "text", set()
        self._text.mkdir()
        rng = random.Random(seed)
        words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 8))) for _ in range(300)]
        for number in range(16):
            text = " ".join(rng.choices(words, [1 / (1 + i) for i in range(300)], k=4000))
            (self._text / f"{number:02d}.txt").write_text(text + "\n")

    def argv(self, folder: Path, number: int) -> list[str]:
        return _command(
            "train", num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, seq_length=256,
            micro_batch_size=1, global_batch_size=2, context_parallel_size=self._ranks,
            cp_comm_type="tree", seed=self._seed, train_iters=self.total, lr=2e-3, data_path=self._text,
            save=folder / "checkpoints", save_interval=SAVE_INTERVAL, keep_checkpoints=2,
            output_dir=folder / f"log-{number}", distributed_timeout_minutes=self._limit_s / 60,
        ) + ["--resume"]  # fmt: skip

    def results(self, folder: Path, number: int) -> list[tuple]:
        """Those of incarnation `number`."""
        log = lines(folder / f"log-{number}" / "train.jsonl")
        return [(line["step"], line["loss"]) for line in log if "step" in line]

    def done(self, results: list[tuple]) -> int:
        """Units of the round that are done after these results."""
        return max((step for step, _ in results), default=0)

    def resumed_after(self, folder: Path, number: int) -> int | None:
        """The unit that incarnation `number` says it went on from; None if it did not come that far."""
        log = lines(folder / f"log-{number}" / "train.jsonl")
        return next((line["first_step"] - 1 for line in log if "first_step" in line), None)

    def saved(self, folder: Path) -> int:
        """The unit that the next incarnation should go on from: the newest good checkpoint."""
        return max((int(path.name[5:]) for path in self._good(folder)), default=0)

    def damage(self, folder: Path) -> bool:
        """Flip a byte of the newest checkpoint, if an older one is left; whether it was done."""
        good = self._good(folder)
        if len(good) < 2:
            return False
        victim = max((path for path in max(good).iterdir() if path.name != MANIFEST), key=lambda p: p.stat().st_size)
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
        self._damaged.add(_stamp(max(good)))
        return True

    def difference(self, truth: float, found: float) -> float:
        return abs(found - truth) / abs(truth)

    def _good(self, folder: Path) -> list[Path]:
        complete = [path.parent for path in folder.glob(f"checkpoints/iter_???????/{MANIFEST}")]
        return [path for path in complete if _stamp(path) not in self._damaged]


def _stamp(checkpoint: Path) -> tuple[Path, int]:
    """Tells a checkpoint from a later one of the same step."""
    return checkpoint, (checkpoint / MANIFEST).stat().st_mtime_ns


class Generation:
    """The command generate on a file of prompts, the cache sharded. A result: (id, tokens, logprobs)."""

    name, allowed, once = "generate", 1e-4, True  # allowed: nats; after a restart a row is batched with other rows

    def __init__(self, home: Path, *, ranks: int, total: int, limit_s: float, seed: int):
        self.total, self._limit_s, self._seed = total, limit_s, seed
        self._model, self._prompts = home / "model", home / "prompts.jsonl"
        _write_model(self._model, positions=PROMPT[1] + ANSWER[1])
        rng = random.Random(seed)
        requests = []
        for number in range(total):
            prompt = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=rng.randint(*PROMPT)))
            request = {"id": number, "prompt": prompt, "max_tokens": rng.randint(*ANSWER), "logprobs": 0}
            if number % 2:
                request |= {"temperature": 1.0, "seed": rng.randrange(2**31), "n": rng.choice((1, 1, 2))}
            requests.append(json.dumps(request) + "\n")
        self._prompts.write_text("".join(requests))

    def argv(self, folder: Path, number: int) -> list[str]:
        return _command(
            "generate", model=self._model, prompts=self._prompts, output=folder / "answers.jsonl", max_rows=4,
            prefill_chunk=64, seed=self._seed, distributed_timeout_minutes=self._limit_s / 60,
        )  # fmt: skip

    def results(self, folder: Path, number: int) -> list[tuple]:
        """Those of the round so far."""
        answers = [line for line in lines(folder / "answers.jsonl") if "id" in line]
        rows = ((line["id"], [row["logprobs"] for row in line["answers"]]) for line in answers)
        return [(i, [[(x["token"], x["logprob"]) for x in row] for row in of_prompt]) for i, of_prompt in rows]

    def done(self, results: list[tuple]) -> int:
        return len(results)

    def resumed_after(self, folder: Path, number: int) -> None:
        """It does not say; an answer that is lost or given twice is found at the end of the round."""

    def saved(self, folder: Path) -> int:
        return len(self.results(folder, 0))

    def damage(self, folder: Path) -> bool:
        """Leave a line that a crash has cut off."""
        with (folder / "answers.jsonl").open("a") as file:
            file.write('{"id": 1, "answers": [{"te')
        return True

    def difference(self, truth: list, found: list) -> float:
        """The largest of a logprob; infinite if the tokens are others."""
        pairs = [list(chain(*rows)) for rows in (truth, found)]
        same = len(pairs[0]) == len(pairs[1]) and all(a == b for (a, _), (b, _) in zip(*pairs))
        return max(abs(x - y) for (_, x), (_, y) in zip(*pairs)) if same else float("inf")


def _write_model(folder: Path, *, positions: int) -> None:
    """A tiny Llama with random weights and a byte tokenizer, as a model folder.

    The output layer is scaled up, so the likeliest token wins by a clear margin and rounding changes no answer.
    """
    shape, tokenizer = dict(layers=2, heads=4, kv_heads=2, head_dim=16, hidden_size=64), byte_tokenizer()
    model = models.random_llama(**shape, positions=positions, vocab_size=len(tokenizer))
    with torch.no_grad():
        model.lm_head.weight.mul_(10.0)
    models.hide_progress_bars()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
