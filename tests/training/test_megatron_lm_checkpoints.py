"""megatron-tree train continues checkpoints in the form in which Megatron-LM writes them."""

import argparse
import shutil
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

import torch
from megatron.core.transformer.enums import AttnBackend

from megatron_tree.training.checkpoint_files import MANIFEST, TRACKER, checkpoint_folder
from megatron_tree.training.checkpoint_options import DATA, LAYOUT, MODEL, OPTIMIZER, PLAIN
from support.ranks import run_distributed
from support.training_runs import losses, train_all, write_text


def as_megatron_lm(ours, target, **changed):
    """A copy of a checkpoint as Megatron-LM would have written it: other common values, and no list of files."""
    shutil.copytree(ours, target)
    folder = checkpoint_folder(target, int((target / TRACKER).read_text()))
    (folder / MANIFEST).unlink()
    common = torch.load(folder / "common.pt", weights_only=True)
    options = common.pop("options")
    for name in ("data_digest", "samples"):
        common.pop(name)
    given = {name: options[name] for name in (*LAYOUT, *MODEL, *OPTIMIZER, *DATA)} | PLAIN
    given |= {"group_query_attention": True, "padded_vocab_size": 320, "consumed_train_samples": 12}
    given |= {"rotary_base": 10000, "attention_backend": AttnBackend.auto, "save": "somewhere"}
    common["args"] = argparse.Namespace(**given | changed)
    torch.save(common, folder / "common.pt")


@pytest.mark.slow
@pytest.mark.supports("Megatron-LM's checkpoints in megatron-tree train", with_="torch_dist; cp = 2")
def test_they_are_continued(tmp_path):
    """Weights, optimizer and schedule go on as if we had written them; what differs is refused by name."""
    text, kept = write_text(tmp_path / "text"), tmp_path / "kept"
    options = f"--data-path {text} --eval-iters 0 --seed 7 --context-parallel-size 2 --train-iters 6"
    whole = [(tmp_path / "whole", f"{options} --save {kept} --save-interval 3 --keep-checkpoints 5")]
    run_distributed(train_all, 2, whole, fresh=True)
    (kept / TRACKER).write_text("3\n")
    variants = {
        "same": {},
        "experts": {"num_experts": 4},
        "layernorm": {"normalization": "LayerNorm"},
        "epsilon": {"layernorm_epsilon": 1e-6},
        "window": {"window_size": (8, 0)},
        "deeper": {"num_layers": 3},
        "vocabulary": {"padded_vocab_size": 384},
    }
    for name, changed in variants.items():
        as_megatron_lm(kept, tmp_path / f"mlm_{name}", **changed)
    as_megatron_lm(kept, tmp_path / "mlm_cut")
    data = checkpoint_folder(tmp_path / "mlm_cut", 3) / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    runs = [(tmp_path / name, f"{options} --load {tmp_path / f'mlm_{name}'}") for name in (*variants, "cut")]
    outcomes = dict(zip((*variants, "cut"), run_distributed(train_all, 2, runs, fresh=True)[0], strict=True))
    assert losses(tmp_path / "same") == {step: losses(tmp_path / "whole")[step] for step in (4, 5, 6)}, "bit for bit"
    assert "its data are not continued" in Path(tmp_path / "same.txt").read_text()
    assert "with num_experts=4; megatron-tree train and convert know num_experts=None" in outcomes["experts"]
    assert "with normalization='LayerNorm'" in outcomes["layernorm"]
    assert "norm_epsilon=1e-05, but" in outcomes["epsilon"]
    assert "with window_size=(8, 0)" in outcomes["window"]
    assert "num_layers=2, but" in outcomes["deeper"]
    assert "(padded to 320), but the vocabulary" in outcomes["vocabulary"]
    assert "384 tokens with its padding" in outcomes["vocabulary"]
    assert "__0_0.distcp has" in outcomes["cut"]
