"""Every causal language model class of Transformers: the table of docs/huggingface.md is what two ranks do."""

import pytest

from every_architecture import BEGIN, END, PAGE, RELEASE, WAYS, cases, find_out, reason_of
from support_matrix import slow_but

pytestmark = pytest.mark.skipif(
    f"Transformers {RELEASE} " not in PAGE.read_text(), reason="the page's table is of another release of Transformers"
)
FAST = ("`llama`", "`emu3`", "`bloom`", "`phi4_multimodal`")  # exact, of another text part, refused, refused in part


def _on_page():
    """({way: (number of exact ones, of refused ones)}, {way: {title: reason}}), of the page's two tables."""
    counts, refused = {}, {way: {} for way in WAYS}
    for line in PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines():
        first, *cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if first in WAYS and cells[0].isdigit():
            counts[first] = tuple(map(int, cells))
        elif cells and "`" in cells[-1]:
            for way in WAYS if first == "all" else first.split(", "):
                refused[way] |= dict.fromkeys(cells[-1].split("; "), cells[0])
    for of_way in refused.values():
        for title in cases():
            if (without := title.split(" with ")[0]) in of_way:
                of_way.setdefault(title, of_way[without])
    return counts, refused


def test_the_page_has_every_class():
    counts, refused = _on_page()
    for way in WAYS:
        assert refused[way].keys() <= cases().keys(), way
        assert counts[way] == (len(cases()) - len(refused[way]), len(refused[way])), way


@pytest.mark.parametrize("title", slow_but(FAST, cases()))
def test_one_class(title):
    _, refused = _on_page()
    for way in WAYS:
        kind, sentence = find_out(title, way)
        assert kind in ("exact", "refused"), f"{way}: {sentence}"
        assert refused[way].get(title) == (reason_of(sentence) if kind == "refused" else None), way
