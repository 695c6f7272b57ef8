"""Check a built site: every link and anchor within it leads somewhere, and no page loads from another host.

    python scripts/site_links.py build/site

It prints a line for each dead link and returns 1 if there is any. It needs no network and does not check
links to other sites. What a browser loads by itself (scripts, styles, images, frames) must be part of the
site, so that the site works from files.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
FOLLOWED = {"a": "href", "area": "href"}
NOT_LOADED = {"canonical", "prev", "next", "alternate"}  # kinds of <link> that only name a page


@dataclass
class Page:
    """The anchors of a page, its links, and the files that it loads."""

    anchors: set[str] = field(default_factory=set)
    followed: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    """Collects a Page from its text."""

    def __init__(self) -> None:
        super().__init__()
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the anchors and links of a tag."""
        values = dict(attrs)
        self.page.anchors.update(value for key in ("id", "name") if (value := values.get(key)))
        followed, loaded = values.get(FOLLOWED.get(tag, "")), values.get(LOADED.get(tag, ""))
        if followed is not None:
            self.page.followed.append(followed)
        if loaded is not None and not (tag == "link" and values.get("rel") in NOT_LOADED):
            self.page.loaded.append(loaded)


def read_page(file: Path) -> Page:
    """Return the anchors and links of an HTML file."""
    reader = _Reader()
    reader.feed(file.read_text(encoding="utf-8"))
    reader.close()
    return reader.page


def faults(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere and for each request to another host."""
    return faults_of(site, {file: read_page(file) for file in sorted(site.rglob("*.html"))})


def faults_of(site: Path, pages: dict[Path, Page]) -> list[str]:
    """Return the same lines for pages that are read already."""
    return [
        f"{file.relative_to(site)}: {link or '(empty)'}: {fault}"
        for file, page in pages.items()
        for links, are_loaded in ((page.followed, False), (page.loaded, True))
        for link in links
        if (fault := _fault(link, are_loaded, file, site, pages))
    ]


def _fault(link: str, is_loaded: bool, file: Path, site: Path, pages: dict[Path, Page]) -> str:
    """Return the fault of one link of a page, "" if it has none."""
    parts = urlsplit(link)
    if parts.scheme == "data":
        return ""
    if parts.scheme or parts.netloc:
        return "is loaded from another host" if is_loaded else ""
    # 404.html is shown at any address, so its links begin at the root of the site.
    start = site if parts.path.startswith("/") else file.parent
    target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else file
    if not target.is_relative_to(site):
        return "leads out of the site"
    if target.is_dir():
        return "leads to a folder, which is no page when read from files"
    if not target.exists():
        return "there is no such file"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return "the page has no such anchor"
    return ""


def main(arguments: list[str]) -> int:
    """Check the site in the folder that ``arguments`` name; print its faults."""
    if len(arguments) != 1 or not (site := Path(arguments[0]).resolve()).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    found = faults(site)
    for line in found:
        print(line, file=sys.stderr)
    if found:
        print(f"{len(found)} dead links or foreign requests in {arguments[0]}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
