#!/usr/bin/env python3
"""The tests that a change can reach, nearest first: scripts/affected.py [BASE]

BASE is a commit; without it, the upstream of the branch, or HEAD. Changes since then count, committed or not.
A test is near if few imports lead from it to a changed file. The laws and the faults are always chosen.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from import_graph import BENCH_FILES, PYTHON_FILES, TEST_FILES, imported_names, imports_of_files, module_of  # noqa: E402

ALWAYS = (
    "tests/packaging/test_layers.py",
    "tests/packaging/test_assignments.py",
    "tests/training/test_laws.py",
    "tests/training/test_promises.py",
    "tests/faults/test_*.py",
)
CORE = "gemini._C"
# What imports by name, which the text does not show: the module, and those that it may import.
BY_NAME = {
    "gemini.compat.modules": "gemini.*",
    "gemini_bench.worker": "gemini_bench.*",
}
# A test with such a text runs a program, which imports what the test does not.
_ALL = ("gemini", "gemini.parallel", "gemini.compat.modules")
STARTED = {
    '"-m", "gemini"': ("gemini.cli.main",),
    "bin/gemini": ("gemini.cli.main",),
    '"gemini_bench': ("gemini_bench.worker",),
    '"examples"': _ALL,
    '"docs"': _ALL,
}
_FILE_NAME = re.compile(r"\w+\.py")
_HELPERS = {path.name for path in TEST_FILES if not path.name.startswith(("test_", "conftest"))}
# Files that everything is built or collected from.
EVERYTHING = ("pyproject.toml", "setup.py", "constraints.txt", "CMakeLists.txt", "tests/conftest.py")


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed_since(base: str | None) -> list[str]:
    """Return the files that differ from a commit, and those that git does not know yet."""
    base = base or next(iter(git("rev-parse", "--verify", "-q", "@{upstream}")), "HEAD")
    known = git("diff", "--name-only", "--no-renames", base, "--")
    return sorted({*known, *git("ls-files", "--others", "--exclude-standard")})


def graph() -> dict[str, set[str]]:
    """Return the modules that each module imports or starts as a program; tests are named by their paths."""
    paths = [*PYTHON_FILES, *BENCH_FILES, *TEST_FILES]
    imports = imports_of_files(paths)
    for path in paths:
        module = ".".join(module_of(path)).removesuffix(".__init__")
        if any(name == CORE or name.startswith(f"{CORE}.") for name in imported_names(path)):
            imports[module].add(CORE)
        imports[module] |= set(started(path)) if path in TEST_FILES else set()
    for module, pattern in BY_NAME.items():
        imports[module] |= set(fnmatch.filter(imports, pattern))
    return imports


def started(path: Path) -> Iterator[str]:
    """Yield the modules that a test runs as programs: commands of this project, or helpers that it names."""
    text = path.read_text()
    for sign, modules in STARTED.items():
        yield from modules if sign in text else ()
    yield from (name.removesuffix(".py") for name in _HELPERS & set(_FILE_NAME.findall(text)) - {path.name})


def nodes_of(file: str, imports: dict[str, set[str]]) -> set[str]:
    """Return the modules that a changed file is, or is compiled into."""
    path = ROOT / file
    if file.startswith("csrc/") or path.suffix == ".pyi":
        return {CORE}
    if path.suffix != ".py" or file.split("/")[0] not in ("gemini", "parallel", "benchmarks", "tests"):
        return set()
    module = ".".join(module_of(path))
    if path.name == "__init__.py":
        package = module.removesuffix(".__init__")
        return {package, *(name for name in imports if name.rpartition(".")[0] == package)}
    return {module}


def distances(changed: list[str]) -> dict[str, int]:
    """Return for each test file that a change reaches the number of imports between them."""
    imports = graph()
    importers: dict[str, set[str]] = defaultdict(set)
    for module, imported in imports.items():
        for other in imported:
            importers[other].add(module)
    near = dict.fromkeys((node for file in changed for node in nodes_of(file, imports)), 0)
    edge = list(near)
    while edge:
        edge = sorted({one for node in edge for one in importers[node]} - near.keys())
        near |= dict.fromkeys(edge, 1 + max(near.values()))
    tests = {str(p.relative_to(ROOT)): p for p in TEST_FILES if p.name.startswith("test_")}
    found = {name: near[path.stem] for name, path in tests.items() if path.stem in near}
    texts = {name: path.read_text() for name, path in tests.items()}
    for file in map(Path, changed):
        near_by = [name for name in tests if _goes_with(file, name, texts[name])]
        found = {**dict.fromkeys(near_by, 1), **found}
    return found


def _goes_with(file: Path, test: str, text: str) -> bool:
    """Return whether a test reads a file that is no module, or is collected with it."""
    if str(file) in EVERYTHING:
        return True
    if file.suffix == ".py":
        return file.name == "conftest.py" and test.startswith(f"{file.parent}/")
    return file.name in text or f'"{file.parent.name}"' in text


def main() -> None:
    """Print the files, one a line, nearest first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("base", nargs="?", help="a commit")
    found = distances(changed_since(parser.parse_args().base))
    always = [str(p.relative_to(ROOT)) for pattern in ALWAYS for p in sorted(ROOT.glob(pattern))]
    ranked = sorted(found, key=lambda name: (found[name], name))
    print("\n".join(dict.fromkeys([*(name for name in ranked if found[name] == 0), *always, *ranked])))


if __name__ == "__main__":
    main()
