"""Plants faults in copies of the package, one at a time, and runs the tests that should fail then.

    python tests/mutate.py --list
    python tests/mutate.py sink-added-twice zigzag-off-by-one
    python tests/mutate.py --jobs 2                # all of them; `make mutants`

The faults are in tests/mutants/*.toml, each a [[mutant]] with

    name      what it is called here
    breaks    what goes wrong
    file      of the repository
    function  the function with the fault: "f", "Class.method", or "f.g" for a function inside another
    find      Python source of one expression or one simple statement in that function
    replace   Python source that takes its place
    tests     tests to run (core/test_merge.py, core/test_merge.py::test_identity): the likeliest to fail

`find` is compared as a syntax tree: formatting, comments and other code may change without touching the tables. It must
occur exactly once in the function. Exit status: 0 if every fault is found, 1 if one is not, 2 if a fault doesn't apply
or its tests fail without it. The working tree is not changed; tests/tools/test_mutants.py checks in every run of the
tests that all faults apply.
"""

import argparse
import ast
import contextlib
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
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
FOUND, NOT_FOUND, TIMED_OUT, BROKEN = "found", "NOT FOUND", "found (timed out)", "BROKEN"
_running = set()


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault. The module's docstring describes the fields."""

    name: str
    breaks: str
    file: str
    function: str
    find: str
    replace: str
    tests: list[str]

    def applied(self, text):
        """The file's text with the fault. Raises: ``ValueError`` if the function or what to find isn't there."""
        where = f"mutant {self.name}, {self.file}"
        function = _function(ast.parse(text), self.function)
        if function is None:
            raise ValueError(f"{where}: there is no function {self.function}")
        wanted = _parsed(self.find)
        places = [node for node in ast.walk(function) if ast.dump(node) == ast.dump(wanted)]
        if len(places) != 1:
            raise ValueError(f"{where}: {self.function} has {self.find!r} {len(places)} times, not once")
        new = _parsed(self.replace)
        if ast.dump(new) == ast.dump(wanted):
            raise ValueError(f"{where}: the replacement is the same code")
        source = f"({self.replace})" if isinstance(new, ast.expr) else self.replace
        return _spliced(text, places[0], source)


def _parsed(source):
    """The tree of one expression, or else of one statement."""
    (statement,) = ast.parse(source).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _function(tree, qualified_name):
    nodes = [tree]
    for name in qualified_name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        nodes = [n for node in nodes for n in ast.walk(node) if isinstance(n, kinds) and n.name == name]
    return nodes[0] if len(nodes) == 1 else None


def _spliced(text, node, source):
    """The text with a node's source replaced. Columns of a tree count bytes."""
    lines = text.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    whole = b"".join(lines)
    return (whole[:start] + source.encode() + whole[end:]).decode()


def read_tables(repo=REPO):
    """All mutants by name. Raises: ``ValueError`` for missing or unknown fields and duplicate names."""
    mutants = {}
    for path in sorted((repo / "tests" / "mutants").glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            try:
                mutant = Mutant(**entry)
            except TypeError as error:
                raise ValueError(f"{path.name}: {entry.get('name')}: {error}") from None
            if mutant.name in mutants:
                raise ValueError(f"{path.name}: duplicate name {mutant.name}")
            mutants[mutant.name] = mutant
    return mutants


@contextlib.contextmanager
def copied(repo):
    """A copy of what git tracks, and of new files that it doesn't ignore."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder).resolve()
        for name in filter(None, names):
            if (repo / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(repo / name, copy / name)
        yield copy


def run_pytest(copy, tests, limit_s):
    """pytest's exit status (None after the time limit) and output, for those of the tests that aren't slow."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line", "-rfE"]
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


def _kill_group(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def try_mutant(repo, mutant, limit_s):
    """(what became of the fault, by which test or why). Tests that can't be collected say nothing about a fault."""
    with copied(repo) as copy:
        path = copy / mutant.file
        path.write_text(mutant.applied(path.read_text()))
        status, output = run_pytest(copy, mutant.tests, limit_s)
    failed = re.search(r"^FAILED tests/(\S+)", output, re.MULTILINE)
    if status == 1 and failed:
        return FOUND, failed[1]
    if status is None:
        return TIMED_OUT, f"no end within {limit_s:g} s"
    return (NOT_FOUND, mutant.breaks) if status == 0 else (BROKEN, f"pytest ended with {status}:\n{output[-1000:]}")


def run(repo, mutants, limit_s, jobs=1):
    """Try all of them and print what became of each. Returns {name: outcome}."""

    def one(mutant):
        start = time.monotonic()
        outcome, by = try_mutant(repo, mutant, limit_s)
        print(f"{outcome:<10} {time.monotonic() - start:5.0f} s  {mutant.name}: {by}", flush=True)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        try:
            return dict(zip((mutant.name for mutant in mutants), pool.map(one, mutants), strict=True))
        except BaseException:  # for example Ctrl-C: the pool waits for what is still running
            for process in list(_running):
                _kill_group(process)
            raise


def main(argv=None, repo=REPO):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant (default: all)")
    parser.add_argument("--list", action="store_true", help="print the faults and what they break")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each (default: %(default)g)")
    parser.add_argument("--skip-baseline", action="store_true", help="don't run the tests without a fault first")
    args = parser.parse_args(argv)
    mutants = read_tables(repo)
    if unknown := sorted(set(args.names) - set(mutants)):
        parser.error(f"there is no fault {', '.join(unknown)}; --list shows all")
    chosen = [mutants[name] for name in args.names or mutants]
    if args.list:
        print(*(f"{mutant.name}: {mutant.breaks}" for mutant in chosen), sep="\n")
        return 0
    try:
        for mutant in chosen:
            mutant.applied((repo / mutant.file).read_text())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not args.skip_baseline:
        with copied(repo) as copy:
            tests = dict.fromkeys(test for mutant in chosen for test in mutant.tests)
            status, output = run_pytest(copy, tests, 10 * args.limit)
        if status != 0:
            print(f"the tests fail without a fault:\n{output[-4000:]}", file=sys.stderr)
            return 2
    outcomes = list(run(repo, chosen, args.limit, args.jobs).values())
    found = sum(outcome in (FOUND, TIMED_OUT) for outcome in outcomes)
    print(f"{found} of {len(outcomes)} faults found")
    return 2 if BROKEN in outcomes else int(found < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
