"""The import paths of the documents' library: in a program written for it, change the root to
``gemini.compat`` (docs/compat.md).

Every name is one of ours or an adapter of :mod:`gemini.compat.adapters`; :mod:`gemini.compat.names` is the
list. Modules are made from the list when they are imported.
"""

from __future__ import annotations

from typing import Any

from gemini.compat.modules import add_finder, look_up, names_in

add_finder()


def __getattr__(name: str) -> Any:
    """Return a name of the root, or a module below it."""
    return look_up("", name)


def __dir__() -> list[str]:
    return names_in("")
