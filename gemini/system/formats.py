"""Formats of our documents: which version one is of, and what to say of a version that is not read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gemini.errors import printable

KEY = "format"  # what says it in a document
_MOST_DIGITS = 6


@dataclass(frozen=True)
class Format:
    """A format of documents, by its ``name`` and ``version``, which each says: ``gemini-trace-2``.

    ``older``: of versions that are read no longer, why, and what to do.
    """

    name: str
    version: int
    older: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}-{self.version}"

    def version_of(self, document: Any) -> int | None:
        """Return which version ``document`` says it is of, None: it is of no version of this format."""
        said = document.get(KEY) if isinstance(document, dict) else None
        if not isinstance(said, str):
            return None
        match = re.fullmatch(rf"{re.escape(self.name)}-(\d{{1,{_MOST_DIGITS}}})", said, re.ASCII)
        return int(match[1]) if match else None

    def is_read(self, document: Any) -> bool:
        """Say whether ``document`` is of the version that is read."""
        return self.version_of(document) == self.version

    def refusal(self, document: Any, what: object) -> str:
        """Return in one line what ``document``, which is not read, is instead; ``what`` names it."""
        version, where = self.version_of(document), printable(str(what))
        if version is None:
            return f"{where} is not a {self} file"
        said = f"{where} is a {self.name}-{version} file"
        if version > self.version:
            return (
                f"{said}, written by a newer version of gemini-runtime; this one reads {self}: install the "
                "newer one (pip install -U gemini-runtime)"
            )
        why = self.older.get(version)
        return f"{said} of an earlier release, which this one does not read{f': {why}' if why else ''}"
