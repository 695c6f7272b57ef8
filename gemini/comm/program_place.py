"""Where in the user's program a thread is."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import NamedTuple

import torch

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
    frame = sys._current_frames().get(thread)
    ours = collective = False
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OWN):
            ours = True
        elif name.startswith(_DISTRIBUTED):
            collective = collective or not ours
        elif not name.startswith(_TORCH) and name != contextlib.__file__:
            text = f"{Path(name).name}:{frame.f_lineno} in {frame.f_code.co_name}"
            return ProgramPlace(text, collective and not ours)
        frame = frame.f_back
    return ProgramPlace("", False)
