"""Write the table of examples/documents into docs/documents.md, from what each file says at its top.

    python scripts/examples_table.py

A file begins with four entries, a comment line each, or more that are indented: ``# Example:``,
``# Repair:``, ``# Run:`` and ``# Shows:``.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "documents"
PAGE = ROOT / "docs" / "documents.md"
ENTRIES = ("Example", "Repair", "Run", "Shows")
BEGIN, END = "<!-- made by scripts/examples_table.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Example:
    """A program of the documents: its number, the repair, the command and its output."""

    path: Path
    name: str
    repair: str
    run: str
    shows: str

    @property
    def processes(self) -> int:
        """The number of processes, including those that it starts itself."""
        found = re.search(r"--nproc-per-node (\d+)|# starts (\d+)", self.run)
        return int(found[1] or found[2]) if found else 1

    @property
    def arguments(self) -> list[str]:
        """The arguments of the command."""
        return shlex.split(self.run.partition(self.path.name)[2], comments=True)


def examples() -> list[Example]:
    """Return all, by the numbers of the documents' list. Raises ValueError where a header is short."""
    found = [_read(path) for path in EXAMPLES.glob("*.py") if not path.name.endswith("stand_ins.py")]
    return sorted(
        found, key=lambda example: (int(re.findall(r"EX(\d+)", example.name)[0]), example.path.name)
    )


def table() -> str:
    """Return the table as Markdown."""
    rows = ["| example | program | processes | repair | what it shows |", "|---|---|---|---|---|"]
    for one in examples():
        link = f"[{one.path.name}](../examples/documents/{one.path.name})"
        number, _, title = one.name.partition(", ")
        rows.append(f"| {number}: {title} | {link} | {one.processes} | {one.repair} | {one.shows} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """Return the text of the page with the table as it is now."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def _read(path: Path) -> Example:
    entries: dict[str, str] = {}
    last = ""
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        key, colon, text = line[1:].strip().partition(": ")
        if colon and key in ENTRIES and not line.startswith("#  "):
            last = key
            entries[last] = text
        elif last:
            entries[last] += f" {line[1:].strip()}"
    if list(entries) != list(ENTRIES):
        raise ValueError(f"{path.name} must begin with {', '.join(ENTRIES)}; it has {', '.join(entries)}")
    return Example(path, *entries.values())


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
