"""Imports go one way, without cycles; nothing names one machine."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "megatron_tree"
ROOMS = ("core", "inference", "tools")

# From the bottom up. A module imports from its own layer and those below. docs/design.md has the same list.
LAYERS = (
    {f"core/{x}" for x in ("errors", "arguments", "config", "spec", "dropout", "duals", "energy", "merge", "layout")}
    | {f"core/{x}" for x in ("log", "files", "units", "compiled", "config_fields", "tape")},
    {"core/kernels"},
    {"core/comm", "core/plan"},
    {"core/attention"},
    {"core/recurrence"},
    {"core/cache"},
    {"launching", "inference/generation"},
    {"integrations"},
    {"tools/emulate"},
    {"inference/serving", *(f"tools/{x}" for x in ("convert", "training", "bench", "calibrate", "doctor"))},
    {"__main__"},
)
FRAMEWORKS = {"megatron", "deepspeed", "transformers"}
MAY_IMPORT_FRAMEWORKS = {"integrations", "inference/generation", "inference/serving"}
MAY_IMPORT_FRAMEWORKS |= {"tools/training", "tools/convert", "tools/bench"}
MAY_COMMUNICATE = {"core/comm", "integrations", "inference/serving"}
MAY_COMMUNICATE |= {f"tools/{x}" for x in ("training", "convert", "emulate", "bench", "calibrate", "doctor")}
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


def _part(names):
    """The place in LAYERS of a module, whose names are below the package."""
    return "/".join(names[: 1 + (names[0] in ROOMS)])


def _sources():
    beginnings = {PACKAGE / "__init__.py", *(PACKAGE / room / "__init__.py" for room in ROOMS)}
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path not in beginnings]


def _violations(path):
    part = _part(path.relative_to(PACKAGE).with_suffix("").parts)
    for line, name in _imports(path):
        root, *rest = name.split(".")
        where = f"{path.relative_to(REPO)}:{line} imports {name}"
        if root == "megatron_tree" and rest and _layer(_part(rest)) > _layer(part):
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


def test_the_check_sees_violations(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules[__name__], "REPO", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "megatron_tree")
    path = tmp_path / "megatron_tree" / "core" / "kernels" / "fast.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import torch\nfrom ..config import TreeConfig\nfrom .. import attention\nfrom ..comm import gather\n"
        "def f():\n    import megatron.core\n    import torch.distributed as dist\n    from torch import distributed\n"
    )
    lines = [int(violation.split(":")[1].split()[0]) for violation in _violations(path)]
    assert lines == [3, 4, 6, 7, 8]


def test_the_core_imports_without_the_frameworks():
    optional = FRAMEWORKS | {"yaml", "matplotlib", "triton"}
    script = f"import sys; from megatron_tree import *; print(sorted({optional} & set(sys.modules)))"
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
