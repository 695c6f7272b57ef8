"""How long tests look for better plans where which one is found changes no law."""

from __future__ import annotations

# Of 25 million units. All kinds of plans are nearly always tried, and the best is changed a little. A whole
# search takes longer than most trainings of the tests; those of the search itself (tests/unit) run all of it.
SHORT_SEARCH = 1_000_000
