"""Complete the site that mkdocs builds: mkdocs.yml names this file among its hooks.

A page of docs/ may link to any file of the checkout: an example, the record of a benchmark. mkdocs knows the
files of docs/ alone, so such a link would be dead on the site. These hooks add, below ``repository/``, every
file that a page links to, and what these files link to. Markdown, notebooks and programs become pages,
folders become lists, and other files stay as they are. The files in docs/ keep links that also work in the
checkout.

In the checkout the text of a link to a page is its file name. On the site it is the heading that the link
leads to.

Docstrings name what they refer to as Sphinx does (:func:`name`). On the site these are links.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PROGRAMS = {
    ".py": "python",
    ".sh": "bash",
    ".toml": "toml",
    "Dockerfile": "docker",
}  # shown as pages, with highlighting
NOTEBOOK = ".ipynb"
LISTED = {".md", ".json", NOTEBOOK, *PROGRAMS}  # which files of a folder its page lists
_TARGET = re.compile(r"\]\(([^()\s#:]+)(#[^()\s]*)?\)")
# Links that show a file name. Without its ending it may be a word of a sentence: then only in references.
_PAGE = r"(?P<target>(?:[^()\s#:]*/)?(?P<stem>[^()\s#:/]+)\.md)(?P<anchor>#[^()\s]*)?"
_FILE_NAME = re.compile(rf"\[[\w./-]+\.md\]\({_PAGE}\)")
_STEM = re.compile(rf"(?:(?<=\()|(?<=, )|(?<=\| ))\[(?:[\w-]+/)?(?P<text>[\w-]+)\]\({_PAGE}\)")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc):<code>~?([\w.]+)</code>")
_UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def on_files(files: Files, config: Any) -> Files:
    """Add to the files of the site the files of the checkout that pages link to."""
    for path in sorted(linked_files()):
        uri = address(path)
        if files.get_file_from_path(uri) is not None:
            continue
        content = page_of(path)
        if content is None:
            files.append(File.generated(config, uri, abs_src_path=str(path)))
        else:
            files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_others: Any) -> str:
    """Return the text of a page of docs/ with links for the site; pages of other files have them already."""
    path = DOCS / page.file.src_uri
    return relinked(markdown, path) if path.is_file() else markdown


def on_page_content(html: str, **_others: Any) -> str:
    """Return the HTML of a page with links in place of the roles of Sphinx, where the page has the name."""
    known = re.findall(r'id="(gemini\.[\w.]+)"', html)

    def linked(match: re.Match[str]) -> str:
        name = match[1]
        targets = [place for place in known if place == name or place.endswith(f".{name}")]
        code = f"<code>{name}</code>"
        return f'<a href="#{targets[0]}">{code}</a>' if len(set(targets)) == 1 else code

    return _ROLE.sub(linked, html)


def linked_files() -> set[Path]:
    """Return the files that pages link to and mkdocs does not find by itself, including the files that these
    link to.
    """
    waiting = list(DOCS.rglob("*.md"))
    found: set[Path] = set()
    while waiting:
        for path in _next(waiting.pop()):
            if path not in found and (path.is_dir() or not path.is_relative_to(DOCS)):
                found.add(path)
                waiting.append(path)
    return found


def _next(path: Path) -> list[Path]:
    """Return the files that one file or folder leads to."""
    if path.is_dir():
        return _listed(path)
    if path.suffix != ".md":
        return []
    targets = (resolved(match[1], path) for match in _TARGET.finditer(path.read_text()))
    return [target for target in targets if target is not None]


def _listed(folder: Path) -> list[Path]:
    """Return the files that the page of a folder lists, and the folders in it that have some."""
    inside = [path for path in sorted(folder.iterdir()) if not path.name.startswith((".", "_"))]
    return [path for path in inside if (_listed(path) if path.is_dir() else path.suffix in LISTED)]


def resolved(target: str, page: Path) -> Path | None:
    """Return the file or folder of the checkout that a link of ``page`` leads to, or None."""
    path = Path(posixpath.normpath((page.parent / target).as_posix()))
    return path if path.exists() and path.is_relative_to(ROOT) and path != ROOT else None


def address(path: Path) -> str:
    """Return the name that mkdocs gives the source of a file or folder of the checkout."""
    within = path.relative_to(DOCS) if path.is_relative_to(DOCS) else "repository" / path.relative_to(ROOT)
    uri = within.as_posix()
    if path.is_dir():
        return f"{uri}/README.md" if (path / "README.md").exists() else f"{uri}/index.md"
    return f"{uri}.md" if _kind(path) in {NOTEBOOK, *PROGRAMS} else uri


def page_of(path: Path) -> str | None:
    """Return the text of the page for a file or folder, or None if the site has the file itself."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir() and not (path / "README.md").exists():
        links = (f"- [{_label(inner)}]({name_from(path, inner)})\n" for inner in _listed(path))
        return f"{_UNSEARCHED}# {name}\n\n{''.join(links)}"
    if _kind(path) in PROGRAMS:
        return f"{_UNSEARCHED}# {name}\n\n````{PROGRAMS[_kind(path)]}\n{path.read_text()}````\n"
    if path.suffix == NOTEBOOK:
        return _UNSEARCHED + relinked(_notebook_text(path), path)
    source = path / "README.md" if path.is_dir() else path
    return _UNSEARCHED + relinked(source.read_text(), source) if source.suffix == ".md" else None


def _notebook_text(path: Path) -> str:
    """Return the cells of a notebook as a page."""
    cells = json.loads(path.read_text())["cells"]
    texts = ((cell["cell_type"], "".join(cell["source"])) for cell in cells)
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in texts)


def _kind(path: Path) -> str:
    """Return the suffix of a file, or its name if it has none."""
    return path.suffix or path.name


def _label(path: Path) -> str:
    """Return the text for a file or folder in the list of its folder."""
    return title(path) if path.suffix == ".md" else path.name


def relinked(text: str, page: Path) -> str:
    """Return the text of a page with the links of the site: to sources as mkdocs names them, with titles."""

    def titled(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        path = resolved(target, page)
        if path is None or match.groupdict().get("text", match["stem"]) != match["stem"]:
            return match[0]
        return f"[{title(path, anchor.removeprefix('#'))}]({target}{anchor})"

    def led(match: re.Match[str]) -> str:
        path = resolved(match[1], page)
        return match[0] if path is None else f"]({name_from(page, path)}{match[2] or ''})"

    return _TARGET.sub(led, _STEM.sub(titled, _FILE_NAME.sub(titled, text)))


def name_from(source: Path, target: Path) -> str:
    """Return the link of the site from one file or folder to another."""
    return posixpath.relpath(address(target), posixpath.dirname(address(source)))


def title(page: Path, anchor: str = "") -> str:
    """Return the heading of a page that has the anchor, or the first one, or the file name if it has none."""
    headings: list[str] = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    named = [text for text in headings if slugify(text.replace("`", ""), "-") == anchor]
    return [*named, *headings, page.name][0]
