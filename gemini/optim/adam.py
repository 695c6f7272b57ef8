"""Adam and AdamW: for CPU parameters, with the states in memory or, in part, in a file; for CUDA parameters,
one launch for all of a layout; for both, each where it lives."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from gemini.offload.async_file import Directories
from gemini.optim.kernel_adam import KernelAdam
from gemini.optim.state_format import StateFormat


class CPUAdam(KernelAdam):
    """Adam for CPU tensors; see :class:`KernelAdam` for its numbers."""

    devices = frozenset({"cpu"})
    other_devices_hint = "takes CPU tensors: move the model there first, or use HybridAdam"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: Directories | None = None,
        *,
        state_dtype: str = "fp32",
        master_remainders: bool = False,
        nvme_offload_checksums: bool = False,
        **torch_flags: Any,
    ) -> None:
        """Prepare; states are made by the first step.

        Args:
            params: as for every torch optimizer; parameter groups may override what follows up to adamw_mode.
            lr: learning rate.
            bias_correction: divide the moments by ``1 - beta ** step``.
            betas: decay of the two moments, in [0, 1).
            eps: added to the denominator.
            weight_decay: coefficient, decoupled with ``adamw_mode``, else added to the gradient.
            adamw_mode: AdamW, else Adam.
            nvme_offload_fraction: share in [0, 1] of the state bytes kept in a file: those of CPU parameters,
                in order, until it is reached; the last one's may be cut. No value of it changes a result.
                ``step`` reads and writes them once, through at most 32 MiB of memory. Of a managed model's
                states, with or without ``disk_dir``, it is at least this share, up to one chunk more.
            nvme_offload_dir: where the file is: a directory, or several on different drives, which then work
                at the same time; None is a managed model's ``disk_dir``, else the system's directory for
                temporary files.
            state_dtype: how the moments are kept: ``"fp32"`` (8 bytes per parameter, torch's numbers),
                ``"bf16"`` (4 bytes) or ``"int8"`` (2 bytes and 8 per 256 parameters). The last two round
                deterministically and change the numbers a little.
            master_remainders: for bf16 parameters, keep the 16 bits that rounding takes away (2 bytes per
                parameter): updates then work on exact fp32 masters. The parameter is its master rounded to
                nearest, ties away from zero.
            nvme_offload_checksums: keep a CRC32C of every 4 KiB in the file, in memory, and verify what is
                read: a ``ChecksumError`` instead of training on with what a disk has made of it.
            torch_flags: ``amsgrad``, ``maximize``, ``foreach``, ``capturable``, ``differentiable`` and
                ``fused`` as torch's AdamW has them by default, for programs that say so; nothing else.

        Raises:
            ConfigError: a value out of range, a directory that cannot be used, a parameter on another
                device, not dense, or of another type.
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
            params,
            defaults,
            StateFormat(state_dtype, master_remainders),
            nvme_offload_fraction=nvme_offload_fraction,
            nvme_offload_dir=nvme_offload_dir,
            nvme_offload_checksums=nvme_offload_checksums,
            torch_flags=torch_flags,
        )


class HybridAdam(CPUAdam):
    """``CPUAdam`` for CPU and CUDA tensors together; same arguments.

    CPU tensors are updated by the CPU kernel, with states in memory or streamed from a file; CUDA tensors by
    the CUDA kernel, with states beside them, a launch per device and layout of types.
    """

    devices = frozenset({"cpu", "cuda"})
    other_devices_hint = "takes CPU and CUDA tensors"


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
