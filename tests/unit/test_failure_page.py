"""docs/when-it-fails.md is about what the code raises: its messages, its error classes, its exit codes."""

from __future__ import annotations

import ast
import functools
import re
import signal
from pathlib import Path

import pytest

from gemini import errors
from gemini.errors import GeminiError

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "when-it-fails.md").read_text()
# What a message quotes on the page, with ... for what differs from case to case.
MESSAGES = [
    quoted
    for line in PAGE.split("## Exit codes")[0].splitlines()
    if line.startswith("| `")
    for quoted in re.findall(r"`([^`]+)`", line.split(" | ")[0])
]


def text_of(node: ast.AST) -> str:
    """Return the text that a literal makes, with {} for what is put in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" for part in node.values)
    return ""


@functools.cache
def texts() -> str:
    """Return every text that the library may say, a line each, with {} for what is put in."""
    found = []
    for folder in ("gemini", "parallel"):
        for path in (ROOT / folder).rglob("*.py"):
            found += [text_of(node).replace("\n", " ") for node in ast.walk(ast.parse(path.read_text()))]
    for path in (ROOT / "csrc").rglob("*.*"):
        found += [core_text(statement) for statement in path.read_text().split(";\n")]
    return "\n".join(found)


def core_text(statement: str) -> str:
    """Return the text that the literals of a C++ statement make, with {} for an expression between two."""
    parts = re.split(r'"((?:[^"\\\n]|\\.)*)"', statement)[1:-1]  # literals, and the code between them
    return "".join(part if i % 2 == 0 else "{}" * bool(part.strip()) for i, part in enumerate(parts))


@pytest.mark.parametrize("message", MESSAGES)
def test_what_the_page_quotes_is_said_somewhere(message: str) -> None:
    assert message.replace("...", "{}") in texts()


@pytest.mark.parametrize("module", ["run_directory.py", "training.py"])
def test_page_has_every_error_of_a_run(module: str) -> None:
    tree = ast.parse((ROOT / "gemini" / "jobs" / "run" / module).read_text())
    raised = [
        text_of(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Error")
        if node.args
    ]
    said = [text for text in raised if text]  # the others come from a function
    assert len(said) > 2
    assert [text for text in said if not any(message in text for message in MESSAGES)] == []


def test_page_names_every_error_class() -> None:
    public = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, GeminiError)
    }
    assert public == {
        name for name in re.findall(r"`(?:gemini\.errors\.)?(\w+Error)\b", PAGE) if name in public
    }
    assert {name for name in re.findall(r"`(\w+Error)`", PAGE)} - public == {"TypeError"}
    assert len(public) == 11
    assert len(MESSAGES) > 30


def test_page_has_every_exit_code() -> None:
    said = set(re.findall(r"\d+", " ".join(re.findall(r"^\| ([\d, ]+) \|", PAGE, flags=re.M))))
    constants = set()
    for path in (ROOT / "gemini").rglob("*.py"):
        constants |= set(re.findall(r"^_?EXIT_\w+ = (\d+)$", path.read_text(), flags=re.M))
    stopped = {str(128 + number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    assert said == {"0"} | constants | stopped
