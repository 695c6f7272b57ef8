"""How many examples hypothesis tries, under the profile that was chosen."""

from __future__ import annotations

from hypothesis import settings

_FULL = 100  # of hypothesis' own default


def num_examples(full: int) -> int:
    """Return ``full``, or that part of it which the profile runs: a tenth under ``dev`` (``conftest.py``)."""
    return max(1, full * settings.default.max_examples // _FULL)
