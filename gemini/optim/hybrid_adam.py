"""Adam that updates each tensor where it lives."""

from __future__ import annotations

import torch

from .cpu_adam import CPUAdam


class HybridAdam(CPUAdam):
    """``CPUAdam`` for CPU tensors, with states in memory or streamed from a file; same arguments.

    CUDA tensors are refused: their kernel is not in this release.
    """

    def _wrong_device(self, label: str, device: torch.device) -> str:
        return (
            f"{label} is on {device}, for which HybridAdam has no kernel in this release; "
            "keep the model on the CPU, or use torch.optim.AdamW(fused=True) for it"
        )
