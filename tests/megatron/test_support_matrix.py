"""The support matrix of docs/megatron.md is what the marks on the tests say."""

import subprocess
import sys

import pytest

import support_matrix
from support_matrix import page_with

COLLECT = """
import sys
from pathlib import Path
import support_matrix
for path in sys.argv[1:]:
    try:
        marks = support_matrix.collect([Path(path)])
        print()
        print(support_matrix.tables(marks))
    except SystemExit as error:
        print("refused:", path, error)
"""


def collect_texts(tmp_path, **texts):
    """What is printed about the marks of test files of these names, collected in a process of its own."""
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(f"import pytest\n{text}")
    command = [sys.executable, "-c", COLLECT, *(str(tmp_path / f"{name}.py") for name in texts)]
    done = subprocess.run(command, cwd=support_matrix.TESTS, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_pages_are_up_to_date(request):
    """By the tests this session has collected; if it was asked for some only, another process collects them."""
    tests, pages = request.config.stash[support_matrix.COLLECTED], support_matrix.marked_files()
    marked = {file for files in pages.values() for file in files}
    if marked <= {test.path for test in tests} and not any("::" in argument for argument in request.config.args):
        for page, files in pages.items():
            marks = support_matrix.Marks()
            marks.pytest_collection_modifyitems([test for test in tests if test.path in files])
            assert page_with(page.read_text(), support_matrix.tables(marks)) == page.read_text(), (
                "run python tests/support_matrix.py"
            )
        return
    command = [sys.executable, "support_matrix.py", "--check"]
    done = subprocess.run(command, cwd=support_matrix.TESTS, capture_output=True, text=True, timeout=240)
    if "is skipped here" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]


def test_marks_become_rows(tmp_path):
    printed = collect_texts(
        tmp_path,
        test_it="""
@pytest.mark.supports("windows", with_="cp = 2")
@pytest.mark.supports("sinks", with_="cp = 2")
def test_a(): ...

@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.supports("windows", with_="cp = 4")
def test_b(cp): ...

@pytest.mark.parametrize("name", ["other", pytest.param("x", marks=pytest.mark.refuses("x", when="built"))])
def test_c(name): ...
""",
    )
    assert printed[printed.index("| supported") :].splitlines()[:9] == [
        "| supported | with | shown by |",
        "| --- | --- | --- |",
        "| sinks | cp = 2 | `test_it.py::test_a` |",
        "| windows | cp = 2<br>cp = 4 | `test_it.py::test_a`<br>`test_it.py::test_b` (slow) |",
        "",
        "| refused with a ValueError | when | shown by |",
        "| --- | --- | --- |",
        "| x | built | `test_it.py::test_c` |",
    ]


def test_marks_that_say_nothing_are_refused(tmp_path):
    cases = [
        ("@pytest.mark.supports('x')", 'write @pytest.mark.supports("feature", with_="...")'),
        ("@pytest.mark.refuses('x', with_='y')", 'write @pytest.mark.refuses("feature", when="...")'),
        ("@pytest.mark.supports('a|b', with_='y')", "does not fit into a table"),
        ("@pytest.mark.skip\n@pytest.mark.supports('x', with_='y')", "is marked skip: it shows nothing"),
        ("@pytest.mark.xfail\n@pytest.mark.supports('x', with_='y')", "is marked xfail: it shows nothing"),
    ]
    texts = {f"test_{i}": f"{marks}\ndef test_a(): ...\n" for i, (marks, _) in enumerate(cases)}
    printed = collect_texts(tmp_path, **texts)
    assert printed.count("refused: ") == len(cases) and "| supported" not in printed
    assert all(message in printed for _, message in cases)


def test_only_the_matrix_is_replaced():
    page = f"before\n{support_matrix.BEGIN}\nold\n{support_matrix.END}\nafter\n"
    new = page_with(page, "| new |")
    assert new == page.replace("old", "| new |")
    with pytest.raises(ValueError, match="needs the lines"):
        page_with("no lines", "| new |")
