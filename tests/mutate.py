"""Plants faults in copies of the package, one at a time, and sees whether the fast tests notice.

    python tests/mutate.py --list
    python tests/mutate.py --only merge-without-the-maximum sink-added-twice-in-training
    python tests/mutate.py --out runs/mutants          # all of them: about an hour; `make mutants`

The faults stand in tests/mutants/*.toml. Each is a [[mutant]] with

    name      what it is called here
    breaks    what is wrong then, in words
    file      of the repository
    old, new  texts: `old` must stand in the file exactly once, and is replaced by `new`
    tests     files of tests/, or tests in them (test_merge.py::test_identity), the likeliest to notice first
    survives  only where no test can notice: why. It still counts as a survivor

Every mutant gets a copy of the repository's files of its own; the working tree is not touched. First all listed tests
must pass without a mutant. Exit status: 0, or 1 if fewer than 95 % are killed, or 2 if the tables or the tests as they
are have a fault. test_mutants.py checks the tables in continuous integration, without running a mutant.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

REPO = Path(__file__).resolve().parent.parent
LEAST_KILLED = 0.95
FIELDS = {"name", "breaks", "file", "old", "new", "tests"}
CAUGHT = 1  # pytest's exit status where a test failed
_running: set[subprocess.Popen] = set()
KILLED, TIMED_OUT, SURVIVED, NOT_RUN = "killed", "killed (time-out)", "survived", "not run"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault; the fields are those of the tables."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""

    def applied(self, text: str) -> str:
        """The file's text with the fault in it. Raises: ``ValueError`` where the table no longer fits the file."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"mutant {self.name}: its old text stands {count} times in {self.file}, not once")
        mutated = text.replace(self.old, self.new)
        try:
            if ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(text)):
                raise ValueError(f"mutant {self.name} changes nothing that is executed in {self.file}")
        except SyntaxError as error:
            raise ValueError(f"mutant {self.name} is no Python: {error}") from None
        return mutated


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one mutant."""

    name: str
    breaks: str
    file: str
    outcome: str
    by: str
    """The test that failed first and its message; of a survivor, why it can't be noticed."""
    seconds: float


def read_tables(repo: Path = REPO) -> list[Mutant]:
    """All mutants, table by table. Raises: ``ValueError`` for unknown or missing fields, or a name given twice."""
    mutants: dict[str, Mutant] = {}
    for path in sorted((repo / "tests" / "mutants").glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            if not FIELDS <= set(entry) <= FIELDS | {"survives"}:
                raise ValueError(f"{path.name}: a mutant has the fields {sorted(entry)}, not {sorted(FIELDS)}")
            mutant = Mutant(**{**entry, "tests": tuple(entry["tests"])})
            if mutant.name in mutants or not mutant.tests:
                raise ValueError(f"{path.name}: {mutant.name} is there twice, or names no tests")
            mutants[mutant.name] = mutant
    return list(mutants.values())


def copy_files(repo: Path, to: Path) -> None:
    """Copy what git tracks, and what is new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=repo, capture_output=True, text=True
    )
    if listed.returncode:
        raise ValueError(f"{repo} is no git checkout: {listed.stderr}")
    for name in filter(None, listed.stdout.split("\0")):
        if (repo / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repo / name, to / name)


def run_pytest(copy: Path, tests, limit_s: float) -> tuple[int | None, str]:
    """Exit status (None: it ran past limit_s and was killed) and output of the fast ones of these tests."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--tb=line", "-rfE"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=copy, env=environment, stdout=log, stderr=log, start_new_session=True)
        _running.add(process)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _running.discard(process)
            _kill_group(process)
        log.seek(0)
        return status, log.read().decode(errors="replace")


def _kill_group(process: subprocess.Popen) -> None:
    """The tests' own processes, too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def try_mutant(repo: Path, mutant: Mutant, limit_s: float) -> Result:
    """Run a mutant's tests on a copy that has its fault. A fault with which tests can't even be collected is no test
    of them: it is not run."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder).resolve()
        copy_files(repo, copy)
        path = copy / mutant.file
        path.write_text(mutant.applied(path.read_text()))
        status, output = run_pytest(copy, mutant.tests, limit_s)
    failed = re.search(r"^FAILED tests/(.+)$", output, re.MULTILINE)
    if status == CAUGHT and failed:
        outcome, by = KILLED, failed[1]
    elif status is None:
        outcome, by = TIMED_OUT, f"no end within {limit_s:g} s"
    elif status == 0:
        outcome, by = SURVIVED, mutant.survives
    else:
        outcome, by = NOT_RUN, f"pytest ended with status {status}: {output[-1000:]}"
    seconds = round(time.monotonic() - start, 1)
    return Result(name=mutant.name, breaks=mutant.breaks, file=mutant.file, outcome=outcome, by=by, seconds=seconds)


