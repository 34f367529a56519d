"""Imports go one way, without cycles; files and functions are short; nothing names one machine."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "megatron_tree"
MAX_FUNCTION_LINES = 60
LONG_FUNCTIONS = {"attn_decode_kernel"}  # a kernel of Triton is one function

# From the bottom up. A module imports from its own layer and those below. docs/design.md has the same list.
LAYERS = (
    {
        "errors",
        "arguments",
        "config",
        "dropout",
        "duals",
        "energy",
        "merge",
        "layout",
        "log",
        "files",
        "units",
        "compiled",
    },
    {"kernels"},
    {"comm", "plan"},
    {"attention"},
    {"recurrence"},
    {"cache", "launching"},
    {"generation"},
    {"integrations"},
    {"emulate"},
    {"convert", "training", "serving", "bench", "calibrate", "doctor"},
    {"__main__"},
)
FRAMEWORKS = {"megatron", "deepspeed", "transformers"}
MAY_IMPORT_FRAMEWORKS = {"generation", "integrations", "training", "serving", "convert", "bench"}
MAY_COMMUNICATE = {"comm", "integrations", "training", "serving", "convert", "emulate", "bench", "calibrate"}
HOSTS_IN_LINKS = {"arxiv.org", "www.apache.org", "semver.org", "www.w3.org"}


def _layer(part):
    for level, parts in enumerate(LAYERS):
        if part in parts:
            return level
    pytest.fail(f"megatron_tree/{part} stands in no layer: add it to LAYERS and to docs/design.md")


def _imports(path, *, of_types=True):
    """(line, absolute dotted name) of everything a source file imports, wherever in the file; of_types: also for
    annotations only."""
    here, tree = path.relative_to(REPO).with_suffix("").parts, ast.parse(path.read_text())
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = set() if of_types else {id(x) for block in blocks for x in ast.walk(block)}
    for node in (node for node in ast.walk(tree) if id(node) not in skipped):
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


def _cycles(imports):
    """Groups of modules that import each other, directly or not. imports: {module: modules}."""
    reached = {}
    for start in imports:
        reached[start], waiting = set(), [*imports[start]]
        while waiting:
            module = waiting.pop()
            if module not in reached[start]:
                reached[start].add(module)
                waiting += imports[module]
    groups = {frozenset(y for y in reached[x] if x in reached[y]) for x in imports if x in reached[x]}
    return sorted(map(sorted, groups))


def _module_imports():
    """{module: modules of the package that it imports when it runs}, wherever in the file."""
    paths = {path.relative_to(REPO).with_suffix(""): path for path in PACKAGE.rglob("*.py")}
    paths = {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}
    imports = {}
    for module, path in paths.items():
        parts = [name.split(".") for _, name in _imports(path, of_types=False)]
        longest = (next((x for i in (len(p), len(p) - 1) if (x := ".".join(p[:i])) in paths), None) for p in parts)
        imports[module] = {name for name in longest if name not in (None, "megatron_tree")}
    return imports


def test_no_modules_import_each_other():
    assert _cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert not _cycles(_module_imports())


def test_functions_are_short():
    """Their bodies, without the docstring."""
    long = [
        f"{path.relative_to(REPO)}: {node.name}"
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _lines(node) > MAX_FUNCTION_LINES
        if node.name not in LONG_FUNCTIONS
    ]
    assert not long


def _lines(function):
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


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
