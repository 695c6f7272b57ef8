"""The table of models, ``models.toml``, as rows."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).with_name("models.toml")


@dataclass(frozen=True)
class Row:
    """One architecture: how it is built small, and what it is given.

    ``build`` is a name in ``library``, ``options`` are those of its configuration or constructor;
    ``arguments`` are the model's own in training and evaluation, of which ``generate`` takes those that
    ``prompt`` names (none: it does not generate). ``budget``: DEVICE's share of what training keeps.
    ``recomputes``: activations are computed again where the model can; ``bf16``: the model itself computes in
    bf16; ``note`` says why not.
    """

    name: str
    group: str
    library: str
    build: str
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    prompt: tuple[str, ...] = ()
    budget: float = 0.25
    recomputes: bool = True
    bf16: bool = True
    note: str = ""


def rows() -> list[Row]:
    """Return the whole table, group by group."""
    table = _table()
    return [
        _row(name, {**group, **model}, group, table)
        for group in table["group"]
        for name, model in group["models"].items()
    ]


def rows_of_run(day: int | None = None) -> list[Row]:
    """Return the models that between them show every mechanism that any of them uses; for a day, a third of
    the others, too. Three days in a row have all of them."""
    names = _table()["every_run"]
    others = [row.name for row in rows() if row.name not in names]
    assert len(others) + len(names) == len(rows()), "every_run names a model that is not in the table"
    more = [] if day is None else others[day % 3 :: 3]
    return [row for row in rows() if row.name in (*names, *more)]


def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text())


def _row(name: str, model: dict[str, Any], group: dict[str, Any], table: dict[str, Any]) -> Row:
    """Return one row; ``model`` says what it has otherwise than its ``group``."""
    options = {**group.get("options", {}), **model.get("options", {})}
    if "sizes" in model:
        options = {"sizes": model["sizes"], **options}
    own = {
        key: model[key]
        for key in ("library", "build", "budget", "recomputes", "bf16", "note")
        if key in model
    }
    return Row(
        name=name,
        group=group["title"],
        options=_sized(options, table["sizes"]),
        arguments={**table["inputs"][model["inputs"]], **model.get("arguments", {})},
        prompt=tuple(model.get("prompt", ())),
        **own,
    )


def _sized(options: dict[str, Any], sizes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return ``options`` after the ``sizes`` that they name; in dicts within them, too."""
    own = {
        name: _sized(value, sizes) if isinstance(value, dict) else value
        for name, value in options.items()
        if name != "sizes"
    }
    return {**sizes[options["sizes"]], **own} if "sizes" in options else own
