"""The support matrix of docs/megatron.md is what the marks on the tests say."""

import subprocess
import sys

import pytest

import support_matrix
from support_matrix import page_with


def collect_text(tmp_path, text):
    """The marks of one test file, collected in a process of its own."""
    (tmp_path / "test_it.py").write_text(f"import pytest\n{text}")
    script = (
        "import sys, support_matrix as m; from pathlib import Path; marks = m.collect([Path(sys.argv[1])]); "
        "print(); print(m.tables(marks))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "test_it.py")]
    return subprocess.run(command, cwd=support_matrix.TESTS, capture_output=True, text=True, timeout=120)


def test_the_page_is_up_to_date():
    command = [sys.executable, "support_matrix.py", "--check"]
    done = subprocess.run(command, cwd=support_matrix.TESTS, capture_output=True, text=True, timeout=240)
    if "is skipped here" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]


def test_marks_become_rows(tmp_path):
    done = collect_text(
        tmp_path,
        """
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
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout[done.stdout.index("| supported") :].splitlines() == [
        "| supported | with | shown by |",
        "| --- | --- | --- |",
        "| sinks | cp = 2 | `test_it.py::test_a` |",
        "| windows | cp = 2<br>cp = 4 | `test_it.py::test_a`<br>`test_it.py::test_b` (slow) |",
        "",
        "| refused with a ValueError | when | shown by |",
        "| --- | --- | --- |",
        "| x | built | `test_it.py::test_c` |",
    ]


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ("@pytest.mark.supports('x')", 'write @pytest.mark.supports("feature", with_="...")'),
        ("@pytest.mark.refuses('x', with_='y')", 'write @pytest.mark.refuses("feature", when="...")'),
        ("@pytest.mark.supports('a|b', with_='y')", "does not fit into a table"),
        ("@pytest.mark.skip\n@pytest.mark.supports('x', with_='y')", "is marked skip: it shows nothing"),
        ("@pytest.mark.xfail\n@pytest.mark.supports('x', with_='y')", "is marked xfail: it shows nothing"),
    ],
)
def test_marks_that_say_nothing_are_refused(tmp_path, marks, message):
    done = collect_text(tmp_path, f"{marks}\ndef test_a(): ...\n")
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


def test_only_the_matrix_is_replaced():
    page = f"before\n{support_matrix.BEGIN}\nold\n{support_matrix.END}\nafter\n"
    new = page_with(page, "| new |")
    assert new == page.replace("old", "| new |")
    with pytest.raises(ValueError, match="needs the lines"):
        page_with("no lines", "| new |")
