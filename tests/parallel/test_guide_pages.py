"""Programs of pages about several processes run as printed, and the map leads where it says."""

from __future__ import annotations

import contextlib
import io
import os
import re
import warnings
from pathlib import Path

import pytest
from processes import run_on_ranks

from gemini.parallel.launch import shutdown

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {"gradients.md": 3, "paradigms.md": 1}


def programs_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.M | re.S)


def run_pages() -> int:
    """Run them all in this process, one after the other."""
    programs = [program for page in PAGES for program in programs_of(page)]
    for program in programs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(program, "a page", "exec"), {"__name__": "__main__"})
        shutdown()
    return len(programs)


def test_programs_of_the_pages_run_as_printed_on_several_ranks_too() -> None:
    assert {page: len(programs_of(page)) for page in PAGES} == PAGES
    assert run_on_ranks(run_pages, 2) == [4, 4]
    assert run_on_ranks(run_pages, 1) == [4]


def run_two_processes(directory: str) -> str:
    """Run the program of two-processes.md in ``directory``, on this rank; return what it prints."""
    (program,) = programs_of("two-processes.md")
    before = Path.cwd()
    os.chdir(directory)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(program, "a page", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
    return output.getvalue()


def test_a_run_of_two_ranks_continues_on_one_as_printed(tmp_path: Path) -> None:
    begun = run_on_ranks(run_two_processes, 2, str(tmp_path))
    (fewer,) = run_on_ranks(run_two_processes, 1, str(tmp_path))
    assert begun[0].startswith("ranks 2 steps 0 to 2 loss ")
    assert begun[1] == ""
    assert fewer.startswith("ranks 1 steps 3 to 5 loss ")
    assert float(fewer.split()[-1]) < float(begun[0].split()[-1])


def anchors_of(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["guide.md"])
def test_the_map_leads_to_headings_there_are(page: str) -> None:
    links = re.findall(r"\]\(([\w./-]+)(?:#([\w-]+))?\)", (DOCS / page).read_text())
    assert len(links) > 40
    for path, anchor in links:
        assert (DOCS / path).exists(), path
        assert not anchor or anchor in anchors_of(path), (path, anchor)
