"""The site of the documentation has the files outside docs/, and its checker finds each kind of fault."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


IN_CHINESE = (ROOT / "docs" / "zh" / "install.md").read_text().splitlines()[0].removeprefix("# ")


@pytest.fixture
def scripts() -> Iterator[None]:
    """Let scripts/ be imported."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture
def hooks(scripts: None) -> ModuleType:
    pytest.importorskip("mkdocs", reason="only scripts/setup.sh brings it")
    import site_hooks

    return site_hooks


@pytest.fixture
def links(scripts: None) -> ModuleType:
    import site_links

    return site_links


def test_each_file_that_pages_link_to_has_its_own_place_on_the_site(hooks: ModuleType) -> None:
    linked = {
        path for path in hooks.linked_files() if path.name != "README.md"
    }  # that of a folder is its page
    places = [hooks.address(path) for path in linked]
    assert len(set(places)) == len(places) > 100
    assert "repository/examples/wrap_a_model.py.md" in places
    assert "repository/examples/documents/index.md" in places


@pytest.mark.parametrize(
    ("link", "on_the_site"),
    [
        ("[budgets.md](budgets.md#how-to-choose)", "[How to choose](budgets.md#how-to-choose)"),
        ("[budgets.md](budgets.md)", "[Choose a budget](budgets.md)"),
        ("[budgets.md](budgets.md#gone)", "[Choose a budget](budgets.md#gone)"),
        ("([budgets](budgets.md))", "([Choose a budget](budgets.md))"),
        ("this, [zh/install](zh/install.md)", f"this, [{IN_CHINESE}](zh/install.md)"),
        ("the [budgets](budgets.md) of a run", "the [budgets](budgets.md) of a run"),
        ("([why](budgets.md))", "([why](budgets.md))"),
        ("[how](budgets.md)", "[how](budgets.md)"),
        ("[a.py](../examples/wrap_a_model.py)", "[a.py](repository/examples/wrap_a_model.py.md)"),
        ("[examples/](../examples)", "[examples/](repository/examples/index.md)"),
        ("[README](../README.md)", "[README](repository/README.md)"),
        ("[here](#a-heading)", "[here](#a-heading)"),
        ("[away](https://example.org/x.md)", "[away](https://example.org/x.md)"),
        ("[dead](no-such-page.md)", "[dead](no-such-page.md)"),
        ("![bars](img/bars.svg)", "![bars](img/bars.svg)"),
    ],
)
def test_a_link_of_the_checkout_becomes_one_of_the_site(
    link: str, on_the_site: str, hooks: ModuleType
) -> None:
    assert hooks.relinked(f"See {link}.", ROOT / "docs" / "start.md") == f"See {on_the_site}."


def test_records_link_to_pages_from_where_they_are_on_the_site(hooks: ModuleType) -> None:
    record = ROOT / "benchmarks" / "results" / "newcomer_xeon-2core_202611.md"
    text = hooks.relinked("[README](../../README.md), [docs/finetune.md](../../docs/finetune.md)", record)
    assert text == "[README](../../README.md), [Fine-tune: gemini finetune](../../../finetune.md)"


PAGE = '<h1 id="top">A</h1><a href="b/c.html#part">C</a><a href="#top">up</a><img src="i.svg">'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.html").write_text(PAGE)
    (tmp_path / "b" / "c.html").write_text(
        '<a id="part" href="../a.html">A</a><a href="https://example.org">E</a>'
    )
    (tmp_path / "404.html").write_text(
        '<a href="/a.html">A</a><link rel="canonical" href="https://example.org/">'
    )
    (tmp_path / "i.svg").write_text("<svg/>")
    return tmp_path


def test_a_whole_site_has_no_faults(site: Path, links: ModuleType) -> None:
    assert links.faults(site) == []
    assert links.main([str(site)]) == 0


