"""docs/zoo.md: the table of models with what a run of the tests found out about each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from catalogue import Row, rows
from zoo_runs import Facts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"
WRITE = "--write-zoo"

_HEAD = """# Models that are tried

<!-- Written by `scripts/check.sh zoo`; the models are in tests/zoo/models.toml. -->

{count} architectures, small and with random weights, in the versions of `constraints.txt`. `tests/zoo` checks
for each:

- Three training steps with the table's budget of DEVICE and the rest on DISK give the losses and weights
  of the unmanaged model with the same optimizer, bit for bit. An evaluation and `generate` after each step
  give the same results, too. DEVICE stays within its budget.
- Three steps with everything on DEVICE give the same losses and weights, too.
- Over two ranks, each with other batches, three steps give the bits of plain torch that adds up the
  gradients of the ranks in their order: with everything on DEVICE, and within the table's budget
  or the least that a rank needs.
- Activations are recomputed in backward, if the library supports it for the model.
- A checkpoint of `gemini.checkpoint` loads into a fresh model with another budget; the next step is the
  same.
- Under `mixed_precision="bf16"` a step with the budget has the bits of one without.

"yes" means that the test passes, "-" that the model does not have the feature. Other models are likely to
work. [limits](limits.md) lists what does not work or gives other bits.
"""
_COLUMNS = """
## {group}

| model | built of | parameters | DEVICE | recomputes | generates | bf16 |
|---|---|---|---|---|---|---|
"""


def line(row: Row, facts: Facts) -> str:
    """Return the line of one model."""
    built = f"`{row.build}`"
    if row.library == "peft":
        built += f" on `{row.options['base']}`"
    if row.library == "torch":
        built = "`nn`"
    refusal = f"no: {row.note}"
    recomputed = ("yes" if facts.recomputes else "-") if row.recomputes else refusal
    cells = (
        row.name,
        built,
        f"{facts.parameters:,}",
        f"{facts.device_bytes // 1024} of {facts.data_bytes // 1024} KiB",
        recomputed,
        "yes" if row.prompt else "-",
        "yes" if row.bf16 else refusal,
    )
    return f"| {' | '.join(cells)} |"


def page(lines: Mapping[str, str]) -> str:
    """Return the page with the line of each model, by its name."""
    table = rows()
    parts = [_HEAD.format(count=len(table))]
    for group, members in groupby(table, key=lambda row: row.group):
        parts.append(_COLUMNS.format(group=group) + "".join(lines[row.name] + "\n" for row in members))
    return "".join(parts)


def lines_of_page() -> dict[str, str]:
    """Return the lines of models that the page has, by name."""
    lines = [text for text in PAGE.read_text().splitlines() if text.startswith("| ")]
    return {text.split(" | ")[0].removeprefix("| "): text for text in lines}


class PageWriter:
    """Writes the page at the end of a run in which nothing failed; a plugin of pytest. Models that the run
    left out keep their lines."""

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the line that a test has left, in this process or in another one."""
        properties: Iterable[tuple[str, Any]] = report.user_properties if report.passed else ()
        self._lines |= dict(properties)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the page."""
        if exitstatus == 0 and self._lines:
            PAGE.write_text(page(lines_of_page() | self._lines))
