"""How long tests look for better plans where which one is found changes no law."""

from __future__ import annotations

# Of 25 million units. Every kind of plan is tried, and some are changed a little; a whole search takes longer
# than most trainings of the tests. Tests of the search itself (tests/unit) run all of it.
SHORT_SEARCH = 3_000_000
