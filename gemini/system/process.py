"""This process as the system runs it: memory limits of control groups, kernel caches of libraries, ending
with the parent, Python's garbage collector, and named ranges for torch.profiler.
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


_PR_SET_PDEATHSIG = 1  # from Linux's prctl.h
MOUNTS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


class _Files(NamedTuple):
    limit: str
    usage: str
    reclaimable: str  # the key in memory.stat for file pages that the kernel reclaims first


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


# The capacities of oneDNN's cache of kernels for 16-bit products, and of torch's; both are 1,024 by default.
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_KEPT_KERNELS = 64


def keep_few_kernels() -> None:
    """Limit the caches of compiled kernels unless the environment sets them. Call it before torch computes.

    oneDNN compiles one kernel of about 1 MB per shape. A dense model has few shapes; in a mixture of experts
    each expert gets another number of tokens in every pass. A kernel gives the same bits whenever it is
    compiled.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(_KEPT_KERNELS))


def free_bytes() -> int | None:
    """Return the bytes that the tightest of the process's control groups and their parents leaves; None
    without a limit.
    """
    left = [_left(group, files) for group, files in _groups()]
    return min((nbytes for nbytes in left if nbytes is not None), default=None)


def _groups() -> Iterator[tuple[Path, _Files]]:
    """Yield the control groups that limit this process's memory, each before its parent, as far as they are
    visible from within a container.
    """
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
    """Make the kernel kill this process when ``parent``, the process that started it, ends in any way; kill
    it now if that has already happened. Call it in the first lines of a child.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        signal.raise_signal(signal.SIGKILL)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the garbage collector of the process while many objects are made that all stay or are all freed
    at once: it would scan them again and again. The collector's state is restored afterwards, which undoes
    changes by other threads.
    """
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
    """Show calls of a function as the range ``gemini::name`` in torch.profiler. Otherwise a call costs one
    extra check.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not _is_profiled():
                return function(*args, **kwargs)
            with torch.profiler.record_function(f"gemini::{name}"):
                return function(*args, **kwargs)

        return call

    return decorate
