"""What a soak runs on its ranks: two scripts of launch/, in rounds of a fixed size, and the files they write."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple, Protocol

from ...integrations.transformers import models
from ...training.checkpoint_files import MANIFEST
from .records import Answer

SCRIPTS = Path(__file__).resolve().parents[3] / "launch"
KEPT_CHECKPOINTS = 2
LENGTHS = {"prompt": (16, 400), "answer": (4, 48)}  # tokens
ROWS = 4
WORDS = 300


class Options(NamedTuple):
    """The sizes of a soak."""

    ranks: int
    steps: int
    """Training steps of a round."""
    save_interval: int
    requests: int
    """Prompts of a round."""
    limit_s: float
    seed: int


class Tail:
    """Reads the complete lines of a growing file; a missing file counts as empty."""

    def __init__(self, path: Path):
        self._path, self._read = path, 0

    def lines(self) -> list[dict]:
        """The lines added since the last call, parsed as JSON."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._read += len(data)
        return [json.loads(line) for line in data.splitlines()]


class Work(Protocol):
    """One kind of work. Each round has its own folder, and is done by one or more incarnations of the ranks."""

    name: str
    unit: str
    total: int
    """Units of a round."""

    def prepare(self) -> None:
        """Write the inputs."""

    def argv(self, folder: Path, number: int) -> list[str]:
        """The script and its options for incarnation `number`."""

    def saved(self, folder: Path) -> int:
        """Units on disk, after which the next incarnation resumes."""

    def results(self, folder: Path, number: int) -> Tail:
        """The results that incarnation `number` writes."""


class Training:
    """launch/train_gpt.py on a small GPT, all ranks in one context-parallel group."""

    name, unit = "train", "steps"

    def __init__(self, home: Path, options: Options):
        self.options, self.total, self._text = options, options.steps, home / "text"

    def prepare(self) -> None:
        self._text.mkdir()
        rng = random.Random(self.options.seed)
        words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 8))) for _ in range(WORDS)]
        for number in range(16):
            text = " ".join(words[min(int(rng.expovariate(0.03)), WORDS - 1)] for _ in range(4000))
            (self._text / f"{number:02d}.txt").write_text(text + "\n")

    def argv(self, folder: Path, number: int) -> list[str]:
        o = self.options
        given = dict(
            num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, seq_length=256,
            init_method_std=0.05, micro_batch_size=1, global_batch_size=2, context_parallel_size=o.ranks,
            cp_comm_type="tree", seed=o.seed, train_iters=o.steps, lr=2e-3, data_path=self._text, data_suffix=".txt",
            save=folder / "checkpoints", save_interval=o.save_interval, keep_checkpoints=KEPT_CHECKPOINTS,
            output_dir=folder / f"log-{number}", distributed_timeout_minutes=o.limit_s / 60,
        )  # fmt: skip
        return [str(SCRIPTS / "train_gpt.py"), "--resume", *_as_options(given)]

    def saved(self, folder: Path) -> int:
        return max(self.checkpoints(folder), default=0)

    def checkpoints(self, folder: Path) -> list[int]:
        """Steps of the complete checkpoints of a round."""
        return [int(path.parent.name[5:]) for path in folder.glob(f"checkpoints/iter_???????/{MANIFEST}")]

    def results(self, folder: Path, number: int) -> Tail:
        return Tail(folder / f"log-{number}" / "train.jsonl")


class Generation:
    """launch/generate.py on a file of prompts: continuous batching, the cache sharded over all ranks."""

    name, unit = "generate", "answers"

    def __init__(self, home: Path, options: Options):
        self.options, self.total = options, options.requests
        self._model, self._prompts = home / "model", home / "prompts.jsonl"

    def prepare(self) -> None:
        models.write_random_llama(self._model, positions=LENGTHS["prompt"][1] + LENGTHS["answer"][1])
        rng = random.Random(self.options.seed)
        lines = []
        for number in range(self.options.requests):
            prompt = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=rng.randint(*LENGTHS["prompt"])))
            line = {"id": number, "prompt": prompt, "max_tokens": rng.randint(*LENGTHS["answer"]), "logprobs": 0}
            if number % 2:
                line |= {"temperature": 1.0, "seed": rng.randrange(2**31), "n": rng.choice((1, 1, 2))}
            lines.append(json.dumps(line))
        self._prompts.write_text("\n".join(lines) + "\n")

    def argv(self, folder: Path, number: int) -> list[str]:
        o = self.options
        given = dict(
            model=self._model, prompts=self._prompts, output=folder / "answers.jsonl", max_rows=ROWS, prefill_chunk=64,
            seed=o.seed, distributed_timeout_minutes=o.limit_s / 60,
        )  # fmt: skip
        return [str(SCRIPTS / "generate.py"), "--resume", *_as_options(given)]

    def saved(self, folder: Path) -> int:
        return sum("id" in line for line in self.results(folder, 0).lines())

    def results(self, folder: Path, number: int) -> Tail:
        return Tail(folder / "answers.jsonl")


def _as_options(given: dict) -> list[str]:
    return [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def answer(line: dict) -> Answer:
    """A line of generate.py's output as an `Answer`."""
    tokens = [[x["token"] for x in row["logprobs"]] for row in line["answers"]]
    return Answer(line["id"], tokens, [[x["logprob"] for x in row["logprobs"]] for row in line["answers"]])
