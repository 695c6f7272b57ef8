"""Open every page of a built site in Chromium, from files and as wide as a phone, and search it.

    python scripts/site_browser.py build/site [FOLDER]    # with FOLDER: pictures of each page, too
    python scripts/site_browser.py --which                # the browser that it would use

It prints a line for each fault and returns 1 if there is any: an error of a script, a request that fails or
goes to another host, a dead link or anchor once the page's scripts have run, a page without a title or
heading, a link that shows the file name of a page, a page wider than the screen, words that the search does
not find. It returns 1 without a browser, too.

The browser is commanded through two pipes (``--remote-debugging-pipe``). That takes no package, while a
driver such as Selenium or Playwright would be larger than this file, and has to match the browser.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from site_links import Page, faults_of

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
PHONE, LAPTOP = 390, 1280  # CSS pixels
TALLEST = 4000  # CSS pixels of a picture
WORDS = {"out of memory": "fit.html", "budget": "budgets.html", "two machines": "two-processes.html"}
SILENCE_SECONDS = 60  # after which the browser is taken for dead
LOCAL = {"file", "data", "blob", "about"}  # schemes of requests that go to no host
# 404.html is for web servers: its links begin at the root of the site, which files do not have.
LEFT_OUT = {"404.html"}

OPTIONS = [
    "--headless",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]

# What a page is once its scripts have run. If it is too wide, the elements that stick out are named, but not
# those in something that scrolls by itself, as tables do.
PROBE = """
new Promise((resolve) => requestAnimationFrame(() => setTimeout(() => {
  const all = (query) => [...document.querySelectorAll(query)];
  const [width, screen] = [document.documentElement.scrollWidth, document.documentElement.clientWidth];
  const scrolls = (e) =>
    e !== document.body && (getComputedStyle(e).overflowX !== "visible" || scrolls(e.parentElement));
  const sticksOut = (e) => e.getBoundingClientRect().right > screen + 1 && e.checkVisibility() && !scrolls(e);
  const tooWide = () => all("body *").filter(sticksOut).map((e) => `${e.localName} ${e.className}`);
  resolve({
    title: document.title.trim(),
    headings: all("h1").map((e) => e.firstChild?.textContent.trim()),
    anchors: all("[id], [name]").flatMap((e) => [e.id, e.getAttribute("name")]).filter((name) => name),
    links: all("a[href]").map((e) => [e.getAttribute("href"), e.textContent.trim()]),
    width,
    screen,
    sticking: width > screen ? tooWide() : [],
  });
})))
"""

# Type WORDS into the box as a reader does, and wait for an answer: the address of each page that is found.
SEARCH = """
new Promise((resolve) => {
  const box = document.querySelector("[data-md-component=search-query]");
  const results = () => [...document.querySelectorAll(".md-search-result__item > a:first-of-type")];
  const found = () => results().map((e) => e.href);
  const deadline = Date.now() + SECONDS * 1000;
  const look = () => (found().length || Date.now() > deadline ? resolve(found()) : setTimeout(look, 20));
  box.focus();
  box.value = WORDS;
  box.dispatchEvent(new InputEvent("input", { bubbles: true }));
  box.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
  look();
})
"""
SEARCH_SECONDS = 20


class Browser:
    """A headless Chromium with one page open. It must be closed, which a ``with`` statement does."""

    def __init__(self, program: str, profile: str) -> None:
        """Start ``program`` with an empty profile in the folder ``profile``."""
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        # The browser reads from descriptor 3 and writes to 4, which the shell makes of those two.
        shell = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # which Chromium refuses to have for root
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", program, *OPTIONS, *sandbox, f"--user-data-dir={profile}"],
            pass_fds=[read_commands, write_answers],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._commands)  # the browser ends when nobody can command it any longer
        os.close(self._answers)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Command ``method`` and return its result; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]  # type: ignore[no-any-return]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        """Return the next message of the browser."""
        while b"\0" not in self._rest:
            if not select.select([self._answers], [], [], SILENCE_SECONDS)[0]:
                raise TimeoutError(f"the browser has said nothing for {SILENCE_SECONDS} s")
            received = os.read(self._answers, 1 << 16)
            if not received:
                raise RuntimeError(f"the browser ended with code {self._process.wait()}")
            self._rest += received
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)  # type: ignore[no-any-return]

    def evaluate(self, script: str) -> Any:
        """Return the value of a script in the page, as JSON has it."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"a script of the check failed: {result['exceptionDetails']}")
        return result["result"]["value"]

    def open(self, address: str) -> None:
        """Open a page and wait until it has loaded; the events are then those of this page."""
        self.events.clear()
        self.call("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def resize(self, width: int, height: int = 844) -> None:
        """Give the page a screen of that many CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def picture(self, width: int) -> bytes:
        """Return a picture (PNG) of the page at that width, from its top to TALLEST."""
        self.resize(width)
        height = min(self.evaluate("document.documentElement.scrollHeight"), TALLEST)
        self.resize(width, height)
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


def fault_of(event: dict[str, Any]) -> str:
    """Return the fault that an event of the browser shows, "" if it shows none."""
    what = event.get("params", {})
    if event["method"] == "Runtime.exceptionThrown":
        details = what["exceptionDetails"]
        return f"script fails: {details.get('exception', {}).get('description', details['text'])}"
    if event["method"] == "Runtime.consoleAPICalled" and what["type"] in {"error", "assert"}:
        return (
            f"console: {' '.join(str(part.get('value', part.get('description'))) for part in what['args'])}"
        )
    if event["method"] == "Log.entryAdded" and what["entry"]["level"] == "error":
        return f"console: {what['entry']['text']} {what['entry'].get('url', '')}"
    if event["method"] == "Network.requestWillBeSent":
        address = what["request"]["url"]
        return "" if urlsplit(address).scheme in LOCAL else f"request to another host: {address}"
    if event["method"] == "Network.loadingFailed" and not what.get("canceled"):
        return f"a request fails: {what['errorText']}"
    return ""


def faults_of_page(seen: dict[str, Any]) -> list[str]:
    """Return the faults of a page, from the result of PROBE."""
    found = []
    if not seen["title"]:
        found.append("has no title")
    if len(seen["headings"]) != 1 or not seen["headings"][0]:
        found.append(f"has {len(seen['headings'])} headings of the first level, not one with a text")
    if seen["width"] > seen["screen"]:
        sticking = ", ".join(seen["sticking"][-3:])
        found.append(f"is {seen['width']} pixels wide on a screen of {seen['screen']}: {sticking}")
    for link, text in seen["links"]:
        name = Path(unquote(urlsplit(link).path)).stem
        if text == f"{name}.md" and not urlsplit(link).scheme:
            found.append(f"the text of a link is a file name: {text}")
    return found


def faults_of_events(browser: Browser) -> list[str]:
    """Return the faults that the events of the open page show."""
    return [fault for event in browser.events if (fault := fault_of(event))]


def search(browser: Browser, words: str, wanted: str) -> list[str]:
    """Type ``words`` into the box of the open page; ``wanted`` must be among the first ten results."""
    script = SEARCH.replace("WORDS", json.dumps(words)).replace("SECONDS", str(SEARCH_SECONDS))
    names = [Path(unquote(urlsplit(link).path)).name for link in browser.evaluate(script)[:10]]
    if wanted in names:
        return []
    return [f"a search for '{words}' finds {', '.join(names) or 'nothing'}, not {wanted}"]


def check(site: Path, program: str, words: dict[str, str] = WORDS, pictures: Path | None = None) -> list[str]:
    """Return a line for each fault of the site in the folder ``site``; its first page searches ``words``."""
    pages: dict[Path, Page] = {}
    lines = []

    def note(file: Path, faults: list[str]) -> None:
        lines.extend(f"{file.relative_to(site)}: {fault}" for fault in faults)

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        Browser(program, profile) as browser,
    ):
        for file in sorted(set(site.rglob("*.html")) - {site / name for name in LEFT_OUT}):
            browser.resize(PHONE)
            browser.open(file.as_uri())
            seen = browser.evaluate(PROBE)
            note(file, faults_of_events(browser) + faults_of_page(seen))
            pages[file] = Page(set(seen["anchors"]), [link for link, _text in seen["links"]])
            if pictures is not None:
                name = file.relative_to(site).with_suffix("").as_posix().replace("/", "-")
                for width in (PHONE, LAPTOP):
                    (pictures / f"{name}-{width}.png").write_bytes(browser.picture(width))
        browser.resize(LAPTOP)  # where the box is always open
        for typed, wanted in words.items():
            browser.open((site / "index.html").as_uri())
            note(site / "index.html", search(browser, typed, wanted) + faults_of_events(browser))
    return lines + faults_of(site, pages)


def find_browser() -> str | None:
    """Return the Chromium of this machine, or None."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


def main(arguments: list[str]) -> int:
    """Check the site in the folder that ``arguments`` name, or print which browser would do it."""
    program = find_browser()
    if program is None:
        print("no Chromium: apt-get install chromium-headless-shell", file=sys.stderr)
        return 1
    if arguments == ["--which"]:
        print(program)
        return 0
    if len(arguments) not in {1, 2} or not (site := Path(arguments[0]).resolve()).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    pictures = Path(arguments[1]) if len(arguments) == 2 else None
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    found = check(site, program, pictures=pictures)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