@pytest.mark.parametrize(
    ("tag", "fault"),
    [
        ('<a href="gone.html">', "no such file"),
        ('<a href="b/c.html#gone">', "no such anchor"),
        ('<a href="#gone">', "no such anchor"),
        ('<a href="b/">', "a folder"),
        ('<a href="../a.html">', "out of the site"),
        ('<img src="gone.svg">', "no such file"),
        ('<script src="https://example.org/x.js"></script>', "another host"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "another host"),
    ],
)
def test_each_fault_is_one_line_with_its_page(tag: str, fault: str, site: Path, links: ModuleType) -> None:
    (site / "a.html").write_text(PAGE + tag)
    (line,) = links.faults(site)
    assert line.startswith("a.html: ")
    assert fault in line
    assert links.main([str(site)]) == 1


# What a browser is to find wrong with a page, by a part of its body (or its whole head).
SEEN_FAULTS = {
    '<script>console.error("lost")</script>': "console: lost",
    "<script>gone()</script>": "script fails: ReferenceError: gone is not defined",
    '<script>fetch("https://example.org/x")</script>': "request to another host: https://example.org/x",
    '<img src="gone.png">': "a request fails: net::ERR_FILE_NOT_FOUND",
    '<script>document.body.innerHTML += "<a href=#late>x</a>"</script>': "#late: the page has no such anchor",
    "<h1>another</h1>": "has 2 headings of the first level",
    "<title></title>": "has no title",
    '<a href="index.html">index.md</a>': "the text of a link is a file name: index.md",
    '<p style="width: 500px">x</p>': "pixels wide on a screen of 390: p ",
}
SEEN = """<!doctype html><title>A site</title><body><h1 id="top">A</h1><a href="#top">up</a>
<pre style="overflow: auto"><div style="width: 500px">x</div></pre>{body}"""
BOX = """<input data-md-component="search-query" oninput="
  if (this.value === 'budget') found.innerHTML = '<li class=md-search-result__item><a href=2.html>x</a></li>'
"><ol id="found"></ol>"""


def test_a_browser_sees_each_fault(tmp_path: Path, scripts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import site_browser

    program = site_browser.find_browser()
    if program is None:
        pytest.skip("needs Chromium, which `make docs` installs where it may")
    monkeypatch.setattr(site_browser, "SEARCH_SECONDS", 0.5)
    (tmp_path / "index.html").write_text(SEEN.format(body=BOX))
    for number, body in enumerate(SEEN_FAULTS):
        page = SEEN.format(body=body)
        page = page.replace("<title>A site</title>", "") if "title" in body else page
        (tmp_path / f"{number}.html").write_text(page)
    words = {"budget": "2.html", "nothing": "fit.html"}
    lines = site_browser.check(tmp_path, program, words)
    assert [line for line in lines if line.startswith("index.html")] == [
        "index.html: a search for 'nothing' finds nothing, not fit.html"
    ]
    for number, fault in enumerate(SEEN_FAULTS.values()):
        own = [line for line in lines if line.startswith(f"{number}.html: ")]
        assert any(fault in line for line in own), (fault, own)


def test_tasks_of_the_front_page_cover_the_guides_of_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    guides = text[text.index("  - Fit a model:") : text.index("  - Planning:")]
    pages = set(re.findall(r"- ([\w-]+\.md)$", guides, re.MULTILINE))
    assert len(pages) > 20
    front = set(re.findall(r"\(([\w-]+\.md)", (ROOT / "docs" / "index.md").read_text()))
    assert pages - front == set()


def test_a_name_in_a_docstring_leads_to_its_entry_on_the_page(hooks: ModuleType) -> None:
    entries = '<h3 id="gemini.manage"></h3><h4 id="gemini.A.save"></h4><h4 id="gemini.B.save"></h4>'
    said = "".join(
        f"<p>:func:<code>{name}</code></p>" for name in ("gemini.manage", "manage", "save", "gone")
    )
    html = hooks.on_page_content(entries + said)
    assert html.removeprefix(entries) == (
        '<p><a href="#gemini.manage"><code>gemini.manage</code></a></p>'
        '<p><a href="#gemini.manage"><code>manage</code></a></p>'
        "<p><code>save</code></p><p><code>gone</code></p>"
    )


def test_every_page_of_docs_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"([\w/-]+\.md)", text[text.index("\nnav:") :]))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= named
    assert {path for path in named - pages if not (ROOT / path.removeprefix("repository/")).exists()} == set()
