"""Commands that other distributions add, by entry points of the group ``gemini.commands``.

An entry point ``NAME = "module:function"`` adds ``gemini NAME``: the function gets the subparsers of
argparse, adds a parser of that name, and gives it a default ``run(options) -> exit code``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import metadata
from typing import Any

from gemini.errors import ConfigError

GROUP = "gemini.commands"
AddParser = Callable[[Any], object]

# Commands of this project that are installed by themselves, and how.
ELSEWHERE = {"bench": "pip install ./benchmarks, in a checkout of gemini-runtime"}


def added_commands(called: str, known: Collection[str]) -> dict[str, AddParser]:
    """Return what installed distributions add, by name, besides the commands that are ``known`` already.

    One that cannot be loaded is left out, so that it stops no other command.

    Raises:
        ConfigError: it is the one that was ``called``, or that one is not installed.
    """
    found: dict[str, AddParser] = {}
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        if entry.name in known:
            continue
        try:
            found[entry.name] = entry.load()
        except (ImportError, AttributeError) as error:
            if entry.name == called:
                origin = entry.dist.name if entry.dist is not None else entry.value
                raise ConfigError(
                    f"gemini {called}, which {origin} adds, cannot be loaded ({error}); install {origin} anew"
                ) from error
    if called in ELSEWHERE and called not in {*known, *found}:
        raise ConfigError(f"gemini {called} is not installed: {ELSEWHERE[called]}")
    return found
