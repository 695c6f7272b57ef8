"""Saves and restores the state of every random generator that training may use."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch

from gemini.errors import CheckpointError, in_words
from gemini.system.device import gpu_generator_states, set_gpu_generator_states

_NUMPY_WORDS = 624  # the state size of a Mersenne Twister
_WITHOUT_GENERATOR = ("cpu", "meta")  # device types without a generator of their own


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


class States(NamedTuple):
    """The states that :func:`capture` returned, in the types that the generators take."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: torch.Tensor
    gpus: list[bytes]


def parse(document: dict[str, Any]) -> States:
    """Convert a document from :func:`capture`. Raises CheckpointError if it is invalid; sets nothing."""
    try:
        version, internal, gauss = document["python"]
        legacy = document["numpy"]
        key = np.array(legacy["state"]["key"], dtype=np.uint32)
        states = States(
            (version, tuple(internal), gauss),
            {**legacy, "state": {"key": key, "pos": legacy["state"]["pos"]}},
            torch.frombuffer(bytearray(bytes.fromhex(document["torch"])), dtype=torch.uint8),
            [bytes.fromhex(state) for state in document.get("cuda", [])],
        )
        if key.shape != (_NUMPY_WORDS,) or not 0 <= legacy["state"]["pos"] <= _NUMPY_WORDS:
            raise ValueError("numpy's has another size")  # numpy would read past the end
        # Only generators can validate states: try them on new generators, not the program's.
        random.Random().setstate(states.python)
        np.random.RandomState().set_state(states.numpy)
        torch.Generator().set_state(states.torch)
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError, AttributeError) as error:
        raise CheckpointError(
            f"the random number generators' states are damaged: {in_words(error)}"
        ) from error
    return states


def restore(states: States) -> None:
    """Set the generators to ``states`` from :func:`parse`. Raises CheckpointError if the state of a GPU is
    damaged.
    """
    random.setstate(states.python)
    np.random.set_state(states.numpy)
    torch.set_rng_state(states.torch)
    try:
        set_gpu_generator_states(states.gpus)
    except RuntimeError as error:
        raise CheckpointError(f"the state of a GPU's generator is damaged: {error}") from error


# -- the generators that operators on one device use -----------------------------------------------------


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the generators that operators on ``device`` use: the CPU's, and the device's own
    if it has one.
    """
    states = [torch.default_generator.get_state()]
    if device.type not in _WITHOUT_GENERATOR:
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_generator_states(device: torch.device, states: list[torch.Tensor]) -> None:
    """Restore the result of :func:`generator_states`."""
    torch.default_generator.set_state(states[0])
    if device.type not in _WITHOUT_GENERATOR:
        torch.get_device_module(device).set_rng_state(states[1], device)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators that operators on ``device`` use."""
    torch.default_generator.manual_seed(seed)
    if device.type not in _WITHOUT_GENERATOR:
        torch.get_device_module(device).manual_seed(seed)
