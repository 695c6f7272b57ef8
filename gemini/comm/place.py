"""Where in the user's program a thread is."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch


def _as_dumped(path: str | Path) -> str:
    return str(path).encode("ascii", "backslashreplace").decode()


_OWN = _as_dumped(Path(__file__).parent)
_TORCH = _as_dumped(Path(torch.__file__).parent)
_DISTRIBUTED = _as_dumped(Path(torch.__file__).parent / "distributed")
_CONTEXTLIB = _as_dumped(contextlib.__file__)

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?+) in (.*)')


class ProgramPlace(NamedTuple):
    """``text`` as a message names it, empty where it is nowhere; ``in_collective``: there it waits for a call
    of torch.distributed that is none of this library's."""

    text: str
    in_collective: bool


def find_place(thread: int) -> ProgramPlace:
    """Return the innermost line of a thread that is neither this library's nor torch's."""
    ours = collective = False
    for file, line, name in _frames(thread):
        if file.startswith(_OWN):
            ours = True
        elif file.startswith(_DISTRIBUTED):
            collective = collective or not ours
        elif not file.startswith(_TORCH) and file != _CONTEXTLIB:
            return ProgramPlace(f"{Path(file).name}:{line} in {name}", collective and not ours)
    return ProgramPlace("", False)


def _frames(thread: int) -> Iterator[tuple[str, str, str]]:
    """Yield file, line and function of the frames of a thread, the innermost first.

    From faulthandler's dump, which makes no objects. ``sys._current_frames`` and ``f_back`` make objects of
    another thread's frames, and before CPython 3.12 making one may collect garbage: a finalizer that gives up
    the interpreter's lock lets that thread return from the very frame, and memory that is something else by
    then is taken for one.
    """
    try:
        descriptor = os.memfd_create("gemini-stacks")
    except OSError:  # none is left, or a container forbids it: signs go on without a place
        return
    with os.fdopen(descriptor, "w+b") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        lines = iter(file.read().decode("ascii").splitlines())
    for line in lines:
        found = _THREAD.match(line)
        if found and int(found[1], 16) == thread:
            break
    for line in lines:
        frame = _FRAME.fullmatch(line)
        if frame is None:
            return
        yield frame[1], frame[2], frame[3]
