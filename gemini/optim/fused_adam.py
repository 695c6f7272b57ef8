"""Adam for CUDA parameters, one launch for all of a layout."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from .kernel_adam import KernelAdam
from .state_format import StateFormat


class FusedAdam(KernelAdam):
    """Adam for CUDA tensors; see :class:`KernelAdam` for its numbers."""

    devices = frozenset({"cuda"})
    other_devices_hint = "takes CUDA tensors: use CPUAdam or HybridAdam for others"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        *,
        state_dtype: str = "fp32",
        master_remainders: bool = False,
        **torch_flags: Any,
    ) -> None:
        """Prepare; states are made by the first step. Arguments: as :class:`CPUAdam`'s of the same names.

        Raises:
            ConfigError: a value out of range, a parameter not on a GPU, not dense, or of another type.
        """
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adamw_mode": adamw_mode,
        }
        super().__init__(
            params, defaults, StateFormat(state_dtype, master_remainders), torch_flags=torch_flags
        )
