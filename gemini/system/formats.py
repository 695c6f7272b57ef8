"""Formats of our documents; what is not read is an older release's, a newer one's or a stranger's."""

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

    ``reads``: older versions that are read as well. ``older``: of those that are not, why, and what to do.
    """

    name: str
    version: int
    reads: frozenset[int] = frozenset()
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
        """Say whether ``document`` is of a version that is read."""
        version = self.version_of(document)
        return version == self.version or version in self.reads

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
