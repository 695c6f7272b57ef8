"""Adam that updates each tensor where it lives."""

from __future__ import annotations

from .cpu_adam import CPUAdam


class HybridAdam(CPUAdam):
    """``CPUAdam`` for CPU and CUDA tensors together; same arguments.

    CPU tensors are updated by the CPU kernel, with states in memory or streamed from a file; CUDA tensors by
    the CUDA kernel, with states beside them, a launch per device and layout of types.
    """

    devices = frozenset({"cpu", "cuda"})
    other_devices_hint = "takes CPU and CUDA tensors"
