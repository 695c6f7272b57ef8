"""Which computing device a model's chunks are for."""

from __future__ import annotations

import torch

from gemini.chunk.cpu_memory import CPU
from gemini.chunk.gpu_memory import CudaDevice
from gemini.chunk.memory import ComputeDevice
from gemini.device import resolve_device


def open_device(device: torch.device | str | int | None, *, pin_memory: bool | None = None) -> ComputeDevice:
    """Return the computing device, the CPU if not said. ``pin_memory=False`` leaves HOST memory of a GPU
    pageable.

    Raises:
        ConfigError: it cannot be used here.
    """
    resolved = resolve_device(device)
    if resolved.type == "cpu":
        return CPU
    return CudaDevice(resolved, pin=pin_memory is not False)
