#!/usr/bin/env python3
"""Single-line changes that the tests must catch: choose them, find the tests that reach them, try them.

    scripts/mutate.py choose > mutants.json      the mutants of this checkout, which a seed chooses
    scripts/mutate.py probe mutants.json TREE    put a probe before each place, in a copy of the checkout
    scripts/mutate.py try mutants.json TREE REACHED TIMES [NUMBER...]
                                                 run the tests that reach each mutant, in another copy
    scripts/mutate.py near mutants.json TREE [NUMBER...]
                                                 run the files of tests nearest to each mutant, in a copy

With the probes built in and GEMINI_REACHED naming a folder, `make test` leaves a file per process there: the
places and the case that reached each. A test that does not execute a line cannot tell that it changed, so the
tests that reach a place answer for all. This takes one run of all tests. `near` takes none: it runs the files
that the fewest imports lead to. Among them those come first that name the module in their text. Other tests
may notice what they do not. TREE of `try` and `near` has the extension built, and gemini/parallel in it is a
link to parallel/. TIMES is what `pytest --cpu-times` wrote.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import affected

ROOT = Path(__file__).resolve().parent.parent
SEED = 42
COUNTS = {"gemini": 26, "parallel": 14, "csrc": 20}

_COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
             ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}  # fmt: skip
_WRITTEN = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
            ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}  # fmt: skip
_CPP_OPERATORS = {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ",
                  " + ": " - ", " - ": " + ", " && ": " || ", " || ": " && "}  # fmt: skip
_CPP_CALL = re.compile(r"^\s+(?!return\b|throw\b|delete\b|if\b|for\b|while\b|switch\b|else\b|static_assert\b)"
                       r"[a-z_][\w.>:\-]*\(.*\);$")  # fmt: skip
_CPP_CHECK = re.compile(r"^(\s+if )(\(.*\))( (?:throw|return)\b.*;)$")


@dataclass(frozen=True)
class Mutant:
    """A change of one line: the file, the line, its new text, and the line before which a probe can stand."""

    path: str
    line: int
    kind: str
    before: str
    after: str
    probe_line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.kind}: {self.before.strip()}  ->  {self.after.strip()}"


# ------------------------------------------------------------------------------------------------- Python
class _Changes(ast.NodeVisitor):
    """Collects the possible changes of one file, only within functions: all tests reach the lines that an
    import executes.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path, self.lines = path, text.splitlines()
        self.statements: list[ast.stmt] = []
        self.functions = 0
        self.found: list[Mutant] = []

    def visit(self, node: ast.AST) -> None:
        is_statement = isinstance(node, ast.stmt)
        if is_statement:
            self.statements.append(node)
        is_function = isinstance(node, ast.FunctionDef)
        self.functions += is_function
        if self.functions and not isinstance(node, ast.arguments):
            self._look_at(node)
        if not (isinstance(node, ast.Raise) or (isinstance(node, ast.AnnAssign) and not self.functions)):
            self.generic_visit(node)
        self.functions -= is_function
        if is_statement:
            self.statements.pop()

    def _look_at(self, node: ast.AST) -> None:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            kind = type(node.ops[0])
            self._between(node.left, node.comparators[0], _WRITTEN[kind], _COMPARED[kind], "comparison")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            sides = (node.left, node.right)
            texts = (ast.JoinedStr, ast.List, ast.Tuple)
            strings = [side for side in sides if isinstance(side, texts) or _is_text(side)]
            if not strings:
                old, new = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
                self._between(node.left, node.right, old, new, "sign")
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            self._between(node.values[0], node.values[1], old, new, "condition")
        elif (
            isinstance(node, ast.If)
            and len(node.body) == 1
            and isinstance(node.body[0], (ast.Raise, ast.Return))
        ):
            if node.test.lineno == node.test.end_lineno:
                row = self.lines[node.test.lineno - 1]
                start, end = node.test.col_offset, node.test.end_col_offset
                self._add(
                    node.test.lineno, f"{row[:start]}False and ({row[start:end]}){row[end:]}", "skipped check"
                )
        elif (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.lineno == node.end_lineno
        ):
            row = self.lines[node.lineno - 1]
            if "super().__init__" not in row and "logger." not in row:
                self._add(node.lineno, row[: node.col_offset] + "pass", "missing call")

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str, kind: str) -> None:
        if left.end_lineno != right.lineno:
            return
        row = self.lines[right.lineno - 1]
        if not row.isascii():
            return
        gap = row[left.end_col_offset : right.col_offset]
        if gap.strip() == old:
            changed = row[: left.end_col_offset] + gap.replace(old, new, 1) + row[right.col_offset :]
            self._add(right.lineno, changed, kind)

    def _add(self, line: int, after: str, kind: str) -> None:
        for statement in reversed(self.statements):
            first = min([d.lineno for d in getattr(statement, "decorator_list", [])] + [statement.lineno])
            if not self.lines[first - 1].lstrip().startswith("elif"):
                self.found.append(Mutant(self.path, line, kind, self.lines[line - 1], after, first))
                return


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _python(file: Path) -> list[Mutant]:
    text = file.read_text()
    changes = _Changes(str(file.relative_to(ROOT)), text)
    changes.visit(ast.parse(text))
    return changes.found