def check_baseline(repo: Path, mutants: list[Mutant], limit_s: float) -> None:
    """Raise ``ValueError`` unless the tests of all mutants pass as they are, on the package of the copy."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    tests = [test for test in tests if "::" not in test or test.partition("::")[0] not in tests]
    package = mutants[0].file.partition("/")[0]
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder).resolve()
        copy_files(repo, copy)
        where = ["-c", f"import {package}; print({package}.__file__)"]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        found = subprocess.run([sys.executable, *where], cwd=copy, env=environment, capture_output=True, text=True)
        if not found.stdout.startswith(str(copy)):
            raise ValueError(f"{package} is imported from {found.stdout or found.stderr}, not from the copy")
        status, output = run_pytest(copy, tests, limit_s)
    if status != 0:
        raise ValueError(f"the tests must pass without a mutant, but pytest ended with {status}:\n{output[-4000:]}")


def run(repo: Path, mutants: list[Mutant], *, limit_s: float, jobs: int = 1, progress: bool = True) -> list[Result]:
    """Try all mutants, `jobs` at a time, with a progress bar on stderr."""
    bar = tqdm(total=len(mutants), unit="mutant", file=sys.stderr, disable=not progress)
    with bar, ThreadPoolExecutor(jobs) as pool:

        def one(mutant: Mutant) -> Result:
            result = try_mutant(repo, mutant, limit_s)
            bar.write(f"{result.outcome:<17} {result.seconds:6.1f} s  {result.name}: {result.by[:100]}")
            bar.update()
            return result

        try:
            return list(pool.map(one, mutants))
        except BaseException:  # Ctrl-C among others: the pool waits for those that run
            for process in list(_running):
                _kill_group(process)
            raise


def rate(results: list[Result]) -> float:
    """Share of the mutants that are killed."""
    return sum(result.outcome in (KILLED, TIMED_OUT) for result in results) / len(results)


def markdown(results: list[Result]) -> str:
    """The table of a run, survivors first."""
    killed = round(rate(results) * len(results))
    rows = [
        f"| {r.name} | `{r.file.removeprefix('megatron_tree/')}` | {_cell(r.breaks)} | {r.outcome} | "
        f"{_cell(r.by.partition(' - ')[0] if r.outcome == KILLED else r.by)} | {r.seconds:g} |"
        for r in sorted(results, key=lambda r: r.outcome in (KILLED, TIMED_OUT))
    ]
    head = ["| mutant | file | what it breaks | outcome | by | seconds |", "| --- | --- | --- | --- | --- | --- |"]
    return "\n".join([f"{killed} of {len(results)} mutants killed ({rate(results):.1%}).", "", *head, *rows]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write(results: list[Result], folder: Path) -> None:
    """mutants.json and mutants.md."""
    folder.mkdir(parents=True, exist_ok=True)
    report = {"killed": rate(results), "mutants": [asdict(result) for result in results]}
    (folder / "mutants.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "mutants.md").write_text(markdown(results))


def main(argv: list[str] | None = None, repo: Path = REPO) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="example: python tests/mutate.py --only zigzag-off-by-one --skip-baseline",
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and what they break, and run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants alone")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for a mutant (default: %(default)g)")
    parser.add_argument("--skip-baseline", action="store_true", help="don't run the tests without a mutant first")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write mutants.json and mutants.md there")
    args = parser.parse_args(argv)
    mutants = read_tables(repo)
    if unknown := set(args.only or ()) - {mutant.name for mutant in mutants}:
        parser.error(f"--only: there is no mutant {', '.join(sorted(unknown))}; --list shows them")
    mutants = [mutant for mutant in mutants if not args.only or mutant.name in args.only]
    if args.list:
        for mutant in mutants:
            print(f"{mutant.name}: {mutant.breaks}")
        return 0
    try:
        for mutant in mutants:  # before anything takes time
            mutant.applied((repo / mutant.file).read_text())
        if not args.skip_baseline:
            print("the tests without a mutant ...", file=sys.stderr)
            check_baseline(repo, mutants, 10.0 * args.limit)
        results = run(repo, mutants, limit_s=args.limit, jobs=args.jobs)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.out:
        write(results, args.out)
    print(f"{round(rate(results) * len(results))} of {len(results)} mutants killed ({rate(results):.1%})")
    for result in results:
        if result.outcome in (SURVIVED, NOT_RUN):
            print(f"{result.outcome}: {result.name}: {result.by or 'unexplained'}")
    if any(result.outcome == NOT_RUN for result in results):
        return 2
    return 0 if rate(results) >= LEAST_KILLED else 1


if __name__ == "__main__":
    sys.exit(main())
