"""The support matrices of docs/megatron.md and docs/huggingface.md, made from marks on the tests that show them.

    @pytest.mark.supports("packed sequences (thd)", with_="cp = 2, 4; causal")    # what a passing test shows
    def test_packed(): ...

    @pytest.mark.refuses("cp_comm_type of another name", when="the model is built")    # what raises, and when
    def test_unknown(): ...

    @pytest.mark.parametrize("options", [refused("qk_clip", {"qk_clip": True}, when="the model is built")])
    def test_refused(options): ...

A test may carry several marks, and several tests the same feature: they share a row of the table. Write a feature as
users of Megatron or Transformers call it (its option in brackets), and in `with_` what it was run with, short. No mark
on a test that can't fail. After a change of marks:

    python tests/support_matrix.py         # writes the tables between the two comment lines of both pages

Tests in tests/transformers and tests/deepspeed belong to docs/huggingface.md, the others to docs/megatron.md.
Only the collection of pytest is used, so a run takes seconds; test_support_matrix.py compares the page with it.
"""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
MEGATRON, HUGGING_FACE = (TESTS.parent / "docs" / name for name in ("megatron.md", "huggingface.md"))
HUGGING_FACE_FOLDERS = {"transformers", "deepspeed"}
COLLECTED = pytest.StashKey()  # of a session: all its tests, those that -m and -k leave out, too
BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"


def refused(feature, *values, when):
    """A case of pytest.mark.parametrize with the mark `refuses`, named after the feature."""
    return pytest.param(*values, marks=pytest.mark.refuses(feature, when=when), id=feature)


class Marks:
    """A pytest plugin that keeps what the marks of collected tests say: {feature: {condition: {test: is it slow}}}."""

    def __init__(self):
        self.supported, self.refused, self.skipped = {}, {}, []

    def pytest_collectreport(self, report):
        if report.skipped:
            self.skipped.append(f"{report.nodeid} is skipped here: {report.longrepr[2]}")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        for item in items:
            for name, keyword, table in (("supports", "with_", self.supported), ("refuses", "when", self.refused)):
                for mark in reversed(list(item.iter_markers(name))):
                    self._add(table, item, mark, keyword)

    @staticmethod
    def _add(table, item, mark, keyword):
        values = [*mark.args, mark.kwargs.get(keyword)]
        if len(values) != 2 or set(mark.kwargs) != {keyword} or not all(v and isinstance(v, str) for v in values):
            raise pytest.UsageError(f'{item.nodeid}: write @pytest.mark.{mark.name}("feature", {keyword}="...")')
        if any("|" in value or "\n" in value for value in values):
            raise pytest.UsageError(f"{item.nodeid}: {values} does not fit into a table")
        never = [other for other in ("skip", "xfail") if item.get_closest_marker(other)]
        if never:
            raise pytest.UsageError(
                f"{item.nodeid} is marked {never[0]}: it shows nothing, take the mark {mark.name} away"
            )
        test = f"`{item.path.name}::{item.originalname}`"
        feature, condition = values
        tests = table.setdefault(feature, {}).setdefault(condition, {})
        tests[test] = tests.get(test, True) and item.get_closest_marker("slow") is not None  # all of its cases


def marked_files():
    """The test files that use one of the marks, by page."""
    found = {MEGATRON: [], HUGGING_FACE: []}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if "mark.supports(" in text or "mark.refuses(" in text:
            found[HUGGING_FACE if path.parent.name in HUGGING_FACE_FOLDERS else MEGATRON].append(path)
    return found


def tables(marks):
    """The Markdown between the comment lines."""
    lines = ["| supported | with | shown by |", "| --- | --- | --- |", *_rows(marks.supported), ""]
    lines += ["| refused with a ValueError | when | shown by |", "| --- | --- | --- |", *_rows(marks.refused)]
    return "\n".join(lines)


def _rows(table):
    for feature in sorted(table, key=str.lower):
        conditions = table[feature]
        tests = (  # line by line beside the conditions
            ", ".join(test + " (slow)" * slow for test, slow in tests.items()) for tests in conditions.values()
        )
        yield f"| {feature} | {'<br>'.join(conditions)} | {'<br>'.join(tests)} |"


def page_with(page, matrix):
    """The page's text with `matrix` between its two comment lines."""
    before, begin, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"\n{END}")
    if not (begin and end):
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}")
    return before + begin + matrix + end + after


def collect(files):
    """Marks of these test files. Nothing is run."""
    if not files:
        raise SystemExit("no test has a mark of the support matrix")
    marks = Marks()
    options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-c", str(TESTS.parent / "setup.cfg")]
    code = pytest.main([*options, *map(str, files)], plugins=[marks])
    if code and not marks.skipped:
        raise SystemExit(f"pytest could not collect the tests (exit code {int(code)})")
    if marks.skipped:
        raise SystemExit("\n".join(marks.skipped))
    return marks


def main():
    """Write the pages, or with --check say which are not what they should be."""
    stale = []
    for page, files in marked_files().items():
        text = page.read_text()
        new = page_with(text, tables(collect(files)))
        if new != text:
            stale.append(page.name)
        if "--check" not in sys.argv[1:]:
            page.write_text(new)
    if stale and "--check" in sys.argv[1:]:
        sys.exit(f"{', '.join(stale)}: not what the marks say, run python tests/support_matrix.py")


if __name__ == "__main__":
    main()
