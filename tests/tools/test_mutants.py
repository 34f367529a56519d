"""The planted faults fit the sources as they are, and tests/mutate.py tells which ones the tests find."""

import json
import subprocess
import sys

import psutil
import pytest

from mutate import BROKEN, FOUND, NOT_FOUND, REPO, TIMED_OUT, Mutant, main, read_tables, run

PACKAGE = """class Numbers:
    slots = "a constant of the class"

    def double(self, x):
        "größer"
        def product(a):
            return 2 * a  # a comment
        return product(x)

def unused(x):
    y = 2 * x
    return y
"""
TEST = "from small import Numbers\n\ndef test_double():\n    assert Numbers().double(3) == 6\n"


def _mutant(name="m", function="Numbers.double", find="2*a", replace="3 * a", **more):
    fields = {"file": "small.py", "tests": ["test_small.py"], "breaks": "it"} | more
    return Mutant(name=name, function=function, find=find, replace=replace, **fields)


@pytest.fixture
def small(tmp_path):
    """A repository with one module, one test and no mutants."""
    repo = tmp_path / "small repository"
    (repo / "tests" / "mutants").mkdir(parents=True)
    (repo / "small.py").write_text(PACKAGE)
    (repo / "tests" / "test_small.py").write_text(TEST)
    subprocess.run(["git", "init", "-q"], cwd=repo, check=True)
    return repo


def _write(repo, *mutants):
    entries = ("\n".join(f"{k} = {json.dumps(v)}" for k, v in vars(mutant).items()) for mutant in mutants)
    (repo / "tests/mutants/a.toml").write_text("".join(f"[[mutant]]\n{entry}\n" for entry in entries))


@pytest.mark.parametrize("mutant", read_tables().values(), ids=lambda mutant: mutant.name)
def test_every_fault_applies_and_names_tests(mutant):
    compile(mutant.applied((REPO / mutant.file).read_text()), mutant.file, "exec")
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0] or 'test_'}" in (REPO / "tests" / file).read_text(), test


@pytest.mark.slow
def test_what_is_found_and_what_is_not(small, capsys):
    fails = _mutant("fails")
    survives = _mutant("survives", function="unused", find="y = 2 * x", replace="y = 3 * x")
    import_error = _mutant("import error", function="Numbers", find="'a constant of the class'", replace="1 / 0")
    outcomes = run(small, [fails, survives, import_error], limit_s=120)
    assert outcomes == {"fails": FOUND, "survives": NOT_FOUND, "import error": BROKEN}
    assert "fails: test_small.py::test_double" in capsys.readouterr().out
    assert (small / "small.py").read_text() == PACKAGE, "the working tree is not changed"
    _write(small, fails)
    assert main([], small) == 0
    _write(small, fails, survives)
    assert main(["--skip-baseline", "survives"], small) == 1


@pytest.mark.slow
def test_tests_that_fail_without_a_fault(small, capsys):
    (small / "tests/test_small.py").write_text(TEST.replace("6", "7"))
    _write(small, _mutant())
    assert main([], small) == 2
    assert "fail without a fault" in capsys.readouterr().err


@pytest.mark.slow
def test_a_fault_that_hangs(small):
    hangs = "__import__('subprocess').run(['sleep', '987.6'])"
    assert run(small, [_mutant(replace=hangs)], limit_s=8) == {"m": TIMED_OUT}
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "987.6"]]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"function": "Numbers.product2"}, "no function Numbers.product2"),
        ({"function": "double", "find": "5 * a"}, "'5 * a' 0 times"),
        ({"function": "unused", "find": "x"}, "'x' 2 times"),
        ({"replace": "2  *  a"}, "same code"),
    ],
)
def test_faults_that_do_not_apply(small, capsys, options, complaint):
    _write(small, _mutant("old one", **options))
    if options == {"function": "unused", "find": "x"}:
        (small / "small.py").write_text(PACKAGE.replace("return y", "return x + y"))
    assert main([], small) == 2
    told = capsys.readouterr().err
    assert "mutant old one" in told and complaint in told


def test_tables_with_mistakes(small):
    _write(small, _mutant(), _mutant())
    with pytest.raises(ValueError, match="duplicate name m"):
        read_tables(small)
    (small / "tests/mutants/a.toml").write_text('[[mutant]]\nname = "x"\ntets = []\n')
    with pytest.raises(ValueError, match="a.toml: x: .*'tets'"):
        read_tables(small)


def test_list_and_unknown_names():
    command = [sys.executable, str(REPO / "tests" / "mutate.py")]
    listed = subprocess.run([*command, "--list"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(listed) == len(read_tables()) >= 40
    refused = subprocess.run([*command, "no-such"], capture_output=True, text=True)
    assert refused.returncode == 2 and "no fault no-such" in refused.stderr
