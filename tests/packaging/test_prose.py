"""What scripts/prose.py finds in pages, and what it leaves alone."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

pytest.importorskip("proselint", reason="only the extra 'lint' brings it")

ROOT = Path(__file__).resolve().parents[2]
NAMES = runpy.run_path(str(ROOT / "scripts" / "prose.py"))
hits: Callable[[str], Iterable[tuple[int, str]]] = NAMES["hits"]


@pytest.mark.parametrize(
    ("sentence", "instead"),
    [
        ("A chunk whose copy is clean is dropped.", "'with ...'"),
        ("It has two parts, of which one is a view.", "a second sentence"),
        ("The view stands in the place of the weight.", "'instead of'"),
        ("The graph is built anew.", "'again'"),
        ("A rank that raises is no more.", "'no longer'"),
        ("The rank waits for ever.", "'indefinitely'"),
        ("The weights are lost in silence.", "'silently'"),
        ("The errors are to be raised here.", "'must be'"),
    ],
)
def test_each_phrase_is_found_with_what_to_write(sentence: str, instead: str) -> None:
    found = list(hits(f"# Title\n\nA sentence.\n{sentence}\n"))
    assert (4, True) in [(line, instead in text) for line, text in found]


def test_proselints_own_checks_run() -> None:
    found = list(hits("A first line.\n\nThe model model is large.\n"))
    assert [line for line, _text in found] == [3]
    assert "repeated" in found[0][1]


@pytest.mark.parametrize(
    "page",
    [
        "Its `whose` is code, `anew` too.\n",
        "```\nfor ever, anew\n```\n",
        "Run this:\n\n    print('whose')\n",
        "It needs no more than one chunk, and no more memory.\n",
        'Straight "quotes", three dots ... and 2 x 2 stay.\n',
        "",
    ],
)
def test_code_and_plain_sentences_pass(page: str) -> None:
    assert list(hits(page)) == []


def test_a_hit_ends_with_code_1_and_names_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = tmp_path / "bad.md", tmp_path / "good.md"
    bad.write_text("A line.\nIt is built anew.\n")
    good.write_text("It is built again.\n")
    assert NAMES["main"]([str(bad), str(good)]) == 1
    assert capsys.readouterr().out == f"{bad}:2: 'anew': write 'again'\n"
    assert NAMES["main"]([str(good)]) == 0


def test_of_a_python_file_docstrings_and_comments_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        'import torch\nimport torch\n\n\ndef build():\n    """Build it anew."""\n'
        '    said = "for ever"\n    return said  # in silence\n'
    )
    assert NAMES["main"]([str(module)]) == 1
    assert [line.split(":")[1] for line in capsys.readouterr().out.splitlines()] == ["6", "8"]
