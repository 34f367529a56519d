"""Imports go one way, down the layers of docs/design.md; no file is too long; nothing names one machine."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "megatron_tree"
MAX_LINES = 350

# From the bottom up. A module imports from its own layer and those below.
LAYERS = (
    {"errors", "config", "dropout", "energy", "merge", "layout", "log", "files", "units", "compiled"},
    {"kernels"},
    {"comm", "plan"},
    {"attention"},
    {"cache", "launching"},
    {"generation"},
    {"integrations"},
    {"emulate"},
    {"convert", "training", "serving", "bench", "calibrate", "doctor"},
    {"__main__"},
)
# Inside attention/, from the bottom up: a call goes down and never climbs back.
ATTENTION = (
    {"validate", "spec", "slices", "topology", "derivatives", "precision", "heads", "head_shares", "token_shares"},
    {"finite", "rows", "decode_ring", "validate_cache"},
    {"cell"},
    {"call"},
    {"ring", "prefill_cell", "decode_call"},
    {"exchanged"},
    {"passes"},
    {"autograd"},
    {"functional", "decode", "prefill", "sequences"},
)
FRAMEWORKS = {"megatron", "deepspeed", "transformers"}
MAY_IMPORT_FRAMEWORKS = {"generation", "integrations", "training", "serving", "convert"}
MAY_COMMUNICATE = {"comm", "integrations", "training", "serving", "convert", "emulate", "bench", "calibrate"}
HOSTS_IN_LINKS = {"arxiv.org", "www.apache.org", "semver.org"}


def _layer(part):
    for level, parts in enumerate(LAYERS):
        if part in parts:
            return level
    pytest.fail(f"megatron_tree/{part} stands in no layer: add it to LAYERS and to docs/design.md")


def _imports(path):
    """(line, absolute dotted name) of everything a source file imports, wherever in the file."""
    here = path.relative_to(REPO).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: -node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def _part(path):
    """The file's place in LAYERS: the first component below the package."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def _sources():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def _violations(path):
    part = _part(path)
    for line, name in _imports(path):
        root, *rest = name.split(".")
        where = f"{path.relative_to(REPO)}:{line} imports {name}"
        if root == "megatron_tree" and rest and _layer(rest[0]) > _layer(part):
            yield f"{where}, a layer above its own"
        if root in FRAMEWORKS and part not in MAY_IMPORT_FRAMEWORKS:
            yield f"{where}: only {sorted(MAY_IMPORT_FRAMEWORKS)} may"
        if name.startswith("torch.distributed") and part not in MAY_COMMUNICATE:
            yield f"{where}: communication goes through comm.py"


def _repository_files():
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=REPO, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [REPO / name for name in listed.stdout.split("\0") if name and (REPO / name).is_file()]


def _texts():
    for path in _repository_files():
        try:
            yield path, path.read_text()
        except UnicodeDecodeError:
            continue


def test_imports_go_down_the_layers():
    assert not [violation for path in _sources() for violation in _violations(path)]


def _test_modules_imported(path):
    """Lines of a file below tests/ that import a test module, in the code that it hands to other processes too."""
    return [
        f"{path.name}:{number}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\b(?:from|import)\s+(?:[\w.]+\.)?test_\w+", line)
    ]


def test_a_call_goes_down_inside_attention():
    levels = {name: level for level, names in enumerate(ATTENTION) for name in names}
    modules = {path.stem for path in (PACKAGE / "attention").glob("*.py")} - {"__init__"}
    assert modules == set(levels)
    climbs = [
        f"{path.name}:{line} imports {name}"
        for path in (PACKAGE / "attention").glob("*.py")
        if path.stem != "__init__"
        for line, name in _imports(path)
        if (found := re.match(r"megatron_tree\.attention\.(\w+)", name)) and levels[found[1]] >= levels[path.stem]
    ]
    assert not climbs


def test_the_design_page_lists_the_layers():
    """Section 5 of docs/design.md names every room of the package, those above before those below."""
    page = (REPO / "docs" / "design.md").read_text().split("## 5. ")[1]
    (listed,) = re.findall(r"\n\n((?:    .*\n)+)", page.split("What one call passes through")[0])
    names = [re.findall(r"(\w+)(?:/|\.py)", re.split(r"\s{2,}", line.strip())[0]) for line in listed.splitlines()]
    levels = [_layer(name) for line in names for name in line]
    assert levels == sorted(levels, reverse=True)
    assert {name for line in names for name in line} == {_part(path) for path in _sources()}


def test_tests_share_through_support_not_through_each_other(tmp_path):
    """A test module may be renamed, split or left out alone; what several use lies in tests/support/."""
    (tmp_path / "test_a.py").write_text("import torch\nfrom test_b import x\ncode = 'import test_c'\n")
    assert _test_modules_imported(tmp_path / "test_a.py") == ["test_a.py:2", "test_a.py:3"]
    files = [path for path in sorted((REPO / "tests").rglob("*.py")) if path != Path(__file__).resolve()]
    assert len(files) > 50
    assert not [line for path in files for line in _test_modules_imported(path)]


def test_the_check_sees_violations(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules[__name__], "REPO", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "megatron_tree")
    path = tmp_path / "megatron_tree" / "kernels" / "fast.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import torch\nfrom ..config import TreeConfig\nfrom .. import attention\nfrom ..comm import gather\n"
        "def f():\n    import megatron.core\n    import torch.distributed as dist\n    from torch import distributed\n"
    )
    lines = [int(violation.split(":")[1].split()[0]) for violation in _violations(path)]
    assert lines == [3, 4, 6, 7, 8]


def test_the_core_imports_without_the_frameworks():
    optional = FRAMEWORKS | {"yaml", "matplotlib", "triton"}
    script = f"import sys, megatron_tree; print(sorted({optional} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_files_are_short():
    folders = ("megatron_tree", "launch", "tests", "benchmarks")
    long = [
        f"{path.relative_to(REPO)}: {count} lines"
        for path, text in _texts()
        if path.relative_to(REPO).parts[0] in folders and (count := text.count("\n")) > MAX_LINES
    ]
    assert not long, f"at most {MAX_LINES} lines: split what has more than one purpose"


def test_links_lead_to_known_places():
    """Package indices, mirrors and hubs differ from machine to machine: environment variables name them."""
    found = [
        f"{path.relative_to(REPO)}: {host}"
        for path, text in _texts()
        for host in re.findall(r"https?://([\w.-]+)", text)
        if host not in HOSTS_IN_LINKS and not host.startswith(("127.", "localhost"))
    ]
    assert not found


def test_no_absolute_paths_of_one_machine():
    pattern = re.compile(r"(?<![\w.$}/])/(?:home|root|Users|work|mnt|srv)/\w+")
    found = [
        f"{path.relative_to(REPO)}: {match}"
        for path, text in _texts()
        if path != Path(__file__).resolve()
        for match in pattern.findall(text)
    ]
    assert not found
