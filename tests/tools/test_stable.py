"""What the changelog calls stable is in stable.txt, and is still there: names, parameters, options and file formats.

A line is `module: name(positional, *, keyword)` of a function or a class, `megatron-tree COMMAND: --option ...`, or
`file NAME: key ...`. After an addition: `python tests/tools/test_stable.py` writes the file anew. What a new release
would lose from it keeps working for as long as CHANGELOG.md says.
"""

import importlib
import inspect
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
STABLE = Path(__file__).with_name("stable.txt")
MODULES = {
    "megatron_tree": (),
    "megatron_tree.core.comm": ("in_step", "monitored"),
    "megatron_tree.integrations.deepspeed": (
        "generate", "init_distributed", "init_inference", "register_sequence_parallel",
    ),
    "megatron_tree.integrations.megatron": (
        "MegatronRunner", "UnsupportedMegatronError", "dispatch_batch", "get_gpt_layer_tree_spec", "install",
        "megatron_on_cpu", "uninstall", "use_dispatched_documents", "use_sequence_parallel_norm", "use_tree_attention",
    ),
    "megatron_tree.integrations.transformers": (
        "Runner", "TreeCache", "gather_tokens", "generate", "log_probs_of_hidden", "register_sequence_parallel",
        "shard_batch", "token_log_probs", "train_on_shards",
    ),
    "megatron_tree.integrations.transformers.infer.engine": ("generate", "share_model"),
    "megatron_tree.integrations.transformers.models": ("model_folder",),
    "megatron_tree.integrations.transformers.train.accelerated": ("prepare_data_loader",),
    "megatron_tree.integrations.transformers.train.trainer": ("SequenceParallelMixin", "Trainer"),
}  # fmt: skip
"""Names that are stable; (): all of `__all__` but the EXPERIMENTAL ones."""
EXPERIMENTAL = {"tree_select", "tree_select_func", "selected", "head_shares", "cuda_graphs", "record_steps"}


def signature(value) -> str:
    """`(positional, *, keyword)`, with `=` behind what has a default; "" for what has none."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    words = []
    for x in parameters:
        if x.name in EXPERIMENTAL or x.name.startswith("_"):
            continue
        if x.kind is x.KEYWORD_ONLY and "*" not in words and not any(w.startswith("*") for w in words):
            words.append("*")
        stars = {x.VAR_POSITIONAL: "*", x.VAR_KEYWORD: "**"}.get(x.kind, "")
        words.append(f"{stars}{x.name}{'=' * (x.default is not x.empty)}")
    return f"({', '.join(words)})"


def names() -> dict[str, str]:
    """{"module: name": its signature}."""
    found = {}
    for module, chosen in MODULES.items():
        here = importlib.import_module(module)
        for name in chosen or [x for x in here.__all__ if x not in EXPERIMENTAL]:
            value = getattr(here, name)
            found[f"{module}: {name}"] = signature(value) if callable(value) else ""
    return found


def options() -> dict[str, str]:
    """{"megatron-tree COMMAND": its options}."""
    from megatron_tree.__main__ import COMMANDS

    commands = [[name] for name in COMMANDS if name not in ("bench", "convert")]
    found = {}
    for words in (*commands, ["convert", "to-huggingface"]):
        call = [sys.executable, "-m", "megatron_tree", *words, "--help"]
        usage = subprocess.run(call, capture_output=True, text=True, check=True).stdout.partition("\n\n")[0]
        known = {x for x in re.findall(r"--[a-z][\w-]*", usage) if not x.endswith(("cuda-graphs", "record-steps"))}
        found[" ".join(["megatron-tree", *words])] = " ".join(sorted(known))
    return found


def formats() -> dict[str, str]:
    """{"file NAME": its keys}."""
    from megatron_tree.core.cache.files import FORMAT
    from megatron_tree.core.plan import load_topology
    from megatron_tree.tools.training.arguments import NEW_MODEL

    topology = load_topology("ethernet")
    return {
        "file TOPOLOGY.yaml": " ".join(sorted(vars(topology))),
        "file TOPOLOGY.yaml, levels": " ".join(sorted(vars(topology.levels[0]))),
        "file model.yaml": " ".join(sorted(NEW_MODEL)),
        "file cache.json": f"format={FORMAT}",
    }


def listed() -> list[str]:
    return [
        *(f"{name}{text}" for name, text in names().items()),
        *(f"{name}: {text}" for name, text in (options() | formats()).items()),
    ]


def _name(line: str) -> str:
    return line.rpartition(": ")[0] if line.startswith(("megatron-tree", "file")) else line.partition("(")[0]


def _parameters(line: str) -> list[str]:
    return [x for x in line.partition("(")[2].rstrip(")").split(", ") if x]


def lost(then: str, now: str) -> str | None:
    """What a line has no longer; of a signature, what it asks for anew."""
    if then.startswith(("megatron-tree", "file")):
        return ", ".join(sorted(set(then.split()) - set(now.split()))) or None
    before, after = _parameters(then), _parameters(now)
    places = [x.rstrip("=") for x in itertools.takewhile(lambda x: not x.startswith("*"), before)]
    if [x.rstrip("=") for x in after[: len(places)]] != places:
        return f"positions of {', '.join(places)}"
    gone = [x for x in before if x not in after and f"{x}=" not in after]
    asked = [x for x in after if not x.endswith("=") and not x.startswith("*") and x not in before]
    return ", ".join(gone + [f"{x} without a default" for x in asked]) or None


def test_nothing_stable_is_lost():
    pytest.importorskip("megatron.core")
    pytest.importorskip("deepspeed")
    pytest.importorskip("accelerate")
    lines = STABLE.read_text().splitlines()
    then, now = ({_name(line): line for line in x} for x in (lines, listed()))
    assert then.keys() == now.keys(), "a name is gone; or it is new: write stable.txt anew"
    assert not {name: fault for name in then if (fault := lost(then[name], now[name]))}


@pytest.mark.parametrize(
    ("now", "fault"),
    [
        ("m: f(a, b, *, c, d=, e=)", None),
        ("m: f(a, b=, *, c=, d=)", None),
        ("m: f(b, a, *, c, d=)", "positions of a, b"),
        ("m: f(a, b, *, d=)", "c"),
        ("m: f(a, b, *, c, d)", "d=, d without a default"),
        ("m: f(a, b, *, c, d=, e)", "e without a default"),
    ],
)
def test_what_counts_as_lost(now, fault):
    assert lost("m: f(a, b, *, c, d=)", now) == fault


def test_the_changelog_names_what_is_experimental():
    text = (REPO / "CHANGELOG.md").read_text()
    assert "tests/tools/stable.txt" in text
    for name in EXPERIMENTAL - {"head_shares"}:
        assert f"`{name}" in text, name


if __name__ == "__main__":
    STABLE.write_text("\n".join(listed()) + "\n")
