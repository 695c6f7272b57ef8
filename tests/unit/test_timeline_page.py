"""The HTML page of a timeline: whole in itself, safe for any name, alive in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from timeline_samples import NAMES, long_timeline, timelines

from gemini.timeline.events import Timeline
from gemini.timeline.page import embed, page_data, to_html

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
TABLE = {"i", "table", "thead", "tbody", "tr", "th", "td"}
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; apt-get install chromium")


class Page(HTMLParser):
    """What a browser sees of a page: its tags with their attributes, and the text in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside][-1] += data


@given(timelines(), NAMES)
def test_no_name_becomes_markup_and_the_data_arrive_as_they_were(timeline: Timeline, title: str) -> None:
    plain = Page(to_html(Timeline(), title="plain"))
    page = Page(to_html(timeline, title=title))
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in plain.tags} | TABLE
    data, program = page.texts["script"]
    assert json.loads(data) == json.loads(json.dumps(page_data(timeline)))
    assert program == plain.texts["script"][1]


def test_page_asks_for_nothing_from_outside() -> None:
    text = to_html(long_timeline(10), title="a step")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    for tag, attributes in Page(text).tags:
        assert not {"src", "href", "srcset", "action"} & attributes.keys(), tag


def test_embedded_json_cannot_end_its_script() -> None:
    text = embed(["</script>", "<!--", "a & b"])
    assert not set("<>&") & set(text)
    assert json.loads(text) == ["</script>", "<!--", "a & b"]


def test_page_of_many_events_stays_small() -> None:
    timeline = long_timeline(12_500)
    assert timeline.num_events == 50_000
    assert len(to_html(timeline, title="")) < 100 * timeline.num_events


def test_page_of_nothing_says_so() -> None:
    assert "No training step was recorded." in to_html(Timeline(), title="")


def opened(page: str, script: str, directory: Path) -> str:
    """Return the document after a browser has opened ``page`` and run ``script`` in it."""
    assert CHROMIUM is not None
    path = directory / "page.html"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={directory / 'profile'}"]
    command += ["--virtual-time-budget=3000", "--window-size=1200,900", "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


HOVER = """
  const canvas = document.getElementById("canvas"), box = canvas.getBoundingClientRect();
  const at = (kind, x, y) => canvas.dispatchEvent(new PointerEvent(kind,
      {clientX: box.left + x, clientY: box.top + y, bubbles: true}));
"""


@needs_browser
def test_hovering_says_what_lies_under_the_pointer(tmp_path: Path) -> None:
    script = (
        HOVER
        + """
      at("pointermove", 128 + (box.width - 136) * 3650 / 12000, 66);  // in the fourth operator
      document.title = document.getElementById("tip").textContent;
    """
    )
    document = opened(to_html(long_timeline(12), title="x"), script, tmp_path)
    assert "<title>layer 3\nforward\n500 us with its operands pinned" in document


@needs_browser
def test_dragging_looks_closer_and_a_button_goes_back(tmp_path: Path) -> None:
    script = (
        HOVER
        + """
      const views = [], seen = () => views.push(canvas.dataset.view);
      at("pointerdown", 300, 60); at("pointermove", 500, 60); at("pointerup", 500, 60); seen();
      document.getElementById("closer").click(); seen();
      [...document.querySelectorAll("#steps button")].at(-1).click(); seen();
      document.title = views.join(";");
    """
    )
    document = opened(to_html(long_timeline(1000), title="x"), script, tmp_path)
    found = re.search(r"<title>([\d ;]+)</title>", document)
    assert found is not None
    dragged, closer, whole = ([int(edge) for edge in view.split()] for view in found[1].split(";"))
    assert whole == [0, 1_000_000]
    assert whole[0] < dragged[0] < closer[0] < closer[1] < dragged[1] < whole[1]


@needs_browser
def test_fifty_thousand_events_are_drawn(tmp_path: Path) -> None:
    document = opened(to_html(long_timeline(12_500), title="x"), "", tmp_path)
    drawn = re.search(r'data-drawn="(\d+)"', document)
    assert drawn is not None
    assert int(drawn[1]) > 37_500
