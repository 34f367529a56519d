"""README and docs/: links lead somewhere, pages are short, the picture is what its script draws, the program runs."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

from support.ranks import as_launched, run_distributed

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").rglob("*.md"))]
WORDS = {"README.md": 900, "design.md": 3000, "planner.md": 3000}
ALL_WORDS = 30_000


def _anchors(page):
    """The anchors that GitHub gives to a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [link.partition("#") for link in links if not link.startswith("http")]
    places = [(page.parent / name if name else page, anchor) for name, _, anchor in local]
    assert not [str(path) for path, _ in places if not path.exists()]
    assert not [(path.name, anchor) for path, anchor in places if anchor and anchor not in _anchors(path)]


def test_pages_are_short():
    pages = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
    counts = {page.name: len(page.read_text().split()) for page in pages}
    assert not {name: counts[name] for name, most in WORDS.items() if counts[name] > most}
    assert sum(counts.values()) <= ALL_WORDS


def test_the_picture_is_what_its_script_draws():
    script = REPO / "docs" / "images" / "tree.py"
    spec = importlib.util.spec_from_file_location("tree", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert script.with_suffix(".svg").read_text() == module.drawing()


def _printed(rank, world, program):
    out = io.StringIO()
    with as_launched(), contextlib.redirect_stdout(out):
        exec(program, {"__name__": "__main__"})
    return out.getvalue()


def test_the_megatron_program_of_the_readme():
    """As it stands there, on CPU ranks: the loss that the README names, on any number of ranks."""
    pytest.importorskip("megatron.core")
    readme = (REPO / "README.md").read_text()
    (program,) = re.findall(r"```python\n(# gpt.py.*?)```", readme, flags=re.DOTALL)
    (loss,) = re.findall(r"`loss (\S+)`", readme)
    for ranks in (1, 4):
        printed = run_distributed(_printed, ranks, program, fresh=True)
        last = [float(text.rsplit("loss ", 1)[1]) for text in printed]
        assert last == pytest.approx([float(loss)] * ranks, abs=2e-4)
