"""Where in the user's program a thread is."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import torch

from gemini import _C

_OWN = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_DISTRIBUTED = str(Path(torch.__file__).parent / "distributed")


class ProgramPlace(NamedTuple):
    """``text`` as a message names it, empty where it is nowhere; ``in_collective``: there it waits for a call
    of torch.distributed that is none of this library's."""

    text: str
    in_collective: bool


def find_place(thread: int) -> ProgramPlace:
    """Return the innermost line of a thread that is neither this library's nor torch's."""
    ours = collective = False
    for file, line, name in _C.thread_frames(thread):
        if file.startswith(_OWN):
            ours = True
        elif file.startswith(_DISTRIBUTED):
            collective = collective or not ours
        elif not file.startswith(_TORCH) and file != contextlib.__file__:
            return ProgramPlace(f"{Path(file).name}:{line} in {name}", collective and not ours)
    return ProgramPlace("", False)