# ---------------------------------------------------------------------------------------------------- C++
def _statement(lines: list[str], index: int) -> int | None:
    """Return the line on which the statement around a line begins, or None where no other fits before it."""
    while index > 0:
        row, before = lines[index], lines[index - 1].split("//")[0].rstrip()
        if not row.startswith("  ") or row.lstrip().startswith(
            ("}", ":", "case ", "default:", "else", "static ")
        ):
            return None
        if before.endswith((";", "{", "}")) and not before.lstrip().startswith(
            ("if ", "for ", "else", "} else")
        ):
            return index
        if before.endswith("{"):
            return index
        index -= 1
    return None


def _cpp(file: Path) -> list[Mutant]:
    lines = file.read_text().splitlines()
    found = []
    for index, row in enumerate(lines):
        code = row.split("//")[0].rstrip()
        start = _statement(lines, index)
        if not code or code.lstrip().startswith("#") or '"' in code or start is None:
            continue
        changes = [
            (code.replace(old, new, 1), "operator")
            for old, new in _CPP_OPERATORS.items()
            if code.count(old) == 1
        ]
        if start == index and _CPP_CALL.match(code):
            changes.append((re.match(r"\s*", code)[0] + ";", "missing call"))
        check = _CPP_CHECK.match(code)
        if check:
            changes.append((f"{check[1]}(false && {check[2]}){check[3]}", "skipped check"))
        path = str(file.relative_to(ROOT))
        found += [Mutant(path, index + 1, kind, row, after, start + 1) for after, kind in changes]
    return found


# ------------------------------------------------------------------------------------------------- choosing
def _files(folder: str) -> Iterator[Path]:
    if folder == "csrc":
        # Of the kernel's instruction sets one is chosen at run time, and its flags are its own.
        yield from (f for f in sorted((ROOT / folder).rglob("*.cpp")) if not f.name.startswith("isa_"))
    else:
        yield from sorted((ROOT / folder).rglob("*.py"))


def chosen() -> list[Mutant]:
    """Return the mutants of this checkout, the same ones each time: at most one of a file."""
    random_numbers = random.Random(SEED)
    mutants: list[Mutant] = []
    for folder, count in COUNTS.items():
        candidates = [m for file in _files(folder) for m in (_cpp if folder == "csrc" else _python)(file)]
        random_numbers.shuffle(candidates)
        files: set[str] = set()
        for mutant in candidates:
            if len(files) < count and mutant.path not in files:
                files.add(mutant.path)
                mutants.append(mutant)
    return mutants


# -------------------------------------------------------------------------------------------------- probes
_PYTHON_PROBE = """
import os
_last = {}
def at(site):
    case = os.environ.get("PYTEST_CURRENT_TEST", "?")
    if _last.get(site) != case and "GEMINI_REACHED" in os.environ:
        _last[site] = case
        with open(os.path.join(os.environ["GEMINI_REACHED"], str(os.getpid())), "a") as file:
            file.write(f"{site} {case}\\n")
"""
_CPP_PROBE = """#pragma once
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
namespace reach {
inline void at(int site) {
  static std::mutex mutex;
  static std::string last[%d];
  const char* test = std::getenv("PYTEST_CURRENT_TEST");
  const char* folder = std::getenv("GEMINI_REACHED");
  if (test == nullptr || folder == nullptr) return;
  std::scoped_lock lock(mutex);
  if (last[site] == test) return;
  last[site] = test;
  const std::string path = std::string(folder) + "/cpp-" + std::to_string(getpid());
  if (FILE* file = std::fopen(path.c_str(), "a")) {
    std::fprintf(file, "%%d %%s\\n", site, test);
    std::fclose(file);
  }
}
}  // namespace reach
"""


def write_probes(tree: Path, mutants: list[Mutant]) -> None:
    """Put a probe before each place, in a copy of the checkout."""
    (tree / "csrc/common/reach.h").write_text(_CPP_PROBE % len(mutants))
    (tree / "gemini/reach_probe.py").write_text(_PYTHON_PROBE)
    for site, mutant in enumerate(mutants):
        file = tree / mutant.path
        lines = file.read_text().splitlines()
        row = lines[mutant.probe_line - 1]
        indent = row[: len(row) - len(row.lstrip())]
        if file.suffix == ".py":
            probe = f"__import__('gemini.reach_probe').reach_probe.at({site})"
        else:
            probe = f"::reach::at({site});"
            include = next(i for i, line in enumerate(lines) if line.startswith("#include"))
            lines[include] = '#include "common/reach.h"\n' + lines[include]
        lines.insert(mutant.probe_line - 1, indent + probe)
        file.write_text("\n".join(lines) + "\n")


