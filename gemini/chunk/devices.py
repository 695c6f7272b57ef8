"""Which computing device a model's chunks are for."""

from __future__ import annotations

import logging

import torch

from gemini.chunk.cpu_memory import CPU
from gemini.chunk.gpu_memory import CudaDevice
from gemini.chunk.memory import ComputeDevice
from gemini.system.device import resolve_device

logger = logging.getLogger(__name__)


def open_device(device: torch.device | str | int | None, *, pin_memory: bool | None = None) -> ComputeDevice:
    """Return the computing device, the current GPU if not said and there is one. ``pin_memory=False``
    leaves HOST memory of a GPU pageable.

    Raises:
        ConfigError: it cannot be used here.
    """
    resolved = resolve_device(device)
    if resolved.type == "cpu":
        if pin_memory:
            logger.info("pin_memory=True has no effect: there is no GPU to pin HOST memory for")
        return CPU
    return CudaDevice(resolved, pin=pin_memory is not False)
