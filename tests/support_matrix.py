"""The support tables of docs/megatron.md and docs/huggingface.md, made from marks on the tests that show them.

    @pytest.mark.supports("packed sequences (thd)", with_="cp = 2, 4; causal")    # what a passing test shows
    @pytest.mark.refuses("cp_comm_type of another name", when="the model is built")    # what raises, and when

Tests with the same feature share a row, and so do features with the same tests. What begins with the name of one of
COLUMNS ("images: training; cp = 2") stands in that column. Name a feature as users of Megatron
or Transformers do (its option in brackets); `with_` says briefly what it ran with. After a change of marks:

    python tests/support_matrix.py         # writes the tables between the two comment lines of both pages

Marks in tests/transformers and tests/deepspeed belong to docs/huggingface.md, others to docs/megatron.md. Only pytest's
collection is used; test_support_matrix.py compares the pages with it.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
MEGATRON, HUGGING_FACE = (TESTS.parent / "docs" / name for name in ("megatron.md", "huggingface.md"))
HUGGING_FACE_FOLDERS = {"transformers", "deepspeed"}
COLLECTED = pytest.StashKey()  # all tests of a session, also those that -m and -k leave out
COLUMNS = ("images: generation", "images: training")
BEGIN, END = "<!-- support matrix: begin -->\n", "\n<!-- support matrix: end -->"


def refused(feature, *values, when):
    """A case of pytest.mark.parametrize with the mark `refuses`, named after the feature."""
    return pytest.param(*values, marks=pytest.mark.refuses(feature, when=when), id=feature)


def supported(names, with_, fast=None):
    """Cases of pytest.mark.parametrize with the mark `supports`, one a name; slow but for the `fast` ones, if given."""
    cases = []
    for name in names:
        slow = [] if fast is None or name in fast else [pytest.mark.slow]
        cases.append(pytest.param(name, marks=[pytest.mark.supports(f"`{name}`", with_=with_), *slow], id=name))
    return cases


def slow_but(fast, names):
    """Cases of pytest.mark.parametrize, one a name, slow but for the `fast` ones."""
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in names]


def marked_files():
    """{page: test files that use one of the marks}."""
    pages = {MEGATRON: [], HUGGING_FACE: []}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if any(f"{name}(" in text for name in ("mark.supports", "mark.refuses", "supported", "refused")):
            pages[HUGGING_FACE if path.parent.name in HUGGING_FACE_FOLDERS else MEGATRON].append(path)
    return pages


def _placed(with_):
    """(column, condition) of a mark."""
    column, _, condition = with_.partition("; ")
    return (column, condition) if column in COLUMNS else ("tested with", with_)


def tables(items):
    """The Markdown of what the marks of these tests say."""
    # {feature: {column: conditions}}, {when: features}; a dict keeps the order and drops repetitions
    supported, refused = {}, {}
    for item in items:
        for mark in reversed(list(item.iter_markers("supports"))):
            column, condition = _placed(mark.kwargs["with_"])
            supported.setdefault(*mark.args, {}).setdefault(column, {})[condition] = None
        for mark in item.iter_markers("refuses"):
            refused.setdefault(mark.kwargs["when"], {})[mark.args[0]] = None
    columns = ["tested with", *(name for name in COLUMNS if any(name in found for found in supported.values()))]
    rows = {}  # {conditions in each column: features}
    for feature in sorted(supported, key=str.lower):
        found = supported[feature]
        rows.setdefault(tuple("<br>".join(found.get(name, ())) for name in columns), []).append(feature)
    lines = ["| " + " | ".join(["supported", *columns]) + " |", "| --- " * (1 + len(columns)) + "|"]
    lines += [f"| {'; '.join(features)} | {' | '.join(conditions)} |" for conditions, features in rows.items()]
    lines += ["", "| ValueError when | for |", "| --- | --- |"]
    lines += [f"| {when} | {'; '.join(sorted(refused[when], key=str.lower))} |" for when in sorted(refused)]
    return "\n".join(lines)


def page_with(page, matrix):
    """The page's text with `matrix` between its two comment lines."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + matrix + END + rest.split(END)[1]


class _Collector:
    def pytest_collection_modifyitems(self, items):
        self.items = items.copy()


def main():
    for page, files in marked_files().items():
        collector = _Collector()
        options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-c", str(TESTS.parent / "setup.cfg")]
        if code := pytest.main([*options, *map(str, files)], plugins=[collector]):
            raise SystemExit(f"pytest could not collect the tests (exit code {int(code)})")
        page.write_text(page_with(page.read_text(), tables(collector.items)))


if __name__ == "__main__":
    main()
