"""The import paths of ColossalAI's documentation: in a program written for it, change the import root to
``gemini.compat`` (docs/compat.md).

Every name is one of our classes or functions, or an adapter from :mod:`gemini.compat.adapters`;
:mod:`gemini.compat.names` lists them. Modules are created from that list when they are imported.
"""

from __future__ import annotations

from typing import Any

from gemini.compat.modules import add_finder, look_up, names_in

add_finder()


def __getattr__(name: str) -> Any:
    """Return a name of the root, or a submodule."""
    return look_up("", name)


def __dir__() -> list[str]:
    return names_in("")
