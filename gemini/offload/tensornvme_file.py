"""TensorNVMe as the disk side of DiskOffloader, for comparison; the package is never required."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemini.errors import ConfigError


@dataclass(eq=False)
class CountedTransfer:
    """Tensors in transit; ``left`` of them have not arrived."""

    is_write: bool
    left: int = 0

    def count_down(self) -> None:
        """Note that one tensor has arrived."""
        self.left -= 1


class TensorNvmeFile:
    """The interface of ExtentFile over a ``tensornvme.DiskOffloader``.

    CPU tensors, one directory, through the page cache. TensorNVMe checks no results and keeps the disk space
    of tensors that were freed; failures that it does not detect are not detected here.
    """

    def __init__(self, directories: Sequence[str], *, num_entries: int, checksums: bool) -> None:
        if checksums or len(directories) != 1:
            raise ConfigError("backend 'tensornvme' has one directory and no checksums; use another backend")
        try:
            module: Any = importlib.import_module("tensornvme")
        except ImportError as error:
            raise ConfigError(
                f"backend 'tensornvme' needs that package ({error}); pip install tensornvme, or use None, "
                "'uring' or 'threads'"
            ) from error
        self._offloader: Any = module.DiskOffloader(directories[0], num_entries)
        self._disk_bytes = 0

    @property
    def disk_bytes(self) -> int:
        """Bytes of the tensors that are on disk; TensorNVMe does not report the space that it holds."""
        return self._disk_bytes

    def write(self, tensors: Sequence[torch.Tensor]) -> CountedTransfer:
        """Start writing."""
        transfer = CountedTransfer(is_write=True)
        for tensor in _with_bytes(tensors):
            transfer.left += 1
            self._disk_bytes += tensor.untyped_storage().nbytes()
            self._offloader.async_write(tensor, transfer.count_down)
        return transfer

    def read(self, tensors: Sequence[torch.Tensor]) -> CountedTransfer:
        """Start reading."""
        transfer = CountedTransfer(is_write=False)
        for tensor in _with_bytes(tensors):
            transfer.left += 1
            self._disk_bytes -= tensor.untyped_storage().nbytes()
            self._offloader.async_read(tensor, transfer.count_down)
        return transfer

    def wait(self, transfer: CountedTransfer) -> None:
        """Wait for all transfers of the direction: TensorNVMe cannot wait for a single one."""
        if transfer.left == 0:
            return
        if transfer.is_write:
            self._offloader.sync_write_events()
        else:
            self._offloader.sync_read_events()

    def close(self) -> None:
        """Drop the offloader, which removes its file."""
        self._offloader = None


def _with_bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ConfigError(f"backend 'tensornvme' takes CPU tensors, not one on {tensor.device}")
    return [tensor for tensor in tensors if tensor.numel() > 0]
