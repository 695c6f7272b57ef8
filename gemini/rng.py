"""The state of every random number generator that training may draw from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from gemini.device import gpu_generator_states, set_gpu_generator_states
from gemini.errors import CheckpointError


def capture() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's global generators as JSON data."""
    version, internal, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    state = legacy["state"]
    return {
        "python": [version, list(internal), gauss],
        "numpy": {**legacy, "state": {"key": [int(k) for k in state["key"]], "pos": int(state["pos"])}},
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.hex() for state in gpu_generator_states()],
    }


def restore(document: dict[str, Any]) -> None:
    """Set the generators to what :func:`capture` returned. Raises CheckpointError for damaged data."""
    try:
        version, internal, gauss = document["python"]
        random.setstate((version, tuple(internal), gauss))
        legacy = document["numpy"]
        key = np.array(legacy["state"]["key"], dtype=np.uint32)
        np.random.set_state({**legacy, "state": {"key": key, "pos": legacy["state"]["pos"]}})
        raw = bytearray(bytes.fromhex(document["torch"]))
        torch.set_rng_state(torch.frombuffer(raw, dtype=torch.uint8))
        set_gpu_generator_states([bytes.fromhex(state) for state in document.get("cuda", [])])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the random number generators' states are damaged: {error}") from error
