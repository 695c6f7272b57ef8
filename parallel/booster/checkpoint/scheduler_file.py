"""A learning-rate scheduler's state in a JSON file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gemini.checkpoint import Scheduler, plain_data
from gemini.errors import CheckpointError
from gemini.parallel.booster.checkpoint.writing import save_text
from gemini.parallel.booster.ranks import Ranks
from gemini.system.files import parse_json, read_regular
from gemini.system.formats import KEY, Format

_FORMAT = Format("gemini-scheduler", 1)
_MAX_BYTES = 2**26  # the text of a tensor of 16 MiB has 32


def save_scheduler(scheduler: Scheduler, checkpoint: str | os.PathLike[str], ranks: Ranks) -> None:
    """Write a scheduler; see :meth:`Booster.save_lr_scheduler`."""
    state = plain_data.encode(scheduler.state_dict(), "the scheduler's state")
    save_text(checkpoint, json.dumps({KEY: str(_FORMAT), "state": state}, indent=1) + "\n", ranks)


def load_scheduler(scheduler: Scheduler, checkpoint: str | os.PathLike[str], ranks: Ranks) -> None:
    """Read a scheduler; see :meth:`Booster.load_lr_scheduler`."""
    scheduler.load_state_dict(ranks.together(lambda: _state_in(checkpoint)))


def _state_in(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    path = Path(checkpoint)
    try:
        document = parse_json(read_regular(path, _MAX_BYTES))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not _FORMAT.is_read(document):
        raise CheckpointError(_FORMAT.refusal(document, path))
    state = plain_data.decode(document.get("state"))
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: its state is no dict")
    return state
