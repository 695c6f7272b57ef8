"""What the runtime makes for itself is where and what it says: torch's default device and dtype are the
user's. A file that is left out makes modules of its own, or runs in processes that set neither."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("gemini/jobs/", "gemini/cli/")
FILES = sorted(
    path
    for folder in ("gemini", "parallel")
    for path in (ROOT / folder).rglob("*.py")
    if not str(path.relative_to(ROOT)).startswith(LEFT_OUT)
)

# Where each takes the device and the dtype from.
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "empty_strided", "scalar_tensor", "randn", "rand")
INTEGERS = ("arange", "randint", "randperm")  # of integers, whatever the default dtype is


def left_open(source: str) -> list[str]:
    """Return what calls of torch's factories do not say, by line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        said = {keyword.arg for keyword in node.keywords}
        name = node.func.attr
        needed = {"device", "dtype"} if name in FACTORIES else {"device"} if name in INTEGERS else set()
        found += [f"line {node.lineno}: torch.{name} without {word}" for word in sorted(needed - said)]
    return found


def test_what_is_left_open_is_found() -> None:
    source = (
        "import torch\ntorch.zeros(3)\ntorch.arange(3, device='cpu')\ntorch.ones(2, dtype=d, device='cpu')\n"
    )
    assert left_open(source) == ["line 2: torch.zeros without device", "line 2: torch.zeros without dtype"]


def test_factories_say_where_and_what() -> None:
    assert len(FILES) > 100
    open_calls = {str(path.relative_to(ROOT)): left_open(path.read_text()) for path in FILES}
    assert {path: calls for path, calls in open_calls.items() if calls} == {}
