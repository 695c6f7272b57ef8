"""How often torch's compiler has worked in this process: a pass in which it did takes memory and time that no
other takes."""

from __future__ import annotations

import sys


def num_compilations() -> int:
    """Return how many frames the compiler has taken up, none where nobody uses it."""
    used = sys.modules.get("torch._dynamo.utils")
    return 0 if used is None else int(sum(used.counters["frames"].values()))
