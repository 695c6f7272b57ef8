"""This process as the system runs it: the memory that control groups leave it, the kernels that its libraries
keep, the process that it ends with, Python's garbage collector, and the ranges that torch.profiler shows.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


_PR_SET_PDEATHSIG = 1  # of Linux
MOUNTS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


class _Files(NamedTuple):
    limit: str
    usage: str
    reclaimable: str  # the line of memory.stat: file pages that the kernel takes back first


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


# The kernels for products in 16 bits that oneDNN keeps, and those that torch keeps of it; by default 1,024.
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_KEPT_KERNELS = 64


def keep_few_kernels() -> None:
    """Have few compiled kernels kept, unless the environment says how many: call it before torch computes.

    oneDNN compiles one for each shape, of about 1 MB. A dense model has few shapes; in a mixture each expert
    gets another number of tokens in every pass. A kernel is the same whenever it is compiled.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(_KEPT_KERNELS))


def free_bytes() -> int | None:
    """Return what the tightest of the process's control groups and those above them leaves; None without a
    limit."""
    left = [_left(group, files) for group, files in _groups()]
    return min((nbytes for nbytes in left if nbytes is not None), default=None)


def _groups() -> Iterator[tuple[Path, _Files]]:
    """Yield the groups that count this process's memory, each before the one above it; those that can be seen
    from within a container."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _number, controllers, path = line.split(":", 2)
        mounts: tuple[Path, ...] = ()
        files = _V2
        if not controllers:
            mounts = (MOUNTS, MOUNTS / "unified")
        elif "memory" in controllers.split(","):
            mounts, files = (MOUNTS / "memory",), _V1
        for mount in mounts:
            group = mount / path.lstrip("/")
            for place in (group, *group.parents):
                if place.is_relative_to(mount):
                    yield place, files


def _left(group: Path, files: _Files) -> int | None:
    try:
        limit, usage = (group / files.limit).read_text().strip(), (group / files.usage).read_text().strip()
        stat = (group / "memory.stat").read_text()
    except OSError:
        return None
    if not (limit.isdigit() and usage.isdigit()):
        return None  # "max"
    words = dict(line.partition(" ")[::2] for line in stat.splitlines())
    return max(0, int(limit) - int(usage) + int(words.get(files.reclaimable, 0)))


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process once ``parent``, the process that has started it, has ended in
    whatever way; at once if it has already. Called in the first lines of a child."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        signal.raise_signal(signal.SIGKILL)


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


_is_profiled = torch._C._autograd._profiler_enabled


def shown_as(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have calls of a function appear as the range ``gemini::name`` while torch.profiler runs; otherwise they
    cost one look at whether it does."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not _is_profiled():
                return function(*args, **kwargs)
            with torch.profiler.record_function(f"gemini::{name}"):
                return function(*args, **kwargs)

        return call

    return decorate
