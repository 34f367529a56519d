"""`megatron-tree config`: every field of TreeConfig, with its values, default and docstring."""

import ast
import dataclasses

import pytest

from megatron_tree import TreeConfig
from megatron_tree.core import config_fields
from megatron_tree.core.config import CHOICES

FIELDS = dataclasses.fields(TreeConfig)


def test_every_field_is_explained(capsys):
    assert config_fields.main([]) == 0
    *found, _ = capsys.readouterr().out.split("\n\n")
    assert len(found) == len(FIELDS)
    for field, text in zip(FIELDS, found):
        head, *meaning = text.splitlines()
        name, _, rest = head.partition(": ")
        values, _, default = rest.rpartition(" = ")
        assert name == field.name and ast.literal_eval(default) == getattr(TreeConfig(), name)
        assert len(" ".join(meaning).split()) > 10 and max(map(len, meaning)) <= config_fields.COLUMNS
        if name in CHOICES:
            for value in values.split(" | "):
                TreeConfig(**{name: ast.literal_eval(value)})
            with pytest.raises(ValueError, match=f"{name}='nope' is unknown"):
                TreeConfig(**{name: "nope"})


def test_some_fields(capsys):
    assert config_fields.main(["check", "grid"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line and line[0] != " "] == [
        "grid: tuple[int, int] | None = None",
        "check: 'first' | 'always' | 'never' | 'finite' = 'first'",
    ]
