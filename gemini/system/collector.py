"""Python's collector of cyclic garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the collector, which is the whole process's, while many objects are made that all stay, or all go
    at once: it would look through them again and again. It is left as it was found: what another thread made
    of it meanwhile is undone."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
