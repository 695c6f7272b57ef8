"""Files below memory: asynchronous reads and writes, and tensors moved to disk."""

from __future__ import annotations

from .async_file import AsyncFile
from .disk_offloader import DiskOffloader

__all__ = ["AsyncFile", "DiskOffloader"]
