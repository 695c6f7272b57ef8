"""What each Python file of the project imports, read from its text.

The layer rules (``packaging/test_layers.py``) and ``scripts/affected.py`` use it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON_FILES = sorted(p for top in ("gemini", "parallel") for p in (ROOT / top).rglob("*.py"))
BENCH_FILES = sorted((ROOT / "benchmarks" / "gemini_bench").rglob("*.py"))  # a distribution of its own
# Tests import each other's helpers by their bare names: pytest puts their folders on the path.
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))


def module_of(path: Path) -> list[str]:
    """Return the dotted name by which a file is imported, as a list."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "parallel":
        return ["gemini", *parts]
    if parts[0] == "benchmarks":
        return parts[1:]
    return parts[-1:] if parts[0] == "tests" else parts


@cache
def tree_of(path: Path) -> ast.Module:
    """Return a file, parsed."""
    return ast.parse(path.read_text())


@cache
def imported_names(path: Path) -> tuple[str, ...]:
    """Return the absolute dotted name of everything a file imports, also inside functions."""
    return tuple(_imported(module_of(path)[:-1], tree_of(path)))


def _imported(package: list[str], tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


@cache
def _used_names(path: Path) -> tuple[str, ...]:
    """Return the names of everything that runs with a file: a package imports what it hands on late (under
    TYPE_CHECKING) for those alone who write ``package.name``."""
    tree = tree_of(path)
    late = [
        node
        for branch in tree.body
        if path.name == "__init__.py" and isinstance(branch, ast.If)
        if isinstance(branch.test, ast.Name) and branch.test.id == "TYPE_CHECKING"
        for node in branch.body
    ]
    waiting = set(_imported(module_of(path)[:-1], ast.Module(late, [])))
    written = (
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gemini"
    )
    return *(name for name in imported_names(path) if name not in waiting), *written


def imports_of_files(paths: Sequence[Path]) -> dict[str, set[str]]:
    """Return by dotted name which of these files each one imports.

    A name that a package hands on counts for the file that defines it.
    """
    files = {".".join(module_of(path)).removesuffix(".__init__"): path for path in paths}

    def defining(name: str) -> str | None:
        head, _, tail = name.rpartition(".")
        if name in files or not head:
            return name if name in files else None
        if files.get(head) is not None and files[head].name == "__init__.py":
            handed_on = [full for full in imported_names(files[head]) if full.endswith(f".{tail}")]
            return defining(handed_on[0]) if handed_on else head
        return defining(head)

    return {
        module: {found for name in _used_names(path) if (found := defining(name)) not in (None, module)}
        for module, path in files.items()
    }
