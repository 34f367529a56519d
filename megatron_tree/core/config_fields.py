"""Print the fields of TreeConfig: type or values, default, and meaning."""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from dataclasses import fields

from .arguments import Parser, suggestion
from .config import CHOICES, CONFIG_VARIABLE, TreeConfig

EPILOG = f"""\
Pass them as config=TreeConfig(check="always", ...), or write them to a YAML file, one `name: value` per line (a grid as
2x4, memory_budget as 2GB), and name it in {CONFIG_VARIABLE}: it holds for calls that are given no config.
"""
COLUMNS = 100


def main(argv: list[str]) -> int:
    """Print the named fields, or all of them; returns 0."""
    parser = Parser(
        prog="megatron-tree config",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("field", nargs="*", help="default: all")
    names, docs = parser.parse_args(argv).field, docstrings()
    if unknown := [name for name in names if name not in docs]:
        parser.error(f"{unknown[0]!r} is no field of TreeConfig, only {', '.join(docs)}{suggestion(unknown, docs)}")
    for field in fields(TreeConfig):
        if field.name in names or not names:
            values = " | ".join(map(repr, CHOICES[field.name])) if field.name in CHOICES else field.type
            print(f"{field.name}: {values} = {field.default!r}")
            print(textwrap.indent(textwrap.fill(docs[field.name], COLUMNS - 4), "    ") + "\n")
    if not names:
        print(EPILOG, end="")
    return 0


def docstrings() -> dict[str, str]:
    """What is written below each field, in one line. (Python keeps no docstrings of fields.)"""
    (cls,) = ast.parse(textwrap.dedent(inspect.getsource(TreeConfig))).body
    docs = {}
    for statement, below in zip(cls.body, cls.body[1:]):
        if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
            docs[statement.target.id] = " ".join(ast.literal_eval(below.value).split())
    return docs