# --------------------------------------------------------------------------------------------------- trying
def reaching(folder: Path) -> dict[int, set[str]]:
    """Return the test functions that reached each place, without parameters."""
    found: dict[int, set[str]] = defaultdict(set)
    for file in folder.iterdir():
        for line in file.read_text(errors="replace").splitlines():
            match = re.match(r"(\d+) (tests/[^\[ @]+)", line)
            if match:
                found[int(match[1])].add(match[2])
    return found


def costs(file: Path) -> dict[str, float]:
    """Return the processor time of each test function, all its cases together."""
    found: dict[str, float] = defaultdict(float)
    for name, row in json.loads(file.read_text()).items():
        found[name.partition("[")[0]] += row["seconds"]
    return found


class Trial:
    """A copy of the checkout in which one mutant after the other is tried."""

    def __init__(self, tree: Path, seconds: dict[str, float]) -> None:
        self._tree, self._seconds = tree, seconds

    def killer(self, mutant: Mutant, tests: Sequence[str]) -> str:
        """Return the check that notices the mutant; "" if no test does. The cheapest tests run first."""
        file = self._tree / mutant.path
        text = file.read_text()
        lines = text.splitlines(keepends=True)
        assert lines[mutant.line - 1].rstrip("\n") == mutant.before, f"{mutant.path} is not what it was"
        lines[mutant.line - 1] = mutant.after + "\n"
        file.write_text("".join(lines))
        try:
            if file.suffix == ".cpp":
                return self._cpp_killer() or self._python_killer(tests)
            return self._python_killer(tests)
        finally:
            file.write_text(text)

    def _cpp_killer(self) -> str:
        tools, folder = self._tree / ".venv/bin", next(self._tree.glob("build/cmake-*"))
        commands = [
            [str(tools / "cmake"), "--build", str(folder), "--target", "_C", "cpp_tests"],
            [str(tools / "ctest"), "--test-dir", str(folder), "-j", "2", "--timeout", "120"],
        ]
        for command in commands:
            done = subprocess.run(command, cwd=self._tree, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                failed = re.search(r"error: .*|\d+ - \w+ \(.*", done.stdout + done.stderr)
                return f"{Path(command[0]).name}: {failed[0] if failed else done.returncode}"
        for module in folder.glob("_C.*.so"):
            shutil.copy(module, self._tree / "gemini")
        return ""

    def _python_killer(self, tests: Sequence[str]) -> str:
        ranked = sorted(tests, key=lambda test: self._seconds.get(test, 1.0))
        batch: list[str] = []
        spent = 0.0
        for test in [*ranked, ""]:
            spent += self._seconds.get(test, 1.0)
            if batch and (not test or spent > _BATCH_SECONDS):
                found = self._pytest(batch, spent)
                if found:
                    return found
                batch, spent = [], 0.0
            batch.append(test)
        return ""

    def _pytest(self, tests: list[str], seconds: float) -> str:
        paths = {name.partition("::")[0] for name in tests}
        kept = [name for name in tests if (self._tree / name.partition("::")[0]).exists()]
        limit = 120 + 6 * seconds
        environment = {**os.environ, "PYTHONPATH": str(self._tree), "OMP_NUM_THREADS": "1"}
        command = [
            str(self._tree / ".venv/bin/python"),
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            *kept,
        ]
        try:
            done = subprocess.run(
                command,
                cwd=self._tree,
                env=environment,
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return f"hangs in one of {sorted(paths)}"
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        if done.returncode in (0, 5):
            return ""
        return failed[1] if failed else f"exit code {done.returncode}: {(done.stdout + done.stderr)[-300:]}"


_BATCH_SECONDS = 60.0
_NEAR_FILES = 8


def nearest(mutant: Mutant) -> list[str]:
    """Return the files of tests that the imports lead to first."""
    found, name = affected.distances([mutant.path]), Path(mutant.path).stem
    named = {test for test in found if re.search(rf"\b{name}\b", (ROOT / test).read_text())}
    return sorted(found, key=lambda test: (found[test], test not in named, test))[:_NEAR_FILES]


def main() -> None:
    """Run the command that the first argument names."""
    what, *arguments = sys.argv[1:] or ["help"]
    if what == "choose":
        print(json.dumps([asdict(mutant) for mutant in chosen()], indent=0))
        return
    if what not in ("probe", "try", "near"):
        sys.exit(__doc__)
    mutants = [Mutant(**row) for row in json.loads(Path(arguments[0]).read_text())]
    tree = Path(arguments[1]).resolve()
    if what == "probe":
        write_probes(tree, mutants)
        return
    reached = reaching(Path(arguments[2])) if what == "try" else {}
    trial = Trial(tree, costs(Path(arguments[3])) if what == "try" else {})
    numbers = arguments[4 if what == "try" else 2 :]
    for number in map(int, numbers or range(len(mutants))):
        mutant = mutants[number]
        tests = sorted(reached.get(number, ())) if what == "try" else nearest(mutant)
        found = trial.killer(mutant, tests)
        print(f"{number}\t{len(tests)}\t{found or 'SURVIVES'}\t{mutant}", flush=True)


if __name__ == "__main__":
    main()
