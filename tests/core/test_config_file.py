"""MEGATRON_TREE_CONFIG: a TreeConfig from a YAML file."""

import pytest
import torch

from megatron_tree import tree_attn_func
from megatron_tree.core.config import TreeConfig, default_config, read_config


def written(folder, text):
    file = folder / "tree.yaml"
    file.write_text(text)
    return str(file)


def test_every_field(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("levels: []")
    text = "schedule: grid\ngrid: 2x4\ngrid_backward: [4, 2]\nhead_chunks: 2\nulysses_size: 1\ntopology: mine.yaml\n"
    text += "memory_budget: 2GB\ntransport: direct\nbackend: aten\ncomm_dtype: fp32\ntimeout_s: 20\ncheck: always\n"
    monkeypatch.setenv("MEGATRON_TREE_CONFIG", written(tmp_path, text + "deterministic: true\n"))
    assert default_config() == TreeConfig(
        schedule="grid",
        grid=(2, 4),
        grid_backward=(4, 2),
        head_chunks=2,
        ulysses_size=1,
        topology=str(tmp_path / "mine.yaml"),
        memory_budget=2_000_000_000,
        transport="direct",
        backend="aten",
        comm_dtype="fp32",
        timeout_s=20,
        check="always",
        deterministic=True,
    )


def test_without_a_file_or_with_an_empty_one(tmp_path, monkeypatch):
    monkeypatch.delenv("MEGATRON_TREE_CONFIG", raising=False)
    assert default_config() == TreeConfig()
    monkeypatch.setenv("MEGATRON_TREE_CONFIG", written(tmp_path, "# nothing\n"))
    assert default_config() == TreeConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shedule: ring", "tree.yaml': unknown key 'shedule': choose from schedule, grid, grid_backward, head_chunks"),
        ("gird: 2x4", "unknown key 'gird': choose from .*; did you mean 'grid' instead of 'gird'"),
        ("grid: [1,", "MEGATRON_TREE_CONFIG=.*tree.yaml can't be read as YAML: line 1, column 10: expected the node"),
        ("schedule: rnig", "tree.yaml': schedule='rnig' is unknown: choose one of 'auto', 'grid', 'cast', 'ring'"),
        ("grid: two", "tree.yaml': grid: 'two' is not a grid: write AxB, for instance 2x4"),
        ("- grid", "must contain options of TreeConfig, one `name: value` per line"),
        ("grid: 2x4\ngrid: 2x2", "can't be read as YAML.*duplicate key"),
    ],
)
def test_bad_files_are_named(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_config(written(tmp_path, text))


def test_the_functions_use_it(tmp_path, monkeypatch):
    """The call on one rank is refused as it would be with that TreeConfig; one that is passed wins."""
    monkeypatch.setenv("MEGATRON_TREE_CONFIG", written(tmp_path, "grid: 2x2"))
    q = torch.randn(1, 8, 2, 8)
    tree_attn_func(q, q, q, cp_group=None, config=TreeConfig())
    with pytest.raises(ValueError, match=r"grid=\(2, 2\)"):
        tree_attn_func(q, q, q, cp_group=None)
    monkeypatch.setenv("MEGATRON_TREE_CONFIG", str(tmp_path / "absent.yaml"))
    with pytest.raises(ValueError, match=r"MEGATRON_TREE_CONFIG='.*absent.yaml can't be read as YAML: .*No such file"):
        tree_attn_func(q, q, q, cp_group=None)
