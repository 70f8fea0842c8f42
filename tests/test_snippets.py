"""Every Python block of the README and of docs/ runs as written."""

import pytest

from tests import snippets
from tests.processes import SERVER
from tests.snippets import ROOT, blocks_of

PAGES = [page for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))] if blocks_of(page)]
FIRST = ("README.md", "docs/quickstart.md", "docs/functional.md")
"""Pages that run by default; together the others take minutes."""
NOT_RUN = 3
"""Blocks that do not run here, each with its reason in the page. More than these need a better reason still."""


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    snippets.prepare(folder)
    return folder


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=name_of(p), marks=() if name_of(p) in FIRST else pytest.mark.slow) for p in PAGES]
)
def test_the_blocks_of_a_page_run_in_order(page, place, monkeypatch, tmp_path):
    if snippets.registers(page):
        process = SERVER.Process(target=snippets.run_page_apart, args=(page, place, tmp_path / "errors"))
        process.start()
        process.join()
        assert process.exitcode == 0, (tmp_path / "errors").read_text()
        return
    monkeypatch.chdir(place)
    monkeypatch.setattr("vitclinic.exam.request.BUDGET", snippets.BUDGET)
    snippets.run_page(page)


def test_few_blocks_are_not_run_and_each_says_why():
    left_out = [block for page in PAGES for block in blocks_of(page) if block.reason]
    assert len(left_out) <= NOT_RUN
    assert all(len(block.reason.split()) > 2 for block in left_out)


def test_python_blocks_are_found_however_they_are_written(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: it takes an hour -->\n```python\na = 1\n```\n\ntext\n\n```python\nb = 2\n```\n")
    assert [(block.code, block.line, block.reason) for block in blocks_of(page)] == [
        ("a = 1\n", 2, "it takes an hour"),
        ("b = 2\n", 8, None),
    ]


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))], ids=lambda page: page.name)
def test_no_python_block_escapes(page):
    text = page.read_text(encoding="utf-8")
    assert text.count("```python") + text.count("```py\n") == len(blocks_of(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_import_public_names_only(page):
    for block in blocks_of(page):
        for line in block.code.splitlines():
            module = line.removeprefix("from ").removeprefix("import ").split(" ")[0]
            if line.startswith(("from vitclinic", "import vitclinic")):
                assert module.count(".") <= 1, f"{page.name}: {line}"
                assert "._" not in module, f"{page.name}: {line}"
