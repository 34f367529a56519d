"""README and docs/: links lead somewhere, pages are short, the picture is what its script draws, the program runs."""

import contextlib
import dataclasses
import importlib.util
import io
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import megatron_tree
from megatron_tree import TreeConfig, shard_sequence, tree_attn_func, unshard_sequence
from megatron_tree.core.config import CONFIG_VARIABLE
from megatron_tree.launching import LAUNCHER_VARIABLES
from support.ranks import as_launched, run_distributed
from support.rounding import assert_near

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


def test_what_the_pages_import_is_there():
    """Each import of this package in a page, but those that need a package which is not installed."""
    text = "\n".join(page.read_text() for page in PAGES)
    lines = set(re.findall(r"^(?:from|import) megatron_tree.*$", text, flags=re.MULTILINE))
    missing = {}
    for line in sorted(lines):
        try:
            exec(line, {})
        except ImportError as error:
            if "cannot import name" in str(error) or "No module named 'megatron_tree" in str(error):
                missing[line] = str(error)
    assert len(lines) > 15 and not missing


@pytest.mark.slow
def test_the_reference_has_the_public_names(tmp_path):
    """`make reference`; with the fields of TreeConfig."""
    pytest.importorskip("pdoc", reason="pdoc is needed for the reference alone")
    rule = re.search(r"^reference:.*\n((?:\t.*\n)+)", (REPO / "Makefile").read_text(), flags=re.MULTILINE)[1]
    command = rule.replace("build/reference", str(tmp_path)).replace("PYTHONPATH=. python", sys.executable)
    subprocess.run(["bash", "-c", command], cwd=REPO, check=True, capture_output=True, timeout=200)
    page = (tmp_path / "megatron_tree.html").read_text()
    wanted = [*megatron_tree.__all__, *(f"TreeConfig.{field.name}" for field in dataclasses.fields(TreeConfig))]
    assert not [name for name in wanted if f'id="{name}"' not in page]
    assert not list((tmp_path / "megatron_tree").glob("core*"))


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


def _asked(rank, world, program, folder):
    sys.argv = ["ask.py", folder]
    return _printed(rank, world, program)


def test_the_program_of_inference_answers_as_plain_transformers(tmp_path):
    """Both turns, and the second one continues the cache."""
    pytest.importorskip("transformers")
    from support.byte_tokens import byte_tokenizer
    from support.hf_models import plain, tiny_model

    (program,) = re.findall(r"```python\n(# ask.py.*?)```", (REPO / "docs/inference.md").read_text(), flags=re.DOTALL)
    model, tokenizer = tiny_model("llama"), byte_tokenizer(size=129)
    for x in (model, tokenizer):
        x.save_pretrained(tmp_path)
    first, *others = run_distributed(_asked, 2, program, str(tmp_path), fresh=True)
    said = re.findall(r" bytes on this rank: (.*?)(?=\n\d|\n\Z)", first, flags=re.DOTALL)
    ids, wanted = torch.zeros(1, 0, dtype=torch.int64), []
    for text in re.search(r'in \("(.*?)", "(.*?)"\)', program).groups():
        ids = torch.cat([ids, tokenizer(text, return_tensors="pt").input_ids], dim=1)
        ids = torch.cat([ids, plain(model, ids, 16, eos_token_id=None)[0]], dim=1)
        wanted.append(tokenizer.decode(ids[0]))
    assert others == [""] and said == wanted


def _fragments(rank, world, folder):
    """Those of inference.md and kv-cache.md that begin with a model, in one program."""
    from support.hf_models import VOCAB, plain, tiny_model

    blocks = [re.findall(r"```python\n(.*?)```", (REPO / "docs" / name).read_text(), flags=re.DOTALL)
              for name in ("inference.md", "kv-cache.md")]  # fmt: skip
    (_, generation), (rows, files) = blocks
    model, ids = tiny_model("llama"), torch.arange(1, 12)[None] % VOCAB
    (wanted, _), logits = plain(model, ids, 64), model(torch.tensor([[*ids[0], 5]])).logits[0, -1]
    names = {"model": model, "group": dist.group.WORLD, "input_ids": ids, "mask": torch.ones_like(ids)}
    names |= {"prompt": ids[0], "token": torch.tensor(5), "folder": folder, "device": "cpu"}
    with torch.no_grad():
        exec(generation, names)
        exec(rows, names)
        names["input_ids"] = names["output"][:, :-1]  # the last token was not run
        exec(files, names)
    assert torch.equal(torch.stack(names["tokens"]), names["input_ids"])
    assert_near(names["logits"][0, -1], logits, 512)
    return names["output"][0, ids.shape[1] :].tolist(), wanted[0].tolist()


def test_the_fragments_of_inference_and_the_cache(tmp_path):
    pytest.importorskip("transformers")
    for output, wanted in run_distributed(_fragments, 2, str(tmp_path / "cache"), fresh=True):
        assert output == wanted and len(wanted) > 1


def _on_a_mesh(rank, world):
    (block,) = re.findall(r"```python\n(.*?)```", (REPO / "docs/launching.md").read_text(), flags=re.DOTALL)
    q, k, v = torch.ones(1, 4, 2, 8), torch.ones(1, 4, 2, 8), torch.full((1, 4, 2, 8), float(rank))
    names = {"dist": dist, "init_device_mesh": init_device_mesh, "tree_attn_func": tree_attn_func}
    names |= {"q": q, "k": k, "v": v}
    exec(block, names)
    return names["out"][0, -1, 0, 0].item()  # of what this rank's last query sees: all, or 2 and 4 tokens


def test_the_page_about_starting_ranks():
    """Its scripts and variables are those that there are, and its mesh makes pairs of ranks."""
    text = (REPO / "docs/launching.md").read_text()
    assert not [
        name for name in (*LAUNCHER_VARIABLES, CONFIG_VARIABLE, "MEGATRON_TREE_CACHE") if f"`{name}`" not in text
    ]
    starts = [path.name for path in (REPO / "launch").glob("*.sh") if 'find_program "$1"' in path.read_text()]
    assert sorted(starts) == sorted(set(re.findall(r"launch/(\w+\.sh)", text))) and len(starts) == 3
    assert run_distributed(_on_a_mesh, 4) == pytest.approx([1 / 2, 2 / 3, 5 / 2, 8 / 3])


def _difference(rank, world):
    """What the lines of "My loss differs" print, for a right and for a wrong result."""
    text = (REPO / "docs/troubleshooting.md").read_text()
    (program,) = re.findall(r"```python\n(   out = .*?)   ```", text, flags=re.DOTALL)
    printed = []
    for scale in (1.0, 1.01):
        torch.manual_seed(3)
        q, k, v = (torch.randn(1, 32, h, 16) for h in (4, 2, 2))
        names = {"torch": torch, "group": dist.group.WORLD, "unshard_sequence": unshard_sequence}
        names |= {x: shard_sequence(y, dist.group.WORLD, 1) for x, y in (("q", q), ("k", k), ("v", v))}
        names["tree_attn_func"] = lambda *args, scale=scale, **options: scale * tree_attn_func(*args, **options)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(textwrap.dedent(program), names)
        printed.append(float(re.search(r"tensor\(([^,]+),", out.getvalue())[1]))
    return printed


def test_the_comparison_of_troubleshooting():
    for right, wrong in run_distributed(_difference, 2):
        assert right < 1e-5 < 1e-3 < wrong


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
