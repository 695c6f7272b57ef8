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

_FORMAT = "gemini-scheduler-1"


def save_scheduler(scheduler: Scheduler, checkpoint: str | os.PathLike[str], ranks: Ranks) -> None:
    """Write a scheduler; see :meth:`Booster.save_lr_scheduler`."""
    state = plain_data.encode(scheduler.state_dict(), "the scheduler's state")
    save_text(checkpoint, json.dumps({"format": _FORMAT, "state": state}, indent=1) + "\n", ranks)


def load_scheduler(scheduler: Scheduler, checkpoint: str | os.PathLike[str], ranks: Ranks) -> None:
    """Read a scheduler; see :meth:`Booster.load_lr_scheduler`."""
    scheduler.load_state_dict(ranks.together(lambda: _state_in(checkpoint)))


def _state_in(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        document = json.loads(Path(checkpoint).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {checkpoint}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise CheckpointError(f"{checkpoint} is not a {_FORMAT} file")
    state: dict[str, Any] = plain_data.decode(document["state"])
    return state
