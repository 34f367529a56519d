"""The tables of planted faults fit the sources as they are, and tests/mutate.py tells killed from surviving ones."""

import json
import subprocess
import sys

import psutil
import pytest

from mutate import KILLED, NOT_RUN, REPO, SURVIVED, TIMED_OUT, Mutant, main, read_tables

DOUBLE = "def double(x):\n    return 2 * x\n\n\ndef unused(x):\n    return x\n"
TEST = "from small import double\n\n\ndef test_double():\n    assert double(3) == 6\n"


def _mutant(name, old, new, **more):
    fields = dict(file="small/__init__.py", old=old, new=new, tests=("test_double.py",), breaks="it")
    return Mutant(name=name, **{**fields, **more})


def _entry(mutant):
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(mutant).items() if v}
    return "[[mutant]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


@pytest.fixture
def small(tmp_path):
    """A repository with one package, one test and no mutants yet."""
    repo = tmp_path / "small repository"
    for name, text in {"small/__init__.py": DOUBLE, "tests/test_double.py": TEST, "tests/mutants/a.toml": ""}.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=repo, check=True)
    return repo


def _run(repo, mutants, *options):
    """(exit status, outcome by name) of a run over these mutants."""
    (repo / "tests/mutants/a.toml").write_text("\n".join(map(_entry, mutants)))
    status = main(["--out", str(repo / "out"), *options], repo)
    told = repo / "out" / "mutants.json"
    return status, {m["name"]: m for m in json.loads(told.read_text())["mutants"]} if told.exists() else {}


def test_the_tables_fit_the_sources():
    mutants = read_tables()
    assert len(mutants) >= 60
    for mutant in mutants:
        mutant.applied((REPO / mutant.file).read_text())
        for test in mutant.tests:
            file, _, name = test.partition("::")
            text = (REPO / "tests" / file).read_text()
            assert f"def {name or 'test_'}" in text, f"{mutant.name} names a test that is not there: {test}"


def test_killed_and_surviving_mutants(small, capfd):
    killed = [_mutant(f"killed {i}", "2 * x", f"{i} * x", tests=("test_double.py::test_double",)) for i in (3, 4)]
    status, found = _run(small, [*killed, _mutant("survives", "return x", "return -x", survives="nobody calls it")])
    assert status == 1, "2 of 3 are less than 95 %"
    outcomes = {name: told["outcome"] for name, told in found.items()}
    assert outcomes == {"killed 3": KILLED, "killed 4": KILLED, "survives": SURVIVED}
    assert found["killed 3"]["by"].startswith("test_double.py::test_double")
    table = (small / "out" / "mutants.md").read_text().splitlines()
    assert table[0] == "2 of 3 mutants killed (66.7%)." and table[4].startswith("| survives |")
    assert (small / "small/__init__.py").read_text() == DOUBLE, "the working tree stays as it is"
    assert "survived: survives: nobody calls it" in capfd.readouterr().out
    assert _run(small, killed, "--skip-baseline", "--only", "killed 3")[0] == 0


def test_a_mutant_that_hangs(small):
    forever = "import subprocess, time; subprocess.Popen(['sleep', '987.6']); time.sleep(99); return 2"
    status, found = _run(small, [_mutant("hangs", "return 2", forever)], "--skip-baseline", "--limit", "5")
    assert status == 0 and found["hangs"]["outcome"] == TIMED_OUT
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "987.6"]]


def test_what_is_no_test_of_the_tests(small, capfd):
    status, found = _run(small, [_mutant("can't be imported", "def double", "def treble")], "--skip-baseline")
    assert status == 2 and found["can't be imported"]["outcome"] == NOT_RUN
    (small / "tests/test_double.py").write_text(TEST.replace("6", "7"))
    assert _run(small, [_mutant("x", "2 * x", "3 * x")])[0] == 2
    assert "the tests must pass without a mutant" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("3 * x", "4 * x", "0 times"),
        ("return", "yield", "2 times"),
        ("2 * x", "2  *  x", "changes nothing"),
        ("2 * x", "2 *", "no Python"),
    ],
)
def test_stale_tables_are_told(small, capsys, old, new, complaint):
    status, found = _run(small, [_mutant("old one", old, new)])
    assert status == 2 and not found
    told = capsys.readouterr().err
    assert "old one" in told and complaint in told


def test_tables_with_mistakes(small):
    entry = _entry(_mutant("x", "2 * x", "3 * x"))
    for text, complaint in ((entry + entry, "twice"), (entry + "tets = []\n", "fields"), ("[[mutant]]\n", "fields")):
        (small / "tests/mutants/a.toml").write_text(text)
        with pytest.raises(ValueError, match=complaint):
            read_tables(small)


def test_list_and_unknown_names():
    call = [sys.executable, str(REPO / "tests" / "mutate.py")]
    listed = subprocess.run([*call, "--list"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(listed) == len(read_tables()) and any(line.startswith("zigzag-off-by-one: ") for line in listed)
    refused = subprocess.run([*call, "--only", "no-such"], capture_output=True, text=True)
    assert refused.returncode == 2 and "no mutant no-such" in refused.stderr
